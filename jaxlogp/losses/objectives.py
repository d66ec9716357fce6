"""Objectives that a policy loss maximizes per token or per document, as small frozen classes.

Your own objective is a frozen (hence hashable) dataclass with the two methods of `Objective`.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxlogp._arrays import AnyArray, hold_python_numbers
from jaxlogp.errors import is_number, require

DIVERGENCES = ("tv", "kl")


@runtime_checkable
class Objective(Protocol):
    """The part of a policy loss that reads ratios and advantages.

    For a loss with ratio "sequence" the arrays hold one entry per document: its mean log-ratio, mean log-prob and mean
    advantage. Otherwise they hold one per token, whose log-ratio is its document's for "sequence_token" and "product".
    Entries without a label are 0 in all three and count nowhere.

    An objective may have an attribute `vanishes_without_advantage`, as those here do: True if value and gradient are exactly
    0 where the advantage is 0. With `needs_token_ratio` True, a `PolicyLoss` refuses any ratio but "token".
    """

    def value(
        self,
        log_ratio: Float[AnyArray, "*shape"],
        log_prob: Float[AnyArray, "*shape"],
        advantages: Float[AnyArray, "*shape"],
    ) -> Float[Array, "*shape"]:
        """Computes the objective, elementwise.

        Args:
            log_ratio: log-prob under the policy minus that under the sampler, in nats, at most `MAX_LOG_RATIO`, so that its
                exponential is finite.
            log_prob: log-prob under the policy, in nats.
            advantages: advantages, without gradient.

        Returns:
            The quantity to be maximized, in the inputs' dtype; differentiable in the first two arguments.
        """
        ...

    def clipped(self, ratio: Float[AnyArray, "*shape"]) -> Bool[Array, "*shape"]:
        """Returns True where the objective limits this importance ratio, for the metric `clipped_ratio_fraction`."""
        ...


class _Vanishing:
    """Objectives whose value and gradient are exactly 0 where the advantage is 0."""

    vanishes_without_advantage = True


class _Unbounded(_Vanishing):
    """What an objective without a bound on the ratio says of its clipping."""

    def clipped(self, ratio: Float[AnyArray, "*shape"]) -> Bool[Array, "*shape"]:
        """Returns False everywhere: nothing limits the ratio."""
        return jnp.zeros_like(ratio, dtype=bool)


@dataclass(frozen=True)
class Clipped(_Vanishing):
    """min(r A, clip(r) A) with clip(r) = min(max(r, 1 - epsilon), 1 + epsilon_high), the objective of PPO.

    The gradient passes where A > 0 and r ≤ 1 + epsilon_high, or A < 0 and r ≥ 1 - epsilon, bounds included. With
    `delta` (dual clip, two-sided clip) it is max(min(r A, clip(r) A), delta A) where A < 0: the ratio is limited at
    delta as well, with no gradient above it.

    Attributes:
        epsilon: distance of the lower bound from 1, in (0, 1).
        epsilon_high: distance of the upper bound from 1, at least 0; None for `epsilon`. A value above `epsilon` is DAPO's
            clip-higher.
        delta: largest ratio where A < 0, above 1; None for no limit (`clip_ratio_c` in verl, where it is 3).

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> ratio, advantages = jnp.array([1.5, 1.5, 0.5]), jnp.array([1.0, -1.0, -1.0])
        >>> [f"{x:.1f}" for x in Clipped(0.2).value(jnp.log(ratio), jnp.zeros(3), advantages)]
        ['1.2', '-1.5', '-0.8']

    References:
        PPO, arXiv:1707.06347; dual clip, arXiv:1912.09729; INTELLECT-2 (two-sided clip), arXiv:2505.07291; DAPO,
        arXiv:2503.14476.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None

    def __post_init__(self) -> None:
        good = is_number(self.epsilon) and 0.0 < self.epsilon < 1.0
        require(good, "epsilon", "a number in (0, 1)", repr(self.epsilon))
        high, delta = self.epsilon_high, self.delta
        good = high is None or is_number(high) and 0.0 <= high < math.inf
        require(good, "epsilon_high", "a number of at least 0", repr(high))
        good = delta is None or is_number(delta) and 1.0 < delta < math.inf
        require(good, "delta", "a finite number above 1", repr(delta))
        hold_python_numbers(self)

    @property
    def low(self) -> float:
        """The lower bound of the ratio."""
        return 1.0 - self.epsilon

    @property
    def high(self) -> float:
        """The upper bound of the ratio."""
        return 1.0 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    def value(
        self,
        log_ratio: Float[AnyArray, "*shape"],
        log_prob: Float[AnyArray, "*shape"],
        advantages: Float[AnyArray, "*shape"],
    ) -> Float[Array, "*shape"]:
        """Computes min(r A, clip(r) A), or its two-sided form.

        The two branches of a minimum tie inside the bounds, and JAX splits the gradient of a tie; a select does not.
        """
        del log_prob
        ratio = jnp.exp(log_ratio)
        blocked = ((advantages > 0) & (ratio > self.high)) | ((advantages < 0) & (ratio < self.low))
        limited = jnp.clip(ratio, self.low, self.high)
        if self.delta is not None:
            beyond = (advantages < 0) & (ratio > self.delta)
            blocked, limited = blocked | beyond, jnp.where(beyond, self.delta, limited)
        return jnp.where(blocked, lax.stop_gradient(limited), ratio) * advantages

    def clipped(self, ratio: Float[AnyArray, "*shape"]) -> Bool[Array, "*shape"]:
        """Returns True where the ratio is outside the closed interval, whatever the sign of the advantage."""
        return (ratio < self.low) | (ratio > self.high)


