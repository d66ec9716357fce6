"""The two kernels in plain JAX: their specification, and a stand-in where there is no GPU.

It takes the operands of :mod:`jaxlogp.head.triton.launch`, stores the logits of a whole call or window, and is for
tests.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlogp.head.projection import dot, finish_logits
from jaxlogp.head.row_scalars import RowScalars
from jaxlogp.head.triton.operands import Launch, Operands

LN_2 = 0.6931471805599453
MASKED = -1e30


def _logits(operands: Operands, columns: Array) -> Array:
    """Final logits of some columns; those past the end are the last one."""
    hidden, weight, bias, spec, vocab_dim = operands
    sources = jnp.minimum(columns, operands.num_columns - 1)
    products = dot(hidden, jnp.take(weight, sources, axis=vocab_dim), (1, 1 - vocab_dim))
    logits = finish_logits(products, None if bias is None else bias[sources], spec)
    return jnp.where(logits < MASKED, MASKED, logits)


def forward_statistics(
    operands: Operands, column: Int[Array, " tokens"], bounds: Int[Array, "3"], with_slope: bool, launch: Launch
) -> Float[Array, "tiles 4 tokens"]:
    """As :func:`jaxlogp.head.triton.launch.forward_statistics`; NaN where the kernel leaves rows unwritten."""
    config, tokens = launch.config, operands.hidden.shape[0]
    tiles = -(-operands.num_columns // config.columns)
    columns = jnp.arange(tiles * config.columns, dtype=jnp.int32)
    logits = _logits(operands, columns)
    selected = jnp.where(columns[None, :] == column[:, None], logits, 0.0)
    selected = jnp.where(selected <= MASKED, -jnp.inf, selected)
    logits = jnp.where(columns[None, :] < bounds[1], logits, MASKED)
    logits, selected = (x.reshape(tokens, tiles, -1) for x in (logits, selected))
    maximum = jnp.max(logits, axis=-1)
    shift = logits - maximum[..., None]
    exp = jnp.exp(shift)
    unwritten = jnp.full(maximum.shape, jnp.nan)
    shifted = jnp.sum(exp * shift, axis=-1) if with_slope else unwritten
    statistics = jnp.stack([maximum, jnp.sum(exp, axis=-1), shifted, jnp.sum(selected, axis=-1)])
    row_tile = jnp.arange(tokens, dtype=jnp.int32) // config.rows * config.rows
    return jnp.where(row_tile[None, :, None] < bounds[2], statistics, jnp.nan).transpose(2, 0, 1)


def window_gradient(
    operands: Operands,
    scalars: RowScalars,
    bounds: Int[Array, "3"],
    window: int,
    with_slope: bool,
    launch: Launch,
) -> Float[Array, "tokens window"]:
    """As :func:`jaxlogp.head.triton.launch.window_gradient`."""
    del launch
    spec = operands.spec
    columns = bounds[0] + jnp.arange(window, dtype=jnp.int32)
    logits = _logits(operands, columns)
    shift = logits - scalars.maximum[:, None]
    probs = jnp.exp(shift - scalars.log2_sum[:, None] * LN_2)
    slope = scalars.slope[:, None] * shift if with_slope else 0.0
    gradient = probs * (scalars.constant[:, None] + slope)
    chosen = columns[None, :] == scalars.target[:, None]
    gradient = jnp.where(chosen, gradient + scalars.onehot[:, None], gradient)
    if spec.softcap is not None:
        capped = logits * (spec.temperature / spec.softcap)
        gradient = gradient * (1.0 - capped * capped)
    alive = (scalars.constant != 0.0) | (scalars.slope != 0.0) | (scalars.onehot != 0.0)
    alive &= jnp.arange(operands.hidden.shape[0], dtype=jnp.int32) < bounds[2]
    gradient = jnp.where(alive[:, None] & (columns < bounds[1])[None, :], gradient, 0.0)
    return gradient.astype(operands.weight.dtype)
