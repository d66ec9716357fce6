"""Options of the guards: what a run refuses, and what it warns of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GuardsConfig:
    """What is watched while a run trains. A step with a number that is not finite is always refused."""

    max_refused_steps: int = 5
    """Refused steps in a row after which the run ends, with a checkpoint and exit code 4."""
    spike_factor: float = 10.0
    """Warn of a gradient norm that is this many times the median of the 32 before it. 0: never."""
    replica_every: int = 50
    """Optimizer steps between two bitwise comparisons of the copies of parameters and optimizer state on all devices.
    A copy that differs ends the run with exit code 4. Checkpoints are compared, too. 0: never compare."""
