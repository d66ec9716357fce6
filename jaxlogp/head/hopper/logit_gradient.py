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

from jaxlogp.head.hopper._pallas_compat import plgpu
from jaxlogp.head.hopper.forward import LOG2_E, finish_tile, special_tiles
from jaxlogp.head.hopper.product import output_buffer, product, store_tile
from jaxlogp.head.hopper.tiles import TileConfig
from jaxlogp.head.projection import HeadSpec
from jaxlogp.head.row_scalars import RowScalars


def chunk_gradient(
    hidden: Float[Array, "tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    bias: Float[Array, " vocab"] | None,
    rows: RowScalars,
    width: Int[Array, ""],
    index: Int[Array, ""],
    chunk: int,
    spec: HeadSpec,
    with_slope: bool,
    config: TileConfig,
    num_sms: int,
    interpret: Any = None,
    live: Int[Array, ""] | None = None,
    plan: Int[Array, " n"] | None = None,
    into: Any = None,
) -> Float[Array, "tokens chunk"] | None:
    """Gradient of hidden · weightᵀ + bias for the index-th chunk of columns, bf16.

    Args:
      hidden: bf16 [tokens, H], tokens a multiple of config.rows.
      weight: bf16 [V, H]; a last chunk that reads past the end has zeros there.
      bias: fp32 [V], padded to whole chunks, or None.
      rows: scalars of each token.
      width: number of rows of the weight that are real ids; further columns get 0.
      index: which chunk.
      chunk: number of columns, a multiple of config.columns.
      spec: scale, soft cap and temperature.
      with_slope: whether the entropy has a cotangent: B is not 0.
      config: tile shapes.
      num_sms: number of persistent blocks.
      interpret: None, or what runs the kernel on the CPU.
      live: int32, how many tokens, from the first, have a gradient; None means all. Row tiles behind them are not
        computed, and their results may be anything. With 0 nothing is computed at all.
      plan: int32, the tiles to compute (:func:`jaxlogp.head.hopper.work_lists.gradient_plan`), others may be anything;
        None means all of ``live``.
      into: None, or a reference to bf16 [tokens, chunk] that the gradient is written to instead of returned.
    """
    tokens, tile, share = hidden.shape[0], config.columns, config.share
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
        return pl.ds(bounds[0] + index * tile, tile), pl.ds(step * config.depth, config.depth)

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
        steps=hidden.shape[1] // config.depth,
        left_minor=True,
        right_minor=True,
        left_index=left_index,
        right_index=right_index,
        out_type=jax.ShapeDtypeStruct((tokens, chunk), jnp.bfloat16) if into is None else (),
        scratch={"gradient": output_buffer(config, jnp.bfloat16)},
        num_sms=num_sms,
        interpret=interpret,
        setup=setup,
        prologue=prologue,
        live=None if plan is not None else lambda others: others[0][2],
        plan=None if plan is None else lambda others: others[-2],
    )
    bounds = jnp.stack([index, width, jnp.int32(tokens) if live is None else live]).astype(jnp.int32)
    special = special_tiles(rows.target, index * chunk, width, tiles, config)
    result = call(hidden, weight, bounds, special, *rows, *(x for x in (bias, plan, into) if x is not None))
    return result if into is None else None
