"""Engine ``chunked``: vocabulary tiles times token chunks, on any device, logits never stored.

Forward: for each vocabulary tile and token chunk the logits of one [token_chunk, vocab_tile] block are computed, reduced
to tile statistics and dropped. Backward: each block is computed again, turned into its gradient and multiplied into both
products. Between the two only token-sized vectors are kept. The tile loop is the outer one, so a tile of the weight's
gradient is complete, and rounded once, when its loop over the tokens ends; the hidden gradient accumulates in fp32.

The last tile starts earlier than its turn when the width does not divide the vocabulary, so the weight is never padded or
copied; its columns that an earlier tile has covered are masked.

With a gradient filter the forward also keeps the largest logit of every tile and token, [tiles, tokens], and the backward's
inner loop runs over the blocks that count. They are listed first and looped over, instead of branching in each block: a
branch would copy the accumulators, and under vmap it would compute both sides.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxlogp._compat import union_of_varying_axes, vary_over
from jaxlogp.errors import require
from jaxlogp.head.gradient_filter import GradientFilter, check_filter, kept_blocks, visits
from jaxlogp.head.projection import HeadOptions, dot, finish_logits, product_gradient, take_rows, write_rows
from jaxlogp.reduce import WeightedSum
from jaxlogp.stats import (
    Normaliser,
    TokenLogProbs,
    all_reduce,
    combine,
    empty_stats,
    finish,
    logit_gradient,
    tile_stats,
)
from jaxlogp.targets import LocalTargets, mask_cotangents


@dataclasses.dataclass(frozen=True)
class ChunkedEngine:
    """Computes [token_chunk, vocab_tile] logits at a time. The result does not depend on the two sizes.

    Attributes:
      token_chunk: tokens a block; more than there are means all at once.
      vocab_tile: vocabulary columns a block; more than there are means all at once.
      gradient_filter: None, or which blocks of the gradient are left out; the result then depends on the two sizes, and
        smaller blocks (128 tokens, 256 columns) leave out more.
    """

    token_chunk: int = 512
    vocab_tile: int = 2048
    gradient_filter: GradientFilter | None = None
    name = "chunked"
    reduces_gradients = False
    masks_hidden = False

    def __post_init__(self) -> None:
        """Refuses sizes that are not positive integers, and what is no gradient filter."""
        check_filter(self.gradient_filter)
        for argument in ("token_chunk", "vocab_tile"):
            value = getattr(self, argument)
            require(isinstance(value, int) and value > 0, argument, "an integer > 0", value)

    def log_probs(
        self,
        hidden: Float[Array, "tokens hidden"],
        weight: Float[Array, "vocab hidden"],
        bias: Float[Array, " vocab"] | None,
        targets: LocalTargets,
        options: HeadOptions,
    ) -> TokenLogProbs:
        """Log-probs and entropy of flat tokens; all operands typed as varying over every axis in play."""
        return _log_probs(hidden, weight, bias, targets, options, self)

    def skipped_tiles(
        self,
        hidden: Float[Array, "tokens hidden"],
        weight: Float[Array, "vocab hidden"],
        bias: Float[Array, " vocab"] | None,
        targets: LocalTargets,
        options: HeadOptions,
    ) -> WeightedSum:
        """Blocks of this shard that the backward leaves out, and all of them; every token of the mask has a cotangent.

        Raises:
          ValueError: the engine has no gradient filter.
        """
        require(self.gradient_filter is not None, "engine", "an engine with a gradient_filter", repr(self))
        _, normaliser, peaks = _statistics(hidden, weight, bias, targets, options, self)
        blocks = _Blocks.of(self, hidden.shape[0], weight.shape[0])
        kept = _kept(blocks, self, peaks, targets, normaliser, targets.mask.astype(jnp.float32), None)
        return WeightedSum(jnp.sum(~kept, dtype=jnp.float32), jnp.int32(kept.size))


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """How [tokens, vocab] is cut; static."""

    tokens: int
    vocab: int
    chunk: int
    tile: int

    @classmethod
    def of(cls, engine: ChunkedEngine, tokens: int, vocab: int) -> "_Blocks":
        return cls(tokens, vocab, min(engine.token_chunk, tokens), min(engine.vocab_tile, vocab))

    @property
    def num_chunks(self) -> int:
        return -(-self.tokens // self.chunk)

    @property
    def num_tiles(self) -> int:
        return -(-self.vocab // self.tile)

    def chunks(self, x: Array, fill: float | int) -> Array:
        """[tokens, ...] as [num_chunks, chunk, ...], filled up behind."""
        padding = [(0, self.num_chunks * self.chunk - self.tokens)] + [(0, 0)] * (x.ndim - 1)
        padded = jnp.pad(x, padding, constant_values=fill) if padding[0][1] else x
        return padded.reshape(self.num_chunks, self.chunk, *x.shape[1:])

    def unchunk(self, x: Array) -> Array:
        return x.reshape(-1, *x.shape[2:])[: self.tokens]

    def tile_columns(self, index: Array, width: Array) -> tuple[Array, Array, Array]:
        """First column of a tile, which of its columns are this tile's turn, and which of those are real ids."""
        start = jnp.minimum(index * self.tile, self.vocab - self.tile)
        columns = start + jnp.arange(self.tile, dtype=jnp.int32)
        turn = columns >= index * self.tile
        return start, turn, turn & (columns < width)


