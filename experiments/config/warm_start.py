"""Options of the warm start."""

from dataclasses import dataclass

import optax

from experiments.learner.optimizers import Optimizer, adamw

WARM_START_STEPS = 400
"""Default warm-start steps of a new model."""
WARM_UP_STEPS = 50
"""Maximum number of steps in which the learning rate rises."""


@dataclass(frozen=True)
class WarmStartConfig:
    """Short supervised phase on worked examples. It ends at the target, or after its last step."""

    max_steps: int | None = None
    """Maximum number of optimizer steps. 0: skip the phase. None: 400 for a new model, 0 for one from disk."""
    batch_size: int = 256
    """Documents (prompt and answer) per optimizer step."""
    learning_rate: float = 2e-3
    """Peak learning rate of AdamW, reached after 50 steps, or a quarter of the maximum number if that is less."""
    target: float = 0.36
    """Stop when this share of sampled answers (temperature 1, training prompts) is right."""
    check_every: int = 5
    """Optimizer steps between checks of the target."""

    def optimizer(self) -> Optimizer:
        """Returns AdamW at a rate that rises to its peak and stays there."""
        steps = max(1, min(WARM_UP_STEPS, (self.max_steps or 0) // 4))
        return Optimizer(adamw(), optax.linear_schedule(0.0, self.learning_rate, steps), elementwise=True)
