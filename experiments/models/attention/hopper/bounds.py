"""Work lists of the attention kernels: made once from the first keys, for all layers that share them."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from experiments.models.attention.call import padded_first

HALF = 64
"""Rows that one warpgroup owns: queries of one head forward and in dq, keys in dk and dv."""
TILE = 2 * HALF
"""Rows that the two warpgroups of a block own at most; row lengths are padded to a multiple."""
SEGMENT = 2048
"""Tokens whose tiles are worked on together, so that the keys that they share stay in the second-level cache."""


class Bounds(NamedTuple):
    """Which keys queries may read, and the work lists that follow from that; all int32. Lengths are multiples of TILE.

    Every list names all tiles of a row, in the order in which blocks take them: the longest of a segment first, so that
    those that end a kernel are short. Per tile the lists of queries have (first query, first key that any query of the
    tile may read, largest first key of its queries: from there on all may read). That of keys has (first key, and for
    each half of the keys: the last query that may read its first key, the last that may read any of its keys).

    Attributes:
        limits: the first and the last key that each query may read.
        narrow: tiles of HALF queries, for kernels that work on two heads at a time.
        wide: tiles of TILE queries.
        keys: tiles of TILE keys.
    """

    limits: Int[Array, "B 2 T"]
    narrow: Int[Array, "B halves 3"]
    wide: Int[Array, "B tiles 3"]
    keys: Int[Array, "B tiles 5"]

    @classmethod
    def of(cls, first: Int[Array, "B T"]) -> "Bounds":
        """Pads the rows, and finds the bounds of their tiles."""
        first = padded_first(first, TILE)
        slots = jnp.broadcast_to(jnp.arange(first.shape[1], dtype=jnp.int32), first.shape)
        return cls(
            jnp.stack([first, slots], axis=1), _query_tiles(first, HALF), _query_tiles(first, TILE), _key_tiles(first)
        )


def _query_tiles(first: Int[Array, "B T"], size: int) -> Int[Array, "B tiles 3"]:
    rows, length = first.shape
    starts = jnp.broadcast_to(jnp.arange(0, length, size, dtype=jnp.int32), (rows, length // size))
    tiled = first.reshape(rows, -1, size)
    lowest = tiled.min(-1)
    return _longest_first((starts, lowest, tiled.max(-1)), starts + size - lowest, size)


def _key_tiles(first: Int[Array, "B T"]) -> Int[Array, "B tiles 5"]:
    rows, length = first.shape
    slots = jnp.arange(length, dtype=jnp.int32)

    def last_reader(keys):
        """Returns the last query whose first key is no later than the key."""
        return jnp.where(first[:, None, :] <= keys[:, None], slots, 0).max(-1)

    begins = jnp.arange(0, length, HALF, dtype=jnp.int32)
    full = last_reader(begins)
    last = last_reader(begins + HALF - 1)
    starts = jnp.broadcast_to(begins[::2], (rows, length // TILE))
    fields = starts, full[:, ::2], last[:, ::2], full[:, 1::2], last[:, 1::2]
    return _longest_first(fields, jnp.maximum(last[:, ::2], last[:, 1::2]) - starts, TILE)


def _longest_first(fields: tuple[Array, ...], work: Int[Array, "B tiles"], size: int) -> Int[Array, "B tiles fields"]:
    """Orders the tiles of each row: segments by their longest tile, and each segment's tiles by their work."""
    rows, tiles = work.shape
    segment = jnp.broadcast_to(jnp.arange(tiles) // (SEGMENT // size), work.shape)
    padded = jnp.pad(work, ((0, 0), (0, -tiles % (SEGMENT // size))))
    longest = padded.reshape(rows, -1, SEGMENT // size).max(-1)
    order = jnp.lexsort((-work, segment, -jnp.take_along_axis(longest, segment, axis=1)), axis=-1)
    return jnp.take_along_axis(jnp.stack(fields, axis=-1), order[:, :, None], axis=1)