def _local_targets(column: Array, start: Array) -> Array:
    """Columns relative to a tile; -1, which is not owned (column < 0), stays negative."""
    return jnp.where(column < 0, -1, column - start)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _log_probs(
    hidden: Array, weight: Array, bias: Array | None, targets: LocalTargets, options: HeadOptions, engine: ChunkedEngine
) -> TokenLogProbs:
    return _forward(hidden, weight, bias, targets, options, engine)[0]


def _statistics(
    hidden: Array, weight: Array, bias: Array | None, targets: LocalTargets, options: HeadOptions, engine: ChunkedEngine
) -> tuple[TokenLogProbs, Normaliser, Array | None]:
    """Values, normaliser and, for a gradient filter, the largest logit of every tile and token [tiles, chunks, chunk]."""
    blocks = _Blocks.of(engine, hidden.shape[0], weight.shape[0])
    axes = union_of_varying_axes(hidden, weight)
    dtype = options.operand_dtype(weight)
    hidden_chunks, columns = blocks.chunks(hidden.astype(dtype), 0), blocks.chunks(targets.column, -1)

    def tile_step(index, carry):
        start, _, valid = blocks.tile_columns(index, targets.width)
        weight_tile = take_rows(weight, start, blocks.tile).astype(dtype)
        bias_tile = None if bias is None else take_rows(bias, start, blocks.tile)

        def chunk_step(chunk, carry):
            stats, peaks = carry
            logits = finish_logits(dot(hidden_chunks[chunk], weight_tile, contract=(1, 1)), bias_tile, options)
            new = tile_stats(logits, _local_targets(columns[chunk], start), valid, options.with_entropy)
            merged = combine(jax.tree.map(lambda x: x[chunk], stats), new)
            stats = jax.tree.map(lambda x, y: x.at[chunk].set(y), stats, merged)
            return stats, None if peaks is None else peaks.at[index, chunk].set(new.max)

        return lax.fori_loop(0, blocks.num_chunks, chunk_step, carry)

    shape = blocks.num_chunks, blocks.chunk
    filtered = engine.gradient_filter is not None
    empty = (
        empty_stats(shape, options.with_entropy),
        jnp.zeros((blocks.num_tiles, *shape), jnp.float32) if filtered else None,
    )
    empty = jax.tree.map(lambda x: vary_over(x, axes), empty)
    local, peaks = lax.fori_loop(0, blocks.num_tiles, tile_step, empty)
    stats = all_reduce(jax.tree.map(blocks.unchunk, local), options.axis_name, targets.codes)
    result, normaliser = finish(stats, targets.mask, options.vocab_size, targets.invalid)
    return result, normaliser, peaks


def _kept(
    blocks: _Blocks,
    engine: ChunkedEngine,
    peaks: Array,
    targets: LocalTargets,
    normaliser: Normaliser,
    g_log_probs: Array,
    g_entropy: Array | None,
) -> Array:
    """Which blocks [tiles, chunks] count; tokens that fill the last chunk up have no cotangent."""
    normaliser = Normaliser(blocks.chunks(normaliser.max, 0), blocks.chunks(normaliser.log_sum_exp, 0), None)
    cotangents = (None if x is None else blocks.chunks(x, 0) for x in (g_log_probs, g_entropy))
    # Floor division keeps -1, which is no column, below every tile.
    tile_of_target = blocks.chunks(targets.column, -1) // blocks.tile
    return kept_blocks(engine.gradient_filter, peaks, tile_of_target, normaliser, *cotangents)


def _forward(
    hidden: Array, weight: Array, bias: Array | None, targets: LocalTargets, options: HeadOptions, engine: ChunkedEngine
):
    result, normaliser, peaks = _statistics(hidden, weight, bias, targets, options, engine)
    return result, (hidden, weight, bias, targets, normaliser, peaks)