@dataclass(frozen=True)
class StopGradientWeight(_Vanishing):
    """sg(clip(r)) A log π: a bounded importance weight without gradient, so that every token keeps a gradient.

    clip(r) = min(max(r, min_weight), max_weight).

    Attributes:
        max_weight: largest importance weight, above 0 (1 + ε_high of the paper, `epsilon_high` in TRL's cispo).
        min_weight: smallest importance weight, in [0, max_weight] (1 - ε_low of the paper, which sets no bound: 0).

    Raises:
        ValueError: if a number is out of range.

    References:
        MiniMax-M1 (CISPO), arXiv:2506.13585; The Art of Scaling RL Compute (the value 5), arXiv:2510.13786.
    """

    max_weight: float = 5.0
    min_weight: float = 0.0

    def __post_init__(self) -> None:
        require_above_0("max_weight", self.max_weight)
        good = is_number(self.min_weight) and 0.0 <= self.min_weight <= self.max_weight
        require(good, "min_weight", f"a number in [0, max_weight = {self.max_weight}]", repr(self.min_weight))
        hold_python_numbers(self)

    def value(
        self,
        log_ratio: Float[AnyArray, "*shape"],
        log_prob: Float[AnyArray, "*shape"],
        advantages: Float[AnyArray, "*shape"],
    ) -> Float[Array, "*shape"]:
        """Computes sg(clip(r)) A log π; with min_weight 0 it is 0 where π is 0."""
        weight = jnp.minimum(lax.stop_gradient(jnp.exp(log_ratio)), self.max_weight)
        if self.min_weight > 0.0:
            weight = jnp.maximum(weight, self.min_weight)
        return _weighted(weight * advantages, log_prob)

    def clipped(self, ratio: Float[AnyArray, "*shape"]) -> Bool[Array, "*shape"]:
        """Returns True where the weight is limited."""
        return (ratio > self.max_weight) | (ratio < self.min_weight)


