"""Statistics of one tile, and the gradient of its logits; no bit depends on the surrounding program.

A float sum over the columns would take its order from that program (``jax.checkpoint``, ``jax.vmap``, a fusion). So
each term is split into two integers, and integers are added; :mod:`jaxlogp.head.fold` then adds up the tiles as
integers too.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._stats import Normaliser
from jaxlogp.invariance.exact import product

# e^-80 is a normal fp32 number; below, exp may return denormals, which some programs flush and others keep.
SMALLEST_SHIFT = -80.0
# e^-1000 is 0, and 0 * -inf would be NaN.
SMALLEST_FACTOR = -1000.0


def tile_statistics(
    logits: Float[Array, "rows columns"], valid: Bool[Array, " columns"], with_entropy: bool
) -> tuple[Float[Array, " rows"], Float[Array, " rows"], Float[Array, " rows"]]:
    """m, Σ e^(z - m) and Σ e^(z - m) (z - m) of one tile, for :func:`jaxlogp.head.fold.sum_tiles`.

    Args:
        logits: fp32, final (scaled, capped, divided by the temperature).
        valid: False for columns that are padding or belong to another tile.
        with_entropy: whether the last of the three is wanted; otherwise it is 0.
    """
    seen = jnp.where(valid[None, :], logits, -jnp.inf)
    maximum = jnp.max(seen, axis=-1)
    # A row that is not finite is recognised by its maximum; its sums are then not used.
    shift = jnp.where(jnp.isneginf(seen), -jnp.inf, seen - maximum[:, None])
    exp = jnp.exp(shift)
    if not with_entropy:
        return maximum, sum_columns(exp), jnp.zeros_like(maximum)
    return maximum, sum_columns(exp), sum_columns(exp * jnp.maximum(shift, SMALLEST_FACTOR))


def sum_columns(terms: Float[Array, "rows columns"]) -> Float[Array, " rows"]:
    """Σ over columns, |term| <= 1, in any order: each term as a 2^-bits + b 2^-(2 bits) with integers a and b.

    With as many bits as let the sums of a fit into int32: 20 for 1024 columns, where a term is rounded at 2^-40.
    """
    scale = 2.0 ** (30 - (terms.shape[-1] - 1).bit_length())
    # Powers of two: both products are exact, so contracting them with the subtraction changes nothing.
    high = (terms * scale).astype(jnp.int32)
    low = lax.round((terms * scale - high.astype(jnp.float32)) * scale, lax.RoundingMethod.TO_NEAREST_EVEN)
    # One reduction of pairs reads the terms once; two would take 1.7 times as long on a CPU.
    pairs, zeros = (high, low.astype(jnp.int32)), (np.int32(0), np.int32(0))
    high, low = lax.reduce(pairs, zeros, lambda x, y: (x[0] + y[0], x[1] + y[1]), (terms.ndim - 1,))
    return high.astype(jnp.float32) * (1 / scale) + low.astype(jnp.float32) * (1 / scale**2)


def logit_gradient(
    logits: Float[Array, "rows columns"],
    targets: Int[Array, " rows"],
    valid: Bool[Array, " columns"],
    normaliser: Normaliser,
    g_log_probs: Float[Array, " rows"],
    g_entropy: Float[Array, " rows"] | None,
) -> Float[Array, "rows columns"]:
    """dL/dz = g (onehot - p) + g_H p (Σ p z - z) for one tile, fp32; exact zeros where there is no cotangent."""
    shift = logits - normaliser.max[:, None]
    probs = _exp(shift - normaliser.log_sum_exp[:, None])
    factor = jnp.broadcast_to(-g_log_probs[:, None], probs.shape)
    if g_entropy is not None:
        gap = normaliser.mean[:, None] - jnp.where(probs == 0.0, normaliser.mean[:, None], shift)
        factor = factor + product(jnp.broadcast_to(g_entropy[:, None], probs.shape), gap)
    onehot = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets[:, None]
    gradient = product(probs, factor) + jnp.where(onehot, g_log_probs[:, None], 0.0)
    live = live_tokens(g_log_probs, g_entropy)
    return jnp.where(live[:, None] & valid[None, :], gradient, 0.0)


def _exp(shift: Float[Array, "..."]) -> Float[Array, "..."]:
    """exp without denormals. The selection also separates the last product inside exp from what is added to it."""
    return jnp.where(shift < SMALLEST_SHIFT, 0.0, jnp.exp(jnp.maximum(shift, SMALLEST_SHIFT)))


def live_tokens(
    g_log_probs: Float[Array, "*tokens"], g_entropy: Float[Array, "*tokens"] | None
) -> Bool[Array, "*tokens"]:
    """Tokens with a cotangent other than zero."""
    live = g_log_probs != 0.0
    return live if g_entropy is None else live | (g_entropy != 0.0)
