"""Launches of the two kernels through jax-triton; both are imported here, when a launch is traced."""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlogp.head.projection import HeadSpec
from jaxlogp.head.row_scalars import RowScalars
from jaxlogp.head.triton.operands import Launch, Operands
from jaxlogp.head.triton.tiles import TileConfig


@runtime_checkable
class TileFunctions(Protocol):
    """The two functions that run on the GPU: this module, or :mod:`tests.head.triton_plain` in their place."""

    def forward_statistics(self, *operands: Any) -> Array:
        """See :func:`forward_statistics`."""
        ...

    def window_gradient(self, *operands: Any) -> Array:
        """See :func:`window_gradient`."""
        ...


def forward_statistics(
    operands: Operands, column: Int[Array, " tokens"], bounds: Int[Array, "3"], with_slope: bool, launch: Launch
) -> Float[Array, "tiles 4 tokens"]:
    """Tile statistics of all columns; the logits are not written.

    Args:
        operands: what is multiplied.
        column: int32 [tokens], the target's column, -1 where there is none.
        bounds: int32: 0, number of columns that are real ids, number of tokens, from the first, that need statistics. Row
            tiles after these are not computed, and their results may be anything.
        with_slope: whether the entropy is wanted.
        launch: tile shapes and device.

    Returns:
        fp32 [tiles, 4, tokens]: max, Σ e^(z - max), Σ e^(z - max) (z - max) (not written without entropy), target logit
        or 0.
    """
    from jaxlogp.head.triton.kernels import forward_kernel

    tokens, config = operands.hidden.shape[0], launch.config
    tiles = -(-operands.num_columns // config.columns)
    return _call(
        forward_kernel,
        operands,
        (column, bounds),
        jax.ShapeDtypeStruct((tiles, 4, tokens), jnp.float32),
        tokens // config.rows * tiles,
        launch,
        WITH_ENTROPY=with_slope,
    )


def window_gradient(
    operands: Operands,
    scalars: RowScalars,
    bounds: Int[Array, "3"],
    window: int,
    with_slope: bool,
    launch: Launch,
) -> Float[Array, "tokens window"]:
    """Gradient of hidden · weightᵀ + bias for a window of columns, in the weight's dtype, rounded once.

    Args:
        operands: what is multiplied.
        scalars: the scalars of dz, one value per token; a row whose constant, slope and onehot are 0 gets 0.
        bounds: int32: first column of the window (for a weight [H, V] a multiple of 8), number of columns that are real
            ids (further ones get 0), number of tokens, from the first, that have a gradient (row tiles after these get 0
            without a product).
        window: number of columns, all of them columns of the weight.
        with_slope: whether the entropy has a cotangent.
        launch: tile shapes and device.
    """
    from jaxlogp.head.triton.kernels import gradient_kernel

    tokens, config = operands.hidden.shape[0], launch.config
    values = jnp.stack([scalars.maximum, scalars.log2_sum, scalars.constant, scalars.slope, scalars.onehot])
    return _call(
        gradient_kernel,
        operands,
        (scalars.target, values, bounds),
        jax.ShapeDtypeStruct((tokens, window), operands.weight.dtype),
        tokens // config.rows * -(-window // config.columns),
        launch,
        WITH_ENTROPY=with_slope,
        WINDOW=window,
    )


def kernel_constants(spec: HeadSpec, vocab_dim: int, config: TileConfig) -> dict[str, Any]:
    """The compile-time arguments that both kernels share."""
    return {
        "VOCAB_DIM": vocab_dim,
        "SCALE": float(spec.logit_scale),
        "SOFTCAP": 0.0 if spec.softcap is None else float(spec.softcap),
        "TEMPERATURE": float(spec.temperature),
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "DEPTH": config.depth,
        "GROUP": config.group,
    }


def _call(
    kernel: Any,
    operands: Operands,
    per_token: tuple[Array, ...],
    out_shape: jax.ShapeDtypeStruct,
    programs: int,
    launch: Launch,
    **constants: Any,
) -> Array:
    import jax_triton

    hidden, weight, bias, spec, vocab_dim = operands
    # A kernel's argument must be an array; without a bias it is not read.
    placeholder = jnp.zeros((1,), jnp.float32) if bias is None else bias
    return jax_triton.triton_call(
        *(hidden, weight, placeholder, *per_token, hidden.shape[0], operands.num_columns),
        kernel=kernel,
        out_shape=out_shape,
        grid=(programs,),
        num_warps=launch.config.warps,
        num_stages=launch.config.stages,
        compute_capability=launch.capability,
        HIDDEN=hidden.shape[1],
        HAS_BIAS=bias is not None,
        **kernel_constants(spec, vocab_dim, launch.config),
        **constants,
    )
