"""The run folder: configuration, logs, checkpoints, console and curves."""
