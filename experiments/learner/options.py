"""Options of training: the warm start, drift reports and guards."""

from dataclasses import dataclass
from typing import Annotated

import optax

from experiments.learner.optimizers import Optimizer, adamw
from experiments.options import AtLeast, Positive, Within

WARM_START_STEPS = 400
"""Default warm-start steps of a new model."""
WARM_UP_STEPS = 50
"""Maximum number of steps in which the learning rate rises."""


@dataclass(frozen=True)
class WarmStartConfig:
    """Short supervised phase on worked examples. It ends at the target, or after its last step."""

    max_steps: Annotated[int | None, AtLeast(0)] = None
    """Maximum number of optimizer steps. 0: skip the phase. None: 400 for a new model, 0 for one from disk."""
    batch_size: Annotated[int, AtLeast(1)] = 256
    """Documents (prompt and answer) per optimizer step."""
    learning_rate: Annotated[float, Positive()] = 2e-3
    """Peak learning rate of AdamW, reached after 50 steps, or a quarter of the maximum number if that is less."""
    target: Annotated[float, Within(0.0, 1.0)] = 0.36
    """Stop when this share of sampled answers (temperature 1, training prompts) is right."""
    check_every: Annotated[int, AtLeast(1)] = 5
    """Optimizer steps between checks of the target."""

    def optimizer(self) -> Optimizer:
        """Returns AdamW at a rate that rises to its peak and stays there."""
        steps = max(1, min(WARM_UP_STEPS, (self.max_steps or 0) // 4))
        return Optimizer(adamw(), optax.linear_schedule(0.0, self.learning_rate, steps), elementwise=True)


@dataclass(frozen=True)
class DriftConfig:
    """Report on the distance between sampler and trainer, on tokens that were sampled with the trainer's parameters."""

    every: Annotated[int, AtLeast(0)] = 50
    """Optimizer steps between reports, the first at step 1 or the first step with such tokens. 0: none.
    A report costs a forward pass over the documents of a step, or nothing with --rollout.rescore."""


@dataclass(frozen=True)
class GuardsConfig:
    """Checks during training. A step with a non-finite number is always refused."""

    max_refused_steps: Annotated[int, AtLeast(1)] = 5
    """Consecutive refused steps after which the run ends, with a checkpoint and exit code 4."""
    spike_factor: Annotated[float, AtLeast(0.0)] = 10.0
    """Warn of a gradient norm that is this many times the median of the 32 norms before it. 0: never."""
    replica_every: Annotated[int, AtLeast(0)] = 50
    """Optimizer steps between bitwise comparisons of the copies of parameters and optimizer state on all devices.
    A copy that differs ends the run with exit code 4. Checkpoints are compared as well. 0: never."""
