"""Options of the policy loss: its algorithm, and corrections where sampler and trainer disagree on a label's probability."""

import dataclasses
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from experiments.learner.entropy_control import EntropyControl
from experiments.learner.moving_reference import MovingReference
from experiments.learner.selection import SELECTIONS, Selection, TopEntropy
from experiments.options import OneOf, option_errors, option_name
from jaxlogp import losses
from jaxlogp.errors import require
from jaxlogp.head import ChunkedEngine, GradientFilter, HopperEngine
from jaxlogp.head.divergence import KINDS
from jaxlogp.head.registry import EngineChoice
from jaxlogp.losses import Correction, PolicyLoss, Rejection
from jaxlogp.losses.ratios import KL_ESTIMATORS
from jaxlogp.policy.algorithms import ADVANTAGES, ALGORITHMS, Algorithm, find_algorithm


@dataclass(frozen=True)
class LossConfig:
    """Algorithm: a policy loss with its advantages, and changes to it. None keeps the algorithm's own value."""

    name: str = "grpo"
    """cispo, clip_cov, dapo, dppo_kl, dppo_tv, dr_grpo, gdpo, gmpo, gpg, grpo, grpo_paper, gspo, gspo_token, kl_cov,
    lite_ppo, opo, reinforce, reinforce_pp, reinforce_pp_baseline, remax, rloo, sapo or vespo (docs/losses.md).
    Or a loss of your own (register_loss)."""
    epsilon: float | None = None
    """Lower clip range: ratios below 1 - --loss.epsilon are clipped. With gmpo log-ratios below its negative, in nats.
    dppo_tv and dppo_kl: labels stop whose probability has fallen by more, or by more of this KL."""
    epsilon_high: float | None = None
    """Upper clip range: ratios above 1 + --loss.epsilon-high are clipped. With gmpo log-ratios above it, in nats.
    dppo_tv and dppo_kl: the same of a probability that has risen."""
    delta: float | None = None
    """Largest ratio where the advantage is negative (dual clip)."""
    temperature_positive: float | None = None
    """sapo: temperature of the gate where the advantage is positive."""
    temperature_negative: float | None = None
    """sapo: temperature of the gate elsewhere."""
    max_weight: float | None = None
    """cispo, dppo_tv and dppo_kl: largest importance weight."""
    min_weight: float | None = None
    """cispo: smallest importance weight."""
    weighting: str | None = None
    """gspo: document (equal weights) or length (documents weighted by their number of labels)."""
    drift_coefficient: float | None = None
    """kl_cov: weight of |log ratio| of the labels that are penalized."""
    cov_share: float | None = None
    """clip_cov and kl_cov: share of the step's labels that stop learning, or that are penalized; at least one label."""
    cov_low: float | None = None
    """clip_cov: only labels with a covariance of log-prob and advantage above this may stop learning."""
    cov_high: float | None = None
    """clip_cov: only labels with a covariance below this may stop learning."""
    top_entropy: float | None = None
    """Share of the step's labels that learn, those of the highest entropy. None: all labels.
    The others get advantage 0, and keep their place in the divisor of the loss, its KL and its entropy bonus."""
    ratio: str | None = None
    """Ratio of new to old policy: token, sequence (the geometric mean of a document's, as in gspo), sequence_token (the same
    value with the gradient of the token's own), or product (of a document's)."""
    length: int | None = None
    """dr_grpo, and reduction constant_length: the divisor in tokens. None: the longest completion, with --source a row."""
    reduction: str | None = None
    """Weight of each label and divisor of the sum: labels, documents, document_mean or constant_length."""
    kl_coefficient: float | None = None
    """Weight of the KL to a reference, the policy after the warm start."""
    kl_estimator: Annotated[str | None, OneOf(*KL_ESTIMATORS, *KINDS)] = None
    """Estimator of the KL from the tokens drawn: k1, k2 or k3.
    Or a divergence over the whole vocabulary, as of linear_kl: reverse (that KL), forward or jensen_shannon."""
    kl_unbiased: bool | None = None
    """Weigh the KL by the ratio to the policy that sampled, which makes its gradient that of the KL (DeepSeek-V3.2)."""
    teacher: str | None = None
    """Hugging Face directory or GGUF file of a model that the KL is measured from, instead of the policy's beginning:
    distillation. It has the policy's token ids. With --loss.kl-estimator reverse, forward or jensen_shannon."""
    reference_every: int | None = None
    """Updates after which the reference moves to the policy, over and over. None: it stays."""
    reference_share: float | None = None
    """Share of the policy in the reference that moves; the rest is the reference before. None: 1, a copy of the policy."""
    entropy_coefficient: float | None = None
    """Weight of an entropy bonus, with --loss.entropy-target that of the first step."""
    entropy_target: float | None = None
    """Entropy, in nats, that the weight of the entropy bonus follows. None: the weight stays.
    After a step with less entropy the weight rises by --loss.entropy-step, after one with more it falls."""
    entropy_step: float | None = None
    """Change of the weight of the entropy bonus after each step, with --loss.entropy-target. None: 0.005."""
    entropy_maximum: float | None = None
    """Largest weight of the entropy bonus, with --loss.entropy-target. None: 1."""
    grad_divisor: float | None = None
    """Divisor of the gradient. None: that of the reported loss."""
    advantages: Annotated[str | None, OneOf(*ADVANTAGES)] = None
    """Advantages of completions (docs/losses.md). None: those of the algorithm.
    In a group: group (minus its mean, divided by its deviation), centred (not divided), leave_one_out, length_weighted.
    Against a greedy completion of each prompt: greedy_baseline.
    Over a rollout: batch_scaled, batch, batch_baseline, active_group, decoupled (each of --reward.functions by itself).
    Or none: 0, which leaves the other parts of the loss, such as the KL to a --loss.teacher."""
    skip_zero_advantages: bool | None = None
    """Count documents whose advantages are all 0 in the divisor of the loss, and do not compute them.
    Their gradient is exactly 0. Metrics that need the policy's log-probs are then named computed/...
    None: where the loss has no other part (no KL, entropy bonus, rejection or choice of labels)."""
    on_support: bool | None = None
    """Take log-probs, KL and entropy over the ids that each token was drawn from, instead of over the whole vocabulary.
    The sampler records what --rollout.top-k, --rollout.top-p and --rollout.min-p leave.
    None: with one of these, so that sampler and trainer have the same distribution."""
    support_room: int = 128
    """With --loss.on-support: ids a token for which rows and micro-batches have room, on average over their tokens.
    Where a set does not fit, the sampler draws among the most likely of its ids (support_cut)."""
    metrics: Annotated[str, OneOf("none", "basic", "with_entropy")] = "with_entropy"
    """Metrics of a step: none, basic or with_entropy."""
    engine: str = "auto"
    """Engine of the head: auto, chunked, hopper, reference, triton, or a name given to register_engine."""
    token_chunk: int | None = None
    """With --loss.engine chunked: tokens of a block of logits. None: the engine's own, or 128 with a gradient filter."""
    vocab_tile: int | None = None
    """With --loss.engine chunked: vocabulary columns of a block. None: the engine's own, or 256 with a gradient filter."""
    gradient_filter: float | None = None
    """Skip blocks of the head's gradient in which every probability is below this threshold. Engines hopper and chunked.
    Lossy: at 1.5e-5 (2^-16) the error is below that of bf16 (docs/gradient_filter.md). None: no filter."""

    def resolved(self) -> "LossConfig":
        """Returns the options with the advantages that belong to the algorithm."""
        return dataclasses.replace(self, advantages=self.advantages or self.algorithm().advantages)

    def algorithm(self) -> Algorithm:
        """Returns the algorithm by its name; ValueError if there is none."""
        found, names = find_algorithm(self.name), ", ".join(sorted(ALGORITHMS | losses.PRESETS))
        require(found is not None, "--loss.name", f"one of {names}", self.name)
        return found

    def head_engine(self) -> EngineChoice:
        """Returns the engine that the head's calls take, with block sizes and the gradient filter if there are any.

        Raises:
            ValueError: block sizes for another engine, or out of range.
        """
        sizes = self._given(("token_chunk", "vocab_tile"))
        for name, value in sizes.items():
            expected = f"None with --loss.engine {self.engine} (chunked has blocks of any size)"
            require(self.engine == "chunked", option_name(f"loss.{name}"), expected, value)
        with option_errors("loss"):
            if self.gradient_filter is None:
                return ChunkedEngine(**sizes) if sizes else self.engine
            chosen = GradientFilter(self.gradient_filter)
            # More is skipped in small blocks: these have the size of hopper's.
            chunked = ChunkedEngine(**{"token_chunk": 128, "vocab_tile": 256, **sizes}, gradient_filter=chosen)
        engines = {"hopper": HopperEngine(gradient_filter=chosen), "chunked": chunked}
        return tuple(engines.values()) if self.engine == "auto" else engines[self.engine]

    def policy_loss(self, longest_completion: int) -> PolicyLoss:
        """Returns the loss object; `length` is by default `longest_completion`, in tokens.

        Raises:
            ValueError: if the algorithm is unknown, lacks a given option, or a value is out of range.
        """
        preset = self.algorithm().loss
        parameters = inspect.signature(preset).parameters
        shared = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        known = {*parameters, *(_SHARED_LOSS_OPTIONS if shared else ()), *self._selection_options()}
        given = self._given(_LOSS_OPTIONS)
        if self.entropy_target is not None:
            expected = f"None for loss {self.name!r}, which has no entropy bonus"
            require("entropy_coefficient" in known, "--loss.entropy-target", expected, self.entropy_target)
            # The coefficient of each step is its factor.
            given["entropy_coefficient"] = 1.0
        length = given.pop("length", longest_completion)
        for name, value in (given | self._given(_SELECTION_OPTIONS)).items():
            expected = f"None for loss {self.name!r}, which has no such option"
            require(name in known, option_name(f"loss.{name}"), expected, value)
        if self.length is not None and (self.reduction is not None or "length" not in parameters):
            expected = f"None for loss {self.name!r} without --loss.reduction constant_length"
            require(self.reduction == "constant_length", "--loss.length", expected, self.length)
        if "length" in parameters:
            given["length"] = length
        if self.exact_kl:
            # Its part of the loss is none of the library's (`ExactKL`), which takes the coefficient alone.
            del given["kl_estimator"]
        with option_errors("loss"):
            loss = preset(**given)
            if self.ratio is not None:
                loss = dataclasses.replace(loss, ratio=self.ratio)
            if self.reduction is not None:
                length = length if self.reduction == "constant_length" else None
                loss = dataclasses.replace(loss, reduction=self.reduction, length=length)
        expected = f"None for loss {self.name!r}: an advantage of 0 would change the mean of its whole document"
        single = self.top_entropy is None or loss.ratio != "sequence"
        require(single, "--loss.top-entropy", expected, self.top_entropy)
        for name, value in self._given(("kl_estimator", "kl_unbiased")).items():
            require(self.has_kl(loss), option_name(f"loss.{name}"), "None without --loss.kl-coefficient", value)
        expected = f"None with --loss.kl-estimator {self.kl_estimator}, which no token drawn estimates"
        require(not (self.exact_kl and self.kl_unbiased), "--loss.kl-unbiased", expected, self.kl_unbiased)
        if self.teacher is not None:
            expected = f"{', '.join(KINDS[:-1])} or {KINDS[-1]} with --loss.teacher"
            require(self.exact_kl, "--loss.kl-estimator", expected, self.kl_estimator)
            expected = "None with --loss.teacher, which stays as it is"
            require(self.reference_every is None, "--loss.reference-every", expected, self.reference_every)
        return loss

    @property
    def exact_kl(self) -> str | None:
        """The divergence over the whole vocabulary that is the KL; None if that is estimated from the tokens drawn."""
        return self.kl_estimator if self.kl_estimator in KINDS else None

    def has_kl(self, loss: PolicyLoss) -> bool:
        """Returns whether a KL is asked for; a coefficient of 0 may be one of several that are tried."""
        return self.kl_coefficient is not None or loss.kl_coefficient != 0.0

    def skips(self, loss: PolicyLoss) -> bool:
        """Returns whether documents whose advantages are all 0 are not computed.

        Args:
            loss: with its correction and rejection.

        Raises:
            ValueError: they are not to be, and have an effect.
        """
        exact = self.selection() is None and loss.vanishes_without_advantage
        expected = f"None or False for loss {self.name!r} with these options, on which such documents have an effect"
        require(exact or not self.skip_zero_advantages, "--loss.skip-zero-advantages", expected, True)
        return exact if self.skip_zero_advantages is None else self.skip_zero_advantages

    def selection(self) -> Selection | None:
        """Returns the choice among the labels of a step; None if all of them learn alike.

        Raises:
            ValueError: if the algorithm is unknown, or an option is out of range or does not go with it.
        """
        kind = self.algorithm().selection
        if self.top_entropy is not None:
            expected = f"None for loss {self.name!r}, which chooses labels by their covariance"
            require(kind is None, "--loss.top-entropy", expected, self.top_entropy)
        with option_errors("loss"):
            if kind is not None:
                return SELECTIONS[kind](**self._given(self._selection_options()))
            return None if self.top_entropy is None else TopEntropy(self.top_entropy)

    def entropy_control(self) -> EntropyControl | None:
        """Returns the rule that the weight of the entropy bonus follows; None if it stays.

        Raises:
            ValueError: if an option is out of range or does not go with the others.
        """
        names = {"entropy_coefficient": "first", "entropy_step": "step", "entropy_maximum": "maximum"}
        given = self._given(names)
        if self.entropy_target is None:
            for name in ("entropy_step", "entropy_maximum"):
                expected = "None without --loss.entropy-target"
                require(name not in given, option_name(f"loss.{name}"), expected, given.get(name))
            return None
        expected = "with_entropy along with --loss.entropy-target, which reads the entropy of each step"
        require(self.metrics == "with_entropy", "--loss.metrics", expected, self.metrics)
        with option_errors("loss"):
            return EntropyControl(self.entropy_target, **{names[name]: value for name, value in given.items()})

    def moving_reference(self) -> MovingReference | None:
        """Returns the rule by which the reference moves; None if it stays. ValueError if an option is out of range."""
        if self.reference_every is None:
            expected = "None without --loss.reference-every"
            require(self.reference_share is None, "--loss.reference-share", expected, self.reference_share)
            return None
        with option_errors("loss"):
            return MovingReference(self.reference_every, 1.0 if self.reference_share is None else self.reference_share)

    def _selection_options(self) -> tuple[str, ...]:
        kind = self.algorithm().selection
        return () if kind is None else tuple(field.name for field in dataclasses.fields(SELECTIONS[kind]))

    def _given(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


_SHARED_LOSS_OPTIONS = ("kl_coefficient", "kl_estimator", "kl_unbiased", "entropy_coefficient", "grad_divisor")
_OWN_LOSS_OPTIONS = ("epsilon", "epsilon_high", "delta", "max_weight", "min_weight", "weighting", "length")
_FURTHER_LOSS_OPTIONS = ("temperature_positive", "temperature_negative", "drift_coefficient")
_SELECTION_OPTIONS = ("cov_share", "cov_low", "cov_high")
_LOSS_OPTIONS = (*_OWN_LOSS_OPTIONS, *_FURTHER_LOSS_OPTIONS, *_SHARED_LOSS_OPTIONS)


@dataclass(frozen=True)
class CorrectionConfig:
    """Weights trainer / sampler of each label's loss, where old log-probs are the trainer's (docs/losses.md)."""

    level: str | None = None
    """token, sequence (the product over a document) or geometric (its mean). None: no weights."""
    kind: str = "truncate"
    """truncate (weights of at most --correction.high) or mask (0 outside of --correction.low and --correction.high)."""
    low: float = 0.0
    """Smallest weight of kind mask."""
    high: float = 2.0
    """Largest weight."""
    normalize: bool = False
    """Divide the weights by their mean over all labels of the step."""

    def correction(self) -> Correction | None:
        """Returns the correction of the loss; ValueError if an option is out of range."""
        if self.level is None:
            expected = "no other options without --correction.level"
            require(self == CorrectionConfig(), "--correction", expected, "other options")
            return None
        with option_errors("correction"):
            return Correction(**dataclasses.asdict(self))


@dataclass(frozen=True)
class RejectionConfig:
    """Rules by which labels leave the loss where the policies are too far apart (docs/losses.md). None: no such rule."""

    token: tuple[float, float] | None = None
    """Keep labels whose ratio trainer / sampler is between the two numbers."""
    sequence: tuple[float, float] | None = None
    """Keep documents whose product of ratios is between them."""
    geometric: tuple[float, float] | None = None
    """Keep documents whose geometric mean of ratios is between them."""
    veto: float | None = None
    """Reject documents with any ratio below this."""
    k1: float | None = None
    """Reject documents whose mean k1 estimate of the KL from sampler to trainer is above this, in nats."""
    k2: float | None = None
    """The same with k2."""
    k3: float | None = None
    """The same with k3."""
    negative_kl: float | None = None
    """Reject documents with a negative advantage whose mean of old minus new log-probs is above this, in nats."""
    probability_gap: float | None = None
    """Reject labels whose probability has moved by more than this from the sampler's, in the direction of the advantage."""
    keep_denominator: bool = False
    """Count rejected labels in the divisor of the loss."""

    @property
    def reads_sampler(self) -> bool:
        """Whether a rule compares the trainer's log-probs at the time of sampling with the sampler's."""
        rules = (self.token, self.sequence, self.geometric, self.veto, self.k1, self.k2, self.k3)
        return any(rule is not None for rule in rules)

    def rejection(self) -> Rejection | None:
        """Returns the rejection of the loss; ValueError if an option is out of range."""
        if self == RejectionConfig():
            return None
        only = self == RejectionConfig(keep_denominator=True)
        expected = "no value without a rule of --rejection"
        require(not only, "--rejection.keep-denominator", expected, "the option")
        with option_errors("rejection"):
            return Rejection(**dataclasses.asdict(self))
