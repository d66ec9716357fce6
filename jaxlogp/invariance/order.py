"""Sums in one fixed order: the identity that determines the bits, the tree, and transport of floats without arithmetic.

A sum of floats depends on its order, and a mesh, a batch or a collective picks one. Here a :class:`ReductionOrder`
picks it instead: the vocabulary is divided into granules, whatever the mesh; the granules' sums are added in one binary
tree; and between devices floats are sent as bits, in integer all-reduces or all-to-alls, never in a float all-reduce.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxlogp._compat import AxisName, AxisNames, axis_tuple, refuse_unchecked_gradient, union_of_varying_axes, vary_over
from jaxlogp._vocab import TILE, VocabShards
from jaxlogp.errors import describe, is_positive_integer, require
from jaxlogp.invariance.exact import no_negative_zero

LANES = 64
# Above this, Σ exp of one tile may be too large for the integers in which tiles are added up.
WIDEST_TILE = 4096
# Tile widths are multiples of this, so that the last tile of a granule wastes little.
TILE_STEP = 16
_DTYPES = (None, "float32", "bfloat16", "float16")
# The tiles of engine hopper: columns of one, and rows to which tokens are filled up.
HOPPER_ROWS = 128


@dataclasses.dataclass(frozen=True)
class ReductionOrder:
    """The numeric identity: results with equal identity, vocabulary and JAX version are bitwise equal.

    Attributes:
        granules: G, the number of parts of the vocabulary that no shard splits; a multiple of the number of shards. 24
            allows 1, 2, 3, 4, 6, 8, 12 and 24 shards.
        vocab_tile: upper bound of the columns of a tile, a multiple of 64 up to 4096; :meth:`tile` gives the columns.
        row_block: R, rows of every product, a multiple of 64. Tokens are padded to whole blocks.
        dtype: dtype in which operands are multiplied ("float32", "bfloat16", "float16"), checked when the head runs; None
            for the dtype that follows from the operands.
        engine: engine whose arithmetic it is: "fixed_order" (:class:`jaxlogp.head.FixedOrderEngine`) or "hopper"
            (:class:`jaxlogp.head.FixedOrderHopperEngine`), whose granules are whole tiles of 256 columns, and which
            multiplies bfloat16; :meth:`for_hopper` makes one.

    Example:
        >>> ReductionOrder(granules=8).shards(257, 4).ranges
        ((0, 64), (64, 128), (128, 192), (192, 257))
    """

    granules: int = 24
    vocab_tile: int = 1024
    row_block: int = 512
    dtype: str | None = None
    engine: str = "fixed_order"

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for sizes out of range or not multiples of 64, and for unknown dtypes or engines."""
        require(is_positive_integer(self.granules), "granules", "an integer > 0", describe(self.granules))
        for argument, most in (("vocab_tile", WIDEST_TILE), ("row_block", None)):
            value = getattr(self, argument)
            ok = is_positive_integer(value) and value % LANES == 0 and (most is None or value <= most)
            limit = "" if most is None else f", at most {most}"
            require(ok, argument, f"a positive multiple of {LANES}{limit}", describe(value))
        require(self.dtype in _DTYPES, "dtype", f"one of {_DTYPES}", describe(self.dtype))
        require(self.engine in ("fixed_order", "hopper"), "engine", "fixed_order or hopper", describe(self.engine))
        if self.engine == "hopper":
            for argument, only in (("vocab_tile", TILE), ("row_block", HOPPER_ROWS), ("dtype", "bfloat16")):
                value = getattr(self, argument)
                require(value == only, argument, f"{only}, that of engine hopper", describe(value))

    @classmethod
    def for_hopper(cls, granules: int = 8) -> "ReductionOrder":
        """Creates the order of :class:`jaxlogp.head.FixedOrderHopperEngine`.

        Args:
            granules: G, a multiple of the number of shards. A granule is a chunk of the backward: more of them take more
                time and memory.

        Example:
            >>> ReductionOrder.for_hopper(4).shards(2000, 2).ranges
            ((0, 1024), (1024, 2000))
        """
        return cls(granules, TILE, HOPPER_ROWS, "bfloat16", "hopper")

    def granule_columns(self, vocab_size: int) -> int:
        """Returns the number of columns of the widest granule."""
        wide = -(-vocab_size // self.granules)
        return wide if self.engine == "fixed_order" else -(-wide // TILE) * TILE

    def edges(self, vocab_size: int) -> tuple[int, ...]:
        """Returns the first id of every granule, and V.

        Granule g owns [edges[g], edges[g + 1]), nothing if these are equal.

        Raises:
            ValueError: if the vocabulary has fewer ids than granules.
        """
        ok = is_positive_integer(vocab_size) and vocab_size >= self.granules
        require(ok, "vocab_size", f"at least one id for each of {self.granules} granules", describe(vocab_size))
        if self.engine == "hopper":
            columns = self.granule_columns(vocab_size)
            return tuple(min(granule * columns, vocab_size) for granule in range(self.granules + 1))
        return tuple(granule * vocab_size // self.granules for granule in range(self.granules + 1))

    def shards(self, vocab_size: int, num_shards: int) -> VocabShards:
        """Returns the vocabulary shards of this order, each of granules / num_shards whole granules.

        Args:
            vocab_size: V.
            num_shards: size of the mesh axis that shards the vocabulary.

        Returns:
            VocabShards, equal to ``VocabShards.even`` if num_shards divides V and the engine is fixed_order.

        Raises:
            ValueError: if num_shards does not divide the granules, the vocabulary has fewer ids than granules, or a shard
                would have no id.
        """
        expected = f"a divisor of granules {self.granules}"
        require(is_positive_integer(num_shards) and self.granules % num_shards == 0, "num_shards", expected, num_shards)
        edges = self.edges(vocab_size)[:: self.granules // num_shards]
        expected = f"fewer, so that each has one of the {vocab_size} ids"
        require(edges[-2] < edges[-1], "num_shards", expected, num_shards)
        return VocabShards(tuple(zip(edges[:-1], edges[1:], strict=True)), vocab_size)

    def tile(self, vocab_size: int) -> int:
        """Returns the columns of a tile: the multiple of 16 up to vocab_tile that divides a granule with the least waste.

        Depends on this order and V alone.
        """
        wide = self.granule_columns(vocab_size)
        widest = min(self.vocab_tile, -(-wide // TILE_STEP) * TILE_STEP)
        # A sixteenth of 256 columns models the cost of starting one more product.
        return min(range(TILE_STEP, widest + 1, TILE_STEP), key=lambda size: (-(-wide // size) * (size + 16), -size))

    def to_dict(self) -> dict[str, int | str | None]:
        """Returns the identity as plain values, for a configuration file or a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ReductionOrder":
        """Undoes :meth:`to_dict`.

        Raises:
            ValueError: if a field is missing or unknown, or its value is refused.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        require(sorted(values) == sorted(names), "values", f"exactly the fields {names}", sorted(values))
        return cls(**values)

    def digest(self) -> tuple[int, ...]:
        """Returns eight 32-bit words that differ whenever the identity differs."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return tuple(np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32).tolist())

    def check_across_processes(self) -> None:
        """Checks that all processes of the job hold the same identity; a collective call that raises on every process.

        Raises:
            ValueError: if an identity differs; the message names the processes that differ from process 0.
        """
        from jax.experimental import multihost_utils

        mine = np.asarray(self.digest(), np.uint32)
        everyone = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, mine.size)
        self.require_agreement(everyone)

    def require_agreement(self, digests: np.ndarray) -> None:
        """Raises ``ValueError`` unless all rows of ``digests``, one per process, are equal."""
        differing = [rank for rank, row in enumerate(digests) if not np.array_equal(row, digests[0])]
        expected = "the same reduction order on every process"
        require(not differing, "order", expected, f"{self} here, and processes {differing} differ from process 0")


def fold_tree(parts: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combines parts stacked along the first dimension of every pytree leaf, neighbours first, until one is left.

    ((p0 p1) (p2 p3)) p4 for five parts: an odd last part moves up a level unchanged. So neutral parts at the end
    change nothing, and 2^k consecutive parts that start at a multiple of 2^k may be combined beforehand elsewhere.
    """
    while jax.tree.leaves(parts)[0].shape[0] > 1:
        parts = _fold_neighbours(parts, combine)
    return jax.tree.map(lambda x: x[0], parts)


def _fold_neighbours(parts: Any, combine: Callable[[Any, Any], Any]) -> Any:
    count = jax.tree.leaves(parts)[0].shape[0]
    even = count - count % 2
    left = jax.tree.map(lambda x: x[0:even:2], parts)
    right = jax.tree.map(lambda x: x[1:even:2], parts)
    merged = combine(left, right)
    if even == count:
        return merged
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y[even:]]), merged, parts)


def fold_halves(x: Float[Array, "rows columns"]) -> Float[Array, " columns"]:
    """Sums over rows in one order in every program: adds the second half to the first until one row is left."""
    while (rows := x.shape[0]) > 1:
        half = rows // 2
        x = jnp.concatenate([x[:half] + x[half : 2 * half], x[2 * half :]])
    return x[0]


def gather_bits(x: Array, axis_name: AxisName) -> Array:
    """Stacks x of every rank along a new first dimension in rank order, typed as equal on all ranks of the axis.

    The bits are sent in one integer all-reduce, to which every other rank adds zeros: exact for any float, NaN
    payloads and -0.0 included. ``x`` has a 32-bit dtype.
    """
    bits = x if x.dtype == jnp.int32 else lax.bitcast_convert_type(x, jnp.int32)
    slots = jnp.zeros((lax.axis_size(axis_name), *x.shape), jnp.int32)
    slots = vary_over(slots, {axis_name}).at[lax.axis_index(axis_name)].set(bits)
    summed = lax.psum(slots, axis_name)
    return summed if x.dtype == jnp.int32 else lax.bitcast_convert_type(summed, x.dtype)


def tree_sum_over(parts: Float[Array, "parts ..."], axis_name: AxisName) -> Float[Array, "..."]:
    """Sums over local parts and over ranks, in the tree over all parts in rank order; the same on all ranks.

    Each rank receives its share of the elements from every rank (all-to-all), adds them, and sends the sums to all.
    """
    count, shape, ranks = parts.shape[0], parts.shape[1:], lax.axis_size(axis_name)
    flat = parts.reshape(count, -1)
    share = -(-flat.shape[1] // ranks)
    flat = jnp.pad(flat, [(0, 0), (0, share * ranks - flat.shape[1])])
    received = lax.all_to_all(flat.reshape(count, ranks, share), axis_name, split_axis=1, concat_axis=0, tiled=True)
    total = fold_tree(received.reshape(ranks * count, share), jnp.add)
    size = int(np.prod(shape, dtype=np.int64))
    return gather_bits(total, axis_name).reshape(-1)[:size].reshape(shape)


def segment_tree_sum(
    values: Float[Array, "items width"], segments: Int[Array, " items"], num_segments: int
) -> Float[Array, "num_segments width"]:
    """Sums the values of each segment s into row s, in order, by the tree of :func:`fold_tree`.

    Values of other segments in between, and the number of segments, change no bit. Values of segments outside
    [0, num_segments) are dropped; values of -0.0 must have been replaced before.
    """
    items = segments.shape[0]
    order = jnp.argsort(segments, stable=True)
    segments, values = segments[order], values[order]
    place = jnp.arange(items, dtype=jnp.int32)
    first = jnp.searchsorted(segments, segments, side="left").astype(jnp.int32)
    number = place - first
    end = jnp.searchsorted(segments, segments, side="right").astype(jnp.int32)
    step = 1
    while step < items:
        # After the round, a value whose index in its segment is a multiple of 2 * step sums up to 2 * step values.
        pairs = (number % (2 * step) == 0) & (place + step < end)
        values = jnp.where(pairs[:, None], values + jnp.roll(values, -step, axis=0), values)
        step *= 2
    heads = jnp.where((number == 0) & (segments >= 0), segments, num_segments)
    zeros = vary_over(jnp.zeros((num_segments, values.shape[1]), jnp.float32), union_of_varying_axes(values, segments))
    return zeros.at[heads].set(values, mode="drop")


def in_mesh_order(axes: frozenset) -> tuple[AxisName, ...]:
    """Returns ``axes`` in the order in which the surrounding mesh lists them."""
    return tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in axes)


def fixed_order_sum(x: Float[Array, "*shape"], axis_name: AxisNames) -> Float[Array, "*shape"]:
    """Sums over mesh axes in one fixed order, unlike ``lax.psum``, whose order the backend chooses.

    s = ((x_0 + x_1) + (x_2 + x_3)) + … over the ranks of the axis; several axes are summed one after the other, the last
    one first. The bits do not depend on the distribution of ranks over processes, nor on the number of ranks if every rank's
    x is itself the same tree over 2^k terms.

    Args:
        x: contribution of this rank, any shape, cast to fp32.
        axis_name: mesh axis or axes of the surrounding ``shard_map``.

    Returns:
        fp32 array of the shape of x, the same on all ranks. Its gradient is the cotangent on every rank. Reverse mode only.

    Raises:
        ValueError: if x is not floating-point, or it is differentiated under ``shard_map(check_vma=False)``.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
        >>> specs = dict(in_specs=jax.P("data"), out_specs=jax.P())
        >>> jax.shard_map(lambda x: fixed_order_sum(x, "data"), mesh=mesh, **specs)(jnp.arange(3.0)).tolist()
        [0.0, 1.0, 2.0]
    """
    require(
        jnp.issubdtype(getattr(x, "dtype", None), jnp.floating), "x", "an array of a floating-point dtype", describe(x)
    )
    x = x.astype(jnp.float32)
    for name in reversed(axis_tuple(axis_name)):
        x = _sum_over(vary_over(refuse_unchecked_gradient(x, name), {name}), name)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum_over(x: Array, axis_name: AxisName) -> Array:
    return tree_sum_over(no_negative_zero(x)[None], axis_name)


def _sum_over_forward(x: Array, axis_name: AxisName) -> tuple[Array, None]:
    return _sum_over(x, axis_name), None


def _sum_over_backward(axis_name: AxisName, residuals: None, g: Array) -> tuple[Array]:
    del residuals
    return (vary_over(g, {axis_name}),)


_sum_over.defvjp(_sum_over_forward, _sum_over_backward)
