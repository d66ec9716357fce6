"""Options of the size of a step, and the number of steps."""

from dataclasses import dataclass

MICRO_BATCHES = 4
"""Default micro-batches of a step that does not end at a number of documents."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Size of an optimizer step, and number of steps."""

    steps: int = 1000
    """Optimizer steps of reinforcement learning."""
    docs_per_step: int = 512
    """Documents per optimizer step, over all data ranks. 0: count --schedule.micro-batches instead."""
    micro_batches: int | None = None
    """Micro-batches per step and data rank, if --schedule.docs-per-step is 0. None: 4."""
    rows: int | None = None
    """Packed rows of one micro-batch on one data rank.
    None: split a step into equal micro-batches of at most about 1024 tokens on a CPU, 16384 elsewhere."""
    row_length: int | None = None
    """Tokens of one packed row; no document may be longer. None: the task's longest document."""
    accumulate: str = "float32"
    """Dtype of the gradient's sums over micro-batches: float32, or bfloat16, which rounds at every addition.
    Does not affect loss, counts and metrics."""
    epochs: int | None = None
    """Passes over the training prompts, after which the data ends. None: repeat them forever."""
