"""Reordering that moves tokens without a label after those with one, so that an engine can skip them; shapes stay static."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped


class LiveRows(NamedTuple):
    """Where the tokens of a mask go.

    Attributes:
        source: int32 [padded], the live token at each place; the number of tokens where there is none. None
            where every token is live: each stays where it is, and nothing is copied.
        place: int32 [tokens], the place of each token: live ones first, in their order, then the others; None likewise.
        count: int32, number of live tokens.
        padded: number of places.
        tokens: number of tokens.
    """

    source: Int[Array, " padded"] | None
    place: Int[Array, " tokens"] | None
    count: Int[Array, ""]
    padded: int
    tokens: int

    def pack(self, x: Shaped[Array, "tokens ..."], fill: float | int) -> Shaped[Array, "padded ..."]:
        """Live tokens first, then ``fill``; the values of the others are not read."""
        if self.source is None:
            return self._filled_up(x, fill)
        return x.at[self.source].get(mode="fill", fill_value=fill)

    def pack_block(
        self, x: Shaped[Array, "tokens ..."], fill: float | int, start: Int[Array, ""], size: int
    ) -> Shaped[Array, "size ..."]:
        """The places [start, start + size) of :meth:`pack` alone; x may already be padded where every token is live."""
        if self.source is None:
            return lax.dynamic_slice_in_dim(self._filled_up(x, fill), start, size)
        return x.at[lax.dynamic_slice_in_dim(self.source, start, size)].get(mode="fill", fill_value=fill)

    def unpack(self, x: Shaped[Array, "padded ..."]) -> Shaped[Array, "tokens ..."]:
        """Undoes :meth:`pack` for live tokens; the others get 0, whatever x holds after the live ones."""
        if self.place is None:
            return x[: self.tokens]
        live = (self.place < self.count).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(live, x[self.place], jnp.zeros((), x.dtype))

    def _filled_up(self, x: Array, fill: float | int) -> Array:
        return jnp.pad(x, [(0, self.padded - x.shape[0]), *[(0, 0)] * (x.ndim - 1)], constant_values=fill)


def live_rows(mask: Bool[Array, " tokens"], padded: int, all_live: bool = False) -> LiveRows:
    """Places of the tokens of ``mask`` in a padded array.

    Args:
        mask: True where a token needs work.
        padded: size of the padded array, at least the number of tokens.
        all_live: whether the mask is known to be True everywhere.
    """
    tokens = mask.shape[0]
    if all_live:
        return LiveRows(None, None, jnp.int32(tokens), padded, tokens)
    count = jnp.sum(mask, dtype=jnp.int32)
    live, dead = (jnp.cumsum(x, dtype=jnp.int32) - 1 for x in (mask, ~mask))
    place = jnp.where(mask, live, count + dead)
    index = jnp.arange(tokens, dtype=jnp.int32)
    # jnp.zeros_like of an operand, so that the array varies over the mesh axes that the mask varies over.
    start = jnp.full((padded,), tokens, jnp.int32) + jnp.zeros_like(count)
    source = start.at[place].set(jnp.where(mask, index, tokens), unique_indices=True)
    return LiveRows(source, place, count, padded, tokens)


def select_live(x: jax.Array, count: Int[Array, ""]) -> jax.Array:
    """x with exact zeros from row ``count`` on: what a kernel has not written may hold anything."""
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jnp.where((rows < count).reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))
