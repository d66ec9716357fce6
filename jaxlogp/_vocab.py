"""Vocabulary shards: validated contiguous ranges, the owner of a token id, and the padded layout of a sharded weight.

A :class:`VocabShards` is checked once, at construction. Its ranges are sorted, non-empty and cover [0, vocab_size) exactly
once, so every valid token id has exactly one owner.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Integer, Shaped

from jaxlogp._arrays import as_int32
from jaxlogp._compat import (
    AxisName,
    automatic_axes,
    leading_spec,
    require_manual_axis,
    resized_spec,
    tracks_varying_axes,
)
from jaxlogp.errors import describe, is_integer, require, require_integer, require_mask, require_tokens

TILE = 256
"""Rows of the weight in a tile of the `hopper` kernels, counted from a shard's first row."""


@dataclasses.dataclass(frozen=True)
class VocabShards:
    """Contiguous vocabulary ranges, one per shard, that cover [0, vocab_size) exactly once.

    Constructed by :meth:`aligned`, :meth:`even` or :meth:`from_ranges`. Hashable, so it can be a static argument of
    ``jax.jit``.

    Attributes:
        ranges: ((start, end), ...) with end exclusive, in vocabulary order; shard r owns ranges[r].
        vocab_size: number of token ids.

    Example:
        >>> VocabShards.even(10, 4).ranges
        ((0, 3), (3, 6), (6, 8), (8, 10))
    """

    ranges: tuple[tuple[int, int], ...]
    vocab_size: int

    def __post_init__(self) -> None:
        """Refuses ranges that do not cover [0, vocab_size) exactly once, naming the two ranges that disagree."""
        require(is_integer(self.vocab_size) and self.vocab_size > 0, "vocab_size", "an integer > 0", self.vocab_size)
        require(len(self.ranges) > 0, "ranges", "at least one (start, end) range", "none")
        previous = None
        for position, pair in enumerate(self.ranges):
            ok = isinstance(pair, tuple) and len(pair) == 2 and all(is_integer(edge) for edge in pair)
            require(ok, "ranges", "pairs (start, end) of integers", f"{pair!r} at position {position}")
            start, end = pair
            require(start >= 0, "ranges", "start >= 0", f"{pair} (negative) at position {position}")
            require(end > start, "ranges", "start < end", f"{pair} (empty) at position {position}")
            if previous is not None:
                _check_neighbours(previous, pair)
            previous = pair
        first, last = self.ranges[0], self.ranges[-1]
        expected = f"to cover [0, {self.vocab_size}) without a hole"
        require(first[0] == 0, "ranges", expected, f"a hole before {first}")
        require(last[1] >= self.vocab_size, "ranges", expected, f"a hole after {last}")
        require(last[1] <= self.vocab_size, "ranges", f"to end at vocab_size {self.vocab_size}", f"{last}")

    @classmethod
    def even(cls, vocab_size: int, num_shards: int) -> "VocabShards":
        """Creates shards of vocab_size // num_shards ids each; the first vocab_size % num_shards own one more.

        Raises:
            ValueError: if vocab_size or num_shards is not a positive integer, or there are more shards than ids.
        """
        require(is_integer(vocab_size) and vocab_size > 0, "vocab_size", "an integer > 0", vocab_size)
        require(is_integer(num_shards) and num_shards > 0, "num_shards", "an integer > 0", num_shards)
        require(num_shards <= vocab_size, "num_shards", f"at most vocab_size {vocab_size}", num_shards)
        width, extra = divmod(vocab_size, num_shards)
        edges = [rank * width + min(rank, extra) for rank in range(num_shards + 1)]
        return cls(tuple(zip(edges[:-1], edges[1:], strict=True)), vocab_size)

    @classmethod
    def aligned(cls, vocab_size: int, num_shards: int, multiple: int = TILE) -> "VocabShards":
        """Creates shards that begin at multiples of a tile, the default if a caller names no shards.

        Every shard but the last owns W = ⌈vocab_size / (num_shards · multiple)⌉ · multiple ids, the last one the rest. No
        shard cuts a tile, so engine `hopper` computes the log-probs, entropies and weight gradients of one GPU, to the
        last bit, on any number of shards. All padding is behind the last id.

        If no ids would be left for the last shard, as in small vocabularies, the shards are those of :meth:`even`.


        Args:
            vocab_size: V.
            num_shards: size of the mesh axis that shards the vocabulary.
            multiple: ids of a tile.

        Raises:
            ValueError: if an argument is not a positive integer, or there are more shards than ids.

        Example:
            >>> VocabShards.aligned(1000, 2).ranges, VocabShards.aligned(500, 2).ranges, VocabShards.aligned(10, 2).ranges
            (((0, 512), (512, 1000)), ((0, 256), (256, 500)), ((0, 5), (5, 10)))
        """
        require(is_integer(multiple) and multiple > 0, "multiple", "an integer > 0", multiple)
        even = cls.even(vocab_size, num_shards)
        width = -(-vocab_size // (num_shards * multiple)) * multiple
        if (num_shards - 1) * width >= vocab_size:
            return even
        edges = [*range(0, num_shards * width, width), vocab_size]
        return cls(tuple(zip(edges[:-1], edges[1:], strict=True)), vocab_size)

    @classmethod
    def from_ranges(cls, ranges: Sequence[Sequence[int]], vocab_size: int) -> "VocabShards":
        """Creates shards from explicit, possibly uneven ranges in vocabulary order.

        Raises:
            ValueError: if a range is negative or empty, or two ranges are unsorted, overlap or leave a hole.
        """
        require(hasattr(ranges, "__iter__"), "ranges", "pairs (start, end) of integers", describe(ranges))
        pairs = tuple(ranges)
        for pair in pairs:
            require(hasattr(pair, "__iter__"), "ranges", "pairs (start, end) of integers", describe(pair))
        return cls(tuple(tuple(int(e) if is_integer(e) else e for e in pair) for pair in pairs), vocab_size)

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.ranges)

    @property
    def max_width(self) -> int:
        """Number of ids of the widest shard, to which every shard is padded."""
        return max(end - start for start, end in self.ranges)

    @property
    def starts(self) -> tuple[int, ...]:
        """First id of every shard."""
        return tuple(start for start, _ in self.ranges)

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of ids of every shard."""
        return tuple(end - start for start, end in self.ranges)

    def owners(
        self, token_ids: Integer[Array, "*tokens"], mask: Bool[Array, "*tokens"] | None = None
    ) -> Int[Array, "*tokens"]:
        """Returns the rank that owns each token id, int32; -1 where masked or outside [0, vocab_size).

        Args:
            token_ids: integer ids of any shape.
            mask: boolean array of the same shape, False where no owner is wanted; None for all.

        Raises:
            ValueError: if a dtype or shape is wrong.

        Example:
            >>> VocabShards.even(10, 4).owners(jnp.array([0, 5, 9, -100])).tolist()
            [0, 1, 3, -1]
        """
        require_integer(token_ids, "token_ids")
        require_tokens(token_ids, "token_ids")
        if mask is not None:
            require_mask(mask, token_ids.shape)
        return automatic_axes(self._owners, token_ids, mask, out_specs=leading_spec(token_ids, token_ids.ndim))

    def _owners(self, token_ids: Array, mask: Array | None) -> Array:
        token_ids = as_int32(token_ids)
        covered = (token_ids >= 0) & (token_ids < self.vocab_size)
        covered = covered if mask is None else covered & mask
        ends = jnp.asarray([end for _, end in self.ranges], jnp.int32)
        owner = jnp.searchsorted(ends, jnp.where(covered, token_ids, 0), side="right").astype(jnp.int32)
        return jnp.where(covered, owner, jnp.int32(-1))

    def shard_rows(self, weight: Shaped[Array, "..."], dim: int = 0) -> Shaped[Array, "..."]:
        """Pads every shard of ``weight`` to max_width rows: a shard's rows first, then rows of zeros.

        The result splits evenly over a mesh axis. Differentiable; the identity if all shards are equal. If only the last
        shard is shorter (:meth:`aligned`), a weight whose rows are split evenly over the axis is not gathered: each rank
        receives the rows that it lacks from its neighbor.

        Args:
            weight: [vocab_size, ...], any dtype; vocab_size may stand in another dimension.
            dim: dimension of vocab_size, whose slices are the rows: 1 for a weight [H, V].

        Returns:
            An array of weight's shape with num_shards * max_width in place of vocab_size.

        Raises:
            ValueError: if dimension ``dim`` is not vocab_size.
        """
        self._check_rows(weight, self.vocab_size, "weight", dim)
        if len(set(self.widths)) == 1:
            return weight
        specs = resized_spec(weight, self.num_shards * self.max_width, dim)
        return automatic_axes(functools.partial(self._padded_rows, dim=dim), weight, out_specs=specs)

    def _padded_rows(self, weight: Array, dim: int) -> Array:
        def padded(rows: Array, width: int) -> Array:
            return jnp.pad(rows, [(0, width - size if d == dim else 0) for d, size in enumerate(rows.shape)])

        if self._padded_at_the_end:
            return padded(weight, self.num_shards * self.max_width)
        blocks = [lax.slice_in_dim(weight, start, end, axis=dim) for start, end in self.ranges]
        return jnp.concatenate([padded(block, self.max_width) for block in blocks], axis=dim)

    def unshard_rows(self, padded: Shaped[Array, "blocks ..."]) -> Shaped[Array, "vocab ..."]:
        """Undoes :meth:`shard_rows`: [num_shards * max_width, ...] to [vocab_size, ...].

        Raises:
            ValueError: if the first dimension is not num_shards * max_width.
        """
        self._check_rows(padded, self.num_shards * self.max_width, "padded")
        return automatic_axes(self._real_rows, padded, out_specs=resized_spec(padded, self.vocab_size))

    def _real_rows(self, padded: Array) -> Array:
        if self._padded_at_the_end:
            return padded[: self.vocab_size]
        blocks = padded.reshape(self.num_shards, self.max_width, *padded.shape[1:])
        return jnp.concatenate([blocks[rank, :width] for rank, width in enumerate(self.widths)])

    @property
    def _padded_at_the_end(self) -> bool:
        return all(width == self.max_width for width in self.widths[:-1])

    def _check_rows(self, weight: Shaped[Array, "..."], rows: int, argument: str, dim: int = 0) -> None:
        ok = getattr(weight, "ndim", 0) > dim >= 0 and weight.shape[dim] == rows
        require(ok, argument, f"{rows} rows in dimension {dim} for {self}", describe(weight))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["start", "width"], meta_fields=["vocab_size", "num_shards"]
)
@dataclasses.dataclass(frozen=True)
class LocalShard:
    """The vocabulary shard of this rank.

    Attributes:
        start: id of the first local row; an int, or an int32 scalar that differs by rank.
        width: number of local rows that are real ids; rows after them are padding.
        vocab_size: size of the whole vocabulary.
        num_shards: number of ranks over which it is sharded.
    """

    start: int | Int[Array, ""]
    width: int | Int[Array, ""]
    vocab_size: int
    num_shards: int = 1


def local_shard(rows: int, axis_name: AxisName | None, vocab: VocabShards | None, argument: str) -> LocalShard:
    """Returns the local shard of the vocabulary, checked against the caller's array.

    Args:
        rows: number of rows of the local shard, or of the whole vocabulary if axis_name is None.
        axis_name: mesh axis of the surrounding ``shard_map`` that shards the vocabulary, or None.
        vocab: the shards; None for equal shards without padding, refused under ``shard_map(check_vma=False)``.
        argument: name of the array that has ``rows``, for messages.

    Raises:
        ValueError: if axis_name is not an axis of the surrounding ``shard_map``, or the number of shards, the vocabulary
            size or the padded width does not match.
    """
    require(vocab is None or isinstance(vocab, VocabShards), "vocab", "a VocabShards or None", describe(vocab))
    if axis_name is None:
        if vocab is not None:
            require(rows == vocab.vocab_size, "vocab", f"vocab_size {rows}, the V of {argument}", vocab.vocab_size)
        return LocalShard(0, rows, rows)
    require(not isinstance(axis_name, tuple), "axis_name", "the name of one mesh axis", repr(axis_name))
    require_manual_axis(axis_name)
    num_shards, rank = lax.axis_size(axis_name), lax.axis_index(axis_name)
    if vocab is None:
        # Where all ranks hold the whole, log-probs would be too low by the logarithm of the number of ranks.
        known = num_shards == 1 or tracks_varying_axes(axis_name)
        require(
            known, "vocab", "the shards under shard_map(check_vma=False), where types cannot tell one from all", None
        )
        return LocalShard(rank * rows, rows, num_shards * rows, num_shards)
    found = f"{vocab.num_shards} shards"
    require(vocab.num_shards == num_shards, "vocab", f"{num_shards} shards, the size of axis {axis_name!r}", found)
    expected = f"max_width {rows}, the local V of {argument}"
    require(rows == vocab.max_width, "vocab", expected, f"max_width {vocab.max_width}")
    starts, widths = np.asarray(vocab.starts, np.int32), np.asarray(vocab.widths, np.int32)
    return LocalShard(jnp.asarray(starts)[rank], jnp.asarray(widths)[rank], vocab.vocab_size, num_shards)


def _check_neighbours(previous: tuple[int, int], current: tuple[int, int]) -> None:
    require(current[0] >= previous[0], "ranges", f"ranges sorted by start, after {previous}", f"{current} (unsorted)")
    require(current[0] >= previous[1], "ranges", "no overlap", f"{current}, which overlaps {previous}")
    require(current[0] <= previous[1], "ranges", "no hole", f"{previous} and {current} with a hole between them")
