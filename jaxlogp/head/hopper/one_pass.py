"""Values and gradients in one pass over the tokens, for losses whose cotangents are known in the forward pass.

By token chunks: one product leaves bf16 exponentials of the logits and the tile statistics; these give the log-probs, the
loss its cotangents, and the exponentials become dz (:mod:`jaxlogp.head.hopper.exponentials`); then dH = dz · W and
dW += dzᵀ · H. Three products instead of four.

The first chunk, those of a loop and the last one run the same kernels: what they share is jitted, so that JAX lowers each
kernel once and not three times.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxlogp._agreement import id_codes
from jaxlogp._compat import vary_over, varying_axes
from jaxlogp._stats import TokenLogProbs
from jaxlogp._targets import LocalTargets, mask_cotangents
from jaxlogp.head.call import HeadCall, HeadGradients, HeadWeight
from jaxlogp.head.engine import LossCotangents
from jaxlogp.head.fold import finish_sums, spoiled_together, sum_shards, sum_tiles
from jaxlogp.head.hopper.exponentials import (
    estimate_log_sum_exp,
    exp_to_gradient,
    token_factors,
    write_targets,
)
from jaxlogp.head.hopper.forward import forward_statistics
from jaxlogp.head.hopper.gradient_products import (
    add_hidden_gradient,
    finish_hidden_gradient,
    hidden_gradient_sums,
    uninitialised,
    weight_gradient_sums,
    write_weight_gradient,
)
from jaxlogp.head.hopper.logit_gradient import chunk_gradient
from jaxlogp.head.hopper.operands import Launch, Operands, Work
from jaxlogp.head.hopper.settings import HopperSettings, row_multiple, whole_rows
from jaxlogp.head.hopper.tiles import HeadTiles
from jaxlogp.head.live_rows import live_rows, select_live
from jaxlogp.head.row_scalars import RowScalars, row_scalars

# Bytes of the exponentials of one chunk of tokens and the sums of its dH. One chunk needs no fp32 weight gradient, and may
# have its bytes too.
CHUNK_BYTES = 1264 * 2**20


class Windows(NamedTuple):
    """How the columns of dz are cut for dH.

    Attributes:
        columns: of one kernel call, the last of which may have fewer.
        parts: how many parts of them are summed apart.
    """

    columns: int
    parts: int


def windows(vocab: int, columns: int, tiles: HeadTiles, engine: HopperSettings) -> Windows:
    """The windows of ``columns``, the vocabulary in whole tiles; by the vocabulary alone, as the order of summation is.

    No sum goes over all of it: the blocks would drift apart, and read dz again and again.
    """
    width, depth = min(engine.chunk_columns(vocab, tiles), columns), tiles.d_hidden.depth
    if not tiles.windows_apart:
        return Windows(width, tiles.d_hidden_parts)
    parts = max(-(-columns // width), tiles.d_hidden_parts)
    return Windows(columns // (parts * depth) * parts * depth, parts)


def chunk_rows(
    tokens: int, most: int, multiple: int, hidden_size: int, tiles: HeadTiles, parts: int, num_sms: int
) -> int:
    """Tokens of a chunk, a multiple of ``multiple`` and at most ``most``, of a cut into chunks as equal as that allows.

    The blocks should go over the output tiles of dH, ``parts`` of each, as seldom as they can: 144 tiles take 132 blocks
    as long as 264. Then as few chunks as can be.
    """
    columns = -(-hidden_size // tiles.d_hidden.columns) * parts

    def rounds(rows):
        return -(-(-(-rows // tiles.d_hidden.rows) * columns) // num_sms)

    def cost(size):
        whole, rest = divmod(tokens, size)
        return whole * rounds(size) + rounds(rest), -size

    units, fewest = -(-tokens // multiple), -(-tokens // most)
    sizes = {-(-units // chunks) * multiple for chunks in range(fewest, min(2 * fewest, units) + 1)}
    return min((size for size in sizes if size <= most), key=cost)


def _after(x: Array, *others: Array) -> Array:
    """The integer x, unchanged, but computed after others.

    An optimization barrier does not do it: the compiler drops those of its operands whose results nobody uses.
    """
    for other in others:
        bits = lax.bitcast_convert_type(other.astype(jnp.float32), jnp.int32)
        x = x + (lax.shift_right_logical(bits, 31) & 2)
    return x


class _LogitGradient(NamedTuple):
    """dz of a chunk of tokens: ``values``, whose rows are to be multiplied by ``scale`` unless that is None."""

    values: Array
    scale: Array | None


@functools.partial(jax.jit, static_argnames=("launch", "with_entropy"))
def _exponentials(
    operands: Operands, column: Array, estimate: Array | None, live: Array, *, launch: Launch, with_entropy: bool
) -> tuple[Array, Array]:
    """Tile statistics of a chunk, and its exponentials."""
    options = {"with_entropy": with_entropy, "live": live, "with_exp": True, "estimate": estimate}
    return forward_statistics(operands, column, launch, **options)


@functools.partial(jax.jit, static_argnames="launch")
def _recomputed(operands: Operands, scalars: RowScalars, exp: Array, live: Array, *, launch: Launch) -> Array:
    """The exponentials, whose live rows, if there are any, become dz."""
    gradient, columns = jax.new_ref(exp), exp.shape[1]
    how = {"with_slope": False, "work": Work(live), "into": gradient}
    chunk_gradient(operands, scalars, jnp.int32(0), columns, launch, **how)
    return jax.freeze(gradient)


@functools.partial(jax.jit, static_argnames="engine")
def _hidden_gradient(dz: _LogitGradient, operands: Operands, live: Array, *, engine: HopperSettings) -> Array:
    """dz · W in fp32; rows after the live ones may be anything."""
    (tokens, columns), hidden_size = dz.values.shape, operands.hidden.shape[1]
    tiles = engine.head_tiles(hidden_size)
    launch, cut = engine.launch(tiles.d_hidden), windows(operands.num_columns, columns, tiles, engine)
    sums = hidden_gradient_sums(tokens, hidden_size, tiles.d_hidden, cut.parts, engine.interpret, zeros=False)

    def add_window(start, size, parts, first=False):
        how = {"window": size, "parts": parts, "first": first}
        add_hidden_gradient(sums, dz.values, operands, start, launch, work=Work(live), **how)

    whole, rest = divmod(columns, cut.columns)
    add_window(jnp.int32(0), cut.columns, cut.parts, first=True)
    if whole > 1:
        lax.fori_loop(1, whole, lambda index, _: add_window(index * cut.columns, cut.columns, cut.parts), None)
    if rest:
        # Of windows apart a few steps are left, too few for all parts.
        whole_steps = rest % (tiles.d_hidden.depth * cut.parts) == 0
        add_window(jnp.int32(whole * cut.columns), rest, cut.parts if whole_steps else 1)
    d_hidden = finish_hidden_gradient(sums, hidden_size, cut.parts)
    return d_hidden if dz.scale is None else d_hidden * dz.scale[:, None]


def _add_weight_gradient(
    d_weight: Any, dz: _LogitGradient, operands: Operands, launch: Launch, live: Array, addend: Any
) -> None:
    """Writes dzᵀ · H + addend to the reference d_weight."""
    hidden = operands.hidden
    if dz.scale is not None:
        hidden = (hidden.astype(jnp.float32) * dz.scale[:, None]).astype(hidden.dtype)
    scaled = operands.with_hidden(hidden)
    write_weight_gradient(d_weight, dz.values, scaled, jnp.int32(0), launch, work=Work(live), addend=addend)


class _Chunk(NamedTuple):
    """What the pass knows of one chunk of packed tokens.

    Attributes:
        operands: with the hidden states [size, H] of its tokens.
        targets: of its tokens.
        estimate: of log Σ e^z, or None.
        origin: codes of the places where its tokens come from, or None where all shards pack the same ones.
        live: int32, rows of all tiles with a live token, or 0.
    """

    operands: Operands
    targets: LocalTargets
    estimate: Float[Array, " size"] | None
    origin: Int[Array, " size"] | None
    live: Int[Array, ""]


def values_and_gradients(
    call: HeadCall,
    engine: HopperSettings,
    cotangents: LossCotangents,
    tokens: Any,
    old_log_probs: Float[Array, " tokens"] | None,
) -> tuple[TokenLogProbs, HeadGradients]:
    """Log-probs, entropy and lse, the same on all vocabulary shards, and this shard's gradients.

    Args:
        call: the call, without a soft cap; tokens whose mask is False are left out.
        engine: tile shapes.
        cotangents: the loss's cotangents of the values of a chunk of tokens.
        tokens: pytree of arrays [tokens, ...] that ``cotangents`` needs; zeros fill it up.
        old_log_probs: the sampler's, where entropy has no cotangent: exponentials are then taken against an estimate of
            log Σ e^z, and need not be rewritten. An estimate that is off by more than 40 nats costs its chunk one product
            more, and rounds the gradients of the chunk's tokens differently. None where entropy has one.
    """
    return _OnePass(call, engine, cotangents, tokens, old_log_probs).run()


class _OnePass:
    """Live tokens packed into chunks, the arrays that the chunks write to, and the loop over them."""

    def __init__(
        self,
        call: HeadCall,
        engine: HopperSettings,
        cotangents: LossCotangents,
        tokens: Any,
        old_log_probs: Float[Array, " tokens"] | None,
    ) -> None:
        self.call, self.engine, self.cotangents = call, engine, cotangents
        self.tiles = engine.head_tiles(call.hidden.shape[1])
        self.config = self.tiles.exponentials
        self.multiple = row_multiple(self.tiles, engine.interpret)
        self.columns = -(-call.num_columns // self.config.columns) * self.config.columns
        self.size = self._chunk_size()
        self.chunks = -(-call.hidden.shape[0] // self.size)
        filled, given = self.chunks * self.size, call.targets
        self.rows = rows = live_rows(given.mask, filled)
        # A chunk's rows past the last live one are no tokens: nothing is read from what they hold.
        alive = jnp.arange(filled, dtype=jnp.int32) < rows.count
        invalid = None if given.invalid is None else rows.pack(given.invalid, False)
        codes = None if given.codes is None else rows.pack(given.codes, 0)
        self.targets = given._replace(column=rows.pack(given.column, -1), mask=alive, invalid=invalid, codes=codes)
        # Types say where masks may differ between shards: what is packed to a place is then compared as well.
        differing = call.axis_name in varying_axes(given.mask)
        self.origin = id_codes(rows.source, alive) if differing else None
        self.operands = Operands.of(call, rows.pack(call.hidden.astype(jnp.bfloat16), 0), self.columns)
        self.tokens = jax.tree.map(lambda x: rows.pack(x, 0), tokens)
        self.estimate = None if old_log_probs is None else self._estimate(rows.pack(old_log_probs, 0))

    def _chunk_size(self) -> int:
        """Tokens of a chunk, whose exponentials and sums of dH fit into the memory that the pass may take."""
        tokens, hidden_size = self.call.hidden.shape
        parts = windows(self.call.num_columns, self.columns, self.tiles, self.engine).parts
        token_bytes = 2 * self.columns + 4 * hidden_size * parts
        one_chunk = CHUNK_BYTES + 4 * self.columns * hidden_size
        padded = -(-tokens // self.multiple) * self.multiple
        budget = one_chunk if token_bytes * padded <= one_chunk else CHUNK_BYTES
        most = max(budget // token_bytes // self.multiple, 1) * self.multiple
        return chunk_rows(tokens, most, self.multiple, hidden_size, self.tiles, parts, self.engine.num_blocks())

    def _estimate(self, old_log_probs: Array) -> Array:
        """log Σ e^z as far as the policy is the sampler's; over shards from the one that owns the target."""
        estimate = estimate_log_sum_exp(self.operands, self.targets, old_log_probs)
        axis_name = self.call.axis_name
        return estimate if axis_name is None else lax.psum(estimate, axis_name)

    def run(self) -> tuple[TokenLogProbs, HeadGradients]:
        call = self.call
        hidden_size, filled = call.hidden.shape[1], self.chunks * self.size

        def zeros(shape, dtype=jnp.float32, axes=call.axes):
            return jax.new_ref(vary_over(jnp.zeros(shape, dtype), axes))

        self.d_hidden = zeros((filled, hidden_size), call.hidden_gradient_dtype)
        # The all-reduces make values the same on all vocabulary shards.
        self.results = zeros((3, filled), axes=call.value_axes)
        self.d_bias = zeros((self.columns,))
        d_weight = self._chunks_alone() if call.frozen else vary_over(self._chunks_and_d_weight(), call.axes)
        log_probs, entropy, lse = (self.rows.unpack(x) for x in jax.freeze(self.results))
        values = TokenLogProbs(log_probs, entropy if call.with_entropy else None, lse)
        without_bias = call.bias is None or call.frozen
        d_bias = None if without_bias else jax.freeze(self.d_bias)[: call.num_columns]
        return values, HeadGradients(self.rows.unpack(jax.freeze(self.d_hidden)), d_weight, d_bias)

    def _chunks_alone(self) -> None:
        """All chunks, without gradients of weight and bias."""
        self._chunk(0, None, None)
        if self.chunks > 1:
            lax.fori_loop(1, self.chunks, lambda index, _: self._chunk(index, None, None, may_skip=True), None)

    def _chunks_and_d_weight(self) -> HeadWeight:
        """All chunks, and the gradient of the weight."""
        weight, interpret = self.call.weight, self.engine.interpret
        d_weight = jax.new_ref(uninitialised(weight.shape, weight.dtype, interpret))
        # Python numbers: outside of jit a reference takes no other as the begin of a slice.
        if self.chunks == 1:
            self._chunk(0, d_weight, None)
        else:
            # Chunks before the last are summed in fp32, and the last one adds them and rounds.
            total = weight_gradient_sums(self.operands, self.tiles.one_pass_d_weight, self.columns, interpret)
            self._chunk(0, total, None)
            # All of them, however many tokens are live: the host would wait for a number that it does not know.
            lax.fori_loop(1, self.chunks - 1, lambda index, _: self._chunk(index, total, total, may_skip=True), None)
            self._chunk(self.chunks - 1, d_weight, total)
        return jax.freeze(d_weight)

    def _chunk(self, index: Any, out: Any, addend: Any, may_skip: bool = False) -> None:
        """Values and hidden gradient of a chunk of tokens; its part of dW, plus ``addend``, goes to ``out``, or None."""
        start, place = index * self.size, pl.ds(index * self.size, self.size)
        count = jnp.clip(self.rows.count - start, 0, self.size)
        # Of one type in every chunk.
        live = vary_over(whole_rows(count, self.multiple), self.call.axes)
        if may_skip:
            live = jnp.where(count > 0, live, 0)
        if addend is not None or out is None:
            # After the products of the chunk before, whose exponentials would otherwise still be there.
            live = _after(live, self.d_hidden[0, 0], *(() if addend is None else (addend[0, 0],)))

        def part(x):
            return lax.dynamic_slice_in_dim(x, start, self.size)

        targets = jax.tree.map(part, self.targets._replace(width=None))._replace(width=self.targets.width)
        operands = self.operands.with_hidden(part(self.operands.hidden))
        chunk = _Chunk(operands, targets, *jax.tree.map(part, (self.estimate, self.origin)), live)
        values, dz = self._logit_gradient(chunk, jax.tree.map(part, self.tokens))
        d_here = _hidden_gradient(dz, operands, live, engine=self.engine)
        if out is not None:
            launch = self.engine.launch(self.tiles.one_pass_d_weight)
            _add_weight_gradient(out, dz, operands, launch, live, addend)
        if self.call.bias is not None and out is not None:
            of_rows = select_live(dz.values, live).astype(jnp.float32)
            d_bias = jnp.sum(of_rows if dz.scale is None else of_rows * dz.scale[:, None], axis=0)
            self.d_bias[...] += vary_over(d_bias, self.call.axes)
        # Typed here: JAX 0.11 gives a reference that is written as a whole the type of what was written.
        self.d_hidden[place] = vary_over(d_here.astype(self.d_hidden.dtype), self.call.axes)
        values = jax.tree.map(lambda x: vary_over(x, self.call.value_axes), values)
        self.results[0, place] = values.log_probs
        if self.call.with_entropy:
            self.results[1, place] = values.entropy
        self.results[2, place] = values.lse

    def _logit_gradient(self, chunk: _Chunk, tokens: Any) -> tuple[TokenLogProbs, _LogitGradient]:
        """Values of a chunk, and its dz."""
        call = self.call
        operands, column, launch = chunk.operands, chunk.targets.column, self.engine.launch(self.config)
        how = {"launch": launch, "with_entropy": call.with_entropy}
        partials, exp = _exponentials(operands, column, chunk.estimate, chunk.live, **how)
        partials = vary_over(partials, call.axes)
        maximum = jnp.max(partials[:, 0], axis=0)
        if call.axis_name is not None:
            maximum = lax.pmax(maximum, call.axis_name)
        sums = sum_tiles(partials, maximum, chunk.targets.column, call.with_entropy)
        sums = spoiled_together(sum_shards(sums, call.axis_name, chunk.targets.codes, chunk.origin))
        values, normaliser = finish_sums(sums, chunk.targets.mask, call.vocab_size, chunk.targets.invalid)
        g_log_probs, g_entropy = mask_cotangents(self.cotangents(values, tokens), chunk.targets)
        column = call.onehot_column(chunk.targets.column)
        scalars = row_scalars(normaliser, g_log_probs, g_entropy, column, call.spec)
        target = lax.bitcast_convert_type(sums.target, jnp.float32) - sums.max
        if chunk.estimate is None:
            gradient = jax.new_ref(exp)
            exp_to_gradient(gradient, partials[:, 0], normaliser, scalars, target, chunk.live, self.engine.interpret)
            return values, _LogitGradient(jax.freeze(gradient), None)
        factors = token_factors(chunk.estimate, normaliser, scalars, target)
        # First all of dz where an estimate was lost: types of shard_map forbid a kernel to write to what they say varies.
        exp = self._recomputed_where_lost(chunk, exp, factors.lost, scalars)
        scale = jnp.where(factors.lost, 1.0, factors.scale)
        return values, _LogitGradient(write_targets(exp, factors), scale)

    def _recomputed_where_lost(self, chunk: _Chunk, exp: Array, lost: Array, scalars: RowScalars) -> Array:
        """The exponentials, or where an estimate was lost all of dz, now that log Σ e^z is known.

        A kernel with nothing to do ends at once; a condition of XLA would have the host wait for its outcome.
        """
        launch = self.engine.launch(self.tiles.logit_gradient)
        return _recomputed(chunk.operands, scalars, exp, jnp.where(lost, chunk.live, 0), launch=launch)
