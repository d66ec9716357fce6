"""Engine ``chunked``: vocabulary tiles times token chunks, on any device, logits never stored.

Forward: for each vocabulary tile and token chunk the logits of one [token_chunk, vocab_tile] block are computed, reduced
to tile statistics and dropped. Backward: each block is computed again, turned into its gradient and multiplied into both
products. Between the two only token-sized vectors are kept. The tile loop is the outer one, so a tile of the weight's
gradient is complete, and rounded once, when its loop over the tokens ends; the hidden gradient accumulates in fp32.

The last tile starts earlier than its turn when the width does not divide the vocabulary, so the weight is never padded or
copied; its columns that an earlier tile has covered are masked.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxlogp._compat import union_of_varying_axes, vary_over
from jaxlogp.errors import require
from jaxlogp.head.projection import HeadOptions, dot, finish_logits, product_gradient, take_rows, write_rows
from jaxlogp.logits import LocalTargets, mask_cotangents
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


@dataclasses.dataclass(frozen=True)
class ChunkedEngine:
    """Computes [token_chunk, vocab_tile] logits at a time. The result does not depend on the two sizes.

    Attributes:
      token_chunk: tokens a block; more than there are means all at once.
      vocab_tile: vocabulary columns a block; more than there are means all at once.
    """

    token_chunk: int = 512
    vocab_tile: int = 2048
    name = "chunked"
    reduces_gradients = False

    def __post_init__(self) -> None:
        """Refuses sizes that are not positive integers."""
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


def _forward(
    hidden: Array, weight: Array, bias: Array | None, targets: LocalTargets, options: HeadOptions, engine: ChunkedEngine
):
    blocks = _Blocks.of(engine, hidden.shape[0], weight.shape[0])
    axes = union_of_varying_axes(hidden, weight)
    dtype = options.operand_dtype(weight)
    hidden_chunks, columns = blocks.chunks(hidden.astype(dtype), 0), blocks.chunks(targets.column, -1)

    def tile_step(index, stats):
        start, _, valid = blocks.tile_columns(index, targets.width)
        weight_tile = take_rows(weight, start, blocks.tile).astype(dtype)
        bias_tile = None if bias is None else take_rows(bias, start, blocks.tile)

        def chunk_step(chunk, stats):
            logits = finish_logits(dot(hidden_chunks[chunk], weight_tile, contract=(1, 1)), bias_tile, options)
            new = tile_stats(logits, _local_targets(columns[chunk], start), valid, options.with_entropy)
            merged = combine(jax.tree.map(lambda x: x[chunk], stats), new)
            return jax.tree.map(lambda x, y: x.at[chunk].set(y), stats, merged)

        return lax.fori_loop(0, blocks.num_chunks, chunk_step, stats)

    empty = empty_stats((blocks.num_chunks, blocks.chunk), options.with_entropy)
    empty = jax.tree.map(lambda x: vary_over(x, axes), empty)
    local = jax.tree.map(blocks.unchunk, lax.fori_loop(0, blocks.num_tiles, tile_step, empty))
    stats = all_reduce(local, options.axis_name)
    result, normaliser = finish(stats, targets.mask, options.vocab_size, targets.poison)
    return result, (hidden, weight, bias, targets, normaliser)


def _backward(options: HeadOptions, engine: ChunkedEngine, residuals: tuple, g: TokenLogProbs):
    hidden, weight, bias, targets, normaliser = residuals
    cotangents = mask_cotangents(g, targets)
    return *head_gradients(hidden, weight, bias, targets, normaliser, *cotangents, options, engine), None


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
    """
    blocks = _Blocks.of(engine, hidden.shape[0], weight.shape[0])
    axes = union_of_varying_axes(hidden, weight)
    dtype = options.operand_dtype(weight)
    # Padding tokens of the last chunk have hidden 0, cotangent 0 and a harmless normaliser, so they add exact zeros.
    hidden_chunks, columns = blocks.chunks(hidden.astype(dtype), 0), blocks.chunks(targets.column, -1)
    per_token = jax.tree.map(lambda x: blocks.chunks(x, 0), (normaliser, g_log_probs, g_entropy))

    def tile_step(index, carry):
        d_hidden, d_weight, d_bias = carry
        start, turn, valid = blocks.tile_columns(index, targets.width)
        weight_tile = take_rows(weight, start, blocks.tile).astype(dtype)
        bias_tile = None if bias is None else take_rows(bias, start, blocks.tile)

        def chunk_step(chunk, sums):
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
        d_hidden, d_weight_tile, d_bias_tile = lax.fori_loop(0, blocks.num_chunks, chunk_step, (d_hidden, *zeros))
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
