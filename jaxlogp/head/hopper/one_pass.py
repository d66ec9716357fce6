"""Values and gradients in one pass over the tokens, for losses whose cotangents are known in the forward pass.

By token chunks: one product leaves bf16 exponentials of the logits and the tile statistics; these give the log-probs, the
loss its cotangents, and the exponentials become dz (:mod:`jaxlogp.head.hopper.exponentials`); then dH = dz · W and
dW += dzᵀ · H. Three products instead of four.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxlogp.head.fold import finish_sums, sum_tiles
from jaxlogp.head.hopper.engine import HopperEngine, row_multiple, whole_rows
from jaxlogp.head.hopper.exponentials import estimate_log_sum_exp, exp_to_gradient, scaled_gradient
from jaxlogp.head.hopper.forward import forward_statistics
from jaxlogp.head.hopper.gradient_products import (
    add_hidden_gradient,
    finish_hidden_gradient,
    hidden_gradient_sums,
    uninitialised,
    write_weight_gradient,
)
from jaxlogp.head.hopper.logit_gradient import chunk_gradient
from jaxlogp.head.hopper.tiles import HeadTiles
from jaxlogp.head.live_rows import live_rows, select_live
from jaxlogp.head.projection import HeadOptions
from jaxlogp.head.row_scalars import RowScalars, row_scalars
from jaxlogp.stats import Normaliser, TokenLogProbs
from jaxlogp.targets import LocalTargets, mask_cotangents

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


def windows(vocab: int, columns: int, tiles: HeadTiles, engine: HopperEngine) -> Windows:
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


def _chunk_logit_gradient(
    exp: Array,
    partials: Array,
    estimate: Array | None,
    normaliser: Normaliser,
    scalars: RowScalars,
    target: Array,
    operands: tuple[Array, Array, Array | None],
    width: Array,
    live: Array,
    options: HeadOptions,
    engine: HopperEngine,
) -> tuple[Array, Array | None]:
    """(dz, None), or what is dz once each token is multiplied by a factor, and these factors."""
    hidden, weight, bias = operands
    if estimate is None:
        gradient = jax.new_ref(exp)
        exp_to_gradient(gradient, partials[:, 0], normaliser, scalars, target, live, engine.interpret)
        return jax.freeze(gradient), None
    scaled = scaled_gradient(exp, estimate, normaliser, scalars, target)
    gradient = jax.new_ref(scaled.direction)
    columns = exp.shape[1]
    # Where an estimate was lost all of dz is computed once more, now that log Σ e^z is known. A kernel with nothing to do
    # ends at once; a condition of XLA would have the host wait for its outcome.
    chunk_gradient(
        hidden,
        weight,
        None if bias is None else jnp.pad(bias, (0, columns - weight.shape[0])),
        scalars,
        width,
        jnp.int32(0),
        columns,
        dataclasses.replace(options, with_entropy=False),
        engine.head_tiles(weight).logit_gradient,
        engine.num_blocks(),
        engine.interpret,
        jnp.where(scaled.lost, live, 0),
        into=gradient,
    )
    return jax.freeze(gradient), jnp.where(scaled.lost, 1.0, scaled.scale)


def _chunk_products(
    dz: Array,
    scale: Array | None,
    hidden: Array,
    weight: Array,
    d_weight: Any,
    addend: Any,
    live: Array,
    engine: HopperEngine,
) -> Array:
    """Writes dzᵀ · H + addend to the reference d_weight and returns dz · W in fp32, dz being multiplied by ``scale``.

    Rows of the result behind the live ones may be anything.
    """
    tiles, num_sms, interpret = engine.head_tiles(weight), engine.num_blocks(), engine.interpret
    (tokens, columns), hidden_size = dz.shape, hidden.shape[1]
    cut = windows(weight.shape[0], columns, tiles, engine)
    sums = hidden_gradient_sums(tokens, hidden_size, tiles.d_hidden, cut.parts, interpret, zeros=False)

    def add_window(start, size, parts, first=False):
        how = {"window": size, "parts": parts, "first": first}
        add_hidden_gradient(sums, dz, weight, start, tiles.d_hidden, num_sms, interpret, live, **how)

    whole, rest = divmod(columns, cut.columns)
    add_window(jnp.int32(0), cut.columns, cut.parts, first=True)
    if whole > 1:
        lax.fori_loop(1, whole, lambda index, _: add_window(index * cut.columns, cut.columns, cut.parts), None)
    if rest:
        # Of windows apart a few steps are left, too few for all parts.
        whole_steps = rest % (tiles.d_hidden.depth * cut.parts) == 0
        add_window(jnp.int32(whole * cut.columns), rest, cut.parts if whole_steps else 1)
    scaled = hidden if scale is None else (hidden.astype(jnp.float32) * scale[:, None]).astype(hidden.dtype)
    write_weight_gradient(d_weight, dz, scaled, jnp.int32(0), tiles.one_pass_d_weight, num_sms, interpret, live, addend)
    d_hidden = finish_hidden_gradient(sums, hidden_size, cut.parts)
    return d_hidden if scale is None else d_hidden * scale[:, None]


def values_and_gradients(
    cotangents: Callable[[TokenLogProbs, Any], TokenLogProbs],
    hidden: Float[Array, "tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    bias: Float[Array, " vocab"] | None,
    targets: LocalTargets,
    per_token: Any,
    options: HeadOptions,
    engine: HopperEngine,
    old_log_probs: Float[Array, " tokens"] | None = None,
) -> tuple[TokenLogProbs, tuple[Array, Array, Array | None]]:
    """Log-probs and entropy, and the gradients of hidden, weight and bias.

    Args:
      cotangents: (values of a chunk of tokens, per_token's chunk) -> the loss's cotangents of these values.
      hidden: [tokens, H].
      weight: bf16 [V, H].
      bias: [V] or None.
      targets: targets; tokens whose mask is False are left out.
      per_token: pytree of arrays [tokens, ...] that ``cotangents`` needs; zeros fill it up.
      options: static options; no soft cap and no axis.
      engine: tile shapes.
      old_log_probs: the sampler's, where entropy has no cotangent: exponentials are then taken against an estimate of
        log Σ e^z, and need not be rewritten. An estimate that is off by more than 40 nats costs its chunk one product more,
        and rounds the gradients of the chunk's tokens differently. None where entropy has one.

    Returns:
      (TokenLogProbs of fp32 [tokens], gradients in the dtypes of their operands).
    """
    tiles, num_sms, interpret = engine.head_tiles(weight), engine.num_blocks(), engine.interpret
    config, (tokens, hidden_size), vocab = tiles.exponentials, hidden.shape, weight.shape[0]
    multiple, columns = row_multiple(tiles, interpret), -(-vocab // config.columns) * config.columns
    parts = windows(vocab, columns, tiles, engine).parts
    token_bytes = 2 * columns + 4 * hidden_size * parts
    one_chunk = CHUNK_BYTES + 4 * columns * hidden_size
    padded = -(-tokens // multiple) * multiple
    budget = one_chunk if token_bytes * padded <= one_chunk else CHUNK_BYTES
    most = max(budget // token_bytes // multiple, 1) * multiple
    size = chunk_rows(tokens, most, multiple, hidden_size, tiles, parts, num_sms)
    chunks = -(-tokens // size)
    rows = live_rows(targets.mask, chunks * size)
    # A chunk's rows past the last live one are no tokens: nothing is read from what they hold.
    alive = jnp.arange(chunks * size, dtype=jnp.int32) < rows.count
    packed = rows.pack(hidden.astype(jnp.bfloat16), 0)
    invalid = None if targets.invalid is None else rows.pack(targets.invalid, False)
    local = LocalTargets(rows.pack(targets.column, -1), alive, invalid, targets.width)
    extra = jax.tree.map(lambda x: rows.pack(x, 0), per_token)
    bias_operand = None if bias is None else bias.astype(jnp.float32)
    estimate = None
    if old_log_probs is not None:
        old = rows.pack(old_log_probs, 0)
        estimate = estimate_log_sum_exp(packed, weight, bias, local.column, alive, old, options)
    d_weight = jax.new_ref(uninitialised(weight.shape, weight.dtype, interpret))
    padded_shape = columns, hidden_size + -hidden_size % tiles.one_pass_d_weight.columns
    # Chunks before the last are summed in fp32, and the last one adds them and rounds.
    total = None if chunks == 1 else jax.new_ref(uninitialised(padded_shape, jnp.float32, interpret))
    d_hidden = jax.new_ref(jnp.zeros((chunks * size, hidden_size), hidden.dtype))
    results = jax.new_ref(jnp.zeros((2, chunks * size), jnp.float32))
    d_bias = jax.new_ref(jnp.zeros((columns,), jnp.float32))

    def chunk_step(index, out, addend, may_skip=False):
        start = index * size

        def part(x):
            return lax.dynamic_slice_in_dim(x, start, size)

        count = jnp.clip(rows.count - start, 0, size)
        live = whole_rows(count, multiple)
        if may_skip:
            live = jnp.where(count > 0, live, 0)
        if addend is not None:
            # After both products of the chunk before, whose exponentials would otherwise still be there.
            live = _after(live, addend[0, 0], d_hidden[0, 0])
        here = part(packed)
        chunk = LocalTargets(part(local.column), part(alive), None if invalid is None else part(invalid), targets.width)
        partials, exp = forward_statistics(
            here,
            weight,
            bias_operand,
            chunk.column,
            targets.width,
            options,
            config,
            num_sms,
            interpret,
            live,
            with_exp=True,
            estimate=None if estimate is None else part(estimate),
        )
        sums = sum_tiles(partials, jnp.max(partials[:, 0], axis=0), chunk.column, options.with_entropy)
        values, normaliser = finish_sums(sums, chunk.mask, options.vocab_size, chunk.invalid)
        g_log_probs, g_entropy = mask_cotangents(cotangents(values, jax.tree.map(part, extra)), chunk)
        scalars = row_scalars(normaliser, g_log_probs, g_entropy, chunk.column, options)
        target = lax.bitcast_convert_type(sums.target, jnp.float32) - sums.max
        dz, scale = _chunk_logit_gradient(
            exp,
            partials,
            None if estimate is None else part(estimate),
            normaliser,
            scalars,
            target,
            (here, weight, bias_operand),
            targets.width,
            live,
            options,
            engine,
        )
        d_here = _chunk_products(dz, scale, here, weight, out, addend, live, engine)
        if bias is not None:
            of_rows = select_live(dz, live).astype(jnp.float32)
            d_bias[...] += jnp.sum(of_rows if scale is None else of_rows * scale[:, None], axis=0)
        place = pl.ds(start, size)
        d_hidden[place] = d_here.astype(hidden.dtype)
        results[0, place] = values.log_probs
        if options.with_entropy:
            results[1, place] = values.entropy

    # Python numbers: outside of jit a reference takes no other as the begin of a slice.
    if chunks == 1:
        chunk_step(0, d_weight, None)
    else:
        chunk_step(0, total, None)
        # All of them, however many tokens are live: the host would wait for a number that it does not know.
        lax.fori_loop(1, chunks - 1, lambda index, _: chunk_step(index, total, total, may_skip=True), None)
        chunk_step(chunks - 1, d_weight, total)
    log_probs, entropy = (rows.unpack(x) for x in jax.freeze(results))
    values = TokenLogProbs(log_probs, entropy if options.with_entropy else None)
    d_bias = None if bias is None else jax.freeze(d_bias)[:vocab].astype(bias.dtype)
    return values, (rows.unpack(jax.freeze(d_hidden)), jax.freeze(d_weight), d_bias)
