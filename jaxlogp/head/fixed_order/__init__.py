"""Engine ``fixed_order``: bitwise equal on every vocabulary mesh and in every batch."""