@dataclass(frozen=True)
class DivergenceMask(_Vanishing):
    """sg(m min(r, max_weight)) A log π, with m = 0 for labels whose probability has moved too far where A drives it, else 1.

    With the probabilities π and μ = π / r of the label under the new and the old policy, the distance of the two as policies
    over the label and everything else is

        "tv": |π - μ|,        "kl": μ log(μ / π) + (1 - μ) log((1 - μ) / (1 - π)), in nats.

    m = 0 where it is above `epsilon_high`, A > 0 and π > μ, or above `epsilon`, A < 0 and π < μ. A ratio of 100 between
    probabilities of 1e-5 and 1e-3 stays, one of 0.8 at a probability of 0.99 does not. For the ratio "token"
    alone, where r is the label's own.

    Attributes:
        divergence: "tv" or "kl".
        epsilon: largest distance where A < 0, above 0, of "tv" at most 1 (`clip_ratio_low` of verl's dppo_tv and dppo_kl).
        epsilon_high: largest distance where A > 0, likewise (`clip_ratio_high`); None for `epsilon`.
        max_weight: largest importance weight, above 0 (`clip_ratio_c`).

    Raises:
        ValueError: if the divergence is unknown or a number out of range.

    Example:
        >>> new, old = jnp.log(jnp.array([0.001, 0.8])), jnp.log(jnp.array([0.0001, 0.99]))
        >>> [f"{x:.3f}" for x in DivergenceMask("tv", 0.15).value(new - old, new, jnp.array([1.0, -1.0]))]
        ['-69.078', '0.000']

    References:
        Rethinking the Trust Region in LLM Reinforcement Learning (DPPO), arXiv:2602.04879.
    """

    needs_token_ratio = True

    divergence: str = "tv"
    epsilon: float = 0.15
    epsilon_high: float | None = None
    max_weight: float = 20.0

    def __post_init__(self) -> None:
        require(self.divergence in DIVERGENCES, "divergence", f"one of {DIVERGENCES}", repr(self.divergence))
        require_above_0("max_weight", self.max_weight)
        for name in ("epsilon", "epsilon_high"):
            value = getattr(self, name)
            if value is not None or name == "epsilon":
                require_above_0(name, value)
                # No two probabilities are further apart.
                good = self.divergence != "tv" or value <= 1.0
                require(good, name, "a number of at most 1 for divergence 'tv'", repr(value))
        hold_python_numbers(self)

    def value(
        self,
        log_ratio: Float[AnyArray, "*shape"],
        log_prob: Float[AnyArray, "*shape"],
        advantages: Float[AnyArray, "*shape"],
    ) -> Float[Array, "*shape"]:
        """Computes sg(m min(r, max_weight)) A log π; it is 0 where π is 0."""
        log_ratio, new = lax.stop_gradient((log_ratio, log_prob))
        weight = jnp.minimum(jnp.exp(log_ratio), self.max_weight)
        return _weighted(jnp.where(self._stopped(log_ratio, new, advantages), 0.0, weight) * advantages, log_prob)

    def clipped(self, ratio: Float[AnyArray, "*shape"]) -> Bool[Array, "*shape"]:
        """Returns True where the weight is limited; `stopped_low_fraction` and `stopped_high_fraction` count where m = 0."""
        return ratio > self.max_weight

    def _stopped(
        self,
        log_ratio: Float[AnyArray, "*shape"],
        log_prob: Float[AnyArray, "*shape"],
        advantages: Float[AnyArray, "*shape"],
    ) -> Bool[Array, "*shape"]:
        new, old = jnp.exp(log_prob), jnp.exp(log_prob - log_ratio)
        distance = jnp.abs(new - old) if self.divergence == "tv" else _binary_kl(old, new, log_ratio)
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        rises, falls = (advantages > 0) & (new > old), (advantages < 0) & (new < old)
        return (rises & (distance > high)) | (falls & (distance > self.epsilon))


@dataclass(frozen=True)
class SoftGate(_Unbounded):
    """(4 / τ) σ(τ (r - 1)) A, a smooth gate in place of the clip.

    Its slope in r is A at r = 1 and falls on both sides.

    Attributes:
        temperature_positive: τ where A > 0, above 0.
        temperature_negative: τ elsewhere, above 0; a larger one damps gradients away from r = 1 faster.

    Raises:
        ValueError: if a number is out of range.

    References:
        Soft Adaptive Policy Optimization (SAPO), arXiv:2511.20347.
    """

    temperature_positive: float = 1.0
    temperature_negative: float = 1.05

    def __post_init__(self) -> None:
        for name in ("temperature_positive", "temperature_negative"):
            require_above_0(name, getattr(self, name))

    def value(
        self,
        log_ratio: Float[AnyArray, "*shape"],
        log_prob: Float[AnyArray, "*shape"],
        advantages: Float[AnyArray, "*shape"],
    ) -> Float[Array, "*shape"]:
        """Computes (4 / τ) σ(τ (r - 1)) A."""
        del log_prob
        positive, negative = (
            jnp.asarray(x, log_ratio.dtype) for x in (self.temperature_positive, self.temperature_negative)
        )
        temperature = jnp.where(advantages > 0, positive, negative)
        # r - 1, without rounding r first.
        return 4.0 / temperature * jax.nn.sigmoid(temperature * jnp.expm1(log_ratio)) * advantages


