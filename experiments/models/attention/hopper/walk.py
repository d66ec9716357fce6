"""The division of the attention kernels' work: persistent blocks that deal out the tiles of a work list."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from experiments.models.attention.hopper.bounds import HALF, SEGMENT, TILE, Bounds
from experiments.models.attention.hopper.kernel import place, rows_of
from experiments.models.attention.hopper.settings import Settings

MOST_ROUNDS = 4
"""Rounds of a window of several rows at most: rows that are worked on at a time share the second-level cache."""
GOLDEN = 0.382
"""Part of the blocks by which two rounds are moved against the two before: multiples of it are far from each other."""


def divide(number: Any, by: int) -> tuple[Any, Any]:
    """Returns quotient and remainder of int32 numbers that are not negative."""
    quotient = lax.div(number, jnp.int32(by))
    return quotient, number - quotient * by


@dataclass(frozen=True)
class Walk:
    """How persistent blocks deal out the items of a kernel: a listed tile of a row, by the heads that share its keys.

    A window has the tiles of a segment, of one row or of several, by heads; they come from long to short. Blocks take the
    items of a window in rounds, every other one backwards, so that who got the longest item of one gets the shortest of the
    next; what remains uneven falls on other blocks in the next rounds. With 132 blocks the longest has 1 to 6 % more work
    than the mean: rounds that did not begin with a window left 10 to 65 %.

    Attributes:
        blocks: number of persistent blocks.
        rows: B.
        tiles: listed tiles of a row.
        units: heads, or pairs of heads, that each tile is worked on for.
        segment: listed tiles of a row that are in one window.
    """

    blocks: int
    rows: int
    tiles: int
    units: int
    segment: int

    @functools.cached_property
    def window_rows(self) -> int:
        """Rows of a window: the fewest that leave few places empty in the last rounds of windows."""
        own = self.segment * self.units
        choices = [n for n in range(1, self.rows + 1) if n == 1 or n * own <= MOST_ROUNDS * self.blocks]
        places = [-(-self.rows // n) * -(-n * own // self.blocks) for n in choices]
        return next(n for n, total in zip(choices, places, strict=True) if total <= 1.03 * min(places))

    @property
    def rounds(self) -> int:
        """Rounds of a window."""
        return -(-self.window_rows * self.segment * self.units // self.blocks)

    @property
    def all_rounds(self) -> int:
        """Rounds of all windows."""
        return -(-self.rows // self.window_rows) * -(-self.tiles // self.segment) * self.rounds

    def read(self, lists: Any, block: Any, number: Any) -> tuple[Any, ...]:
        """Returns (whether there is one, row, unit, fields of the tile) of a block's item in the round of that number."""
        items, segments = self.window_rows * self.segment * self.units, -(-self.tiles // self.segment)
        window, round_ = divide(number, self.rounds)
        # A last round that is more than half empty has short items alone, and the next may go the same way.
        turn = window * max(1, (items + self.blocks // 2) // self.blocks) + round_
        pair, backwards = divide(turn, 2)
        place = lax.rem(block + pair * (self.blocks - round(GOLDEN * self.blocks)), jnp.int32(self.blocks))
        item = round_ * self.blocks + jnp.where(backwards == 0, place, self.blocks - 1 - place)
        within, unit = divide(item, self.units)
        tile, row = divide(within, self.window_rows)
        group, segment = divide(window, segments)
        tile = segment * self.segment + tile
        row = group * self.window_rows + row
        exists = (item < items) & (row < self.rows) & (tile < self.tiles)
        tile, row = jnp.minimum(tile, self.tiles - 1), jnp.minimum(row, self.rows - 1)
        return exists, row, unit, *(lists[row, tile, field] for field in range(lists.shape[2]))

    def each(self, lists: Any, block: Any, function: Callable[..., Any], carry: Any) -> tuple[Any, Any]:
        """Calls function(item, carry, row, unit, fields ...) for each item of a block; returns how many, and the last carry.

        The next item is read ahead, so that nobody waits for it.
        """

        def step(number, state):
            (exists, *fields), item, carry = state
            # Past the last round it names some item, which nobody uses.
            following = self.read(lists, block, number + 1)
            item, carry = lax.cond(exists, lambda: (item + 1, function(item, carry, *fields)), lambda: (item, carry))
            return following, item, carry

        state = self.read(lists, block, jnp.int32(0)), jnp.int32(0), carry
        return lax.fori_loop(0, self.all_rounds, step, state)[1:]


@dataclass(frozen=True)
class QueryTiles:
    """The work of kernels whose blocks own queries: two warpgroups on the same keys.

    They take two heads that share their keys or, where the number of such heads is odd, two tiles of one head's queries.

    Attributes:
        walk: how blocks deal out the tiles.
        tiles: the work list.
        length: T, a multiple of every number of keys in a block.
        group: query heads that share a key-value head.
        paired: whether the warpgroups take two heads.
    """

    walk: Walk
    tiles: Any
    length: int
    group: int
    paired: bool

    @classmethod
    def of(cls, queries: Any, keys: Any, bounds: Bounds, settings: Settings) -> "QueryTiles":
        """Returns the work of operands [B, T, heads, D]."""
        rows, length, heads, _ = queries.shape
        group = heads // keys.shape[2]
        paired = group % 2 == 0
        tiles = bounds.narrow if paired else bounds.wide
        units, segment = (heads // 2, SEGMENT // HALF) if paired else (heads, SEGMENT // TILE)
        walk = Walk(settings.num_blocks(), rows, tiles.shape[1], units, min(segment, tiles.shape[1]))
        return cls(walk, tiles, length, group, paired)

    def queries_of(self, start: Any, unit: Any, consumer: Any) -> tuple[Any, Any]:
        """Returns (head, first query) of a warpgroup."""
        if self.paired:
            return unit * 2 + consumer, pl.multiple_of(start, HALF)
        return unit, pl.multiple_of(start + consumer * HALF, HALF)

    def kv_head(self, unit: Any) -> Any:
        """Returns the key-value head that both warpgroups read."""
        return lax.div(unit * 2 if self.paired else unit, jnp.int32(self.group))

    def keys_of(self, start: Any, lowest: Any, block_keys: int) -> tuple[Any, Any]:
        """Returns (first key, number of blocks) of what a tile reads, from the half tile of its lowest key on.

        Only where the last block would pass the end of the row do the blocks begin earlier.
        """
        end = start + (HALF if self.paired else TILE)
        begin = lowest - lax.rem(lowest, jnp.int32(HALF))
        blocks = lax.div(end - begin + (block_keys - 1), jnp.int32(block_keys))
        return pl.multiple_of(jnp.minimum(begin, self.length - blocks * block_keys), HALF), blocks

    def at_edge(self, highest: Any, query: Any, key: Any, block_keys: int) -> Any:
        """Returns True if some query of a warpgroup must not read some key of a block.

        Args:
            highest: the largest first key of the tile's queries.
            query: the first query.
            key: the first key.
            block_keys: number of keys.
        """
        return (key < highest) | (key + block_keys > query + 1)

    def visible(self, limits: tuple[Any, Any], key: Any, shape: tuple[int, int]) -> Any:
        """Returns which keys of a block each query may read, bool [queries, keys]; `limits` are its first and last key."""
        first, last = limits
        offset = place(shape, 1) - rows_of(first - key, shape)
        # One comparison for two: before the first key the offset is a large number.
        return offset.astype(jnp.uint32) <= rows_of((last - first).astype(jnp.uint32), shape)
