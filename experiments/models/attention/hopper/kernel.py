"""Building blocks of the attention kernels: their launch, rings of shared memory, and tiles in registers."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from experiments.models.attention.hopper.bounds import HALF
from experiments.models.attention.hopper.settings import Settings
from jaxlogp._mosaic_gpu import kernel, plgpu

CONSUMERS = 2
"""Warpgroups of a block that multiply; one more copies."""
MEMORY_REGISTERS = 24
CONSUMER_REGISTERS = 240
"""With 40 and 232, dk and dv took 0.59 instead of 0.53 ms, the other kernels as long (16 x 2048 tokens, one H100)."""


def launch(
    copy: Callable[..., None],
    multiply: Callable[..., None],
    settings: Settings,
    *,
    name: str,
    out_type: Any,
    scratch: dict[str, Any],
) -> Callable[..., Any]:
    """Returns a kernel of persistent blocks, one per multiprocessor.

    Args:
        copy: what the memory warpgroup of block b does: copy(b, refs, scratch).
        multiply: what warpgroup w of block b does: multiply(w, b, refs, scratch).
        settings: how many blocks there are, and whether they are interpreted.
        name: what profilers call the kernel.
        out_type: shapes and dtypes of the results.
        scratch: shared memory and barriers by name.
    """

    def body(*refs):
        operands, buffers = refs[: -len(scratch)], dict(zip(scratch, refs[-len(scratch) :], strict=True))
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")

        @pl.when(warpgroup == CONSUMERS)
        def _():
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
            copy(block, operands, buffers)

        @pl.when(warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            multiply(warpgroup, block, operands, buffers)
            plgpu.wait_smem_to_gmem(0)

    return kernel(
        body,
        name=name,
        out_type=out_type,
        scratch_types=list(scratch.values()),
        grid=(settings.num_blocks(),),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        # No sum crosses warps, so next to no scratch memory for reductions is needed, and the rings take what there is.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=False, reduction_scratch_bytes=512
        ),
        **({} if settings.interpret is None else {"interpret": settings.interpret}),
    )


def tile_buffer(*shape: int, dtype: Any) -> Any:
    """Returns shared memory of tiles whose last dimension is the features of a head, as the matrix units read it."""
    item_bytes = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * item_bytes * 8)
    transforms = plgpu.TilingTransform((8, swizzle // item_bytes)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def ring_slot(step: Any, stages: int) -> Any:
    """Returns the slot of a ring that a step uses."""
    return lax.rem(step, jnp.int32(stages))


def await_free(empty: Any, step: Any, stages: int) -> None:
    """Waits until all readers of the ring's slot for a step are done with what was there before."""

    @pl.when(step >= stages)
    def _():
        plgpu.barrier_wait(empty.at[ring_slot(step, stages)])


def drain(empty: Any, steps: Any, stages: int) -> None:
    """Observes the releases of a ring's last slots: a barrier must not be given back with one unobserved."""

    def release(step, _):
        await_free(empty, step, stages)

    lax.fori_loop(steps, steps + stages, release, None)


def half_rows(start: Any) -> Any:
    """Returns the index of a warpgroup's rows."""
    return pl.ds(start, HALF)


def store_half(values: Any, buffer: Any, destination: Any) -> None:
    """Writes a warpgroup's rows through its buffer, once what it wrote before has left the buffer."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    buffer[...] = values.astype(buffer.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, destination)


def load_rows(ref: Any) -> Any:
    """Loads a number per row of a tile."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def load_columns(ref: Any) -> Any:
    """Loads a number per column of a tile."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def full_rows(value: float) -> Any:
    """Returns the same fp32 number for each row of a warpgroup."""
    return plgpu.layout_cast(jnp.full((HALF,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def rows_of(vector: Any, shape: tuple[int, int]) -> Any:
    """Spreads a number per row of a tile over its columns."""
    return lax.broadcast_in_dim(vector, shape, [0])


def columns_of(vector: Any, shape: tuple[int, int]) -> Any:
    """Spreads a number per column of a tile over its rows."""
    return lax.broadcast_in_dim(vector, shape, [1])


def place(shape: tuple[int, int], dimension: int) -> Any:
    """Returns the row or column number of each element of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def capped(products: Any, settings: Settings) -> Any:
    """Returns what times `settings.bits` is the scores in bits."""
    if settings.softcap is None:
        return products
    return jnp.tanh(products * (settings.scale / settings.softcap))
