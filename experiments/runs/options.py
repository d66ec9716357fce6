"""Options of checkpoints."""

from dataclasses import dataclass
from typing import Annotated

from experiments.options import AtLeast


@dataclass(frozen=True)
class CheckpointConfig:
    """Times at which the run is saved."""

    every: Annotated[int, AtLeast(0)] = 200
    """Optimizer steps between checkpoints. 0: only at the end, and by time."""
    every_minutes: Annotated[float, AtLeast(0.0)] = 10.0
    """Minutes since the last checkpoint after which a step ends with one. 0: by steps alone."""
    keep: Annotated[int, AtLeast(1)] = 2
    """Number of checkpoints kept on disk."""
