"""Rules by which labels leave a policy loss because sampler, old and new policy are too far apart."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxlogp._arrays import AnyArray, hold_python_numbers
from jaxlogp.errors import is_number, require
from jaxlogp.losses.correction import LEVELS, bounded_weight, check_bounds, ratios_at
from jaxlogp.losses.documents import DocumentLayout
from jaxlogp.losses.ratios import KL_ESTIMATORS


class Policies(NamedTuple):
    """Flat constants of the three policies, 0 where masked: log-probs [tokens] and advantages [tokens].

    `new` is None where no rule reads it.
    """

    sampler: Float[AnyArray, " tokens"]
    old: Float[AnyArray, " tokens"]
    new: Float[AnyArray, " tokens"] | None
    advantages: Float[AnyArray, " tokens"]

    def log_weights(self, mask: Bool[AnyArray, " tokens"]) -> Float[Array, " tokens"]:
        """Computes log π_old - log μ, exactly 0 where masked; NaN for a difference that is not finite."""
        difference = jnp.where(mask, self.old - self.sampler, 0.0)
        return jnp.where(jnp.isfinite(difference), difference, jnp.nan)


@dataclass(frozen=True)
class Rejection:
    """Rules that take labels out of the mask of a policy loss, all off by default; a label leaves if any rule says so.

    With w_t = π_old,t / μ_t, its products W_d and means G_d of `Correction`, and means over the N_d labels of document d,

    - token: labels with w_t outside [low, high]; sequence, geometric: documents with W_d or G_d outside [low, high];
    - veto: documents with any w_t < veto;
    - k1, k2, k3: documents whose mean estimate of KL(μ ‖ π_old) is above the number: of -x, x² / 2 and exp(x) - x - 1 for
      x = log w_t, bounded by ±`MAX_LOG_WEIGHT`;
    - negative_kl: documents with a mean advantage below 0 and a mean of log π_old,t - log π_θ,t above the number;
    - probability_gap: labels with π_θ,t - μ_t > gap and A_t > 0, or π_θ,t - μ_t < -gap and A_t < 0.

    Rejected labels count in nothing: neither in ratios, KL and entropy, nor in the loss's count and in N_d. The number of
    documents M stays, as with documents without labels. Every rule reads the labels of the mask before any left it, and so
    does a `Correction`. No gradient flows through a rule. The last two rules read the policy in training, so a
    :func:`jaxlogp.linear_policy_loss` with them takes two steps.

    Attributes:
        token: (low, high) with low in [0, 1] and high at least 1, or None.
        sequence: (low, high) as for token, or None.
        geometric: (low, high) as for token, or None.
        veto: smallest w_t of a label that leaves its document in, in (0, 1], or None.
        k1: bound in nats, at least 0, or None.
        k2: bound in nats², at least 0, or None.
        k3: bound in nats, at least 0, or None.
        negative_kl: bound in nats, at least 0, or None.
        probability_gap: largest difference of probabilities, in [0, 1], or None.
        keep_denominator: whether rejected labels still count in D and N_d of the reduction.

    Raises:
        ValueError: if a number is out of range, or every rule is off.

    Example:
        >>> from jaxlogp.losses import grpo, policy_loss
        >>> old, sampler = jnp.log(jnp.array([0.5, 0.3])), jnp.log(jnp.array([0.4, 0.1]))
        >>> loss = grpo(rejection=Rejection(token=(0.5, 2.0)))
        >>> total = policy_loss(old, old, jnp.ones(2), sampler_log_probs=sampler, loss=loss)
        >>> float(total.sum), int(total.count)  # the ratios are 1.25 and 3
        (-1.0, 1)

    References:
        DeepSeek-V3.2 (negative_kl), arXiv:2512.02556; prime-rl (probability_gap); verl's rollout correction (the others).
    """

    token: tuple[float, float] | None = None
    sequence: tuple[float, float] | None = None
    geometric: tuple[float, float] | None = None
    veto: float | None = None
    k1: float | None = None
    k2: float | None = None
    k3: float | None = None
    negative_kl: float | None = None
    probability_gap: float | None = None
    keep_denominator: bool = False

    def __post_init__(self) -> None:
        for name in LEVELS:
            bounds = getattr(self, name)
            if bounds is not None:
                require(isinstance(bounds, tuple) and len(bounds) == 2, name, "a tuple (low, high)", repr(bounds))
                check_bounds(*bounds, f"{name}[0]", f"{name}[1]")
        if self.veto is not None:
            require(is_number(self.veto) and 0.0 < self.veto <= 1.0, "veto", "a number in (0, 1]", repr(self.veto))
        for name in (*KL_ESTIMATORS, "negative_kl"):
            bound = getattr(self, name)
            ok = bound is None or is_number(bound) and 0.0 <= bound < math.inf
            require(ok, name, "a finite number of at least 0", repr(bound))
        gap = self.probability_gap
        ok = gap is None or is_number(gap) and 0.0 <= gap <= 1.0
        require(ok, "probability_gap", "a number in [0, 1]", repr(gap))
        require(isinstance(self.keep_denominator, bool), "keep_denominator", "a bool", repr(self.keep_denominator))
        rules = *LEVELS, "veto", *KL_ESTIMATORS, "negative_kl", "probability_gap"
        require(any(getattr(self, name) is not None for name in rules), "rejection", f"one of {rules}", "no rule")
        hold_python_numbers(self)

    @property
    def needs_documents(self) -> bool:
        """Whether a rule reads whole documents."""
        of_labels = {"token", "probability_gap", "keep_denominator"}
        return any(value is not None for name, value in vars(self).items() if name not in of_labels)

    @property
    def needs_log_probs(self) -> bool:
        """Whether a rule reads the policy in training."""
        return self.negative_kl is not None or self.probability_gap is not None

    def rejected(
        self, policies: Policies, mask: Bool[AnyArray, " tokens"], layout: DocumentLayout | None
    ) -> Bool[Array, " tokens"]:
        """Returns True for the labels that leave; one with a NaN weight or without a document stays, so that this shows."""
        logs = policies.log_weights(mask)
        labels = self._rejected_labels(policies, logs, layout)
        documents = self._rejected_documents(policies, logs, layout) if self.needs_documents else None
        if documents is not None:
            labels = labels | documents[layout.document_ids]
        if layout is not None:
            labels = labels & ~layout.outside
        return labels & mask & ~jnp.isnan(logs)

    def _rejected_labels(
        self, policies: Policies, logs: Float[AnyArray, " tokens"], layout: DocumentLayout | None
    ) -> Bool[Array, " tokens"]:
        rejected = jnp.zeros(logs.shape, bool)
        for level in LEVELS:
            bounds = getattr(self, level)
            if bounds is not None:
                ratios = ratios_at(level, logs, layout)
                rejected |= (ratios < bounds[0]) | (ratios > bounds[1])
        if self.probability_gap is not None:
            gap, advantages = jnp.exp(policies.new) - jnp.exp(policies.sampler), policies.advantages
            rejected |= (advantages > 0) & (gap > self.probability_gap)
            rejected |= (advantages < 0) & (gap < -self.probability_gap)
        return rejected

    def _rejected_documents(
        self, policies: Policies, logs: Float[AnyArray, " tokens"], layout: DocumentLayout
    ) -> Bool[Array, " documents"]:
        rejected = jnp.zeros(layout.labels.shape, bool)
        bounded = bounded_weight(logs)
        if self.veto is not None:
            rejected |= layout.sum_of((jnp.exp(bounded) < self.veto).astype(logs.dtype)) > 0
        for name, estimator in KL_ESTIMATORS.items():
            bound = getattr(self, name)
            if bound is not None:
                rejected |= layout.mean_of(estimator(bounded)) > bound
        if self.negative_kl is not None:
            negative = layout.mean_of(policies.advantages) < 0
            rejected |= negative & (layout.mean_of(policies.old - policies.new) > self.negative_kl)
        return rejected
