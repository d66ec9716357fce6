"""Labels of a step that learn: chosen by entropy, or by the covariance of log-prob and advantage.

A label that is not to learn gets the advantage 0. Every objective is proportional to the advantage, so the label then adds
nothing to the objective, and keeps its place in the loss's denominators, its KL and its entropy bonus. That is so where
objectives are those of labels: with the ratio "sequence" the mean advantage of a document would change instead.

**Quantiles and means are those of all labels of the step**, so the functions take these at once, or a threshold that was
computed from them. Those of a micro-batch would make the loss depend on how the step is divided.
"""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._arrays import AnyArray, compute_dtype, nan_where
from jaxlogp.errors import describe, is_concrete, is_number, require
from jaxlogp.losses.inputs import advantages_of_tokens, check_labels, constant, flat, is_array, labels_of, shape_of


def entropy_threshold(
    entropy: Float[AnyArray, "*tokens"], mask: Bool[AnyArray, "*tokens"] | None = None, *, share: float = 0.2
) -> Float[Array, ""]:
    """Computes the entropy that a share of the labels reaches or exceeds: their (1 - share) quantile.

    The quantile is interpolated linearly, as in NumPy's default.

    Args:
        entropy: [*tokens], entropies of all labels of the step, in nats.
        mask: [*tokens], True for labels; None for all tokens.
        share: share of the labels (ρ of the paper, `top_entropy_quantile` in TRL), in [0, 1].

    Returns:
        A scalar in nats, fp32 (float64 for float64 entropies); infinite without labels.

    Raises:
        ValueError: if a shape or dtype is wrong, the share is out of range, or a known entropy is not finite.

    Example:
        >>> print(f"{entropy_threshold(jnp.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0]), share=0.4):.1f}")
        3.0

    References:
        Beyond the 80/20 Rule, arXiv:2506.01939.
    """
    require(is_number(share) and 0.0 <= share <= 1.0, "share", "a number in [0, 1]", describe(share))
    mask = labels_of(mask, shape_of(entropy, "entropy"))
    check_labels({"entropy": entropy}, mask)
    labels, dtype = flat(mask), compute_dtype(entropy)
    count = jnp.sum(labels, dtype=jnp.int32)
    values = jnp.sort(jnp.where(labels, constant(entropy, labels, dtype), jnp.inf))
    values = jnp.where(jnp.arange(values.size, dtype=jnp.int32) < count, values, 0.0)
    position = jnp.asarray(1.0 - share, dtype) * jnp.maximum(count - 1, 0).astype(dtype)
    lower = jnp.floor(position).astype(jnp.int32)
    upper = jnp.minimum(lower + 1, jnp.maximum(count - 1, 0))
    value = values[lower] + (position - lower.astype(dtype)) * (values[upper] - values[lower])
    # Sorting would put a NaN behind the masked entries, where it is cut off.
    broken = jnp.any(labels & ~jnp.isfinite(flat(entropy)))
    return nan_where(broken, jnp.where(count > 0, value, jnp.inf))


