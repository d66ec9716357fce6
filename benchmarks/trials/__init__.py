"""Trials of what happens to runs: kills, signals, other meshes, many steps. Each prints a table; results/ keeps them."""
