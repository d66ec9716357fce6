"""The ids that tokens were drawn from, recorded on the device row by row.

A row keeps its ids one after the other, `support_room` for every token of the longest completion: sets are small where the
model is sure, and large at a few tokens. A part of that, `RESERVED`, is kept free for each token that is still to come. What
is not kept cannot be drawn. So a log-prob on the recorded ids is exactly that of the draw, also where the room has made a
set smaller.

Shapes: B rows, N new tokens, V vocabulary entries.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from experiments.models.mesh import put_in_ranks, rows_of_ranks
from jaxlogp import Support

RESERVED = 1 / 8
MOST_IDS = 1024
"""Largest number of ids of one token."""
WORD = 32


class RecordedSupport(NamedTuple):
    """Ids of rows of tokens: those of a row one after the other, how many each token has, whether the room has left out some
    of a token's, and the probability of all of them in the whole distribution."""

    ids: Int[Array | np.ndarray, "B capacity"]
    counts: Int[Array | np.ndarray, "B N"]
    cut: Bool[Array | np.ndarray, "B N"]
    mass: Float[Array | np.ndarray, "B N"]

    @classmethod
    def empty(cls, rows: int, new_tokens: int, ids_per_token: int) -> "RecordedSupport":
        ids = jnp.zeros((rows, new_tokens * ids_per_token), jnp.int32)
        counts = jnp.zeros((rows, new_tokens), jnp.int32)
        return cls(ids, counts, counts > 0, counts.astype(jnp.float32))

    def room(self, rows: Int[Array, "ranks C"], steps: Int[Array, " ranks*C"]) -> Int[Array, " ranks*C"]:
        """Returns how many ids the next tokens of these rows, counted among those of each rank, may have.

        The tokens after them have the ids that are reserved for them.
        """
        (_, capacity), new_tokens = self.ids.shape, self.counts.shape[1]
        reserved = max(1, int(RESERVED * (capacity // new_tokens)))
        left = capacity - self._held(rows) - reserved * (new_tokens - 1 - steps)
        return jnp.minimum(left, MOST_IDS)

    def extended(
        self,
        rows: Int[Array, "ranks C"],
        steps: Int[Array, " ranks*C"],
        kept: Bool[Array, "ranks*C V"],
        cut: Bool[Array, " ranks*C"],
        mass: Float[Array, " ranks*C"],
    ) -> "RecordedSupport":
        """Returns the support with that of one more token of these rows, as in `room`: `kept` among the vocabulary.

        No row may occur twice. Those that do not exist are left out.
        """
        capacity = self.ids.shape[1]
        numbers = jnp.arange(min(capacity, kept.shape[1], MOST_IDS), dtype=jnp.int32)
        count = jnp.sum(kept, axis=1, dtype=jnp.int32)
        places = jnp.where(numbers < count[:, None], self._held(rows)[:, None] + numbers, capacity + numbers)
        ids = put_in_ranks(self.ids, (rows[..., None], places.reshape(*rows.shape, -1)), _first_ids(kept, numbers))
        at = rows, steps.reshape(rows.shape)
        return RecordedSupport(ids, *map(lambda x, new: put_in_ranks(x, at, new), self[1:], (count, cut, mass)))

    def _held(self, rows: Int[Array, "ranks C"]) -> Int[Array, " ranks*C"]:
        return jnp.sum(rows_of_ranks(self.counts, rows), axis=1, dtype=jnp.int32)


def flat_support(recorded: RecordedSupport) -> Support:
    """Returns the ids of all rows one after the other."""
    rows, capacity = recorded.ids.shape
    held = jnp.sum(recorded.counts, axis=1, dtype=jnp.int32)
    starts, numbers = jnp.cumsum(held, dtype=jnp.int32) - held, jnp.arange(capacity, dtype=jnp.int32)
    beyond = rows * capacity + numbers + capacity * jnp.arange(rows, dtype=jnp.int32)[:, None]
    places = jnp.where(numbers < held[:, None], starts[:, None] + numbers, beyond)
    ids = jnp.zeros(rows * capacity, jnp.int32).at[places].set(recorded.ids, mode="drop", unique_indices=True)
    return Support(ids, recorded.counts)


def _first_ids(kept: Bool[Array, "B V"], numbers: Int[Array, " n"]) -> Int[Array, "B n"]:
    """Returns the first ids that are kept, in their order; beyond the last one, anything.

    The counts that are summed up are those of words of 32 entries: in a tenth of the time of a sum over the entries.
    """
    rows, vocab = kept.shape
    entries = jnp.pad(kept, ((0, 0), (0, -vocab % WORD))).reshape(rows, -1, WORD).astype(jnp.uint32)
    words = jnp.sum(entries << jnp.arange(WORD, dtype=jnp.uint32), axis=2, dtype=jnp.uint32)
    counts = lax.population_count(words).astype(jnp.int32)
    reached = jnp.cumsum(counts, axis=1, dtype=jnp.int32)
    find = jax.vmap(lambda row: jnp.searchsorted(row, numbers + 1, method="scan_unrolled"))
    index = jnp.minimum(find(reached), words.shape[1] - 1).astype(jnp.int32)
    word, before = (jnp.take_along_axis(x, index, axis=1) for x in (words, reached - counts))
    return index * WORD + _place_of_bit(word, numbers - before)


def _place_of_bit(word: UInt32[Array, "B n"], rank: Int[Array, "B n"]) -> Int[Array, "B n"]:
    """Returns the place of the set bit of this rank, from 0, by halves."""
    place = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):
        low = word & jnp.uint32((1 << width) - 1)
        count = lax.population_count(low).astype(jnp.int32)
        beyond = rank >= count
        place += jnp.where(beyond, width, 0)
        word, rank = jnp.where(beyond, word >> width, low), jnp.where(beyond, rank - count, rank)
    return place
