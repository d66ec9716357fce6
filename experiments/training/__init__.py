"""Ways to compute the same run: whole micro-batches under GSPMD, or leaves in a fixed order with `--invariant`."""
