"""Division of [tokens, vocabulary] into blocks of rows, and granules of tiles, for engine ``fixed_order``; and its logits.

A granule is a run of columns that no shard splits. It is divided into equal tiles; if the tile width does not divide the
granule, the last one starts earlier. A tile that is wider than its granule reaches into the next one, whose columns it
masks; at the end of a shard it is read from an earlier row and shifted into place. So the weight is never padded or copied.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxlogp._compat import AxisName
from jaxlogp.errors import require
from jaxlogp.head.call import HeadCall
from jaxlogp.head.fold import MOST_TILES
from jaxlogp.head.projection import HeadSpec, dot, nan_unless_finite, take_rows, write_rows
from jaxlogp.invariance.exact import one_minus_square, product, scaled
from jaxlogp.invariance.order import ReductionOrder


@dataclasses.dataclass(frozen=True)
class Plan:
    """How [tokens, vocab] is divided; static except for the rank."""

    order: ReductionOrder
    vocab_size: int
    axis_name: AxisName | None
    num_shards: int
    tokens: int

    def __post_init__(self) -> None:
        """Refuses a vocabulary of more tiles than the integers of :mod:`jaxlogp.head.fold` can add up."""
        tiles = self.order.granules * self.tiles
        require(tiles <= MOST_TILES, "vocab_tile", f"at most {MOST_TILES} tiles in the vocabulary", f"{tiles} tiles")

    @classmethod
    def of(cls, order: ReductionOrder, call: HeadCall) -> "Plan":
        return cls(order, call.vocab_size, call.axis_name, call.num_shards, call.hidden.shape[0])

    @property
    def granules(self) -> int:
        return self.order.granules // self.num_shards

    @property
    def tile(self) -> int:
        return self.order.tile(self.vocab_size)

    @property
    def tiles(self) -> int:
        widest = math.ceil(self.vocab_size / self.order.granules)
        return math.ceil(widest / self.tile)

    @property
    def num_blocks(self) -> int:
        return -(-self.tokens // self.order.row_block)

    @property
    def overhang(self) -> int:
        """The most columns by which a tile is wider than its granule."""
        return max(self.tile - self.vocab_size // self.order.granules, 0)

    def blocks(self, x: Array, fill: float | int) -> Array:
        """[tokens, ...] as [num_blocks, row_block, ...], padded at the end."""
        missing = self.num_blocks * self.order.row_block - self.tokens
        padded = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=fill) if missing else x
        return padded.reshape(self.num_blocks, self.order.row_block, *x.shape[1:])

    def unblock(self, x: Array) -> Array:
        return x.reshape(-1, *x.shape[2:])[: self.tokens]

    def columns(self, granule: Array, tile: Array) -> tuple[Int[Array, ""], Bool[Array, " columns"]]:
        """First local row of a tile of a local granule, and which of its columns it has to count."""
        edges = jnp.asarray(np.asarray(self.order.edges(self.vocab_size), np.int32))
        rank = 0 if self.axis_name is None else lax.axis_index(self.axis_name)
        first = rank * self.granules
        start, width = edges[first + granule], edges[first + granule + 1] - edges[first + granule]
        # The last tile ends where its granule ends, and masks what the previous tile has counted.
        begin = jnp.minimum(tile * self.tile, jnp.maximum(width - self.tile, 0))
        column = begin + jnp.arange(self.tile, dtype=jnp.int32)
        return start - edges[first] + begin, (column >= tile * self.tile) & (column < width)

    def take(self, x: Array, start: Array, dim: int = 0) -> Array:
        """The columns of a tile that starts at ``start``, as rows, each at the same place wherever the shard ends.

        ``dim`` is the dimension of x that counts vocabulary columns.
        """
        if not self.overhang:
            return take_rows(x, start, self.tile, dim)
        ahead = jnp.minimum(start, x.shape[dim] - self.tile)
        return _moved(take_rows(x, ahead, self.tile, dim), (0, self.overhang), start - ahead)

    def write(self, x: Array, rows: Array, start: Array, owned: Array, dim: int = 0) -> Array:
        """Writes the rows of a tile that it owns; undoes :meth:`take`."""
        if not self.overhang:
            return write_rows(x, rows, start, owned, dim)
        ahead = jnp.minimum(start, x.shape[dim] - self.tile)
        rows, owned = (_moved(part, (self.overhang, 0), self.overhang - (start - ahead)) for part in (rows, owned))
        return write_rows(x, rows, ahead, owned, dim)


def _moved(rows: Array, padding: tuple[int, int], first: Array) -> Array:
    """Rows from ``first`` on of the padded rows, as many as there were before padding."""
    padded = jnp.pad(rows, [padding] + [(0, 0)] * (rows.ndim - 1))
    return lax.dynamic_slice_in_dim(padded, first, rows.shape[0])


def _filled_up(x: Array, missing: int, dim: int) -> Array:
    return jnp.pad(x, [(0, missing if index == dim else 0) for index in range(x.ndim)])


def finish_logits(products: Array, bias: Array | None, spec: HeadSpec) -> Array:
    """As :func:`jaxlogp.head.projection.finish_logits`, from exact partial products, so that any addition may follow."""
    products = products if spec.softcap is None else nan_unless_finite(products)
    logits = products if bias is None else products + bias.astype(jnp.float32)[None, :]
    logits = scaled(logits, spec.logit_scale)
    if spec.softcap is not None:
        logits = scaled(jnp.tanh(logits / spec.softcap), spec.softcap)
    return scaled(logits, 1.0 / spec.temperature)


def product_gradient(gradient: Array, logits: Array, spec: HeadSpec) -> Array:
    """As :func:`jaxlogp.head.projection.product_gradient`."""
    if spec.softcap is not None:
        logits = jnp.where(jnp.isnan(logits), 0.0, logits)
        capped = jnp.clip(scaled(logits, spec.temperature / spec.softcap), -1.0, 1.0)
        gradient = product(gradient, one_minus_square(capped))
    return scaled(gradient, spec.logit_scale / spec.temperature)


class Operands:
    """hidden, weight and bias of one call, in the form that the loops read."""

    def __init__(self, plan: Plan, call: HeadCall):
        self.plan, self.spec = plan, call.spec
        self.dtype = call.operand_dtype
        # Replaced before any product: 0 * NaN from a masked row would reach every row of the weight's gradient.
        kept = jnp.where(call.targets.mask[:, None], call.hidden.astype(self.dtype), jnp.zeros((), self.dtype))
        self.hidden = plan.blocks(kept, 0)
        self.column = plan.blocks(call.targets.column, -1)
        # A shard that is smaller than one tile is padded to it.
        missing, self.vocab_dim = max(plan.tile - call.num_columns, 0), call.vocab_dim
        self.weight = _filled_up(call.weight, missing, call.vocab_dim)
        self.bias = None if call.bias is None else _filled_up(call.bias, missing, 0)

    def tile(self, granule: Array, tile: Array) -> "Tile":
        start, valid = self.plan.columns(granule, tile)
        rows = self.plan.take(self.weight, start, self.vocab_dim).astype(self.dtype)
        return Tile(self, start, valid, rows, None if self.bias is None else self.plan.take(self.bias, start))


@dataclasses.dataclass(frozen=True)
class Tile:
    """One tile: its first local column, which columns count, and their rows of the weight and entries of the bias."""

    operands: Operands
    start: Array
    valid: Array
    weight: Array
    bias: Array | None

    def logits(self, block: Array) -> Array:
        products = dot(self.operands.hidden[block], self.weight, contract=(1, 1))
        return finish_logits(products, self.bias, self.operands.spec)

    def targets(self, block: Array) -> Array:
        """Columns of the targets in this tile; -1 where it does not own them."""
        column = self.operands.column[block]
        relative = column - self.start
        inside = (column >= 0) & (relative >= 0) & (relative < self.valid.shape[0])
        return jnp.where(inside & self.valid[jnp.where(inside, relative, 0)], relative, -1)
