"""Forward kernel: statistics of every 256-column tile of the logits, the logits themselves never written.

For each vocabulary tile and token the epilogue reduces the fp32 accumulators in registers to the four numbers of
:class:`jaxlogp._stats.TileStats` and writes them to [tiles, 4, tokens]; XLA folds the tiles, in one fixed order.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxlogp._mosaic_gpu import plgpu
from jaxlogp.head.hopper.operands import Launch, Operands
from jaxlogp.head.hopper.product import CONSUMERS, output_buffer, product, store_tile
from jaxlogp.head.hopper.tiles import TileConfig
from jaxlogp.head.projection import HeadSpec, nan_unless_finite

# Columns of a tile whose statistics are taken at a time; part of the order of summation, so the same in every configuration.
PIECE = 64
LOG2_E = math.log2(math.e)
# The largest exponent of exponentials taken against an estimate: far below the range of bf16, and of what products add up.
LARGEST_EXPONENT = 60.0
# A masked column's logit. Finite, so that p z is 0 there and not NaN; below every real logit.
MASKED = -1e30
MAX, SUM_EXP, SUM_EXP_SHIFTED, TARGET = range(4)


def finish_tile(products: Any, bias: Any, spec: HeadSpec) -> Any:
    """:func:`jaxlogp.head.projection.finish_logits` on a tile in registers; a logit of -inf, by its bias, becomes MASKED.

    tanh goes through exp2: the hardware's tanh is good to 2^-11 only.
    """
    products = products if spec.softcap is None else nan_unless_finite(products)
    logits = products if bias is None else products + lax.broadcast_in_dim(bias, products.shape, [1])
    if spec.softcap is not None:
        # tanh(x) = 1 - 2 / (1 + e^(2 x)); e^(2 x) = inf gives 1 and 0 gives -1, as it should be.
        doubled = jnp.exp2(logits * (2.0 * LOG2_E * spec.logit_scale / spec.softcap))
        return (1.0 - 2.0 / (1.0 + doubled)) * (spec.softcap / spec.temperature)
    factor = spec.logit_scale / spec.temperature
    logits = logits if factor == 1.0 else logits * factor
    # The comparison, unlike a maximum, lets NaN through.
    return logits if bias is None else jnp.where(logits < MASKED, MASKED, logits)


def forward_statistics(
    operands: Operands,
    column: Int[Array, " tokens"],
    launch: Launch,
    *,
    with_entropy: bool,
    live: Int[Array, ""] | None = None,
    with_exp: bool = False,
    estimate: Float[Array, " tokens"] | None = None,
) -> Any:
    """Tile statistics of all columns, and if wanted the exponentials themselves.

    Args:
        operands: hidden, weight and a bias of whole tiles. Columns past the end of the weight are masked.
        column: int32 [tokens], the target's column, -1 where there is none.
        launch: how the kernel is launched.
        with_entropy: whether entropy is wanted.
        live: int32, how many tokens, from the first, need statistics; None means all. Row tiles after them are not
            computed, and their results may be anything.
        with_exp: also write e^(z - max), max being the tile's; its statistics are bitwise the same.
        estimate: with ``with_exp`` write e^(z - estimate) instead, fp32, an estimate of log Σ e^z of each token. Where a
            tile's maximum lies more than 60 above it, the tile's exponentials are too small.

    Returns:
        fp32 [tiles, 4, tokens]: max, Σ e^(z - max), Σ e^(z - max) (z - max) (not written without
        entropy), target logit or 0; -inf where that is MASKED by its bias.
        With ``with_exp`` a pair of that and bf16 [tokens, tiles * config.columns], 0 in columns that are masked (1 in a tile
        of masked columns alone, whose maximum is -1e30, without ``estimate``).
    """
    (tokens, hidden_size), bias, config = operands.hidden.shape, operands.bias, launch.config
    tile, share = config.columns, config.share
    tiles = -(-operands.num_columns // tile)
    row_layout, column_layout = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
    place_of_estimate = 3 if bias is None else 4

    def left_index(row, _, step, __):
        return pl.ds(row * config.rows, config.rows), pl.ds(step * config.depth, config.depth)

    def right_index(index, step, _):
        return operands.weight_index(pl.ds(index * tile, tile), pl.ds(step * config.depth, config.depth))

    def prologue(first_row, index, _, others):
        def of_rows(ref):
            return plgpu.load(ref.at[pl.ds(first_row, share)], layout=row_layout, optimized=False)

        special = others[2][lax.div(first_row, jnp.int32(share)) * tiles + index]
        return of_rows(others[0]), special, None if estimate is None else of_rows(others[place_of_estimate])

    def epilogue(products, first_row, index, warpgroup, _, early, others, scratch):
        target, special, level = early
        out = others[-2] if with_exp else others[-1]
        start = index * tile
        bias_tile = None
        if bias is not None:
            bias_tile = plgpu.load(others[3].at[pl.ds(start, tile)], layout=column_layout, optimized=False)
        logits = finish_tile(products, bias_tile, operands.spec)

        def all_columns(logits):
            return logits, plgpu.layout_cast(jnp.zeros((share,), jnp.float32), row_layout)

        def some_columns(logits):
            columns = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
            logits = jnp.where(columns < others[1][0] - start, logits, MASKED)
            chosen = columns == lax.broadcast_in_dim(target - start, logits.shape, [0])
            target_logit = jnp.sum(jnp.where(chosen, logits, 0.0), axis=1)
            return logits, target_logit if bias is None else jnp.where(target_logit <= MASKED, -jnp.inf, target_logit)

        logits, target_logit = lax.cond(special > 0, some_columns, all_columns, logits)
        maximum = jnp.max(logits, axis=1)
        write = None
        if with_exp:
            lift = None if level is None else jnp.exp2(jnp.minimum(maximum - level, LARGEST_EXPONENT) * LOG2_E)

            def write(exp, offset):
                if lift is not None:
                    exp = exp * lax.broadcast_in_dim(lift, exp.shape, [0])
                buffer, rows = scratch["exp"].at[warpgroup], pl.ds(first_row, share)
                store_tile(exp, buffer, others[-1], rows, start + offset)

        results = {MAX: maximum, **_tile_sums(logits, maximum, with_entropy, write), TARGET: target_logit}
        buffer = scratch["statistics"].at[warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for place, result in results.items():
            buffer[place] = result
        plgpu.commit_smem()
        for place in results:
            plgpu.copy_smem_to_gmem(buffer.at[place], out.at[index, place, pl.ds(first_row, share)])

    statistics = jax.ShapeDtypeStruct((tiles, 4, tokens), jnp.float32)
    scratch_types = {"statistics": plgpu.SMEM((CONSUMERS, 4, share), jnp.float32)}
    if with_exp:
        scratch_types["exp"] = output_buffer(config, jnp.bfloat16)
    call = product(
        epilogue,
        name="head_exponentials" if with_exp else "head_forward",
        config=config,
        row_tiles=tokens // config.rows,
        column_tiles=tiles,
        steps=hidden_size // config.depth,
        left_minor=True,
        right_minor=operands.vocab_dim == 0,
        left_index=left_index,
        right_index=right_index,
        out_type=(statistics, jax.ShapeDtypeStruct((tokens, tiles * tile), jnp.bfloat16)) if with_exp else statistics,
        scratch=scratch_types,
        num_sms=launch.num_sms,
        interpret=launch.interpret,
        prologue=prologue,
        live=lambda others: others[1][1],
    )
    special = special_tiles(column, jnp.int32(0), operands.width, tiles, config)
    extra = (x for x in (bias, estimate) if x is not None)
    bounds = jnp.stack([operands.width, jnp.int32(tokens) if live is None else live]).astype(jnp.int32)
    return call(operands.hidden, operands.weight, column, bounds, special, *extra)


def _tile_sums(
    logits: Any, maximum: Any, with_entropy: bool, write: Callable[[Any, int], None] | None
) -> dict[int, Any]:
    """Σ e^(z - max) and, for entropy, Σ e^(z - max) (z - max) of a tile in registers.

    Pieces of columns are added up elementwise first: few values besides the logits are alive at a time, each piece may be
    handed to ``write`` along with its first column, and whether it is does not change a bit of the sums.
    """
    total, shifted = None, None
    for offset in range(0, logits.shape[1], PIECE):
        part = logits[:, offset : offset + PIECE]
        shift = part - lax.broadcast_in_dim(maximum, part.shape, [0])
        exp = jnp.exp2(shift * LOG2_E)
        if write is not None:
            write(exp, offset)
        total = exp if total is None else total + exp
        if with_entropy:
            moved = exp * shift
            shifted = moved if shifted is None else shifted + moved
    sums = {SUM_EXP: jnp.sum(total, axis=1)}
    return sums | ({SUM_EXP_SHIFTED: jnp.sum(shifted, axis=1)} if with_entropy else {})


def special_tiles(
    column: Int[Array, " tokens"], start: Int[Array, ""], width: Int[Array, ""], tiles: int, config: TileConfig
) -> Int[Array, " n"]:
    """1 for each share of rows and vocabulary tile that holds a target or a column to mask, else 0; row share major.

    Most tiles hold neither, and their epilogue then spends nothing on either.

    Args:
        column: the target's row of the weight, -1 where there is none.
        start: first column of the first tile.
        width: columns from here on are masked.
        tiles: number of vocabulary tiles.
        config: tile shapes.
    """
    tile = config.columns
    index = jnp.arange(tiles, dtype=jnp.int32)
    local = column - start
    # Compared, not scattered: one small kernel.
    place = jnp.where(local < 0, -1, local // tile).reshape(-1, config.share, 1)
    marks = jnp.any(place == index[None, None, :], axis=1) | (start + (index + 1) * tile > width)[None, :]
    return marks.astype(jnp.int32).reshape(-1)
