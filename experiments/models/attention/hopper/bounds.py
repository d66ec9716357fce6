"""Which blocks the kernels visit: made once from the first keys, for all layers that share them."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from experiments.models.attention.call import padded_first

BLOCK = 64
"""Rows that one warpgroup owns: queries forward and in dq, keys in dk and dv."""
TILE = 2 * BLOCK
"""Rows that one block of two warpgroups owns; row lengths are padded to a multiple."""


class Bounds(NamedTuple):
    """First keys, and what follows from them for tiles; all int32. Lengths are multiples of TILE.

    `lowest` is the first key that any query of a tile may read, `highest` the largest first key of its queries: from there
    on all may read. `last` is the last query that may read any key of a tile.
    """

    first: Int[Array, "B T"]
    lowest: Int[Array, "B tiles"]
    highest: Int[Array, "B tiles"]
    last: Int[Array, "B tiles"]

    @classmethod
    def of(cls, first: Int[Array, "B T"]) -> "Bounds":
        """Pads the rows, and finds the bounds of their tiles."""
        first = padded_first(first, TILE)
        rows, padded = first.shape
        slots = jnp.arange(padded, dtype=jnp.int32)
        tiled = first.reshape(rows, -1, TILE)
        ends = (jnp.arange(padded // TILE, dtype=jnp.int32) + 1) * TILE
        readers = jnp.where(first[:, None, :] < ends[:, None], slots, 0)
        return cls(first, tiled.min(-1), tiled.max(-1), readers.max(-1))
