"""Engine ``chunked``: vocabulary tiles × token chunks, on any device, without storing the logits.

Forward: for each vocabulary tile and token chunk the logits of one [token_chunk, vocab_tile] block are computed,
reduced to tile statistics and dropped. Backward: each block is recomputed, turned into its gradient and multiplied into
both products. Between the two passes only token-sized vectors are kept. The tile loop is the outer one, so a tile of
the weight's gradient is complete, and rounded once, when its loop over the tokens ends; the hidden gradient accumulates
in fp32.

If the tile width does not divide the vocabulary, the last tile starts earlier and its columns that the previous tile
covers are masked, so the weight is never padded or copied.

With a gradient filter the forward also keeps the largest logit of every tile and token, [tiles, tokens], and the
backward's inner loop visits only the blocks that are kept. These are listed first and looped over, instead of branching
in each block: a branch would copy the accumulators, and under vmap it would compute both sides.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxlogp._compat import vary_over
from jaxlogp._reduce import WeightedSum
from jaxlogp._stats import (
    Normaliser,
    TokenLogProbs,
    all_reduce,
    combine,
    empty_stats,
    finish,
    logit_gradient,
    tile_stats,
)
from jaxlogp.errors import is_positive_integer, require
from jaxlogp.head.call import HeadCall, HeadGradients
from jaxlogp.head.chunked.blocks import SMALL, Blocks, BlockSizes, usual_sizes
from jaxlogp.head.chunked.one_pass import values_and_gradients
from jaxlogp.head.engine import Engine, LossCotangents
from jaxlogp.head.gradient_filter import GradientFilter, KeptBlocks, check_filter, kept_blocks, visits
from jaxlogp.head.projection import dot, finish_logits, product_gradient, take_rows, write_rows


class _Kept(NamedTuple):
    """What the backward needs of each token, and for a gradient filter the largest logits [tiles, chunks, chunk]."""

    normaliser: Normaliser
    peaks: Float[Array, "tiles chunks chunk"] | None


@dataclasses.dataclass(frozen=True)
class ChunkedEngine(Engine):
    """Computes [token_chunk, vocab_tile] logits at a time.

    Up to rounding, the result does not depend on the two sizes.

    Attributes:
        token_chunk: tokens per block; all tokens if there are fewer. None: 512; on a GPU, without a gradient filter, 8192.
        vocab_tile: vocabulary columns per block; all columns if there are fewer. None: 2048; likewise 4096.
        gradient_filter: None, or the rule by which blocks of the gradient are skipped. The result then depends on the two
            sizes, and smaller blocks (128 tokens, 256 columns) skip more.
    """

    token_chunk: int | None = None
    vocab_tile: int | None = None
    gradient_filter: GradientFilter | None = None
    name = "chunked"

    def __post_init__(self) -> None:
        """Raises ``ValueError`` unless sizes are positive integers or None, and the gradient filter is one or None."""
        check_filter(self.gradient_filter)
        for argument in ("token_chunk", "vocab_tile"):
            value = getattr(self, argument)
            require(value is None or is_positive_integer(value), argument, "an integer > 0", value)

    @property
    def sizes(self) -> BlockSizes:
        """The sizes of its blocks on the default device."""
        usual = usual_sizes() if self.gradient_filter is None else SMALL
        return BlockSizes(self.token_chunk or usual.token_chunk, self.vocab_tile or usual.vocab_tile)

    def forward(self, call: HeadCall) -> tuple[TokenLogProbs, _Kept]:
        """Computes statistics block by block."""
        local, peaks = _local_statistics(call, self)
        stats, targets = all_reduce(local, call.axis_name, call.targets.codes), call.targets
        values, normaliser = finish(stats, targets.mask, call.vocab_size, targets.invalid)
        return values, _Kept(normaliser, peaks)

    def backward(self, call: HeadCall, kept: _Kept, g: TokenLogProbs) -> HeadGradients:
        """Recomputes each block's logits and turns them into their gradient: three products."""
        visited = None if kept.peaks is None else visits(_counting_blocks(call, self, kept, g))
        return _Backward(call, self, kept.normaliser, g, visited).gradients()

    def why_not_one_pass(self, call: HeadCall, entropy_cotangent: bool) -> str | None:
        """Refuses a gradient filter."""
        del call, entropy_cotangent
        return None if self.gradient_filter is None else "its gradient filter needs the maxima of all tiles first"

    def one_pass(
        self, call: HeadCall, cotangents: LossCotangents, tokens: Any, old_log_probs: Float[Array, " tokens"] | None
    ) -> tuple[TokenLogProbs, HeadGradients]:
        """Runs :mod:`jaxlogp.head.chunked.one_pass`."""
        del old_log_probs
        return values_and_gradients(call, cotangents, tokens, self.sizes.token_chunk)

    def why_not_second_derivative(self) -> str | None:
        """Refuses a gradient filter."""
        return None if self.gradient_filter is None else "its gradient filter skips blocks by their first derivative"

    def why_not_known_lse(self, call: HeadCall) -> str | None:
        """Refuses a gradient filter."""
        return self.why_not_one_pass(call, False)

    def backward_of_lse(self, call: HeadCall, lse: Float[Array, " tokens"], g: TokenLogProbs) -> HeadGradients:
        """Runs the backward alone, with lse in place of the largest logit and 1 as the sum of exponentials."""
        return self.backward(call, _Kept(Normaliser(lse, jnp.zeros_like(lse), None), None), g)

    def skipped_tiles(self, call: HeadCall) -> WeightedSum:
        """Counts skipped and all blocks of this shard, with a cotangent at every token of the mask."""
        _, kept = self.forward(call)
        g = TokenLogProbs(call.targets.mask.astype(jnp.float32), None)
        counting = _counting_blocks(call, self, kept, g)
        left_out = jnp.sum(~counting, dtype=jnp.int32)
        # The number of all blocks, as a sum over an array: a constant has no sharding on an Explicit mesh.
        return WeightedSum(left_out.astype(jnp.float32), left_out + jnp.sum(counting, dtype=jnp.int32))


