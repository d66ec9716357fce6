"""The decoder, its placement on a mesh, and checkpoint formats of others."""
