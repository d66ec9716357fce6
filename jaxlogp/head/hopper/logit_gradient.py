"""Gradient kernel: the logits of a vocabulary chunk once more, turned into their gradient before they are rounded.

dz = p (A + B (z - max)) + g onehot, with three scalars a token: A = -g + g_H Σ p (z - max), B = -g_H, and g. The one-hot
is subtracted in fp32, so a confident target (p near 1) keeps its small gradient.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxlogp._mosaic_gpu import plgpu
from jaxlogp.head.hopper.forward import LOG2_E, finish_tile, special_tiles
from jaxlogp.head.hopper.operands import EVERYTHING, Launch, Operands, Work
from jaxlogp.head.hopper.product import output_buffer, product, store_tile
from jaxlogp.head.row_scalars import RowScalars


def chunk_gradient(
    operands: Operands,
    rows: RowScalars,
    index: Int[Array, ""],
    chunk: int,
    launch: Launch,
    *,
    with_slope: bool,
    work: Work = EVERYTHING,
    into: Any = None,
) -> Float[Array, "tokens chunk"] | None:
    """Gradient of hidden · weightᵀ + bias for the index-th chunk of columns, bf16.

    Args:
        operands: hidden, weight and a bias that is padded to whole chunks. A last chunk that reads past the end of the
            weight has zeros there; columns that are no real ids get 0.
        rows: scalars of each token.
        index: which chunk.
        chunk: number of columns, a multiple of the tile's.
        launch: how the kernel is launched.
        with_slope: whether the entropy has a cotangent: B is not 0.
        work: the tiles to compute (:func:`jaxlogp.head.hopper.work_lists.gradient_plan`); others may be anything.
        into: None, or a reference to bf16 [tokens, chunk] that the gradient is written to instead of returned.
    """
    (tokens, hidden_size), bias, spec, config = operands.hidden.shape, operands.bias, operands.spec, launch.config
    tile, share, (live, plan, _) = config.columns, config.share, work
    if chunk % tile:
        raise ValueError(f"chunk: expected a multiple of the tile's {tile} columns, got {chunk}")
    tiles = chunk // tile
    row_layout, column_layout = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    def setup(others):
        bounds = others[0]
        return bounds[0] * chunk, bounds[1]

    def left_index(row, _, step, __):
        return pl.ds(row * config.rows, config.rows), pl.ds(step * config.depth, config.depth)

    def right_index(index, step, bounds):
        columns = pl.ds(bounds[0] + index * tile, tile)
        return operands.weight_index(columns, pl.ds(step * config.depth, config.depth))

    def prologue(first_row, index, bounds, others):
        place = pl.ds(first_row, share)
        loaded = [plgpu.load(ref.at[place], layout=row_layout, optimized=False) for ref in others[2:8]]
        return RowScalars(*loaded), others[1][lax.div(first_row, jnp.int32(share)) * tiles + index]

    def epilogue(products, first_row, index, warpgroup, bounds, early, others, scratch):
        scalars, is_special = early
        start, width = bounds
        first_column = start + index * tile

        def finish(part, offset):
            shape = part.shape
            bias_part = None
            if bias is not None:
                columns = pl.ds(first_column + offset, shape[1])
                bias_part = plgpu.load(others[8].at[columns], layout=column_layout, optimized=False)

            def spread(row):
                return lax.broadcast_in_dim(row, shape, [0])

            logits = finish_tile(part, bias_part, spec)
            shift = logits - spread(scalars.maximum)
            probs = jnp.exp2(shift * LOG2_E - spread(scalars.log2_sum))
            factor = spread(scalars.constant)
            if with_slope:
                factor = factor + spread(scalars.slope) * shift
            gradient = probs * factor

            def with_target_or_end(gradient):
                columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
                chosen = columns == spread(scalars.target - (first_column + offset))
                gradient = jnp.where(chosen, gradient + spread(scalars.onehot), gradient)
                return jnp.where(columns < width - (first_column + offset), gradient, 0.0)

            gradient = lax.cond(is_special > 0, with_target_or_end, lambda x: x, gradient)
            if spec.softcap is not None:
                capped = logits * (spec.temperature / spec.softcap)
                gradient = gradient * (1.0 - capped * capped)
            return gradient

        buffer = scratch["gradient"].at[warpgroup]
        store_tile(products, buffer, others[-1], pl.ds(first_row, share), index * tile, finish=finish)

    call = product(
        epilogue,
        name="head_logit_gradient",
        config=config,
        row_tiles=tokens // config.rows,
        column_tiles=tiles,
        steps=hidden_size // config.depth,
        left_minor=True,
        right_minor=operands.vocab_dim == 0,
        left_index=left_index,
        right_index=right_index,
        out_type=jax.ShapeDtypeStruct((tokens, chunk), jnp.bfloat16) if into is None else (),
        scratch={"gradient": output_buffer(config, jnp.bfloat16)},
        num_sms=launch.num_sms,
        interpret=launch.interpret,
        setup=setup,
        prologue=prologue,
        live=None if plan is not None else lambda others: others[0][2],
        plan=None if plan is None else lambda others: others[-2],
    )
    width = operands.width
    bounds = jnp.stack([index, width, jnp.int32(tokens) if live is None else live]).astype(jnp.int32)
    special = special_tiles(rows.target, index * chunk, width, tiles, config)
    extra = (x for x in (bias, plan, into) if x is not None)
    result = call(operands.hidden, operands.weight, bounds, special, *rows, *extra)
    return result if into is None else None
