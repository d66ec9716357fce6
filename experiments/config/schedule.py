"""Options of the size of a step, and the number of steps."""

from dataclasses import dataclass, replace

DOCS_PER_STEP = 512
"""Documents of a step where neither option nor source says it."""
SUPERVISED_DOCS_PER_STEP = 32
"""The same of a supervised run."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Size of an optimizer step, and number of steps."""

    steps: int = 1000
    """Optimizer steps."""
    docs_per_step: int | None = None
    """Documents per optimizer step, over all data ranks; a step ends with the micro-batch that reaches it, and with
    --invariant exactly there. 0: all documents of one rollout.
    None: 512, or 0 with --source; 32 of supervised learning."""
    epochs_per_rollout: int = 1
    """Passes over the completions of a rollout, each in an order of its own, in steps of --schedule.docs-per-step."""
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
    """Passes over the training data, after which the run ends. None: repeat it until the last step."""

    def resolved(self, *, own_source: bool, supervised: bool) -> "ScheduleConfig":
        """Returns the options with the size of a step that belongs to the source."""
        if self.docs_per_step is not None:
            return self
        documents = SUPERVISED_DOCS_PER_STEP if supervised else DOCS_PER_STEP
        return replace(self, docs_per_step=0 if own_source else documents)
