"""Sampling completions and dealing them to the data ranks."""
