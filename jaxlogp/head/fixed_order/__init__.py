"""Engine ``fixed_order``: the same bits on every vocabulary mesh and in every batch."""
