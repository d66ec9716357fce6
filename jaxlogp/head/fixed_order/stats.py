"""Tile statistics around a power of two: combining them multiplies by powers of two only, so it is exact up to the sums.

The counterpart of :mod:`jaxlogp.stats` for results that must not depend on the mesh to the last bit. There the reference
of a tile is its maximum and rescaling multiplies by exp(m - m'), an inexact product next to an addition. Here it is
exponent · ln 2 with an integer exponent = ceil(max / ln 2), and rescaling multiplies by 2^(k - K).
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxlogp.invariance.exact import (
    LARGEST_EXPONENT,
    SMALLEST_RESCALE,
    SMALLEST_SHIFT,
    ceil_exponent,
    distance,
    power_of_two,
    product,
    reference,
    split,
    times_ln2,
)


class ScaledStats(NamedTuple):
    """Statistics of some columns, a value per token. With k the exponent and y = z - k ln 2:

    Attributes:
      exponent: k, int32.
      sum_exp: Σ e^y.
      weighted: together with carried, Σ e^y y = weighted + ln 2 · carried; None when entropy is not wanted.
      carried: what rescaling has added to Σ e^y y, in units of ln 2; None like weighted.
    """

    exponent: Int[Array, "*tokens"]
    sum_exp: Float[Array, "*tokens"]
    weighted: Float[Array, "*tokens"] | None
    carried: Float[Array, "*tokens"] | None


class ScaledNormaliser(NamedTuple):
    """What the backward needs: p = exp((z - exponent ln 2) - log_sum_exp), mean = Σ p (z - exponent ln 2) or None."""

    exponent: Int[Array, "*tokens"]
    log_sum_exp: Float[Array, "*tokens"]
    mean: Float[Array, "*tokens"] | None


def empty_scaled_stats(shape: tuple[int, ...], with_entropy: bool) -> ScaledStats:
    """The identity of :func:`combine_scaled`: no column seen."""
    zeros = jnp.zeros(shape, jnp.float32)
    none = zeros if with_entropy else None
    return ScaledStats(jnp.full(shape, -LARGEST_EXPONENT, jnp.int32), zeros, none, none)


def _exp(shift: Float[Array, "..."]) -> Float[Array, "..."]:
    """exp without denormals. The selection also parts the last product inside of exp from what is added to it."""
    return jnp.where(shift < SMALLEST_SHIFT, 0.0, jnp.exp(jnp.maximum(shift, SMALLEST_SHIFT)))


def scaled_tile_stats(
    logits: Float[Array, "tokens columns"], valid: Bool[Array, " columns"], with_entropy: bool
) -> ScaledStats:
    """Statistics of one tile.

    Args:
      logits: fp32, final (scaled, capped, divided by the temperature).
      valid: False for columns that are padding or belong to another tile.
      with_entropy: whether to accumulate what entropy needs.
    """
    seen = jnp.where(valid[None, :], logits, -jnp.inf)
    exponent = ceil_exponent(jnp.max(seen, axis=-1))
    shift = distance(seen, reference(exponent[:, None]))
    exp = _exp(shift)
    if not with_entropy:
        return ScaledStats(exponent, jnp.sum(exp, axis=-1), None, None)
    weighted = product(exp, jnp.where(exp == 0.0, 0.0, shift))
    zeros = jnp.zeros_like(exp[:, 0])
    return ScaledStats(exponent, jnp.sum(exp, axis=-1), jnp.sum(weighted, axis=-1), zeros)


def _rescale(stats: ScaledStats, exponent: Int[Array, "*tokens"]) -> ScaledStats:
    steps = stats.exponent - exponent
    factor = power_of_two(steps)
    if stats.weighted is None:
        return ScaledStats(exponent, factor * stats.sum_exp, None, None)
    # steps has 6 bits and the halves of the sum 12, so both products are exact.
    count = jnp.maximum(steps, SMALLEST_RESCALE).astype(jnp.float32)
    high, low = split(stats.sum_exp)
    carried = (stats.carried + count * low) + count * high
    return ScaledStats(exponent, factor * stats.sum_exp, factor * stats.weighted, factor * carried)


def combine_scaled(left: ScaledStats, right: ScaledStats) -> ScaledStats:
    """Statistics of the columns of both sides, which must not share a column."""
    exponent = jnp.maximum(left.exponent, right.exponent)
    left, right = _rescale(left, exponent), _rescale(right, exponent)
    if left.weighted is None:
        return ScaledStats(exponent, left.sum_exp + right.sum_exp, None, None)
    return ScaledStats(
        exponent,
        left.sum_exp + right.sum_exp,
        left.weighted + right.weighted,
        left.carried + right.carried,
    )


def scaled_normaliser(stats: ScaledStats) -> ScaledNormaliser:
    """log Σ e^y and Σ p y of statistics over the whole vocabulary."""
    log_sum_exp = jnp.log(stats.sum_exp)
    if stats.weighted is None:
        return ScaledNormaliser(stats.exponent, log_sum_exp, None)
    mean = (stats.weighted + times_ln2(stats.carried)) / stats.sum_exp
    return ScaledNormaliser(stats.exponent, log_sum_exp, mean)


def selected_log_prob(target: Float[Array, "*tokens"], normaliser: ScaledNormaliser) -> Float[Array, "*tokens"]:
    """min((z_target - exponent ln 2) - log Σ e^y, 0)."""
    log_prob = distance(target, reference(normaliser.exponent)) - normaliser.log_sum_exp
    return jnp.minimum(log_prob, 0.0)


def scaled_lse(normaliser: ScaledNormaliser) -> Float[Array, "*tokens"]:
    """log Σ e^z = exponent ln 2 + log Σ e^y."""
    to = reference(normaliser.exponent)
    return to.coarse + (to.fine + (to.rest + normaliser.log_sum_exp))


def scaled_entropy(normaliser: ScaledNormaliser, vocab_size: int) -> Float[Array, "*tokens"]:
    """log Σ e^y - Σ p y, clipped to [0, log V]."""
    bound = np.float32(math.log(vocab_size))
    if float(bound) > math.log(vocab_size):
        bound = np.nextafter(bound, np.float32(0.0))
    return jnp.clip(normaliser.log_sum_exp - normaliser.mean, 0.0, bound)


def scaled_logit_gradient(
    logits: Float[Array, "tokens columns"],
    targets: Int[Array, " tokens"],
    valid: Bool[Array, " columns"],
    normaliser: ScaledNormaliser,
    g_log_probs: Float[Array, " tokens"],
    g_entropy: Float[Array, " tokens"] | None,
) -> Float[Array, "tokens columns"]:
    """dL/dz = g (onehot - p) + g_H p (Σ p z - z) for one tile, fp32; exact zeros where there is no cotangent."""
    shift = distance(logits, reference(normaliser.exponent[:, None]))
    probs = _exp(shift - normaliser.log_sum_exp[:, None])
    factor = jnp.broadcast_to(-g_log_probs[:, None], probs.shape)
    if g_entropy is not None:
        gap = normaliser.mean[:, None] - jnp.where(probs == 0.0, normaliser.mean[:, None], shift)
        factor = factor + product(jnp.broadcast_to(g_entropy[:, None], probs.shape), gap)
    onehot = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets[:, None]
    gradient = product(probs, factor) + jnp.where(onehot, g_log_probs[:, None], 0.0)
    live = live_tokens(g_log_probs, g_entropy)
    return jnp.where(live[:, None] & valid[None, :], gradient, 0.0)


def live_tokens(
    g_log_probs: Float[Array, "*tokens"], g_entropy: Float[Array, "*tokens"] | None
) -> Bool[Array, "*tokens"]:
    """Tokens with a cotangent other than zero."""
    live = g_log_probs != 0.0
    return live if g_entropy is None else live | (g_entropy != 0.0)
