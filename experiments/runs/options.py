"""Options of checkpoints."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointConfig:
    """Times at which the run is saved."""

    every: int = 200
    """Optimizer steps between checkpoints. 0: only at the end, and by time."""
    every_minutes: float = 10.0
    """Minutes since the last checkpoint after which a step ends with one. 0: by steps alone."""
    keep: int = 2
    """Number of checkpoints kept on disk."""
