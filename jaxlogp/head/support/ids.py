"""The support of a truncated sampler, the ids from which each token was drawn: ``Support`` and its checks."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer, Shaped

from jaxlogp._arrays import AnyArray, as_int32
from jaxlogp.errors import describe, is_concrete, require, require_ids_in_range, require_integer, require_mask

PADDING_ID = -1
_MOST_IDS = 2**31


@functools.partial(jax.tree_util.register_dataclass, data_fields=["ids", "counts"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Support:
    """The ids that top-k, top-p or min-p kept when each token was drawn, the drawn one among them.

    Made on the host by :meth:`from_lists`, :meth:`from_offsets` or :meth:`from_counts`, which check the ids and give NumPy
    arrays. The capacity is a shape: programs are compiled once for all supports of one capacity.

    Attributes:
        ids: int32 [capacity], the ids of all tokens one after the other, in row-major order of the tokens; those of one
            token are distinct and in any order. What follows the last one is padding.
        counts: int32 [*tokens], number of ids of each token; 0 where no token was drawn.

    Example:
        >>> support = Support.from_lists([[7], [], [3, 5]], capacity=4)
        >>> support.ids.tolist(), support.counts.tolist()
        ([7, 3, 5, -1], [1, 0, 2])
    """

    ids: Int[AnyArray, " capacity"]
    counts: Int[AnyArray, "*tokens"]

    @classmethod
    def from_lists(
        cls,
        ids: Sequence[Sequence[int] | Integer[np.ndarray, " _"]],
        *,
        capacity: int | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> "Support":
        """Makes a support from one list of ids per token.

        Args:
            ids: the ids of each token; an empty list where no token was drawn.
            capacity: size of ``Support.ids``; None for the number of ids.
            shape: shape of the tokens; None for one dimension.

        Raises:
            ValueError: if an id is negative or occurs twice in a token, or the ids exceed the capacity.
        """
        listed = np.ndim(ids) > 0 if hasattr(ids, "ndim") else isinstance(ids, Sequence)
        listed = listed and all(hasattr(kept, "__len__") for kept in ids)
        require(listed, "ids", "one list of ids per token", describe(ids))
        counts = np.array([len(kept) for kept in ids], np.int64)
        return cls._checked(list(chain.from_iterable(ids)), counts, capacity, shape)

    @classmethod
    def from_offsets(
        cls,
        token_ids: Sequence[int] | Integer[np.ndarray, " ids"],
        offsets: Sequence[int] | Integer[np.ndarray, " ends"],
        *,
        capacity: int | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> "Support":
        """Makes a support from flat ids and the offsets between tokens, as vLLM, SGLang and slime record it.

        Args:
            token_ids: the ids of all tokens.
            offsets: [tokens + 1], from 0 to the number of ids; token t has ``token_ids[offsets[t]:offsets[t + 1]]``.
            capacity: size of ``Support.ids``; None for the number of ids.
            shape: shape of the tokens; None for one dimension.

        Raises:
            ValueError: if the offsets decrease or do not end at the number of ids, or as :meth:`from_lists`.

        Example:
            >>> Support.from_offsets([7, 3, 5], [0, 1, 1, 3]).counts.tolist()
            [1, 0, 2]
        """
        ids, ends = _integers(token_ids, "token_ids"), _integers(offsets, "offsets")
        ok = ends.size > 0 and ends[0] == 0 and ends[-1] == ids.size
        seen = f"{ends.size} from {ends[0]} to {ends[-1]}" if ends.size else "none"
        require(ok, "offsets", f"[tokens + 1] integers from 0 to {ids.size}, the number of token_ids", seen)
        counts = np.diff(ends)
        if (counts < 0).any():
            token = int(np.argmax(counts < 0))
            require(False, "offsets", "no smaller one after a larger", f"{ends[token : token + 2]} of token {token}")
        return cls._checked(ids, counts, capacity, shape)

    @classmethod
    def from_counts(
        cls,
        counts: Sequence[int] | Integer[np.ndarray, "*tokens"],
        ids: Sequence[int] | Integer[np.ndarray, " ids"],
        *,
        capacity: int | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> "Support":
        """Makes a support from the number of ids of each token and the flat ids, as verifiers records it.

        Args:
            counts: number of ids of each token.
            ids: the ids of all tokens; as many as the counts say.
            capacity: size of ``Support.ids``; None for the number of ids.
            shape: shape of the tokens; None for that of ``counts``.

        Raises:
            ValueError: if the counts do not add up to the number of ids, or as :meth:`from_lists`.

        Example:
            >>> Support.from_counts([1, 0, 2], [7, 3, 5], capacity=4).ids.tolist()
            [7, 3, 5, -1]
        """
        flat, numbers = _integers(ids, "ids"), _integers(counts, "counts", None)
        total = int(numbers.sum())
        require(total == flat.size, "ids", f"{total}, the sum of counts", flat.size)
        return cls._checked(flat, numbers, capacity, shape)

    @classmethod
    def concatenate(cls, parts: Sequence["Support"]) -> "Support":
        """Makes the support of tokens in one dimension from those of successive tokens, as they come from the host.

        Example:
            >>> first, second = Support.from_lists([[7]]), Support.from_lists([[3, 5], [2]])
            >>> Support.concatenate([first, second]).counts.tolist()
            [1, 2, 1]
        """
        counts = [np.asarray(part.counts).reshape(-1) for part in parts]
        ids = [np.asarray(part.ids)[: number.sum()] for part, number in zip(parts, counts, strict=True)]
        # The empty array gives the dtype where there is no part.
        return cls(*(np.concatenate([np.zeros(0, np.int32), *arrays]) for arrays in (ids, counts)))

    def part(self, start: int, stop: int) -> "Support":
        """Returns the support of tokens [start, stop) of one dimension, without padding, on the host.

        Example:
            >>> Support.from_lists([[7], [3, 5], [2]]).part(1, 3).ids.tolist()
            [3, 5, 2]
        """
        counts = np.asarray(self.counts)
        expected = f"0 <= start <= stop <= {len(counts)}, the number of tokens"
        require(0 <= start <= stop <= len(counts), "start, stop", expected, (start, stop))
        first = int(counts[:start].sum())
        return Support(
            np.asarray(self.ids)[first : first + int(counts[start:stop].sum())].copy(), counts[start:stop].copy()
        )

    def of_tokens(self, index: Int[AnyArray, "*part"]) -> "Support":
        """Returns the support of the tokens at these flat indices, of the same capacity; also in traced code.

        In a ``shard_map`` each rank takes that of its tokens from that of all, wherever the mesh splits them.

        Args:
            index: int32 [*part], row-major indices in [0, number of tokens), each at most once.

        Example:
            >>> support = Support.from_lists([[7], [3, 5], [2]])
            >>> part = support.of_tokens(np.array([2, 1]))
            >>> part.ids.tolist(), part.counts.tolist()
            ([2, 3, 5, -1], [1, 2])
        """
        require_integer(index, "index")
        require_ids_in_range(index, self.counts.size, "index")
        flat, capacity = as_int32(self.counts.reshape(-1)), self.ids.shape[0]
        starts, own = (values_at(x, index.reshape(-1), 0) for x in (jnp.cumsum(flat, dtype=jnp.int32) - flat, flat))
        ends = jnp.cumsum(own, dtype=jnp.int32)
        # What a place is away from its id: the same for all places of a token.
        distance = values_at(starts - (ends - own), tokens_of_places(ends, capacity), capacity)
        ids = values_at(self.ids, distance + jnp.arange(capacity, dtype=jnp.int32), PADDING_ID)
        return Support(ids, own.reshape(index.shape))

    @classmethod
    def _checked(cls, ids: Any, counts: np.ndarray, capacity: int | None, shape: tuple[int, ...] | None) -> "Support":
        flat = _integers(ids, "ids")
        shape = counts.shape if shape is None else tuple(shape)
        require(np.prod(shape) == counts.size, "shape", f"one of {counts.size} tokens", shape)
        counts = counts.reshape(shape)
        capacity = max(flat.size, 1) if capacity is None else capacity
        expected = f"an integer of at least {max(flat.size, 1)}, the number of ids"
        ok = isinstance(capacity, int | np.integer) and capacity >= max(flat.size, 1)
        require(ok, "capacity", expected, describe(capacity))
        _check_ids(flat, counts, _MOST_IDS, None, ("ids", "counts"))
        padded = np.full(capacity, PADDING_ID, np.int32)
        padded[: flat.size] = flat
        return cls(padded, counts.astype(np.int32))


def tokens_of_places(ends: Int[Array, " tokens"], capacity: int) -> Int[Array, " capacity"]:
    """Returns the token of each place: the number of tokens that end before it."""
    starts = jnp.zeros(capacity + 1, jnp.int32) + jnp.zeros_like(ends[0])
    return jnp.cumsum(starts.at[ends].add(1, mode="drop"), dtype=jnp.int32)[:capacity]


def values_at(x: Shaped[AnyArray, " n"], index: Int[AnyArray, " m"], fill: Any) -> Shaped[Array, " m"]:
    """Returns the values at the indices, and `fill` at those after the last one."""
    return jnp.asarray(x).at[index].get(mode="fill", fill_value=fill)


def _integers(values: Any, argument: str, ndim: int | None = 1) -> np.ndarray:
    """Returns int64 values; an empty list has no integer dtype of its own."""
    array = np.asarray(values)
    array = array.astype(np.int64) if array.size == 0 else array
    require_integer(array, argument)
    require(ndim is None or array.ndim == ndim, argument, "one dimension", describe(array))
    # int64 holds no uint64 from 2^63 on, and no token id is larger than 2^31.
    return np.minimum(array, _MOST_IDS).astype(np.int64) if array.dtype == np.uint64 else array.astype(np.int64)


def _check_ids(
    ids: np.ndarray, counts: np.ndarray, vocab_size: int, mask: np.ndarray | None, names: tuple[str, str]
) -> np.ndarray:
    """Returns the token of each id, by its place in the flat tokens; -1 for padding and masked tokens.

    Raises:
        ValueError: if a count is negative, the counts exceed the capacity, or an id of an active token is out of range or
            occurs twice in it; names the token.
    """
    flat = counts.reshape(-1).astype(np.int64)
    if (flat < 0).any():
        token = int(np.argmax(flat < 0))
        require(False, names[1], "counts of at least 0", f"{flat[token]} at {_position(token, counts.shape)}")
    total = int(flat.sum())
    require(total <= ids.size, names[0], f"a capacity of at least {total}, the sum of counts", ids.size)
    tokens = np.full(ids.size, -1)
    tokens[:total] = np.repeat(np.arange(flat.size), flat)
    if mask is not None:
        tokens[~mask.reshape(-1)[tokens]] = -1
    entries = np.flatnonzero(tokens >= 0)
    outside = (ids[entries] < 0) | (ids[entries] >= vocab_size)
    if outside.any():
        place = entries[np.argmax(outside)]
        seen = f"{ids[place]} of the token at {_position(tokens[place], counts.shape)}"
        require(False, names[0], f"ids in [0, {vocab_size})", seen)
    order = entries[np.lexsort((ids[entries], tokens[entries]))]
    twice = (np.diff(ids[order]) == 0) & (np.diff(tokens[order]) == 0)
    if twice.any():
        place = order[np.argmax(twice)]
        seen = f"{ids[place]} twice in the token at {_position(tokens[place], counts.shape)}"
        require(False, names[0], "distinct ids in a token", seen)
    return tokens


def _position(token: int, shape: tuple[int, ...]) -> str:
    return f"position {tuple(int(index) for index in np.unravel_index(token, shape))}"


def mask_by_support(
    support: Support, mask: Bool[AnyArray, "*tokens"] | None, tokens: tuple[int, ...]
) -> Bool[AnyArray, "*tokens"]:
    """Checks shapes and dtypes, and returns the mask of tokens that count: those with ids.

    Raises:
        ValueError: if a shape or dtype is wrong.
    """
    require(isinstance(support, Support), "support", "a Support", describe(support))
    require_integer(support.ids, "support.ids")
    require_integer(support.counts, "support.counts")
    ok = support.ids.ndim == 1 and support.ids.size > 0
    require(ok, "support.ids", "shape [capacity] with capacity > 0", describe(support.ids))
    require(support.counts.shape == tokens, "support.counts", f"shape {tokens} of the tokens", describe(support.counts))
    drawn = support.counts != 0
    if mask is None:
        return drawn
    require_mask(mask, tokens)
    return drawn & mask


def check_support(
    support: Support, targets: Integer[AnyArray, "*tokens"], mask: Bool[AnyArray, "*tokens"], vocab_size: int
) -> None:
    """Checks known ids of active tokens: in range, distinct in a token, within the capacity, the target among them.

    Raises:
        ValueError: naming the first token that is wrong.
    """
    if not is_concrete(support.ids, support.counts, mask):
        return
    ids, counts, live = np.asarray(support.ids), np.asarray(support.counts), np.asarray(mask)
    tokens = _check_ids(ids, counts, vocab_size, live, ("support.ids", "support.counts"))
    if not is_concrete(targets):
        return
    wanted, missing = np.asarray(targets).reshape(-1), live.reshape(-1).copy()
    missing[tokens[(tokens >= 0) & (ids == wanted[tokens])]] = False
    if missing.any():
        token = int(np.argmax(missing))
        kept = ids[tokens == token]
        seen = f"{kept[:8].tolist()}{' and more' if kept.size > 8 else ''}"
        place = _position(token, targets.shape)
        require(False, "support.ids", f"the target {wanted[token]} among the ids of the token at {place}", seen)