def high_entropy_advantages(
    advantages: Float[AnyArray, "*rows"],
    entropy: Float[AnyArray, "*tokens"],
    mask: Bool[AnyArray, "*tokens"] | None = None,
    *,
    threshold: float | np.floating | Float[AnyArray, ""],
) -> Float[Array, "*tokens"]:
    """Returns the advantages of labels whose entropy reaches the threshold, and 0 for all other tokens.

    Args:
        advantages: [*tokens], advantage of each token; or [B] or [B, 1], one per row of [B, T].
        entropy: [*tokens], entropy of the distribution of each target, in nats.
        mask: [*tokens], True for labels; None for all tokens.
        threshold: smallest entropy of a label that learns, in nats, such as that of `entropy_threshold` for the whole step.

    Returns:
        [*tokens], fp32 (float64 for float64 advantages), without gradient.

    Raises:
        ValueError: if a shape or dtype is wrong, or a known value at a label is not finite.

    Example:
        >>> high_entropy_advantages(jnp.array([1.0, 2.0, 3.0]), jnp.array([0.1, 0.9, 0.5]), threshold=0.5).tolist()
        [0.0, 2.0, 3.0]

    References:
        Beyond the 80/20 Rule, arXiv:2506.01939.
    """
    mask = labels_of(mask, shape_of(entropy, "entropy"))
    advantages = advantages_of_tokens(advantages, mask)
    check_labels({"advantages": advantages, "entropy": entropy}, mask)
    one = is_number(threshold) or is_array(threshold) and threshold.shape == ()
    require(one, "threshold", "one number", describe(threshold))
    known_nan = is_concrete(threshold) and math.isnan(float(threshold))
    require(not known_nan, "threshold", "one number, not NaN", threshold)
    dtype = compute_dtype(entropy)
    entropy = jnp.where(mask, jnp.asarray(entropy).astype(dtype), -jnp.inf)
    threshold = jnp.asarray(threshold).astype(dtype)
    unknown = mask & (jnp.isnan(entropy) | jnp.isnan(threshold))
    return nan_where(unknown, _kept(advantages, mask & (entropy >= threshold)))


def label_covariances(
    log_probs: Float[AnyArray, "*tokens"],
    advantages: Float[AnyArray, "*rows"],
    mask: Bool[AnyArray, "*tokens"] | None = None,
) -> Float[Array, "*tokens"]:
    """Computes what each label adds to the covariance of log-probs and advantages: (A - mean A) (log π - mean log π).

    Labels of large covariance are those through which entropy falls. Means are over all labels given.

    Args:
        log_probs: [*tokens], log-probs of the targets of all labels of the step, in nats.
        advantages: [*tokens], advantage of each token; or [B] or [B, 1], one per row of [B, T].
        mask: [*tokens], True for labels; None for all tokens.

    Returns:
        [*tokens], fp32 (float64 for float64 log-probs), 0 where masked, without gradient.

    Raises:
        ValueError: if a shape or dtype is wrong, or a known value at a label is not finite.

    References:
        The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv:2505.22617.
    """
    mask = labels_of(mask, shape_of(log_probs, "log_probs"))
    advantages = advantages_of_tokens(advantages, mask)
    check_labels({"log_probs": log_probs, "advantages": advantages}, mask)
    labels, dtype = flat(mask), compute_dtype(log_probs, advantages)
    count = jnp.maximum(jnp.sum(labels, dtype=jnp.int32), 1).astype(dtype)

    def centred(values: Float[AnyArray, "*tokens"]) -> Float[Array, " tokens"]:
        values = constant(values, labels, dtype)
        return jnp.where(labels, values - jnp.sum(values) / count, 0.0)

    return (centred(advantages) * centred(log_probs)).reshape(mask.shape)


