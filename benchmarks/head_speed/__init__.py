"""Time and memory of the head, relative to one product hidden · weightᵀ."""
