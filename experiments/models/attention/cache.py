"""The key-value cache of the sampler."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


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
