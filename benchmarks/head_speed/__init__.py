"""Time and memory of the head beside one product hidden · weightᵀ."""
