"""Gradients of hidden states, weight and bias by windows of the vocabulary.

For each window the kernel writes dz [tokens, columns] in the weight's dtype; then dH += dz · W_window in fp32, and
dW_window = dzᵀ · H, or Hᵀ · dz for a weight [H, V], which is complete and rounded once. Both products are XLA's own. A
window is dropped before the next one: nothing of size [tokens, V] exists.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._compat import vary_over
from jaxlogp.head.call import HeadCall, HeadGradients
from jaxlogp.head.live_rows import live_rows
from jaxlogp.head.projection import dot
from jaxlogp.head.row_scalars import RowScalars
from jaxlogp.head.triton.launch import TileFunctions
from jaxlogp.head.triton.operands import Launch, Operands
from jaxlogp.head.triton.tiles import row_parts, window_columns


class Kernels(NamedTuple):
    """The gradient kernel and the settings of its launch.

    Attributes:
        functions: the kernels' launches, or their stand-in.
        launch: tile shapes and device.
        with_slope: whether the entropy has a cotangent.
    """

    functions: TileFunctions
    launch: Launch
    with_slope: bool


def head_gradients(
    call: HeadCall,
    scalars: RowScalars,
    wanted: Bool[Array, " tokens"],
    kernels: Kernels,
    multiple: int,
    window: int | None,
) -> HeadGradients:
    """This shard's gradients from the scalars of dz.

    Args:
        call: the call.
        scalars: the scalars of dz, one value per token.
        wanted: False for tokens to skip, whose gradient is exactly zero.
        kernels: the gradient kernel.
        multiple: tokens are padded to a multiple of it.
        window: columns of a window; None derives it from the constants of the tile table.
    """
    tokens, vocab, axes = call.hidden.shape[0], call.num_columns, call.axes
    padded = -(-tokens // multiple) * multiple
    rows = live_rows(wanted, padded)
    packed, filled = rows.pack(call.hidden.astype(call.weight.dtype), 0), scalars.pack(rows)
    window = min(window or window_columns(padded, vocab), vocab)

    def products_of(size: int):
        """The products over the first ``size`` rows, which include all rows with a gradient."""

        def branch(packed, filled, count):
            operands, scalars = Operands.of(call, packed[:size]), RowScalars(*(x[:size] for x in filled))

            def gradient(start: Array) -> Array:
                bounds = jnp.stack([start, call.targets.width, count]).astype(jnp.int32)
                dz = kernels.functions.window_gradient(
                    operands, scalars, bounds, window, kernels.with_slope, kernels.launch
                )
                return vary_over(dz, axes)

            d_hidden, d_weight, d_bias = _window_products(call, operands.hidden, gradient, window)
            d_hidden = d_hidden.astype(call.hidden_gradient_dtype)
            d_hidden = jnp.pad(d_hidden, ((0, padded - size), (0, 0))) if size < padded else d_hidden
            return d_hidden, d_weight, d_bias

        return branch

    sizes = row_parts(padded, multiple)
    operands = packed, filled, rows.count
    if len(sizes) == 1:
        d_hidden, d_weight, d_bias = products_of(padded)(*operands)
    else:
        which = sum((rows.count > size).astype(jnp.int32) for size in sizes[:-1])
        d_hidden, d_weight, d_bias = lax.switch(which, [products_of(size) for size in sizes], *operands)
    return HeadGradients(rows.unpack(d_hidden), d_weight, d_bias)


def _window_products(
    call: HeadCall,
    hidden: Float[Array, "rows hidden"],
    gradient: Callable[[Array], Array],
    window: int,
) -> HeadGradients:
    """fp32 dH, dW as the call wants it and fp32 db of all windows; gradient(first column) gives a window's dz."""
    weight, vocab, dim, has_bias = call.weight, call.num_columns, call.vocab_dim, call.bias is not None

    def add(index: Int[Array, ""], sums):
        d_hidden, d_weight, d_bias = sums
        # The last window starts earlier where the width does not divide the vocabulary. For columns that the previous
        # window has covered, the same gradient of the weight is written again, and nothing is added to dH.
        start = jnp.minimum(index * window, vocab - window)
        dz = gradient(start)
        own = start + jnp.arange(window, dtype=jnp.int32) >= index * window
        part = lax.dynamic_slice_in_dim(weight, start, window, axis=dim)
        part = jnp.where(jnp.expand_dims(own, 1 - dim), part, jnp.zeros((), part.dtype))
        d_hidden = d_hidden + dot(dz, part, contract=(1, dim))
        # 16-bit operands with a result of their dtype: summed in fp32 and rounded when written. An fp32 result and a
        # cast would give the same numbers and, where XLA does not fuse the two, take twice the memory.
        left, right = (dz, hidden) if dim == 0 else (hidden, dz)
        rounded = lax.dot_general(
            left, right, (((0,), (0,)), ((), ())), preferred_element_type=call.weight_gradient_dtype
        )
        d_weight = lax.dynamic_update_slice_in_dim(d_weight, rounded, start, axis=dim)
        if has_bias:
            d_bias = lax.dynamic_update_slice_in_dim(d_bias, jnp.sum(dz, axis=0, dtype=jnp.float32), start, axis=0)
        return d_hidden, d_weight, d_bias

    sums = (
        jnp.zeros(hidden.shape, jnp.float32),
        jnp.zeros(weight.shape, call.weight_gradient_dtype),
        jnp.zeros(vocab, jnp.float32) if has_bias else None,
    )
    sums = jax.tree.map(lambda x: vary_over(x, call.axes), sums)
    return HeadGradients(*lax.fori_loop(0, -(-vocab // window), add, sums))
