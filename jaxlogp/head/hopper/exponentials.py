"""Gradient dz of the logits from their exponentials in bf16; or dz without a factor per token.

With an entropy bonus dz = p (A + B (z - max)) + g onehot differs from E = e^(z - tile maximum) element by element, and a
kernel rewrites E. Without one, dz = p A + g onehot is E times a number per token, except in the target's column, if E was
computed relative to one number per token. The token's log Σ e^z is known only after the product, but nearly known before
it: r = z_target - old_log_prob is off by the logarithm of the ratio alone. With E = e^(z - r) and δ = log Σ e^z - r

    dz = c E',    c = A e^-δ,    E' = E, and (p - 1) e^δ in the target's column,

so dH = c (E' W) and dW = E'ᵀ (c H), and nothing of [tokens, V] is read or written once more.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._mosaic_gpu import kernel, plgpu
from jaxlogp._stats import Normaliser
from jaxlogp._targets import LocalTargets
from jaxlogp.head.hopper.forward import LARGEST_EXPONENT, LOG2_E, MASKED, special_tiles
from jaxlogp.head.hopper.operands import Operands
from jaxlogp.head.hopper.product import tile_transforms
from jaxlogp.head.hopper.tiles import TileConfig
from jaxlogp.head.projection import finish_logits
from jaxlogp.head.row_scalars import RowScalars

# How far an estimate may be off, in nats: e^±40 lies in the range of bf16 with room for every probability above e^-47, and
# so does c, which a policy loss makes proportional to the square of the ratio, itself at most e^30.
MOST_LOG_RATIO = 40.0
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
        interpret: None, or what runs the kernel on the CPU.
    """
    (tokens, columns), tiles = exp.shape, maxima.shape[0]
    pieces = columns // tiles // PIECE
    # e^-1000 is 0 already, and the -1e30 of a tile without a real column would not stay finite times a slope.
    distance = jnp.maximum(maxima - normaliser.max[None, :], -1000.0)
    scale = jnp.exp(distance - normaliser.log_sum_exp[None, :])
    # The log-prob of a target whose bias is -inf; 0 inf would be NaN.
    target = jnp.maximum(target, MASKED)
    own = scalars.constant + scalars.slope * target
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
            # log E + distance = (log2 E + distance log2 e) ln 2, its constant folded into the others.
            slopes = load(slope.at[rows]) * math.log(2.0)
            constants = load(constant.at[rows]) + slopes * (load(distance.at[tile, rows]) * LOG2_E)
            has_target = special[row_tile * tiles + tile]

            for piece in range(pieces):
                start = (tile * pieces + piece) * PIECE
                plgpu.barrier_wait(arrived.at[piece])
                wide = plgpu.load(buffer.at[piece], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                factor = spread(constants) + spread(slopes) * jnp.log2(jnp.maximum(wide, SMALLEST))
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
        name="head_exponentials_to_gradient",
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


def estimate_log_sum_exp(
    operands: Operands, targets: LocalTargets, old_log_probs: Float[Array, " tokens"]
) -> Float[Array, " tokens"]:
    """z_target - old_log_prob, which is log Σ e^z as far as the policy is the sampler's; 0 where there is no label."""
    place, hidden = jnp.maximum(targets.column, 0), operands.hidden.astype(jnp.float32)
    if operands.vocab_dim == 0:
        rows = operands.weight[place]
    else:
        # Element by element: to gather columns XLA would transpose the weight.
        rows = operands.weight[jnp.arange(hidden.shape[1], dtype=jnp.int32)[None, :], place[:, None]]
    logits = jnp.sum(hidden * rows.astype(jnp.float32), axis=1)
    if operands.bias is not None:
        logits = logits + operands.bias[place]
    logits = finish_logits(logits[:, None], None, operands.spec)[:, 0]
    return jnp.where(targets.mask & (targets.column >= 0), logits - old_log_probs.astype(jnp.float32), 0.0)


class TokenFactors(NamedTuple):
    """What makes dz of exponentials e^(z - estimate) where the entropy has no cotangent, fp32 [tokens].

    Attributes:
        scale: c, by which the rows of E' are multiplied.
        own: E' in the target's column, which comes from fp32 numbers alone.
        target: int32, the target's column, -1 where there is none or no gradient.
        lost: bool, whether an estimate was so far off that E' does not hold the gradient of some token.
    """

    scale: Float[Array, " tokens"]
    own: Float[Array, " tokens"]
    target: Int[Array, " tokens"]
    lost: Bool[Array, ""]


def token_factors(
    estimate: Float[Array, " tokens"], normaliser: Normaliser, scalars: RowScalars, target: Float[Array, " tokens"]
) -> TokenFactors:
    """The factors of exponentials that were taken against ``estimate``.

    Args:
        estimate: of log Σ e^z.
        normaliser: of each token.
        scalars: of each token; its constant is 0 for a token without a gradient.
        target: z_target - normaliser.max.
    """
    log_ratio = normaliser.max + normaliser.log_sum_exp - estimate
    bounded = jnp.clip(log_ratio, -LARGEST_EXPONENT, LARGEST_EXPONENT)
    # A token without a gradient may have any estimate and any normaliser, of a row that was not computed.
    counts = scalars.constant != 0
    scale = jnp.where(counts, scalars.constant * jnp.exp(-bounded), 0.0)
    # e^δ (p - 1): a confident target (p near 1) keeps its small gradient.
    own = jnp.expm1(target - normaliser.log_sum_exp) * jnp.exp(bounded)
    lost = counts & (jnp.abs(log_ratio) > MOST_LOG_RATIO)
    return TokenFactors(scale, own, jnp.where(counts, scalars.target, -1), jnp.any(lost))


def write_targets(exp: Float[Array, "tokens columns"], factors: TokenFactors) -> Float[Array, "tokens columns"]:
    """E': the exponentials with ``factors.own`` in the targets' columns, unless an estimate was lost."""
    rows = jnp.arange(exp.shape[0], dtype=jnp.int32)
    # What is not to be written gets a place past the end, which is dropped.
    written = (factors.target >= 0) & ~factors.lost
    place = jnp.where(written, factors.target, exp.shape[1])
    return exp.at[rows, place].set(factors.own.astype(exp.dtype), mode="drop", unique_indices=True)
