"""Options of the size of a step, and the number of steps."""

from dataclasses import dataclass, replace

DOCS_PER_STEP = 512
"""Documents of a step where neither option nor source says it."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Size of an optimizer step, and number of steps."""

    steps: int = 1000
    """Optimizer steps of reinforcement learning."""
    docs_per_step: int | None = None
    """Documents per optimizer step, over all data ranks; a step ends with the micro-batch that reaches it, and with
    --invariant exactly there. 0: all documents of one rollout. None: 512, or 0 with --source."""
    rows: int | None = None
    """Packed rows of one micro-batch on one data rank.
    None: split a step into equal micro-batches of at most about 1024 tokens on a CPU, 16384 elsewhere; with --invariant
    --invariance.leaf-rows."""
    row_length: int | None = None
    """Tokens of one packed row; no document may be longer. None: the task's longest document."""
    accumulate: str = "float32"
    """Dtype of the gradient's sums over micro-batches: float32, or bfloat16, which rounds at every addition.
    Does not affect loss, counts and metrics."""
    epochs: int | None = None
    """Passes over the training prompts, after which the data ends. None: repeat them forever."""

    def resolved(self, *, own_source: bool) -> "ScheduleConfig":
        """Returns the options with the size of a step that belongs to the source."""
        return (
            self if self.docs_per_step is not None else replace(self, docs_per_step=0 if own_source else DOCS_PER_STEP)
        )
