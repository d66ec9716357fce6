"""Options of sampling."""

from dataclasses import dataclass

from experiments.options import refused_as
from experiments.sampling.options import SamplingOptions


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling of completions."""

    prompts_per_rollout: int = 64
    """Prompts per rollout, all completed with the same parameters."""
    num_generations: int = 8
    """Completions per prompt: the size of an advantage group."""
    temperature: float = 1.0
    """Divisor of the logits, in the sampler and in the trainer."""
    top_k: int | None = None
    """Sample among this many most likely tokens. None: all.
    The loss takes log-probs of the whole distribution, unless --loss.on-support is given."""
    top_p: float = 1.0
    """Sample among the fewest most likely tokens whose probabilities sum to this. 1: all."""
    min_p: float = 0.0
    """Sample among tokens at least this many times as likely as the most likely one. 0: all."""
    stop: tuple[str, ...] = ()
    """Stop strings. A completion ends with the token that completes one, and does not count as truncated."""
    max_prompt_tokens: int | None = None
    """Longest prompt in tokens, special tokens included. None: the task's own limit."""
    max_new_tokens: int | None = None
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
    None: only if a rollout feeds more than one step (its completions do not divide --schedule.docs-per-step, or
    --schedule.epochs-per-rollout is above 1), or a correction or rejection compares the two."""
    resample_degenerate: bool = False
    """Sample further prompts until a rollout has its number of groups whose rewards differ (dynamic sampling, DAPO).
    Other groups have no gradient. Surplus groups are discarded."""
    max_resamples: int = 10
    """With --rollout.resample-degenerate: further attempts per rollout, after which groups of equal rewards complete it."""

    def sampling_options(self, max_new_tokens: int, *, record_support: bool = False) -> SamplingOptions:
        """Returns how a rollout draws completions of up to so many tokens; ValueError if an option is out of range."""
        filters = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        with refused_as("rollout"):
            drawn = {"stop": self.stop, "record_support": record_support, **filters}
            return SamplingOptions(max_new_tokens, self.temperature, **drawn)
