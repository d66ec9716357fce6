"""Log-ratios, importance ratios and KL estimates of tokens, safe at masked entries and for any finite log-prob.

Masked entries are replaced before any arithmetic, so NaN, infinity or a huge value there changes neither a value nor a
gradient. Log-ratios are bounded from above before every `exp`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxlogp._arrays import AnyArray, compute_dtype
from jaxlogp.losses.inputs import check_arrays, labels_of, selected, shape_of

MAX_LOG_RATIO = 30.0
"""Upper bound of log-ratios, in nats; larger ones are replaced by it, with zero gradient.

exp(30) is about 1e13: the ratio, its square (1e26) and a sum of 1e12 such squares stay finite in fp32. A clipped loss
reaches the bound only for negative advantages, where nothing else limits the ratio.
"""


def log_ratio(
    new: Float[AnyArray, "*tokens"], old: Float[AnyArray, "*tokens"], mask: Bool[AnyArray, "*tokens"] | None = None
) -> Float[Array, "*tokens"]:
    """Computes the difference of two log-probs, new - old, in nats; exactly 0 with zero gradient where masked.

    Args:
        new: [*tokens], log-probs in nats.
        old: [*tokens], log-probs in nats.
        mask: [*tokens], True where the result is wanted; None for all tokens.

    Returns:
        [*tokens], fp32 (float64 for float64 inputs).

    Raises:
        ValueError: if a shape or dtype differs from the above.
    """
    mask = labels_of(mask, shape_of(new, "new"))
    check_arrays({"new": new, "old": old}, mask)
    dtype = compute_dtype(new, old)
    return selected(new, mask, dtype) - selected(old, mask, dtype)


def ratio(
    new: Float[AnyArray, "*tokens"], old: Float[AnyArray, "*tokens"], mask: Bool[AnyArray, "*tokens"] | None = None
) -> Float[Array, "*tokens"]:
    """Computes the importance ratio exp(new - old), exactly 0 with zero gradient where masked.

    The log-ratio is bounded by `MAX_LOG_RATIO`, with zero gradient beyond.

    Args:
        new: [*tokens], log-probs in nats.
        old: [*tokens], log-probs in nats.
        mask: [*tokens], True where the result is wanted; None for all tokens.

    Returns:
        [*tokens], fp32 (float64 for float64 inputs).

    Raises:
        ValueError: if a shape or dtype differs from the above.
    """
    value = jnp.exp(bounded(log_ratio(new, old, mask)))
    return value if mask is None else jnp.where(mask, value, 0.0)


def kl_k1(
    new: Float[AnyArray, "*tokens"], ref: Float[AnyArray, "*tokens"], mask: Bool[AnyArray, "*tokens"] | None = None
) -> Float[Array, "*tokens"]:
    """Computes the k1 estimate of KL(new ‖ ref) per token, new - ref, in nats; exactly 0 with zero gradient where masked.

    Unbiased as a value. Its gradient has mean zero under the policy, so as a penalty it has no effect.

    Args:
        new: [*tokens], log-probs of the sampled tokens under the policy, in nats.
        ref: [*tokens], log-probs of the same tokens under the reference, in nats.
        mask: [*tokens], True where the result is wanted; None for all tokens.

    Returns:
        [*tokens], fp32 (float64 for float64 inputs).

    Raises:
        ValueError: if a shape or dtype differs from the above.

    References:
        J. Schulman, "Approximating KL divergence", 2020.
    """
    return k1(log_ratio(ref, new, mask))


def kl_k2(
    new: Float[AnyArray, "*tokens"], ref: Float[AnyArray, "*tokens"], mask: Bool[AnyArray, "*tokens"] | None = None
) -> Float[Array, "*tokens"]:
    """Computes the k2 estimate of KL(new ‖ ref) per token, (new - ref)² / 2, in nats.

    Exactly 0 with zero gradient where masked. Biased as a value, but on policy its gradient is an unbiased estimate of that
    of KL(new ‖ ref).

    Args:
        new: [*tokens], log-probs of the sampled tokens under the policy, in nats.
        ref: [*tokens], log-probs of the same tokens under the reference, in nats.
        mask: [*tokens], True where the result is wanted; None for all tokens.

    Returns:
        [*tokens], fp32 (float64 for float64 inputs).

    Raises:
        ValueError: if a shape or dtype differs from the above.

    References:
        J. Schulman, "Approximating KL divergence", 2020.
    """
    return k2(log_ratio(ref, new, mask))


def kl_k3(
    new: Float[AnyArray, "*tokens"], ref: Float[AnyArray, "*tokens"], mask: Bool[AnyArray, "*tokens"] | None = None
) -> Float[Array, "*tokens"]:
    """Computes the k3 estimate of KL(new ‖ ref) per token, exp(ref - new) - (ref - new) - 1, in nats.

    Unbiased as a value and never negative; exactly 0 with zero gradient where masked. ref - new is bounded by
    `MAX_LOG_RATIO`, with zero gradient beyond.

    Args:
        new: [*tokens], log-probs of the sampled tokens under the policy, in nats.
        ref: [*tokens], log-probs of the same tokens under the reference, in nats.
        mask: [*tokens], True where the result is wanted; None for all tokens.

    Returns:
        [*tokens], fp32 (float64 for float64 inputs).

    Raises:
        ValueError: if a shape or dtype differs from the above.

    References:
        J. Schulman, "Approximating KL divergence", 2020.
    """
    return k3(log_ratio(ref, new, mask))


def bounded(log_ratio: Float[AnyArray, "*shape"]) -> Float[Array, "*shape"]:
    """Replaces values of `log_ratio` above `MAX_LOG_RATIO` by it, by a select, so that their gradient is zero."""
    return jnp.where(log_ratio > MAX_LOG_RATIO, MAX_LOG_RATIO, log_ratio)


def k1(ref_new: Float[AnyArray, "*shape"]) -> Float[Array, "*shape"]:
    """Computes -x for x = ref - new."""
    return -ref_new


def k2(ref_new: Float[AnyArray, "*shape"]) -> Float[Array, "*shape"]:
    """Computes x² / 2 for x = ref - new."""
    return jnp.square(ref_new) / 2


def k3(ref_new: Float[AnyArray, "*shape"]) -> Float[Array, "*shape"]:
    """Computes exp(x) - x - 1 for x = ref - new, bounded, without the cancellation of the naive form near 0."""
    x = bounded(ref_new)
    return jnp.expm1(x) - x


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
