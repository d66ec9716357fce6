"""The backward of the Hopper engine: dz by chunks of the vocabulary, dH and dW from each, blocks left out by a filter."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from jaxlogp._compat import vary_over
from jaxlogp._stats import Normaliser, TokenLogProbs
from jaxlogp.head.call import HeadCall, HeadGradients
from jaxlogp.head.gradient_filter import kept_blocks
from jaxlogp.head.hopper.gradient_products import (
    add_hidden_gradient,
    finish_hidden_gradient,
    hidden_gradient_sums,
    part_sums,
    uninitialised,
    write_weight_gradient,
)
from jaxlogp.head.hopper.logit_gradient import chunk_gradient
from jaxlogp.head.hopper.operands import Operands, Work
from jaxlogp.head.hopper.settings import HopperSettings, row_multiple, whole_rows
from jaxlogp.head.hopper.tiles import HeadTiles
from jaxlogp.head.hopper.values import KeptStatistics
from jaxlogp.head.hopper.work_lists import BlockShape, block_shape, gradient_plan, group_rows, product_plan
from jaxlogp.head.live_rows import live_rows, select_live
from jaxlogp.head.row_scalars import RowScalars


def counting_blocks(
    call: HeadCall, engine: HopperSettings, kept: KeptStatistics, g: TokenLogProbs
) -> Bool[Array, "tiles blocks"]:
    """Which blocks [tiles, blocks of packed tokens] of dz count."""
    tiles, targets = engine.head_tiles(call.hidden.shape[1]), call.targets
    shape = block_shape(tiles, row_multiple(tiles, engine.interpret), engine.interpret)
    padded = -(-targets.mask.shape[0] // shape.tokens) * shape.tokens
    rows = live_rows(targets.mask, padded, call.all_live)

    def pack(x, fill):
        return rows.pack(x, fill).reshape(-1, shape.tokens)

    # The forward's tiles may be narrower than a block.
    narrow = shape.columns // tiles.forward.columns
    peaks = kept.peaks[:, :padded]
    peaks = jnp.pad(peaks, [(0, -peaks.shape[0] % narrow), (0, 0)], constant_values=-jnp.inf)
    peaks = jnp.max(peaks.reshape(-1, narrow, padded), axis=1).reshape(-1, padded // shape.tokens, shape.tokens)
    normaliser = Normaliser(pack(kept.normaliser.max, 0), pack(kept.normaliser.log_sum_exp, 0), None)
    # Places after the last live token, computed or not, have no cotangent.
    cotangents = (None if x is None else pack(jnp.where(targets.mask, x, 0.0), 0) for x in (g.log_probs, g.entropy))
    tile_of_target = pack(targets.column, -1) // shape.columns
    return kept_blocks(engine.gradient_filter, peaks, tile_of_target, normaliser, *cotangents)


class _Plans(NamedTuple):
    """Work lists of the three kernels and the blocks [blocks of tokens, tiles] they come from, of every chunk."""

    gradient: Array
    d_hidden: Array
    d_weight: Array
    kept: Array


class _ChunkWork(NamedTuple):
    """The work of the three kernels for one chunk, and which elements [tokens, columns] of its dz count; None: all."""

    gradient: Work
    d_hidden: Work
    d_weight: Work
    written: Bool[Array, "tokens columns"] | None


def _chunk_work(
    plans: _Plans | None, index: Array, live: Array, tiles: HeadTiles, shape: BlockShape | None
) -> _ChunkWork:
    everything = Work(live)
    if plans is None:
        return _ChunkWork(everything, everything, everything, None)
    plan = _Plans(*(x[index] for x in plans))
    written = jnp.repeat(jnp.repeat(plan.kept, shape.tokens, axis=0), shape.columns, axis=1)
    return _ChunkWork(
        Work(live, plan.gradient),
        Work(live, plan.d_hidden, shape.columns // tiles.d_hidden.depth),
        Work(live, plan.d_weight, shape.tokens // tiles.d_weight.depth),
        written,
    )


def _plans(kept: Array, tiles: HeadTiles, chunks: int, chunk: int, hidden_size: int, interpret: Any) -> _Plans:
    """The work lists of every chunk, stacked: made at once, because each is little work."""
    shape = block_shape(tiles, row_multiple(tiles, interpret), interpret)
    per_chunk = chunk // shape.columns
    kept = jnp.pad(kept, [(0, chunks * per_chunk - kept.shape[0]), (0, 0)])

    def column_tiles(config):
        return -(-hidden_size // config.columns)

    def of_chunk(kept):
        rows = kept.T
        repeats = [
            shape.tokens // group_rows(tiles.d_hidden, interpret),
            shape.columns // group_rows(tiles.d_weight, interpret),
        ]
        return _Plans(
            gradient_plan(rows, shape, tiles.logit_gradient, interpret),
            product_plan(rows, repeats[0], column_tiles(tiles.d_hidden), tiles.d_hidden, interpret),
            product_plan(kept, repeats[1], column_tiles(tiles.d_weight), tiles.d_weight, interpret),
            rows,
        )

    return jax.vmap(of_chunk)(kept.reshape(chunks, per_chunk, -1))


def head_gradients(
    call: HeadCall,
    engine: HopperSettings,
    scalars: RowScalars,
    with_slope: bool,
    kept: Bool[Array, "tiles blocks"] | None = None,
    chunks_apart: bool = False,
) -> HeadGradients:
    """This shard's gradients from the scalars of dz: three products, by vocabulary chunks.

    Args:
        call: the call; tokens whose mask is False are left out and get exact zeros.
        engine: tile shapes and chunk width.
        scalars: what dz is made of, a value per token.
        with_slope: whether the entropy has a cotangent.
        kept: which blocks of dz count; None means all. Not with chunks apart.
        chunks_apart: return the hidden gradient of every chunk, fp32 [chunks, tokens, H], instead of their sum.
    """
    axes, bias = call.axes, None if call.frozen else call.bias
    (tokens, hidden_size), vocab = call.hidden.shape, call.num_columns
    tiles, interpret = engine.head_tiles(hidden_size), engine.interpret
    multiple = row_multiple(tiles, interpret)
    padded = -(-tokens // multiple) * multiple
    rows = live_rows(call.targets.mask, padded, call.all_live)
    scalars, live = scalars.pack(rows), whole_rows(rows.count, multiple)
    chunk = engine.chunk_columns(vocab, tiles)
    chunks = -(-vocab // chunk)
    operands = Operands.of(call, rows.pack(call.hidden.astype(jnp.bfloat16), 0), chunks * chunk)
    # Work lists name output tiles of one part.
    parts = tiles.d_hidden_parts if kept is None else 1
    d_hidden = hidden_gradient_sums(padded, hidden_size, tiles.d_hidden, parts)
    plans, shape = None, None
    if call.frozen:
        d_weight = None
    elif kept is None:
        d_weight = jax.new_ref(uninitialised(call.weight.shape, call.weight.dtype, interpret))
    else:
        # Vocabulary tiles of which no block counts are never written.
        d_weight = jax.new_ref(jnp.zeros(call.weight.shape, call.weight.dtype))
    if kept is not None:
        plans = _plans(kept, tiles, chunks, chunk, hidden_size, interpret)
        shape = block_shape(tiles, multiple, interpret)
    launches = [engine.launch(config) for config in (tiles.logit_gradient, tiles.d_hidden, tiles.d_weight)]

    def chunk_step(index, carry):
        d_bias, nodes = carry
        work = _chunk_work(plans, index, live, tiles, shape)
        gradient = chunk_gradient(
            operands, scalars, index, chunk, launches[0], with_slope=with_slope, work=work.gradient
        )
        how = {"work": work.d_hidden, "parts": parts, "first": chunks_apart}
        add_hidden_gradient(d_hidden, gradient, operands, index, launches[1], **how)
        if nodes is not None:
            nodes = nodes.at[index].set(rows.unpack(part_sums(d_hidden[...], hidden_size, parts)))
        if d_weight is not None:
            write_weight_gradient(d_weight, gradient, operands, index, launches[2], work=work.d_weight)
        if bias is None:
            return None, nodes
        if work.written is not None:
            gradient = jnp.where(work.written, gradient, jnp.zeros((), gradient.dtype))
        return d_bias.at[index].set(jnp.sum(select_live(gradient, live), axis=0, dtype=jnp.float32)), nodes

    d_bias = None if bias is None else vary_over(jnp.zeros((chunks, chunk), jnp.float32), axes)
    nodes = vary_over(jnp.zeros((chunks, tokens, hidden_size), jnp.float32), axes) if chunks_apart else None
    d_bias, nodes = lax.fori_loop(0, chunks, chunk_step, (d_bias, nodes))
    d_bias = None if bias is None else d_bias.reshape(-1)[:vocab]
    if nodes is None:
        summed = finish_hidden_gradient(d_hidden, hidden_size, parts).astype(call.hidden_gradient_dtype)
        nodes = vary_over(rows.unpack(summed), axes)
    return HeadGradients(nodes, None if d_weight is None else vary_over(jax.freeze(d_weight), axes), d_bias)
