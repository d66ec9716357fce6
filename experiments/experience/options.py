"""Options of the documents of a step: their source, how they are sampled, how many there are, and held-out prompts."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

from experiments.options import AtLeast, OneOf, Within, option_errors
from experiments.sampling.options import SamplingOptions, narrows

STORED = "stored:"
"""Before the path of a file of documents, in the place of the module:name of a source."""
DOCS_PER_STEP = 512
"""Documents of a step where neither option nor source says it."""
SUPERVISED_DOCS_PER_STEP = 32
"""The same of a supervised run."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Size of an optimizer step, and number of steps."""

    steps: Annotated[int, AtLeast(0)] = 1000
    """Optimizer steps."""
    docs_per_step: Annotated[int | None, AtLeast(0)] = None
    """Documents per optimizer step, over all data ranks. A step ends with the micro-batch that reaches the number.
    With --invariant it ends exactly there. 0: all documents of one rollout.
    None: 512, or 0 with --source; 32 of supervised learning."""
    epochs_per_rollout: Annotated[int, AtLeast(1)] = 1
    """Passes over the completions of a rollout, each in an order of its own, in steps of --schedule.docs-per-step."""
    rows: Annotated[int | None, AtLeast(1)] = None
    """Packed rows of one micro-batch on one data rank.
    None: split a step into equal micro-batches of at most about 1024 tokens on a CPU, 16384 elsewhere.
    On a GPU they are smaller if those do not fit into its memory with --model.remat full.
    With --invariant it is --invariance.leaf-rows."""
    row_length: Annotated[int | None, AtLeast(2)] = None
    """Tokens of one packed row; no document may be longer. None: the task's longest document."""
    accumulate: Annotated[str, OneOf("float32", "bfloat16")] = "float32"
    """Dtype of the gradient's sums over micro-batches: float32, or bfloat16, which rounds at every addition.
    Does not affect loss, counts and metrics."""
    epochs: Annotated[int | None, AtLeast(1)] = None
    """Passes over the training data, after which the run ends. None: repeat it until the last step."""

    def resolved(self, *, own_source: bool, supervised: bool) -> "ScheduleConfig":
        """Returns the options with the size of a step that belongs to the source."""
        if self.docs_per_step is not None:
            return self
        documents = SUPERVISED_DOCS_PER_STEP if supervised else DOCS_PER_STEP
        return replace(self, docs_per_step=0 if own_source else documents)


@dataclass(frozen=True)
class EvaluationConfig:
    """Exact match on held-out prompts, sampled at temperature 1 and decoded greedily."""

    every: Annotated[int, AtLeast(0)] = 100
    """Optimizer steps between evaluations. 0: only before and after training."""
    num_prompts: Annotated[int, AtLeast(1)] = 512
    """Number of held-out prompts."""
    samples: Annotated[int, AtLeast(1)] = 1
    """Completions of each prompt at temperature 1. The share that is right is reported, and with several of them
    the share of prompts with any right one (pass@k)."""
    kl: bool = False
    """Report the KL of the policy to the initial one as well, on the sampled completions.
    Keeps a copy of the initial parameters, as --loss.kl-coefficient does."""


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling of completions."""

    prompts_per_rollout: Annotated[int, AtLeast(1)] = 64
    """Prompts per rollout, all completed with the same parameters."""
    num_generations: Annotated[int, AtLeast(2)] = 8
    """Completions per prompt: the size of an advantage group."""
    rows: Annotated[int | None, AtLeast(1)] = None
    """Completions drawn at a time on one data rank, also by an evaluation. The next takes the place of one that has ended.
    The same tokens are drawn, in less memory. None: all of a rollout at once, or as many as fit into a device's memory."""
    # Beyond this, logits or their gradients leave the range of fp32, or nothing is left of a difference between them.
    temperature: Annotated[float, Within(0.01, 100.0)] = 1.0
    """Divisor of the logits, in the sampler and in the trainer."""
    top_k: int | None = None
    """Sample among this many most likely tokens. None: all.
    Log-probs are then those over the tokens that are left (--loss.on-support)."""
    top_p: float = 1.0
    """Sample among the fewest most likely tokens whose probabilities sum to this. 1: all."""
    min_p: float = 0.0
    """Sample among tokens at least this many times as likely as the most likely one. 0: all."""
    int8_weights: bool = False
    """Sample with matrices rounded to 8 bits, a scale for every output; evaluations use them as they are.
    Old log-probs are those of the rounded model, and further from the trainer's (docs/sampler.md)."""
    stop: tuple[str, ...] = ()
    """Stop strings. A completion ends with the token that completes one, and does not count as truncated."""
    max_prompt_tokens: Annotated[int | None, AtLeast(1)] = None
    """Longest prompt in tokens, special tokens included. None: the task's own limit."""
    max_new_tokens: Annotated[int | None, AtLeast(1)] = None
    """Longest completion in tokens, end token included.
    None: the task's longest answer for a new model, 256 for one from disk."""
    mask_truncated: bool = False
    """Exclude completions without an end token from the loss: none of their tokens is a label.
    Their rewards stay in the group's statistics. A divisor that counts documents still counts them."""
    mesh: str | None = None
    """Device mesh of rollouts and evaluations, to which parameters are copied for each of them. None: the training mesh."""
    rescore: bool | None = None
    """Take old log-probs from a forward pass of the trainer with the parameters that sampled, instead of from the sampler.
    Ratios are then free of the drift between sampler and trainer, which stays a metric.
    Documents of --source that bring old log-probs keep them.
    None: only if a correction or rejection compares the two, or, without --source, a rollout feeds more than one step.
    It feeds several if --schedule.docs-per-step is no multiple of its completions, or in several passes over it."""
    resample_degenerate: bool = False
    """Sample further prompts until a rollout has its number of groups whose rewards differ (dynamic sampling, DAPO).
    Other groups have no gradient. Surplus groups are discarded."""
    max_resamples: Annotated[int, AtLeast(1)] = 10
    """With --rollout.resample-degenerate: further attempts per rollout, after which groups of equal rewards complete it."""

    @property
    def filters(self) -> bool:
        """Whether some tokens are not drawn at all."""
        return narrows(self.top_k, self.top_p, self.min_p)

    def sampling_options(self, max_new_tokens: int, **recording: Any) -> SamplingOptions:
        """Returns how a rollout draws completions of up to so many tokens; ValueError if an option is out of range.

        `recording` are `record_support` and `support_room`.
        """
        filters = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        with option_errors("rollout"):
            own = {"stop": self.stop, "rows": self.rows, "int8_weights": self.int8_weights, **filters, **recording}
            return SamplingOptions(max_new_tokens, self.temperature, **own)
