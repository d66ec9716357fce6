"""Grouped-query attention over packed rows, and the key-value cache of the sampler.

Shapes: B rows, T tokens of a row, S slots (cache) or source tokens, N query heads, K key-value heads, G = N / K query
heads that share a key-value head, D features of a head, L layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

MASKED_SCORE = -1e30
"""Far below any score, and far enough from the end of fp32 that adding a score to it cannot overflow."""


class KVCache(NamedTuple):
    """Keys (already rotated) and values of every layer, and which slots hold a token.

    Attributes:
        keys: [L, B, S, K, D] in the activations' dtype.
        values: [L, B, S, K, D], likewise.
        valid: bool [B, S]; attention ignores the other slots.
    """

    keys: Float[Array, "L B S K D"]
    values: Float[Array, "L B S K D"]
    valid: Bool[Array, "B S"]

    @classmethod
    def empty(cls, layers: int, rows: int, slots: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> "KVCache":
        """A cache without tokens; zeros, so that an unused slot is never a source of NaN."""
        shape = (layers, rows, slots, kv_heads, head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((rows, slots), jnp.bool_))

    def repeat_rows(self, copies: int) -> "KVCache":
        """Every row `copies` times, side by side."""
        return KVCache(
            *(jnp.repeat(x, copies, axis=1) for x in (self.keys, self.values)), jnp.repeat(self.valid, copies, axis=0)
        )


def precision_of(dtype: jnp.dtype) -> lax.Precision:
    """fp32 operands are multiplied as fp32 (never TF32); narrower ones go to the matrix units as they are."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def packed_mask(document_ids: Int[Array, "B T"], window: int | None = None) -> Bool[Array, "B T T"]:
    """True where query t may read key s: t - window < s ≤ t and both in the same document.

    A token always reads itself, so no query is left without a key, not even in a row of padding.

    Args:
        document_ids: int [B, T]; equal ids in one row are one document.
        window: tokens that a query reads at most, itself included; None for no bound.

    Returns:
        bool [B, T, T], query then key.
    """
    mask = jnp.tril(document_ids[:, :, None] == document_ids[:, None, :])
    return mask if window is None else jnp.triu(mask, 1 - window)


def mask_bias(mask: Bool[Array, "B T S"]) -> Float[Array, "B T S"]:
    """What to add to the scores: 0 where the mask allows, and elsewhere so little that the probability is exactly 0.

    One array for all layers; adding it is several times faster on a CPU than selecting in every layer.
    """
    return jnp.where(mask, 0.0, MASKED_SCORE).astype(jnp.float32)


def attend(
    queries: Float[Array, "B T N D"],
    keys: Float[Array, "B S K D"],
    values: Float[Array, "B S K D"],
    bias: Float[Array, "B T S"],
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B T N D"]:
    """softmax(cap(q·k · scale) + bias) · v, query head n reading key-value head n // G; cap(s) = c · tanh(s / c).

    Scores and softmax are fp32; the probabilities are rounded to the values' dtype before the second product.

    Args:
        queries: [B, T, N, D].
        keys: [B, S, K, D] with K a divisor of N.
        values: [B, S, K, D].
        bias: fp32 [B, T, S] from `mask_bias`, with at least one allowed key for every query.
        scale: multiplier of the products.
        softcap: c, or None for no cap.

    Returns:
        [B, T, N, D] in the values' dtype.
    """
    rows, length, heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    grouped = queries.reshape(rows, length, kv_heads, heads // kv_heads, head_dim)
    precision = precision_of(values.dtype)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, keys, precision=precision, preferred_element_type=jnp.float32)
    scores = scores * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    probabilities = jax.nn.softmax(scores + bias[:, None, None], axis=-1)
    mixed = jnp.einsum("bkgts,bskd->btkgd", probabilities.astype(values.dtype), values, precision=precision)
    return mixed.reshape(rows, length, heads, head_dim)
