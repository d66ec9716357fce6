"""Tokens without a label moved behind those with one, so that an engine can leave them out; shapes stay static."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


class LiveRows(NamedTuple):
    """Where the tokens of a mask go.

    Attributes:
      source: int32 [padded], the token that stands at each place; the number of tokens where there is none.
      place: int32 [tokens], the place of each token: live ones first, in their order, then the others.
      count: int32, number of live tokens.
    """

    source: Int[Array, " padded"]
    place: Int[Array, " tokens"]
    count: Int[Array, ""]

    def pack(self, x: Shaped[Array, "tokens ..."], fill: float | int) -> Shaped[Array, "padded ..."]:
        """Live tokens first, then the others, then ``fill``."""
        return x.at[self.source].get(mode="fill", fill_value=fill)

    def unpack(self, x: Shaped[Array, "padded ..."]) -> Shaped[Array, "tokens ..."]:
        """Undoes :meth:`pack`."""
        return x[self.place]


def live_rows(mask: Bool[Array, " tokens"], padded: int) -> LiveRows:
    """Places of the tokens of ``mask`` in a padded array.

    Args:
      mask: True where a token needs work.
      padded: size of the padded array, at least the number of tokens.
    """
    tokens = mask.shape[0]
    count = jnp.sum(mask, dtype=jnp.int32)
    live, dead = (jnp.cumsum(x, dtype=jnp.int32) - 1 for x in (mask, ~mask))
    place = jnp.where(mask, live, count + dead)
    index = jnp.arange(tokens, dtype=jnp.int32)
    # jnp.zeros_like of an operand, so that the array varies over the mesh axes that the mask varies over.
    start = jnp.full((padded,), tokens, jnp.int32) + jnp.zeros_like(count)
    source = start.at[place].set(index, unique_indices=True)
    return LiveRows(source, place, count)


def select_live(x: jax.Array, count: Int[Array, ""]) -> jax.Array:
    """x with exact zeros from row ``count`` on: what a kernel has not written may be anything."""
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jnp.where((rows < count).reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))
