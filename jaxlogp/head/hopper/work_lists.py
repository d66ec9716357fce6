"""Work lists of a filtered backward: which output tiles a kernel computes, and which steps of the contracted dimension.

Persistent blocks deal the listed tiles out among themselves, so what is left out shortens every block's share alike. A list
is one int32 vector in global memory: the number of tiles; the tiles, in the order in which an unfiltered kernel would walk
over them; and, for the two products that follow dz, for each row group how many blocks of steps count, and which.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxlogp.head.hopper.product import tile_order
from jaxlogp.head.hopper.tiles import HeadTiles, TileConfig


@dataclasses.dataclass(frozen=True)
class BlockShape:
    """What the gradient filter keeps or leaves out as one: tokens by vocabulary columns."""

    tokens: int
    columns: int


def block_shape(tiles: HeadTiles, row_multiple: int, interpret: object) -> BlockShape:
    """The smallest block that all kernels can leave out.

    Args:
        tiles: tile shapes of the kernels.
        row_multiple: tokens that are whole tiles, or steps, of every kernel.
        interpret: None, or what runs the kernels on the CPU, where there are no clusters.

    Raises:
        ValueError: tile shapes whose columns do not line up.
    """
    columns = tiles.logit_gradient.columns
    parts = {
        "columns of the forward": tiles.forward.columns,
        "steps of the hidden gradient": tiles.d_hidden.depth,
        "row groups of the weight gradient": group_rows(tiles.d_weight, interpret),
    }
    for name, size in parts.items():
        if columns % size:
            raise ValueError(f"tiles: expected {name} that divide {columns} columns for a gradient filter, got {size}")
    return BlockShape(row_multiple, columns)


def group_rows(config: TileConfig, interpret: object) -> int:
    """Rows of the output that one cluster of blocks walks over together."""
    return config.rows * (config.cluster if interpret is None else 1)


def _listed(kept: Bool[Array, "groups columns"], config: TileConfig, interpret: object) -> Int[Array, " n"]:
    """The number of kept tiles, then their indices (row group major), kept ones first and in walking order."""
    groups, columns = kept.shape
    group = config.group // (config.cluster if interpret is None else 1)
    walk = jax.vmap(lambda index: tile_order(index, jnp.int32(groups), columns, group))
    row, column = walk(jnp.arange(kept.size, dtype=jnp.int32))
    order = jnp.argsort(~kept[row, column], stable=True)
    tiles = (row * columns + column)[order]
    return jnp.concatenate([jnp.sum(kept, dtype=jnp.int32)[None], tiles]).astype(jnp.int32)


def gradient_plan(
    kept: Bool[Array, "blocks tiles"], shape: BlockShape, config: TileConfig, interpret: object
) -> Int[Array, " n"]:
    """Tiles of dz that have to be computed."""
    groups = jnp.repeat(kept, shape.tokens // group_rows(config, interpret), axis=0)
    return _listed(groups, config, interpret)


def product_plan(
    kept: Bool[Array, "outputs steps"], repeats: int, column_tiles: int, config: TileConfig, interpret: object
) -> Int[Array, " n"]:
    """Tiles of a product that have a step which counts, and those steps.

    Args:
        kept: which blocks of steps count for which block of output rows.
        repeats: row groups that one block of output rows has.
        column_tiles: tiles of the product's columns.
        config: tile shapes.
        interpret: None, or what runs the kernels on the CPU.
    """
    groups = jnp.repeat(kept, repeats, axis=0)
    some = jnp.broadcast_to(jnp.any(groups, axis=1)[:, None], (groups.shape[0], column_tiles))
    steps = jnp.argsort(~groups, axis=1, stable=True).astype(jnp.int32)
    counts = jnp.sum(groups, axis=1, dtype=jnp.int32)
    return jnp.concatenate([_listed(some, config, interpret), counts, steps.reshape(-1)])
