"""Corrupted checkpoints and run folders, and what a resume makes of them."""
