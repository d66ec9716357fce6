"""Trials of a run: what is done to it, and what becomes of it."""
