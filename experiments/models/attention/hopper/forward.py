"""The forward kernel: two warpgroups of queries share a pipeline of key and value blocks (FlashAttention-3's shape)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from experiments.models.attention.hopper.bounds import BLOCK, TILE, Bounds
from experiments.models.attention.hopper.settings import (
    WARPGROUPS,
    Settings,
    along_rows,
    block_spec,
    grouped,
    iota,
    launch,
    pipelined,
    scores_in_bits,
    tile_buffer,
)
from jaxlogp._mosaic_gpu import kernel, plgpu

LOWEST = -1e30
"""Below any score, and finite: the difference of two rows that have seen no key is 0."""


def forward(queries: Any, keys: Any, values: Any, bounds: Bounds, settings: Settings) -> tuple[Any, Any]:
    """Returns the result [B, T, N, D], and log2 of the sum of 2^scores, fp32 [B, N, T]. T is a multiple of TILE."""
    rows, length, heads, features = queries.shape
    group, dtype = heads // keys.shape[2], queries.dtype
    step_keys, stages = settings.forward
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    shape = (BLOCK, step_keys)

    def body(operands, outputs, q_smems, sums_smems, barriers, turn):
        q_gmem, k_gmem, v_gmem, first_gmem, lowest_gmem, highest_gmem = operands
        out_gmem, sums_gmem = outputs
        row, head, tile, warpgroup = (lax.axis_index(name) for name in ("row", "head", "tile", "warpgroup"))
        kv_head = lax.div(head, jnp.asarray(group, head.dtype))
        begin = tile * TILE + warpgroup * BLOCK
        block = pl.ds(begin, BLOCK)
        low = lax.div(lowest_gmem[row, tile], step_keys)
        high = lax.div(tile * TILE + TILE + (step_keys - 1), step_keys)
        highest = highest_gmem[row, tile]
        q_smem, sums_smem, barrier = q_smems.at[warpgroup], sums_smems.at[warpgroup], barriers.at[warpgroup]

        def take_turn():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def compute(pipeline):
            plgpu.copy_gmem_to_smem(q_gmem.at[row, block, head], q_smem, barrier)
            first = plgpu.load(first_gmem.at[row, block], layout=row_layout, optimized=False)
            splat = lambda value: plgpu.layout_cast(jnp.full((BLOCK,), value, jnp.float32), row_layout)  # noqa: E731
            mixed = plgpu.layout_cast(jnp.zeros((BLOCK, features), jnp.float32), plgpu.Layout.WGMMA)
            plgpu.barrier_wait(barrier)
            pl.when(warpgroup == 1)(take_turn)
            mixed, largest, total, _ = pipeline((mixed, splat(LOWEST), splat(0.0), first))
            pl.when(warpgroup == 0)(take_turn)
            q_smem[...] = (mixed / along_rows(total, mixed.shape)).astype(dtype)
            sums_smem[...] = largest + jnp.log2(total)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem, out_gmem.at[row, block, head])
            plgpu.copy_smem_to_gmem(sums_smem, sums_gmem.at[row, head, block])
            plgpu.wait_smem_to_gmem(0)

        def step(index, k_smem, v_smem, k_consumed, v_consumed, carry):
            mixed, largest, total, first = carry
            key = (low + index[0]) * step_keys

            def products(accumulator):
                plgpu.wgmma(accumulator, q_smem, k_smem.T)
                take_turn()
                return accumulator[...]

            scores, _ = scores_in_bits(pl.run_scoped(products, plgpu.ACC(shape, jnp.float32)), settings)
            plgpu.barrier_arrive(k_consumed)

            def masked():
                slots = key + iota(shape, 1)
                visible = (slots <= begin + iota(shape, 0)) & (slots >= along_rows(first, shape))
                return jnp.where(visible, scores, -jnp.inf)

            scores = lax.cond((key + step_keys > begin) | (key < highest), masked, lambda: scores)
            larger = jnp.maximum(largest, scores.max(axis=1))
            kept = jnp.exp2(largest - larger)
            exponentials = jnp.exp2(scores - along_rows(larger, shape))
            total = total * kept + exponentials.sum(axis=1)
            narrow = exponentials.astype(dtype)
            take_turn()

            def mix(accumulator):
                plgpu.wgmma(accumulator, narrow, v_smem)
                return accumulator[...]

            part = pl.run_scoped(mix, plgpu.ACC((BLOCK, features), jnp.float32))
            plgpu.barrier_arrive(v_consumed)
            return mixed * along_rows(kept, mixed.shape) + part, larger, total, first

        pipelined(
            step,
            compute,
            grid=(high - low,),
            stages=stages,
            in_specs=[block_spec((step_keys, features), lambda i: (low + i, 0))] * 2,
        )(k_gmem.at[row, :, kv_head], v_gmem.at[row, :, kv_head])

    run = kernel(
        grouped(body, operands=6, outputs=2),
        name="attention_forward",
        out_type=(queries_like(queries), jax.ShapeDtypeStruct((rows, heads, length), jnp.float32)),
        scratch_types=(
            tile_buffer(BLOCK, features, dtype),
            plgpu.SMEM((WARPGROUPS, BLOCK), jnp.float32),
            plgpu.Barrier(num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ),
        **launch(settings, (heads, length // TILE, rows)),
    )
    return run(queries, keys, values, bounds.first, bounds.lowest, bounds.highest)


def queries_like(x: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of an output shaped like an operand."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
