"""Kernel of the gradients of keys and values."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from experiments.models.attention.hopper.bounds import HALF, SEGMENT, TILE, Bounds
from experiments.models.attention.hopper.kernel import (
    CONSUMERS,
    await_free,
    capped,
    columns_of,
    drain,
    half_rows,
    launch,
    load_columns,
    place,
    ring_slot,
    store_half,
    tile_buffer,
)
from experiments.models.attention.hopper.settings import Settings
from experiments.models.attention.hopper.walk import Walk
from jaxlogp._mosaic_gpu import plgpu

STAGES = {128: 3, 64: 6}
"""Blocks of HALF queries in flight, by features of a head. With 2 of them it took 0.448 instead of 0.423 ms with 128."""


def key_gradient(
    queries: Float[Array, "B T N D"],
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K D"],
    sums: Float[Array, "B N T"],
    d_out: Float[Array, "B T N D"],
    deltas: Float[Array, "B N T"],
    bounds: Bounds,
    settings: Settings,
) -> tuple[Float[Array, "B T K D"], Float[Array, "B T K D"]]:
    """Returns dk and dv, summed over the query heads that share a key-value head.

    Each warpgroup owns one half of a tile of keys; blocks of queries come for both, and one that has no query for a half is
    skipped by its owner. Scores are transposed, keys by queries: so probabilities and their gradients are left operands in
    registers.
    """
    dim, dtype = queries.shape[3], queries.dtype
    kv_heads, stages = keys.shape[2], STAGES[dim]
    group = queries.shape[2] // kv_heads
    tiles = bounds.keys.shape[1]
    walk = Walk(settings.num_blocks(), queries.shape[0], tiles, kv_heads, min(SEGMENT // TILE, tiles))
    bits, shape = settings.bits, (HALF, HALF)

    def blocks_to(last, start):
        """Returns how many blocks of queries lead from the first key of a tile to the last query."""
        return lax.div(last - start, jnp.int32(HALF)) + 1

    def copy(block, refs, scratch):
        queries, keys, values, d_out, sums, deltas, limits, tiles, *_ = refs

        def copy_item(item, total, row, unit, start, full_0, last_0, full_1, last_1):
            start = pl.multiple_of(start, HALF)
            await_free(scratch["tiles free"], item, 1)
            for half in range(CONSUMERS):
                for source, buffer in ((keys, "keys"), (values, "values")):
                    here = source.at[row, half_rows(start + half * HALF), unit]
                    plgpu.copy_gmem_to_smem(here, scratch[buffer].at[half], scratch["tiles full"].at[0])
            blocks = blocks_to(jnp.maximum(last_0, last_1), start)

            def copy_block(index, total):
                member = lax.div(index, blocks)
                head, stage = unit * group + member, ring_slot(total, stages)
                query = half_rows(pl.multiple_of(start + (index - member * blocks) * HALF, HALF))
                await_free(scratch["free"], total, stages)
                for source, ring in (
                    (queries.at[row, query, head], "queries"),
                    (d_out.at[row, query, head], "d_out"),
                    (sums.at[row, head, query], "sums"),
                    (deltas.at[row, head, query], "deltas"),
                    (limits.at[row, :, query], "limits"),
                ):
                    plgpu.copy_gmem_to_smem(source, scratch[ring].at[stage], scratch["full"].at[stage])
                return total + 1

            return lax.fori_loop(0, blocks * group, copy_block, total)

        items, total = walk.each(tiles, block, copy_item, jnp.int32(0))
        drain(scratch["free"], total, stages)
        drain(scratch["tiles free"], items, 1)

    def multiply(warpgroup, block, refs, scratch):
        *_, tiles, dk, dv = refs

        def work_item(item, stage, row, unit, start, full_0, last_0, full_1, last_1):
            # The second half has less work where a document goes on: the warpgroups take it in turn.
            half = lax.rem(warpgroup + item, jnp.int32(2))
            key = pl.multiple_of(start + half * HALF, HALF)
            read_by_all = jnp.where(half == 0, full_0, full_1)
            blocks = blocks_to(jnp.maximum(last_0, last_1), start)
            own_blocks = blocks_to(jnp.where(half == 0, last_0, last_1), start)
            plgpu.barrier_wait(scratch["tiles full"].at[0])

            def following(stage):
                return jnp.where(stage == stages - 1, 0, stage + 1)

            def skip(index, stage):
                plgpu.barrier_wait(scratch["full"].at[stage])
                plgpu.barrier_arrive(scratch["free"].at[stage])
                return following(stage)

            def sum_blocks(dk_ref, dv_ref):
                def read_head(member, stage):
                    def step(index, stage):
                        query = start + index * HALF
                        gradient = scratch["d_out"].at[stage]

                        def hide(p):
                            own = key + place(shape, 0)
                            first, last = (
                                columns_of(load_columns(scratch["limits"].at[stage, i]), shape) for i in (0, 1)
                            )
                            return jnp.where((own >= first) & (own <= last), p, 0.0)

                        def score_gradients(s_ref, dp_ref):
                            plgpu.barrier_wait(scratch["full"].at[stage])
                            plgpu.wgmma(s_ref, scratch["keys"].at[half], scratch["queries"].at[stage].transpose((1, 0)))
                            plgpu.wgmma(dp_ref, scratch["values"].at[half], gradient.transpose((1, 0)))
                            log_sum = load_columns(scratch["sums"].at[stage])
                            x = capped(plgpu.wgmma_accumulator_load(s_ref, wait_n=1), settings)
                            p = jnp.exp2(x * bits - columns_of(log_sum, shape))
                            p = lax.cond((query <= key) | (query + HALF > read_by_all + 1), hide, lambda p: p, p)
                            plgpu.wgmma(dv_ref, p.astype(dtype), gradient)
                            if settings.softcap is not None:
                                p = p * (1.0 - x * x)
                            delta = load_columns(scratch["deltas"].at[stage])
                            return p * (plgpu.wgmma_accumulator_load(dp_ref, wait_n=1) - columns_of(delta, shape))

                        accumulators = (plgpu.ACC(shape, jnp.float32),) * 2
                        ds = pl.run_scoped(score_gradients, *accumulators).astype(dtype)
                        plgpu.wgmma(dk_ref, ds, scratch["queries"].at[stage])
                        # With 128 features no registers are left to begin the next block meanwhile.
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(scratch["free"].at[stage])
                        return following(stage)

                    stage = lax.fori_loop(0, half, skip, stage)
                    stage = lax.fori_loop(half, own_blocks, step, stage)
                    return lax.fori_loop(own_blocks, blocks, skip, stage)

                last = lax.fori_loop(0, group, read_head, stage)
                return dk_ref[...], dv_ref[...], last

            accumulators = (plgpu.ACC((HALF, dim), jnp.float32),) * 2
            key_sums, value_sums, stage = pl.run_scoped(sum_blocks, *accumulators)
            plgpu.barrier_arrive(scratch["tiles free"].at[0])
            own_rows, buffer = half_rows(key), scratch["out"].at[warpgroup]
            store_half(value_sums, buffer, dv.at[row, own_rows, unit])
            store_half(key_sums * settings.scale, buffer, dk.at[row, own_rows, unit])
            return stage

        walk.each(tiles, block, work_item, jnp.int32(0))

    halves = tile_buffer(CONSUMERS, HALF, dim, dtype=dtype)
    ring = tile_buffer(stages, HALF, dim, dtype=dtype)
    numbers = plgpu.SMEM((stages, HALF), jnp.float32)
    call = launch(
        copy,
        multiply,
        settings,
        name="attention_key_gradient",
        out_type=(jax.ShapeDtypeStruct(keys.shape, dtype),) * 2,
        scratch={
            "keys": halves,
            "values": halves,
            "queries": ring,
            "d_out": ring,
            "sums": numbers,
            "deltas": numbers,
            "limits": plgpu.SMEM((stages, 2, HALF), jnp.int32),
            "out": halves,
            "tiles full": plgpu.Barrier(num_arrivals=2 * CONSUMERS, num_barriers=1),
            "tiles free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=1),
            "full": plgpu.Barrier(num_arrivals=5, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        },
    )
    return call(queries, keys, values, d_out, sums, deltas, bounds.limits, bounds.keys)