def _local_targets(column: Array, start: Array) -> Array:
    """Columns relative to a tile; -1, which means not owned (column < 0), stays negative."""
    return jnp.where(column < 0, -1, column - start)


def _local_statistics(call: HeadCall, engine: ChunkedEngine) -> tuple[Any, Array | None]:
    """Statistics of this shard's columns per token, and for a filter the largest logits [tiles, chunks, chunk]."""
    hidden, weight, bias, spec = call.hidden, call.weight, call.bias, call.spec
    blocks = Blocks.of(engine.sizes, hidden.shape[0], call.num_columns)
    dtype, axes = call.operand_dtype, call.axes
    hidden_chunks, columns = blocks.chunks(hidden.astype(dtype), 0), blocks.chunks(call.targets.column, -1)

    def tile_step(index, carry):
        start, _, valid = blocks.tile_columns(index, call.targets.width)
        weight_tile = take_rows(weight, start, blocks.tile, call.vocab_dim).astype(dtype)
        bias_tile = None if bias is None else take_rows(bias, start, blocks.tile)

        def chunk_step(chunk, carry):
            stats, peaks = carry
            logits = finish_logits(dot(hidden_chunks[chunk], weight_tile, contract=(1, 1)), bias_tile, spec)
            new = tile_stats(logits, _local_targets(columns[chunk], start), valid, call.with_entropy)
            merged = combine(jax.tree.map(lambda x: x[chunk], stats), new)
            stats = jax.tree.map(lambda x, y: x.at[chunk].set(y), stats, merged)
            return stats, None if peaks is None else peaks.at[index, chunk].set(new.max)

        return lax.fori_loop(0, blocks.num_chunks, chunk_step, carry)

    shape = blocks.num_chunks, blocks.chunk
    filtered = engine.gradient_filter is not None
    empty = (
        empty_stats(shape, call.with_entropy),
        jnp.zeros((blocks.num_tiles, *shape), jnp.float32) if filtered else None,
    )
    empty = jax.tree.map(lambda x: vary_over(x, axes), empty)
    local, peaks = lax.fori_loop(0, blocks.num_tiles, tile_step, empty)
    return jax.tree.map(blocks.unchunk, local), peaks


