"""Forward kernel of attention: the result, and the logarithm of each query's sum of exponentials."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from experiments.models.attention.hopper.bounds import HALF, Bounds
from experiments.models.attention.hopper.kernel import (
    CONSUMERS,
    await_free,
    capped,
    drain,
    full_rows,
    half_rows,
    launch,
    load_rows,
    ring_slot,
    rows_of,
    store_half,
    tile_buffer,
)
from experiments.models.attention.hopper.settings import Settings
from experiments.models.attention.hopper.walk import QueryTiles
from jaxlogp._mosaic_gpu import plgpu

KEYS = {128: 128, 64: 128}
"""Keys of a block, by features of a head. 64 keys and as many bytes in flight took 0.262 instead of 0.240 ms with 128
features and documents of 700 tokens, 2.29 instead of 1.97 ms with one of 8192; 0.122 instead of 0.118 with 64 features."""
STAGES = {128: 2, 64: 4}
"""Blocks of keys, and of values, in flight."""
SLOTS = 2
"""Tiles of queries in flight."""
LEAST = -1e30
"""Below every score, and finite: the difference of two is 0."""


def forward(
    queries: Float[Array, "B T N D"],
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K D"],
    bounds: Bounds,
    settings: Settings,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Returns the result and, in fp32, log2 of each query's sum of 2^(scores in bits).

    Softmax is online. While a warpgroup computes the exponentials of a block, the matrix units multiply those of the block
    before by its values: both products are under way before the scores are read.
    """
    rows, length, heads, dim = queries.shape
    block_keys, stages, dtype = KEYS[dim], STAGES[dim], queries.dtype
    work = QueryTiles.of(queries, keys, bounds, settings)
    bits, shape = settings.bits, (HALF, block_keys)

    def copy(block, refs, scratch):
        queries, keys, values, _, tiles, *_ = refs
        rings = (keys, scratch["keys"], "keys"), (values, scratch["values"], "values")

        def copy_item(item, total, row, unit, start, lowest, highest):
            slot = ring_slot(item, SLOTS)
            await_free(scratch["queries free"], item, SLOTS)
            for consumer in range(CONSUMERS):
                head, query = work.queries_of(start, unit, consumer)
                source = queries.at[row, half_rows(query), head]
                plgpu.copy_gmem_to_smem(source, scratch["queries"].at[slot, consumer], scratch["queries full"].at[slot])
            begin, blocks = work.keys_of(start, lowest, block_keys)
            kv_head = work.kv_head(unit)

            def copy_block(index, total):
                here, stage = pl.ds(begin + index * block_keys, block_keys), ring_slot(total, stages)
                for source, ring, name in rings:
                    await_free(scratch[f"{name} free"], total, stages)
                    plgpu.copy_gmem_to_smem(
                        source.at[row, here, kv_head], ring.at[stage], scratch[f"{name} full"].at[stage]
                    )
                return total + 1

            return lax.fori_loop(0, blocks, copy_block, total)

        items, total = work.walk.each(tiles, block, copy_item, jnp.int32(0))
        drain(scratch["keys free"], total, stages)
        drain(scratch["values free"], total, stages)
        drain(scratch["queries free"], items, SLOTS)

    def multiply(warpgroup, block, refs, scratch):
        _, _, _, limits, tiles, out, sums = refs

        def work_item(item, total, row, unit, start, lowest, highest):
            slot = ring_slot(item, SLOTS)
            head, query = work.queries_of(start, unit, warpgroup)
            begin, blocks = work.keys_of(start, lowest, block_keys)
            own_limits = load_rows(limits.at[row, 0, half_rows(query)]), load_rows(limits.at[row, 1, half_rows(query)])
            own = scratch["queries"].at[slot, warpgroup]
            plgpu.barrier_wait(scratch["queries full"].at[slot])

            def softmax(products, index, maximum, sum_):
                """Returns the new maximum and sum, what the old ones shrink by, and the block's exponentials."""
                key = begin + index * block_keys

                def everything(x):
                    larger = jnp.maximum(maximum, jnp.max(x, axis=1))
                    shrink = jnp.exp2((maximum - larger) * bits)
                    exponentials = jnp.exp2(x * bits - rows_of(larger * bits, shape))
                    return larger, sum_ * shrink + jnp.sum(exponentials, axis=1), shrink, exponentials

                # Both branches do everything: the compiler cannot move what is in a branch behind the next wait, where the
                # matrix units would idle.
                return lax.cond(
                    work.at_edge(highest, query, key, block_keys),
                    lambda x: everything(jnp.where(work.visible(own_limits, key, shape), x, -jnp.inf)),
                    everything,
                    capped(products, settings),
                )

            def scores(stage, meanwhile=None):
                """Returns the products of the queries and a block of keys; other products may be started with them."""

                def products(s_ref):
                    plgpu.barrier_wait(scratch["keys full"].at[stage])
                    plgpu.wgmma(s_ref, own, scratch["keys"].at[stage].transpose((1, 0)))
                    if meanwhile is not None:
                        meanwhile()
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=0 if meanwhile is None else 1)
                    plgpu.barrier_arrive(scratch["keys free"].at[stage])
                    return s

                return pl.run_scoped(products, plgpu.ACC(shape, jnp.float32))

            def attend(out_ref):
                def add_values(exponentials, stage):
                    plgpu.barrier_wait(scratch["values full"].at[stage])
                    plgpu.wgmma(out_ref, exponentials, scratch["values"].at[stage])

                def step(index, state):
                    maximum, sum_, exponentials = state
                    before = ring_slot(total + index - 1, stages)
                    s = scores(ring_slot(total + index, stages), lambda: add_values(exponentials, before))
                    maximum, sum_, shrink, exponentials = softmax(s, index, maximum, sum_)
                    result = out_ref[...]
                    plgpu.barrier_arrive(scratch["values free"].at[before])
                    out_ref[...] = result * rows_of(shrink, result.shape)
                    return maximum, sum_, exponentials.astype(dtype)

                s = scores(ring_slot(total, stages))
                maximum, sum_, _, exponentials = softmax(s, jnp.int32(0), full_rows(LEAST), full_rows(0.0))
                state = maximum, sum_, exponentials.astype(dtype)
                maximum, sum_, exponentials = lax.fori_loop(1, blocks, step, state)
                plgpu.barrier_arrive(scratch["queries free"].at[slot])
                last = ring_slot(total + blocks - 1, stages)
                add_values(exponentials, last)
                result = out_ref[...]
                plgpu.barrier_arrive(scratch["values free"].at[last])
                return result, maximum, sum_

            result, maximum, sum_ = pl.run_scoped(attend, plgpu.ACC((HALF, dim), jnp.float32))
            result = result * rows_of(1.0 / sum_, result.shape)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            log_sums = scratch["log sums"].at[warpgroup]
            log_sums[...] = maximum * bits + jnp.log2(sum_)
            store_half(result, scratch["out"].at[warpgroup], out.at[row, half_rows(query), head])
            plgpu.copy_smem_to_gmem(log_sums, sums.at[row, head, half_rows(query)])
            return total + blocks

        work.walk.each(tiles, block, work_item, jnp.int32(0))

    ring = tile_buffer(stages, block_keys, dim, dtype=dtype)
    call = launch(
        copy,
        multiply,
        settings,
        name="attention_forward",
        out_type=(
            jax.ShapeDtypeStruct(queries.shape, dtype),
            jax.ShapeDtypeStruct((rows, heads, length), jnp.float32),
        ),
        scratch={
            "queries": tile_buffer(SLOTS, CONSUMERS, HALF, dim, dtype=dtype),
            "keys": ring,
            "values": ring,
            "out": tile_buffer(CONSUMERS, HALF, dim, dtype=dtype),
            "log sums": plgpu.SMEM((CONSUMERS, HALF), jnp.float32),
            "queries full": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=SLOTS),
            "queries free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=SLOTS),
            "keys full": plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            "keys free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            "values full": plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            "values free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        },
    )
    return call(queries, keys, values, bounds.limits, work.tiles)
