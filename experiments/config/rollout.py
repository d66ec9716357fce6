"""Options of sampling."""

from dataclasses import dataclass

from experiments.options import refused_as
from experiments.sampling.pick import DrawOptions


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are sampled."""

    prompts_per_rollout: int = 64
    """Prompts per rollout, all completed with the same parameters."""
    num_generations: int = 8
    """Completions per prompt: the size of an advantage group."""
    temperature: float = 1.0
    """Divisor of the logits, in the sampler as in the trainer."""
    top_k: int | None = None
    """Draw among this many likeliest tokens only; None for all. The loss takes log-probs of the whole distribution."""
    top_p: float = 1.0
    """Draw among the fewest likeliest tokens whose probabilities sum to this; 1 for all."""
    min_p: float = 0.0
    """Draw among tokens at least this many times as likely as the likeliest; 0 for all."""
    stop: tuple[str, ...] = ()
    """Texts each of which ends a completion; its last token is the one that completes the text, and it counts as ended."""
    max_prompt_tokens: int | None = None
    """Longest prompt in tokens, special tokens included; None takes the task's own bound."""
    max_new_tokens: int | None = None
    """Longest completion in tokens, end token included. None: the task's longest answer for a new model, 256 for one from
    disk, which writes sentences around its answers."""
    mask_truncated: bool = False
    """Take completions without an end token out of the loss: no token of theirs is a label, while their rewards stay in the
    mean and deviation of their group. A divisor that counts labels loses theirs; one that counts documents keeps them."""
    mesh: str | None = None
    """Device mesh of rollouts and evaluations, to which the parameters are copied for each; None is that of the training."""
    rescore: bool | None = None
    """Take old log-probs from the trainer's own forward pass instead of the sampler's, with the parameters that sampled: a
    ratio is then that of two policies, without the difference between sampler and trainer, which stays the metric drift_max.
    Its log-sum-exp saves a strictly on-policy step the forward pass of the head. None: where a rollout feeds more than one
    optimizer step, that is, where its completions do not divide schedule.docs-per-step."""

    resample_degenerate: bool = False
    """Draw further prompts until a rollout has its number of groups whose rewards differ (dynamic sampling, DAPO); others
    have no gradient. What is drawn beyond that is not trained on."""
    max_resamples: int = 10
    """resample-degenerate: further rollouts for one, after which groups without a difference fill it up."""

    def draw_options(self) -> DrawOptions:
        """How tokens are drawn.

        Raises:
          ValueError: an option out of range.
        """
        with refused_as("rollout"):
            return DrawOptions(self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