def _counting_blocks(call: HeadCall, engine: ChunkedEngine, kept: _Kept, g: TokenLogProbs) -> Array:
    """Which blocks [tiles, chunks] are kept; the padding of the last chunk has no cotangent."""
    blocks = Blocks.of(engine.sizes, call.hidden.shape[0], call.num_columns)
    normaliser = Normaliser(blocks.chunks(kept.normaliser.max, 0), blocks.chunks(kept.normaliser.log_sum_exp, 0), None)
    cotangents = (None if x is None else blocks.chunks(x, 0) for x in (g.log_probs, g.entropy))
    # Floor division keeps -1, which is not a column, below every tile.
    tile_of_target = blocks.chunks(call.targets.column, -1) // blocks.tile
    return kept_blocks(engine.gradient_filter, kept.peaks, tile_of_target, normaliser, *cotangents)


class _Backward:
    """The loops of the backward: vocabulary tiles outside, token chunks inside."""

    def __init__(
        self,
        call: HeadCall,
        engine: ChunkedEngine,
        normaliser: Normaliser,
        g: TokenLogProbs,
        visited: KeptBlocks | None,
    ) -> None:
        self.call, self.visited = call, visited
        self.blocks = blocks = Blocks.of(engine.sizes, call.hidden.shape[0], call.num_columns)
        # The padding of the last chunk has hidden 0, cotangent 0 and a harmless normaliser, so it adds exact zeros.
        self.hidden = blocks.chunks(call.hidden.astype(call.operand_dtype), 0)
        self.columns = blocks.chunks(call.targets.column, -1)
        self.per_token = jax.tree.map(lambda x: blocks.chunks(x, 0), (normaliser, g.log_probs, g.entropy))

    def gradients(self) -> HeadGradients:
        """All tiles, one after the other."""
        call = self.call
        d_bias = None if call.bias is None else self._zeros(call.bias.shape)
        d_weight = self._zeros(call.weight.shape, call.weight_gradient_dtype)
        carry = self._zeros(self.hidden.shape), d_weight, d_bias
        d_hidden, d_weight, d_bias = lax.fori_loop(0, self.blocks.num_tiles, self._tile, carry)
        return HeadGradients(self.blocks.unchunk(d_hidden).astype(call.hidden_gradient_dtype), d_weight, d_bias)

    def _tile(self, index: Array, carry: tuple) -> tuple:
        """Adds a tile to the hidden gradient and writes its rows of the other gradients, complete and rounded once."""
        d_hidden, d_weight, d_bias = carry
        call, blocks = self.call, self.blocks
        start, own, valid = blocks.tile_columns(index, call.targets.width)
        weight_tile = take_rows(call.weight, start, blocks.tile, call.vocab_dim).astype(call.operand_dtype)
        bias_tile = None if call.bias is None else take_rows(call.bias, start, blocks.tile)

        def chunk_step(chunk, sums):
            if self.visited is not None:
                chunk = self.visited.order[index, chunk]
            d_hidden, d_weight_tile, d_bias_tile = sums
            logits = finish_logits(dot(self.hidden[chunk], weight_tile, contract=(1, 1)), bias_tile, call.spec)
            token = jax.tree.map(lambda x: x[chunk], self.per_token)
            gradient = logit_gradient(logits, _local_targets(self.columns[chunk], start), valid, *token)
            gradient = product_gradient(gradient, logits, call.spec)
            rounded = gradient.astype(call.operand_dtype)
            d_hidden = d_hidden.at[chunk].add(dot(rounded, weight_tile, contract=(1, 0)))
            d_weight_tile = d_weight_tile + dot(rounded, self.hidden[chunk], contract=(0, 0))
            return d_hidden, d_weight_tile, None if call.bias is None else d_bias_tile + jnp.sum(gradient, axis=0)

        zeros = self._zeros(weight_tile.shape), None if call.bias is None else self._zeros((blocks.tile,))
        count = blocks.num_chunks if self.visited is None else self.visited.count[index]
        d_hidden, d_weight_tile, d_bias_tile = lax.fori_loop(0, count, chunk_step, (d_hidden, *zeros))
        d_weight = write_rows(d_weight, d_weight_tile, start, own, call.vocab_dim)
        return d_hidden, d_weight, None if call.bias is None else write_rows(d_bias, d_bias_tile, start, own)

    def _zeros(self, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return vary_over(jnp.zeros(shape, dtype), self.call.axes)
