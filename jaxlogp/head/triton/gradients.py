"""Gradients of hidden states, weight and bias by windows of the vocabulary.

For each window the kernel writes dz [tokens, columns] in the weight's dtype; then dH += dz · W_window in fp32, and
dW_window = dzᵀ · H, which is complete and rounded once. Both products are XLA's own. A window is gone when the next one
comes: nothing of size [tokens, V] exists.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._compat import union_of_varying_axes, vary_over
from jaxlogp.head.live_rows import live_rows
from jaxlogp.head.projection import HeadOptions, dot
from jaxlogp.head.row_scalars import RowScalars
from jaxlogp.head.triton.launch import TileFunctions
from jaxlogp.head.triton.tiles import TileConfig, row_parts, window_columns
from jaxlogp.targets import LocalTargets


def head_gradients(
    hidden: Float[Array, "tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    bias: Float[Array, " vocab"] | None,
    targets: LocalTargets,
    scalars: RowScalars,
    wanted: Bool[Array, " tokens"],
    options: HeadOptions,
    functions: TileFunctions,
    config: TileConfig,
    multiple: int,
    window: int | None,
    capability: int | None,
) -> tuple[Array, Array, Array | None]:
    """Gradients of hidden, weight and bias from the scalars of dz, in the dtypes of their operands.

    Args:
      hidden: [tokens, H].
      weight: bf16 or fp16 [V_local, H].
      bias: [V_local] or None.
      targets: targets as this shard sees them.
      scalars: what dz is made of, a value per token.
      wanted: False for tokens to leave out, whose gradient is exactly zero.
      options: static options of the call.
      functions: the kernels' launches, or their stand-in.
      config: tile shapes.
      multiple: tokens are padded to a multiple of it.
      window: columns of a window; None takes what the table's constants allow.
      capability: compute capability times ten to compile for; None asks the device.
    """
    axes = union_of_varying_axes(hidden, weight)
    tokens, vocab = hidden.shape[0], weight.shape[0]
    padded = -(-tokens // multiple) * multiple
    rows = live_rows(wanted, padded)
    packed = rows.pack(hidden.astype(weight.dtype), 0)
    filled = scalars.pack(rows)
    bias_operand = None if bias is None else bias.astype(jnp.float32)
    window = min(window or window_columns(padded, vocab), vocab)

    def products_of(size: int):
        """The products over the first ``size`` rows, among which are all that have a gradient."""

        def branch(packed, filled, count):
            here, scalars = packed[:size], RowScalars(*(x[:size] for x in filled))

            def gradient(start: Array) -> Array:
                bounds = jnp.stack([start, targets.width, count]).astype(jnp.int32)
                dz = functions.window_gradient(
                    here, weight, bias_operand, scalars, bounds, window, options, config, capability
                )
                return vary_over(dz, axes)

            d_hidden, d_weight, d_bias = _window_products(here, weight, bias_operand, gradient, window, axes)
            d_hidden = d_hidden.astype(hidden.dtype)
            d_hidden = jnp.pad(d_hidden, ((0, padded - size), (0, 0))) if size < padded else d_hidden
            return d_hidden, d_weight, None if bias is None else d_bias.astype(bias.dtype)

        return branch

    sizes = row_parts(padded, multiple)
    operands = packed, filled, rows.count
    if len(sizes) == 1:
        d_hidden, d_weight, d_bias = products_of(padded)(*operands)
    else:
        which = sum((rows.count > size).astype(jnp.int32) for size in sizes[:-1])
        d_hidden, d_weight, d_bias = lax.switch(which, [products_of(size) for size in sizes], *operands)
    return rows.unpack(d_hidden), d_weight, d_bias


def _window_products(
    hidden: Float[Array, "rows hidden"],
    weight: Float[Array, "vocab hidden"],
    bias: Float[Array, " vocab"] | None,
    gradient,
    window: int,
    axes: frozenset,
) -> tuple[Float[Array, "rows hidden"], Float[Array, "vocab hidden"], Float[Array, " vocab"] | None]:
    """fp32 dH, dW in the weight's dtype and fp32 db of all windows; gradient(first column) gives a window's dz."""
    vocab = weight.shape[0]

    def add(index: Int[Array, ""], sums):
        d_hidden, d_weight, d_bias = sums
        # The last window starts earlier than its turn when the width does not divide the vocabulary. Columns that a window
        # before it has covered get the same gradient of the weight again, and nothing is added to dH for them.
        start = jnp.minimum(index * window, vocab - window)
        dz = gradient(start)
        turn = start + jnp.arange(window, dtype=jnp.int32) >= index * window
        rows = lax.dynamic_slice_in_dim(weight, start, window)
        d_hidden = d_hidden + dot(dz, jnp.where(turn[:, None], rows, jnp.zeros((), rows.dtype)), contract=(1, 0))
        # 16-bit operands with a result of their dtype: summed in fp32 and rounded as it is written. An fp32 result and a
        # cast would be the same numbers and, where XLA does not join the two, twice the memory.
        rounded = lax.dot_general(dz, hidden, (((0,), (0,)), ((), ())), preferred_element_type=weight.dtype)
        d_weight = lax.dynamic_update_slice_in_dim(d_weight, rounded, start, axis=0)
        if bias is not None:
            d_bias = lax.dynamic_update_slice_in_dim(d_bias, jnp.sum(dz, axis=0, dtype=jnp.float32), start, axis=0)
        return d_hidden, d_weight, d_bias

    sums = (
        jnp.zeros(hidden.shape, jnp.float32),
        jnp.zeros(weight.shape, weight.dtype),
        None if bias is None else jnp.zeros(bias.shape, jnp.float32),
    )
    sums = jax.tree.map(lambda x: vary_over(x, axes), sums)
    return lax.fori_loop(0, -(-vocab // window), add, sums)