def clip_cov_advantages(
    advantages: Float[AnyArray, "*rows"],
    log_probs: Float[AnyArray, "*tokens"],
    mask: Bool[AnyArray, "*tokens"] | None = None,
    *,
    key: jax.Array,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> Float[Array, "*tokens"]:
    """Returns the advantages of Clip-Cov: 0 at a few random labels of large covariance, which then do not learn.

    Of the labels with low < covariance < high, max(share · D, 1) are drawn, rounded down and at most all of them; D is the
    number of all labels. Along with `grpo` this is Clip-Cov for samples of `log_probs`.

    Args:
        advantages: [*tokens], advantage of each token; or [B] or [B, 1], one per row of [B, T].
        log_probs: [*tokens], log-probs of the targets of all labels of the step under the old policy, in nats.
        mask: [*tokens], True for labels; None for all tokens.
        key: key of `jax.random`, a new one for each step.
        share: share of all labels that stop learning, in (0, 1] (`clip_cov_ratio` in verl).
        low: lower bound of the covariance (`clip_cov_lb`).
        high: upper bound of the covariance (`clip_cov_ub`).

    Returns:
        [*tokens], fp32 (float64 for float64 advantages), 0 where masked, without gradient.

    Raises:
        ValueError: if a shape or dtype is wrong, a number out of range, or a known value at a label not finite.

    References:
        The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv:2505.22617.
    """
    _check_share(share)
    require(is_number(low) and is_number(high) and low < high, "low", f"a number below high = {high}", describe(low))
    mask = labels_of(mask, shape_of(log_probs, "log_probs"))
    covariances = label_covariances(log_probs, advantages, mask)
    candidates = mask & (covariances > float(low)) & (covariances < float(high))
    drawn = _first(jax.random.uniform(key, candidates.shape), candidates, _number(mask, share))
    return _kept(advantages_of_tokens(advantages, mask), mask & ~drawn)


def high_covariance_labels(
    log_probs: Float[AnyArray, "*tokens"],
    advantages: Float[AnyArray, "*rows"],
    mask: Bool[AnyArray, "*tokens"] | None = None,
    *,
    share: float = 2e-4,
) -> Bool[Array, "*tokens"]:
    """Returns True for the labels of the largest covariance, max(share · D, 1) of all D labels, rounded down.

    They are those that KL-Cov penalizes: `penalized` of :func:`jaxlogp.policy_loss` along with `kl_cov`.

    Args:
        log_probs: [*tokens], log-probs of the targets of all labels of the step under the old policy, in nats.
        advantages: [*tokens], advantage of each token; or [B] or [B, 1], one per row of [B, T].
        mask: [*tokens], True for labels; None for all tokens.
        share: share of all labels, in (0, 1] (`kl_cov_ratio` in verl).

    Returns:
        bool [*tokens], False where masked; the earlier of equal labels.

    Raises:
        ValueError: if a shape or dtype is wrong, the share is out of range, or a known value at a label is not finite.

    References:
        The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv:2505.22617.
    """
    _check_share(share)
    mask = labels_of(mask, shape_of(log_probs, "log_probs"))
    return _first(-label_covariances(log_probs, advantages, mask), jnp.asarray(mask), _number(mask, share))


def _check_share(share: float) -> None:
    require(is_number(share) and 0.0 < share <= 1.0, "share", "a number in (0, 1]", describe(share))


def _number(mask: Bool[AnyArray, "*tokens"], share: float) -> Array:
    """Returns this share of the labels, rounded down, but at least 1."""
    return jnp.maximum(_floor_of_product(jnp.sum(flat(mask), dtype=jnp.int32), float(share)), 1)


# One program also outside of jit.
@functools.partial(jax.jit, static_argnames="share", inline=True)
def _floor_of_product(count: Int[Array, ""], share: float) -> Int[Array, ""]:
    """Returns floor(share · count), exactly for a share that is a fraction with a denominator of at most 2^24.

    0.53 of 100 is 53. Floats have no 0.53, and the product of the nearest fp32 number with 100 is below 53.
    """
    # Long division in base 2^7: a remainder below 2^24 and the next digit make a number below 2^32.
    ratio = Fraction(share).limit_denominator(2**24)
    quotient, rest = jnp.uint32(0), jnp.uint32(0)
    for shift in (28, 21, 14, 7, 0):
        digit = (count.astype(jnp.uint32) >> shift) & 127
        rest = rest * 128 + digit * ratio.numerator
        quotient, rest = quotient * 128 + rest // ratio.denominator, rest % ratio.denominator
    return quotient.astype(jnp.int32)


def _first(
    values: Float[Array, "*tokens"], candidates: Bool[Array, "*tokens"], number: Array
) -> Bool[Array, "*tokens"]:
    """Returns True for the candidates with the smallest values, so many of them; the earlier of equal ones."""
    order = jnp.argsort(jnp.where(flat(candidates), flat(values), jnp.inf), stable=True)
    ranks = jnp.zeros(order.shape, jnp.int32).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
    return candidates & (ranks < number).reshape(candidates.shape)


def _kept(advantages: Float[AnyArray, "*tokens"], kept: Bool[AnyArray, "*tokens"]) -> Float[Array, "*tokens"]:
    dtype = compute_dtype(advantages)
    return lax.stop_gradient(jnp.where(kept, jnp.asarray(advantages).astype(dtype), jnp.zeros((), dtype)))
