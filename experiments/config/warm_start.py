"""Options of the warm start."""

from dataclasses import dataclass

WARM_START_STEPS = 400
"""Default warm-start steps of a new model."""


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
