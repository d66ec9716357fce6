"""Attention as two products with the scores in between: for short rows, the cache, and runs whose bits must not change."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

MASKED_SCORE = -1e30
"""Far below any score, and far enough from the end of fp32 that adding a score to it cannot overflow."""


def precision_of(dtype: jnp.dtype) -> lax.Precision:
    """Returns the precision of products: fp32 operands as fp32 (never TF32), narrower ones as the matrix units take them."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def mask_bias(mask: Bool[Array, "B T S"]) -> Float[Array, "B T S"]:
    """Returns what to add to the scores: 0 where the mask allows, elsewhere so little that the probability is exactly 0.

    One array for all layers; adding it is several times faster on a CPU than selecting in every layer.
    """
    return jnp.where(mask, 0.0, MASKED_SCORE).astype(jnp.float32)


def capped(scores: Float[Array, "*shape"], softcap: float | None) -> Float[Array, "*shape"]:
    """Returns softcap · tanh(scores / softcap), or the scores as they are."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def attend(
    queries: Float[Array, "B T N D"],
    keys: Float[Array, "B S K D"],
    values: Float[Array, "B S K D"],
    bias: Float[Array, "B T S"],
    *,
    scale: float,
    softcap: float | None = None,
    by_head: bool = False,
) -> Float[Array, "B T N D"]:
    """Computes softmax(cap(scale · q·k) + bias) · v with cap(x) = softcap · tanh(x / softcap), in the values' dtype.

    Query head n reads key-value head n // G. Scores and softmax are fp32; the probabilities are rounded to the values' dtype
    before the second product. `bias` is that of `mask_bias`, with at least one allowed key for every query; `scale` is D^-½
    in most models. With `by_head`, keys and values are [B, K, S, D].
    """
    rows, length, heads, head_dim = queries.shape
    kv_heads, slots = keys.shape[1 if by_head else 2], "bksd" if by_head else "bskd"
    grouped = queries.reshape(rows, length, kv_heads, heads // kv_heads, head_dim)
    precision = precision_of(values.dtype)
    # In the order in which the product makes them; the scores are the largest array here.
    products = jnp.einsum(
        f"btkgd,{slots}->bktgs", grouped, keys, precision=precision, preferred_element_type=jnp.float32
    )
    probabilities = jax.nn.softmax(capped(products * scale, softcap) + bias[:, None, :, None], axis=-1)
    mixed = jnp.einsum(f"bktgs,{slots}->btkgd", probabilities.astype(values.dtype), values, precision=precision)
    return mixed.reshape(rows, length, heads, head_dim)
