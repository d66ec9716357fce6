"""Values and gradients in one pass over the tokens, for losses whose cotangents are known in the forward pass.

By token chunks: one product leaves E = bf16 e^(z - tile maximum) and the tile statistics; these give the log-probs, the
loss its cotangents, and E becomes dz in place; then dH = dz · W and dW += dzᵀ · H. Three products instead of four.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxlogp.head.hopper._pallas_compat import kernel, plgpu
from jaxlogp.head.hopper.engine import HopperEngine, row_multiple, whole_rows
from jaxlogp.head.hopper.fold import finish_sums, sum_tiles
from jaxlogp.head.hopper.forward import LOG2_E, forward_statistics, special_tiles
from jaxlogp.head.hopper.logit_gradient import RowScalars, row_scalars
from jaxlogp.head.hopper.product import tile_transforms
from jaxlogp.head.hopper.tiles import TileConfig
from jaxlogp.head.hopper.weight_gradient import add_hidden_gradient, uninitialised, write_weight_gradient
from jaxlogp.head.live_rows import live_rows, select_live
from jaxlogp.head.projection import HeadOptions
from jaxlogp.logits import LocalTargets, mask_cotangents
from jaxlogp.stats import Normaliser, TokenLogProbs

# Bytes of the exponentials of one chunk of tokens. One chunk needs no fp32 weight gradient, and may have its bytes too.
EXP_BYTES = 1264 * 2**20
# Tokens of a tile of exponentials that becomes dz, and columns that are turned at a time: a swizzled line of 128 bytes.
ROWS, PIECE = 64, 64
# Below every exponential but 0, whose logarithm must be finite.
SMALLEST = 2.0**-126


def exp_to_gradient(
    exp: Any,
    maxima: Float[Array, "tiles tokens"],
    normaliser: Normaliser,
    scalars: RowScalars,
    target: Float[Array, " tokens"],
    live: Int[Array, ""],
    with_entropy: bool,
    interpret: Any = None,
) -> None:
    """Turns exponentials into bf16 dz where they stand; the target's element comes from fp32 numbers alone.

    dz = p (A + B (z - max)) with p = E e^(tile maximum - max) / S and z - tile maximum = log E, whose error, 2^-9, is that
    of p.

    Args:
      exp: reference to bf16 [tokens, columns] as the kernel wrote it, tokens a multiple of 64.
      maxima: maximum of each tile.
      normaliser: of each token.
      scalars: of each token.
      target: z_target - normaliser.max.
      live: int32, how many rows, from the first, a multiple of 64, the products go over; others are left as they are.
      with_entropy: whether scalars.slope counts.
      interpret: None, or what runs the kernel on the CPU.
    """
    (tokens, columns), tiles = exp.shape, maxima.shape[0]
    pieces = columns // tiles // PIECE
    # e^-1000 is 0 already, and the -1e30 of a tile without a real column would not stay finite times a slope.
    distance = jnp.maximum(maxima - normaliser.max[None, :], -1000.0)
    scale = jnp.exp(distance - normaliser.log_sum_exp[None, :])
    own = scalars.constant + (scalars.slope * target if with_entropy else 0.0)
    own = scalars.onehot + jnp.exp(target - normaliser.log_sum_exp) * own
    config = TileConfig(rows=ROWS, columns=columns // tiles, alternate=True)
    # No column is past an end: the weight's padding has exponentials of 0.
    special = special_tiles(scalars.target, jnp.int32(0), jnp.int32(columns), tiles, config)
    layout = plgpu.Layout.WGMMA.reduce(1)

    def body(live, special, scale, distance, constant, slope, target, own, exp, buffer, arrived):
        tile, row_tile = lax.axis_index("tile"), lax.axis_index("row")
        first = row_tile * ROWS
        rows = pl.ds(first, ROWS)

        @pl.when(first < live[0])
        def _():
            for piece in range(pieces):
                place = exp.at[rows, pl.ds((tile * pieces + piece) * PIECE, PIECE)]
                plgpu.copy_gmem_to_smem(place, buffer.at[piece], arrived.at[piece])

            def load(ref):
                return plgpu.load(ref, layout=layout, optimized=False)

            def spread(vector):
                return lax.broadcast_in_dim(vector, (ROWS, PIECE), [0])

            factors, chosen, own_value = load(scale.at[tile, rows]), load(target.at[rows]), load(own.at[rows])
            constants = load(constant.at[rows])
            if with_entropy:
                # log E + distance = (log2 E + distance log2 e) ln 2, its constant folded into the others.
                slopes = load(slope.at[rows]) * math.log(2.0)
                constants = constants + slopes * (load(distance.at[tile, rows]) * LOG2_E)
            has_target = special[row_tile * tiles + tile]

            for piece in range(pieces):
                start = (tile * pieces + piece) * PIECE
                plgpu.barrier_wait(arrived.at[piece])
                wide = plgpu.load(buffer.at[piece], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                factor = spread(constants)
                if with_entropy:
                    factor = factor + spread(slopes) * jnp.log2(jnp.maximum(wide, SMALLEST))
                gradient = wide * spread(factors) * factor

                def with_target(gradient, start=start):
                    column = plgpu.broadcasted_iota(jnp.int32, (ROWS, PIECE), 1, layout=plgpu.Layout.WGMMA)
                    return jnp.where(column == spread(chosen - start), spread(own_value), gradient)

                gradient = lax.cond(has_target > 0, with_target, lambda x: x, gradient)
                buffer[piece] = gradient.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffer.at[piece], exp.at[rows, pl.ds(start, PIECE)])
            plgpu.wait_smem_to_gmem(0)

    call = kernel(
        body,
        out_type=(),
        scratch_types=[
            plgpu.SMEM((pieces, ROWS, PIECE), jnp.bfloat16, transforms=tile_transforms(PIECE)),
            plgpu.Barrier(num_arrivals=1, num_barriers=pieces),
        ],
        grid=(tiles, tokens // ROWS),
        grid_names=("tile", "row"),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=False),
        **({} if interpret is None else {"interpret": interpret}),
    )
    call(live.reshape(1), special, scale, distance, scalars.constant, scalars.slope, scalars.target, own, exp)


def values_and_gradients(
    cotangents: Callable[[TokenLogProbs, Any], TokenLogProbs],
    hidden: Float[Array, "tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    bias: Float[Array, " vocab"] | None,
    targets: LocalTargets,
    per_token: Any,
    options: HeadOptions,
    engine: HopperEngine,
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

    Returns:
      (TokenLogProbs of fp32 [tokens], gradients in the dtypes of their operands).
    """
    tiles, num_sms, interpret = engine.head_tiles(weight), engine.num_blocks(), engine.interpret
    config, (tokens, hidden_size), vocab = tiles.exponentials, hidden.shape, weight.shape[0]
    multiple, columns = row_multiple(tiles, interpret), -(-vocab // config.columns) * config.columns
    one_chunk = EXP_BYTES + 4 * columns * hidden_size
    budget = one_chunk if 2 * columns * tokens <= one_chunk else EXP_BYTES
    most = max(budget // (2 * columns) // multiple, 1) * multiple
    chunks = -(-tokens // most)
    size = -(-tokens // (chunks * multiple)) * multiple
    rows = live_rows(targets.mask, chunks * size)
    # A chunk's rows past the last live one are no tokens: nothing is read from what they hold.
    alive = jnp.arange(chunks * size, dtype=jnp.int32) < rows.count
    packed = rows.pack(hidden.astype(jnp.bfloat16), 0)
    poison = None if targets.poison is None else rows.pack(targets.poison, False)
    local = LocalTargets(rows.pack(targets.column, -1), alive, poison, targets.width)
    extra = jax.tree.map(lambda x: rows.pack(x, 0), per_token)
    bias_operand = None if bias is None else bias.astype(jnp.float32)
    wide_columns = tiles.d_hidden.columns
    wide = hidden_size + -hidden_size % wide_columns
    d_weight = jax.new_ref(uninitialised(weight.shape, weight.dtype, interpret))
    window = min(engine.chunk_columns(vocab, tiles), columns)
    padded_shape = columns, hidden_size + -hidden_size % tiles.d_weight.columns
    # Chunks before the last are summed in fp32, and the last one adds them and rounds.
    total = None if chunks == 1 else jax.new_ref(uninitialised(padded_shape, jnp.float32, interpret))
    d_hidden = jax.new_ref(jnp.zeros((chunks * size, hidden_size), hidden.dtype))
    results = jax.new_ref(jnp.zeros((2, chunks * size), jnp.float32))
    d_bias = jax.new_ref(jnp.zeros((columns,), jnp.float32))

    def chunk_step(index, out, addend):
        start = index * size

        def part(x):
            return lax.dynamic_slice_in_dim(x, start, size)

        live = whole_rows(jnp.clip(rows.count - start, 0, size), multiple)
        here = part(packed)
        if addend is not None:
            # After the chunk before, whose exponentials would otherwise still be there.
            here, _ = lax.optimization_barrier((here, addend[0, 0]))
        chunk = LocalTargets(part(local.column), part(alive), None if poison is None else part(poison), targets.width)
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
        )
        sums = sum_tiles(partials, jnp.max(partials[:, 0], axis=0), chunk.column, options.with_entropy)
        values, normaliser = finish_sums(sums, chunk.mask, options.vocab_size, chunk.poison)
        g_log_probs, g_entropy = mask_cotangents(cotangents(values, jax.tree.map(part, extra)), chunk)
        scalars = row_scalars(normaliser, g_log_probs, g_entropy, chunk.column, options)
        target = lax.bitcast_convert_type(sums.target, jnp.float32) - sums.max
        gradient = jax.new_ref(exp)
        with_entropy = options.with_entropy
        exp_to_gradient(gradient, partials[:, 0], normaliser, scalars, target, live, with_entropy, interpret)
        dz = jax.freeze(gradient)
        sum_hidden = jax.new_ref(jnp.zeros((size, wide), jnp.float32))
        zero = jnp.int32(0)

        def add_window(start, size):
            add_hidden_gradient(sum_hidden, dz, weight, start, tiles.d_hidden, num_sms, interpret, live, window=size)

        # By windows: with all of the vocabulary contracted at once the blocks drift apart, and read dz again and again.
        whole, rest = divmod(columns, window)
        lax.fori_loop(0, whole, lambda index, _: add_window(index * window, window), None)
        if rest:
            add_window(jnp.int32(whole * window), rest)
        write_weight_gradient(out, dz, here, zero, tiles.d_weight, num_sms, interpret, live, addend)
        if bias is not None:
            d_bias[...] += jnp.sum(select_live(dz, live), axis=0, dtype=jnp.float32)
        place = pl.ds(start, size)
        d_hidden[place] = jax.freeze(sum_hidden)[:, :hidden_size].astype(hidden.dtype)
        results[0, place] = values.log_probs
        if options.with_entropy:
            results[1, place] = values.entropy

    if chunks == 1:
        chunk_step(jnp.int32(0), d_weight, None)
    else:
        chunk_step(jnp.int32(0), total, None)
        # Chunks without a live token are left out; the last one always runs, as it rounds.
        end = jnp.clip(-(-rows.count // size), 1, chunks - 1)
        lax.fori_loop(1, end, lambda index, _: chunk_step(index, total, total), None)
        chunk_step(jnp.int32(chunks - 1), d_weight, total)
    log_probs, entropy = (rows.unpack(x) for x in jax.freeze(results))
    values = TokenLogProbs(log_probs, entropy if options.with_entropy else None)
    d_bias = None if bias is None else jax.freeze(d_bias)[:vocab].astype(bias.dtype)
    return values, (rows.unpack(jax.freeze(d_hidden)), jax.freeze(d_weight), d_bias)
