"""Launches of the two kernels through jax-triton; both are imported here, when a launch is traced."""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlogp.head.projection import HeadSpec
from jaxlogp.head.row_scalars import RowScalars
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
    hidden: Float[Array, "tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    bias: Float[Array, " vocab"] | None,
    column: Int[Array, " tokens"],
    bounds: Int[Array, "3"],
    spec: HeadSpec,
    with_slope: bool,
    config: TileConfig,
    capability: int | None,
) -> Float[Array, "tiles 4 tokens"]:
    """Tile statistics of all columns; the logits are not written.

    Args:
      hidden: [tokens, H] in the weight's dtype, tokens a multiple of config.rows.
      weight: bf16 or fp16 [V, H].
      bias: fp32 [V] or None.
      column: int32 [tokens], the target's row of the weight, -1 where there is none.
      bounds: int32: 0, number of rows of the weight that are real ids, number of tokens, from the first, that need
        statistics. Row tiles after these are not computed, and their results may be anything.
      spec: scale, soft cap and temperature.
      with_slope: whether the entropy has a cotangent.
      config: tile shapes.
      capability: compute capability times ten to compile for; None asks the device.

    Returns:
      fp32 [tiles, 4, tokens]: max, Σ e^(z - max), Σ e^(z - max) (z - max) (not written without entropy), target logit
      or 0.
    """
    from jaxlogp.head.triton.kernels import forward_kernel

    tokens, vocab = hidden.shape[0], weight.shape[0]
    tiles = -(-vocab // config.columns)
    return _call(
        (hidden, weight, _or_placeholder(bias), column, bounds, tokens, vocab),
        forward_kernel,
        jax.ShapeDtypeStruct((tiles, 4, tokens), jnp.float32),
        tokens // config.rows * tiles,
        (spec, with_slope),
        config,
        capability,
        HIDDEN=hidden.shape[1],
        HAS_BIAS=bias is not None,
    )


def window_gradient(
    hidden: Float[Array, "tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    bias: Float[Array, " vocab"] | None,
    scalars: RowScalars,
    bounds: Int[Array, "3"],
    window: int,
    spec: HeadSpec,
    with_slope: bool,
    config: TileConfig,
    capability: int | None,
) -> Float[Array, "tokens window"]:
    """Gradient of hidden · weightᵀ + bias for a window of columns, in the weight's dtype, rounded once.

    Args:
      hidden: [tokens, H] in the weight's dtype, tokens a multiple of config.rows.
      weight: bf16 or fp16 [V, H].
      bias: fp32 [V] or None.
      scalars: the scalars of dz, one value per token; a row whose constant, slope and onehot are 0 gets 0.
      bounds: int32: first column of the window, number of rows of the weight that are real ids (further columns get 0),
        number of tokens, from the first, that have a gradient (row tiles after these get 0 without a product).
      window: number of columns, all of them rows of the weight.
      spec: scale, soft cap and temperature.
      with_slope: whether the entropy has a cotangent.
      config: tile shapes.
      capability: compute capability times ten to compile for; None asks the device.
    """
    from jaxlogp.head.triton.kernels import gradient_kernel

    tokens, vocab = hidden.shape[0], weight.shape[0]
    values = jnp.stack([scalars.maximum, scalars.log2_sum, scalars.constant, scalars.slope, scalars.onehot])
    return _call(
        (hidden, weight, _or_placeholder(bias), scalars.target, values, bounds, tokens, vocab),
        gradient_kernel,
        jax.ShapeDtypeStruct((tokens, window), weight.dtype),
        tokens // config.rows * -(-window // config.columns),
        (spec, with_slope),
        config,
        capability,
        HIDDEN=hidden.shape[1],
        WINDOW=window,
        HAS_BIAS=bias is not None,
    )


def kernel_constants(spec: HeadSpec, with_entropy: bool, config: TileConfig) -> dict[str, Any]:
    """The compile-time arguments that both kernels share."""
    return {
        "WITH_ENTROPY": with_entropy,
        "SCALE": float(spec.logit_scale),
        "SOFTCAP": 0.0 if spec.softcap is None else float(spec.softcap),
        "TEMPERATURE": float(spec.temperature),
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "DEPTH": config.depth,
        "GROUP": config.group,
    }


def _or_placeholder(bias: Array | None) -> Array:
    """A kernel's argument must be an array; without a bias it is not read."""
    return jnp.zeros((1,), jnp.float32) if bias is None else bias


def _call(
    operands: tuple,
    kernel: Any,
    out_shape: jax.ShapeDtypeStruct,
    programs: int,
    arithmetic: tuple[HeadSpec, bool],
    config: TileConfig,
    capability: int | None,
    **constants: Any,
) -> Array:
    import jax_triton

    return jax_triton.triton_call(
        *operands,
        kernel=kernel,
        out_shape=out_shape,
        grid=(programs,),
        num_warps=config.warps,
        num_stages=config.stages,
        compute_capability=capability,
        **kernel_constants(*arithmetic, config),
        **constants,
    )
