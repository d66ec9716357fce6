"""Options of the guards: refusals and warnings of a run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GuardsConfig:
    """Checks during training. A step with a non-finite number is always refused."""

    max_refused_steps: int = 5
    """Consecutive refused steps after which the run ends, with a checkpoint and exit code 4."""
    spike_factor: float = 10.0
    """Warn of a gradient norm that is this many times the median of the 32 norms before it. 0: never."""
    replica_every: int = 50
    """Optimizer steps between bitwise comparisons of the copies of parameters and optimizer state on all devices.
    A copy that differs ends the run with exit code 4. Checkpoints are compared as well. 0: never."""
