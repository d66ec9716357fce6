"""Static facts of a call, and what the kernels share."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxlogp._mosaic_gpu import plgpu

LOG2_E = math.log2(math.e)
WARPGROUPS = 2
MEMORY_REGISTERS = 40


class Settings(NamedTuple):
    """Options of a call: multiplier and bound (`softcap`) of the products, and the sizes of the three kernels' steps.

    The sizes are keys (of `d_keys`, queries) of a step, and steps whose operands are in shared memory at a time. `d_queries`
    is for the queries' gradient, `d_keys` for the keys' and values'. `interpret` is what `plgpu.kernel` takes to run on the
    CPU.
    """

    scale: float
    softcap: float | None = None
    forward: tuple[int, int] = (128, 2)
    d_queries: tuple[int, int] = (64, 2)
    d_keys: tuple[int, int] = (64, 2)
    interpret: Any = None


def transforms(features: int) -> tuple:
    """Returns how rows of 16-bit features lie in shared memory: as the matrix units and the copy engine like it."""
    swizzle = plgpu.find_swizzle(features * 16)
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


def tile_buffer(rows: int, features: int, dtype: Any) -> Any:
    """Returns shared memory of each compute warpgroup for [rows, features]."""
    return plgpu.SMEM((WARPGROUPS, rows, features), dtype, transforms=transforms(features))


def block_spec(shape: tuple, index_map: Any) -> Any:
    """Returns blocks of rows of features for a pipeline."""
    return plgpu.BlockSpec(shape, index_map, transforms=transforms(shape[-1]))


def scores_in_bits(products: Any, settings: Settings) -> tuple[Any, Any]:
    """Returns log2(e) · cap(scale · products), and the slope of the cap, or None."""
    if settings.softcap is None:
        return products * (settings.scale * LOG2_E), None
    bent = jnp.tanh(products * (settings.scale / settings.softcap))
    return bent * (settings.softcap * LOG2_E), 1.0 - bent * bent


def pipelined(
    step: Callable[..., Any], compute: Callable[..., None], *, grid: tuple, stages: int, in_specs: list
) -> Any:
    """Returns a kernel body's pipeline: one warpgroup copies blocks, WARPGROUPS of them run `compute` around the steps."""
    return plgpu.emit_pipeline_warp_specialized(
        step,
        grid=grid,
        max_concurrent_steps=stages,
        num_compute_wgs=WARPGROUPS,
        memory_registers=MEMORY_REGISTERS,
        wg_axis="warpgroup",
        manual_consumed_barriers=True,
        compute_context=compute,
        in_specs=in_specs,
    )


def launch(settings: Settings, grid: tuple[int, int, int]) -> dict[str, Any]:
    """Returns how `plgpu.kernel` launches a kernel over (heads, tiles, rows)."""
    return {
        "compiler_params": plgpu.CompilerParams(approx_math=True),
        "grid": grid,
        "grid_names": ("head", "tile", "row"),
        "num_threads": WARPGROUPS + 1,
        "thread_name": "warpgroup",
        **({} if settings.interpret is None else {"interpret": settings.interpret}),
    }


def iota(shape: tuple[int, int], dimension: int) -> Any:
    """Returns row or column numbers of an accumulator."""
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def along_rows(x: Any, shape: tuple[int, int]) -> Any:
    """Returns a number for each row of an accumulator."""
    return lax.broadcast_in_dim(x, shape, [0])


def along_columns(x: Any, shape: tuple[int, int]) -> Any:
    """Returns a number for each column of an accumulator."""
    return lax.broadcast_in_dim(x, shape, [1])


def grouped(body: Callable[..., None], operands: int, outputs: int) -> Callable[..., None]:
    """Returns a kernel's body that takes its operands, and its outputs, as one argument each."""
    return lambda *refs: body(refs[:operands], refs[operands : operands + outputs], *refs[operands + outputs :])