def _backward(options: HeadOptions, engine: ChunkedEngine, residuals: tuple, g: TokenLogProbs):
    hidden, weight, bias, targets, normaliser, peaks = residuals
    cotangents = mask_cotangents(g, targets)
    return *head_gradients(hidden, weight, bias, targets, normaliser, *cotangents, options, engine, peaks), None


def head_gradients(
    hidden: Float[Array, "tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    bias: Float[Array, " vocab"] | None,
    targets: LocalTargets,
    normaliser: Normaliser,
    g_log_probs: Float[Array, " tokens"],
    g_entropy: Float[Array, " tokens"] | None,
    options: HeadOptions,
    engine: ChunkedEngine,
    peaks: Float[Array, "tiles chunks chunk"] | None = None,
) -> tuple[Array, Array, Array | None]:
    """This shard's gradients of hidden, weight and bias from the normaliser of every token: three products.

    Args:
      hidden: [tokens, H], typed as varying over every axis in play, like weight and bias; zeros where masked.
      weight: [V_local, H].
      bias: [V_local] or None.
      targets: targets as this shard sees them.
      normaliser: over the whole vocabulary.
      g_log_probs: cotangents of the log-probs, 0 where masked.
      g_entropy: cotangents of the entropies, or None.
      options: static options of the call.
      engine: sizes of the blocks.
      peaks: largest logit of every tile and token, by which the engine's gradient filter leaves blocks out; None leaves
        out none.
    """
    blocks = _Blocks.of(engine, hidden.shape[0], weight.shape[0])
    axes = union_of_varying_axes(hidden, weight)
    dtype = options.operand_dtype(weight)
    # Padding tokens of the last chunk have hidden 0, cotangent 0 and a harmless normaliser, so they add exact zeros.
    hidden_chunks, columns = blocks.chunks(hidden.astype(dtype), 0), blocks.chunks(targets.column, -1)
    per_token = jax.tree.map(lambda x: blocks.chunks(x, 0), (normaliser, g_log_probs, g_entropy))
    kept = None
    if peaks is not None:
        kept = visits(_kept(blocks, engine, peaks, targets, normaliser, g_log_probs, g_entropy))

    def tile_step(index, carry):
        d_hidden, d_weight, d_bias = carry
        start, turn, valid = blocks.tile_columns(index, targets.width)
        weight_tile = take_rows(weight, start, blocks.tile).astype(dtype)
        bias_tile = None if bias is None else take_rows(bias, start, blocks.tile)

        def chunk_step(chunk, sums):
            if kept is not None:
                chunk = kept.order[index, chunk]
            d_hidden, d_weight_tile, d_bias_tile = sums
            hidden_chunk = hidden_chunks[chunk]
            logits = finish_logits(dot(hidden_chunk, weight_tile, contract=(1, 1)), bias_tile, options)
            token: tuple[Normaliser, Array, Array | None] = jax.tree.map(lambda x: x[chunk], per_token)
            gradient = logit_gradient(logits, _local_targets(columns[chunk], start), valid, *token)
            gradient = product_gradient(gradient, logits, options)
            rounded = gradient.astype(dtype)
            d_hidden = d_hidden.at[chunk].add(dot(rounded, weight_tile, contract=(1, 0)))
            d_weight_tile = d_weight_tile + dot(rounded, hidden_chunk, contract=(0, 0))
            return d_hidden, d_weight_tile, None if bias is None else d_bias_tile + jnp.sum(gradient, axis=0)

        zeros = jnp.zeros(weight_tile.shape, jnp.float32), None if bias is None else jnp.zeros(blocks.tile)
        zeros = jax.tree.map(lambda x: vary_over(x.astype(jnp.float32), axes), zeros)
        count = blocks.num_chunks if kept is None else kept.count[index]
        d_hidden, d_weight_tile, d_bias_tile = lax.fori_loop(0, count, chunk_step, (d_hidden, *zeros))
        d_weight = write_rows(d_weight, d_weight_tile, start, turn)
        return d_hidden, d_weight, None if bias is None else write_rows(d_bias, d_bias_tile, start, turn)

    zeros = (
        jnp.zeros(hidden_chunks.shape, jnp.float32),
        jnp.zeros(weight.shape, weight.dtype),
        None if bias is None else jnp.zeros(bias.shape, bias.dtype),
    )
    zeros = jax.tree.map(lambda x: vary_over(x, axes), zeros)
    d_hidden, d_weight, d_bias = lax.fori_loop(0, blocks.num_tiles, tile_step, zeros)
    return blocks.unchunk(d_hidden).astype(hidden.dtype), d_weight, d_bias


_log_probs.defvjp(_forward, _backward)