@dataclass(frozen=True)
class GammaWeight(_Unbounded):
    """sg(φ(r)) A log π with φ(r) = r^k exp(λ (1 - r)): a smooth importance weight that falls on both sides of k / λ.

    φ(1) = 1. For the ratio "product", where r is the ratio of the whole document.

    Attributes:
        power_positive: k where A ≥ 0, above 0; a larger one damps ratios below 1 faster (`vespo_k_pos` in TRL).
        decay_positive: λ where A ≥ 0, above 0; a larger one damps ratios above 1 faster (`vespo_lambda_pos`).
        power_negative: k elsewhere, above 0 (`vespo_k_neg`).
        decay_negative: λ elsewhere, above 0 (`vespo_lambda_neg`).

    Raises:
        ValueError: if a number is out of range.

    References:
        Variational Sequence-level Soft Policy Optimization (VESPO), arXiv:2602.10693.
    """

    power_positive: float = 2.0
    decay_positive: float = 3.0
    power_negative: float = 3.0
    decay_negative: float = 2.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require_above_0(name, value)

    def value(
        self,
        log_ratio: Float[AnyArray, "*shape"],
        log_prob: Float[AnyArray, "*shape"],
        advantages: Float[AnyArray, "*shape"],
    ) -> Float[Array, "*shape"]:
        """Computes sg(φ(r)) A log π."""

        def by_sign(positive: float, negative: float) -> Array:
            positives, negatives = (jnp.asarray(x, log_ratio.dtype) for x in (positive, negative))
            return jnp.where(advantages >= 0, positives, negatives)

        power = by_sign(self.power_positive, self.power_negative)
        decay = by_sign(self.decay_positive, self.decay_negative)
        log_ratio = lax.stop_gradient(log_ratio)
        return _weighted(jnp.exp(power * log_ratio - decay * jnp.expm1(log_ratio)) * advantages, log_prob)


@dataclass(frozen=True)
class Unclipped(_Unbounded):
    """r A, the importance-weighted objective without a bound."""

    def value(
        self,
        log_ratio: Float[AnyArray, "*shape"],
        log_prob: Float[AnyArray, "*shape"],
        advantages: Float[AnyArray, "*shape"],
    ) -> Float[Array, "*shape"]:
        """Computes r A."""
        del log_prob
        return jnp.exp(log_ratio) * advantages


@dataclass(frozen=True)
class LogLikelihood(_Unbounded):
    """A log π, the objective of REINFORCE.

    It ignores the sampler's log-probs, so it is for samples of the policy itself.

    References:
        R. J. Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning",
        1992.
    """

    def value(
        self,
        log_ratio: Float[AnyArray, "*shape"],
        log_prob: Float[AnyArray, "*shape"],
        advantages: Float[AnyArray, "*shape"],
    ) -> Float[Array, "*shape"]:
        """Computes A log π, infinite where π is 0 and A is not."""
        del log_ratio
        return _weighted(advantages, log_prob)


def _binary_kl(
    old: Float[Array, "*shape"], new: Float[Array, "*shape"], log_ratio: Float[AnyArray, "*shape"]
) -> Float[Array, "*shape"]:
    """Computes the KL of two probabilities of one label from the old to the new one, in nats.

    A probability near 1 is known to some 1e-7 only: without an addition its complement could be 0, and the KL infinite. A
    log-prob that is a rounding above 0 would make the complement negative, and its logarithm NaN, which stops no label.
    """
    others, others_new = (jnp.maximum(1.0 - probability, 0.0) for probability in (old, new))
    return others * jnp.log((others + 1e-8) / (others_new + 1e-8)) - old * log_ratio


def _weighted(weight: Float[AnyArray, "*shape"], log_prob: Float[AnyArray, "*shape"]) -> Float[Array, "*shape"]:
    """Returns weight · log_prob, with 0 · -inf = 0."""
    return weight * jnp.where((weight == 0.0) & jnp.isneginf(log_prob), 0.0, log_prob)


def require_above_0(name: str, value: object) -> None:
    """Raises ValueError unless the argument is a finite number above 0."""
    require(is_number(value) and 0.0 < value < math.inf, name, "a finite number above 0", repr(value))
