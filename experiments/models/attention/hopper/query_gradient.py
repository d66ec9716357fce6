"""Kernel of the queries' gradient, which also finds what the keys' gradient needs of each query."""

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

KEYS = {128: 64, 64: 64}
"""Keys of a block, by features of a head. 128 keys do not fit into the registers with 128 features, and
bring nothing with 64."""
STAGES = {128: 3, 64: 6}
"""Blocks of keys and values in flight. With 2 of them it took 0.434 instead of 0.367 ms with 128 features."""


def query_gradient(
    queries: Float[Array, "B T N D"],
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K D"],
    out: Float[Array, "B T N D"],
    sums: Float[Array, "B N T"],
    d_out: Float[Array, "B T N D"],
    bounds: Bounds,
    settings: Settings,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Returns dq and, in fp32, Σ out · d_out of each query.

    Probabilities p are computed again from the stored sums, and dq = scale · Σ p (d_out · v - Σ out · d_out) k.
    """
    dim, dtype = queries.shape[3], queries.dtype
    block_keys, stages = KEYS[dim], STAGES[dim]
    work = QueryTiles.of(queries, keys, bounds, settings)
    bits, shape = settings.bits, (HALF, block_keys)

    def copy(block, refs, scratch):
        queries, keys, values, out, d_out, _, _, tiles, *_ = refs

        def copy_item(item, total, row, unit, start, lowest, highest):
            await_free(scratch["tiles free"], item, 1)
            for consumer in range(CONSUMERS):
                head, query = work.queries_of(start, unit, consumer)
                for source, buffer in ((out, "out"), (d_out, "d_out"), (queries, "queries")):
                    here = source.at[row, half_rows(query), head]
                    plgpu.copy_gmem_to_smem(here, scratch[buffer].at[consumer], scratch["tiles full"].at[0])
            begin, blocks = work.keys_of(start, lowest, block_keys)
            kv_head = work.kv_head(unit)

            def copy_block(index, total):
                here, stage = pl.ds(begin + index * block_keys, block_keys), ring_slot(total, stages)
                await_free(scratch["free"], total, stages)
                for source, ring in ((keys, "keys"), (values, "values")):
                    here_ = source.at[row, here, kv_head]
                    plgpu.copy_gmem_to_smem(here_, scratch[ring].at[stage], scratch["full"].at[stage])
                return total + 1

            return lax.fori_loop(0, blocks, copy_block, total)

        items, total = work.walk.each(tiles, block, copy_item, jnp.int32(0))
        drain(scratch["free"], total, stages)
        drain(scratch["tiles free"], items, 1)

    def multiply(warpgroup, block, refs, scratch):
        *_, sums, limits, tiles, dq, deltas = refs

        def work_item(item, total, row, unit, start, lowest, highest):
            head, query = work.queries_of(start, unit, warpgroup)
            begin, blocks = work.keys_of(start, lowest, block_keys)
            own_limits = load_rows(limits.at[row, 0, half_rows(query)]), load_rows(limits.at[row, 1, half_rows(query)])
            log_sum = load_rows(sums.at[row, head, half_rows(query)])
            plgpu.barrier_wait(scratch["tiles full"].at[0])
            # Left operands of all blocks stay in shared memory: in registers the compiler wrote others over them with 64
            # features (ptxas 13.0), and they gained nothing with 128.
            own, gradient = scratch["queries"].at[warpgroup], scratch["d_out"].at[warpgroup]
            results, gradients = (
                plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                for ref in (scratch["out"].at[warpgroup], gradient)
            )
            delta = jnp.sum(results * gradients, axis=1)

            def sum_blocks(dq_ref):
                def step(index, _):
                    stage = ring_slot(total + index, stages)
                    key = begin + index * block_keys

                    def score_gradients(s_ref, dp_ref):
                        plgpu.barrier_wait(scratch["full"].at[stage])
                        plgpu.wgmma(s_ref, own, scratch["keys"].at[stage].transpose((1, 0)))
                        plgpu.wgmma(dp_ref, gradient, scratch["values"].at[stage].transpose((1, 0)))
                        x = capped(plgpu.wgmma_accumulator_load(s_ref, wait_n=1), settings)
                        p = jnp.exp2(x * bits - rows_of(log_sum, shape))
                        p = lax.cond(
                            work.at_edge(highest, query, key, block_keys),
                            lambda p: jnp.where(work.visible(own_limits, key, shape), p, 0.0),
                            lambda p: p,
                            p,
                        )
                        if settings.softcap is not None:
                            p = p * (1.0 - x * x)
                        return p * (dp_ref[...] - rows_of(delta, shape))

                    accumulators = (plgpu.ACC(shape, jnp.float32),) * 2
                    ds = pl.run_scoped(score_gradients, *accumulators).astype(dtype)

                    # The wait for these products was one for that of the step before, too.
                    @pl.when(index > 0)
                    def _():
                        plgpu.barrier_arrive(scratch["free"].at[ring_slot(total + index - 1, stages)])

                    plgpu.wgmma(dq_ref, ds, scratch["keys"].at[stage])

                lax.fori_loop(0, blocks, step, None)
                total_gradient = dq_ref[...]
                plgpu.barrier_arrive(scratch["free"].at[ring_slot(total + blocks - 1, stages)])
                plgpu.barrier_arrive(scratch["tiles free"].at[0])
                return total_gradient

            total_gradient = pl.run_scoped(sum_blocks, plgpu.ACC((HALF, dim), jnp.float32))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            own_deltas = scratch["deltas"].at[warpgroup]
            own_deltas[...] = delta
            own_rows = half_rows(query)
            store_half(total_gradient * settings.scale, scratch["dq"].at[warpgroup], dq.at[row, own_rows, head])
            plgpu.copy_smem_to_gmem(own_deltas, deltas.at[row, head, own_rows])
            return total + blocks

        work.walk.each(tiles, block, work_item, jnp.int32(0))

    halves = tile_buffer(CONSUMERS, HALF, dim, dtype=dtype)
    ring = tile_buffer(stages, block_keys, dim, dtype=dtype)
    call = launch(
        copy,
        multiply,
        settings,
        name="attention_query_gradient",
        out_type=(jax.ShapeDtypeStruct(queries.shape, dtype), jax.ShapeDtypeStruct(sums.shape, jnp.float32)),
        scratch={
            "out": halves,
            "d_out": halves,
            "queries": halves,
            "keys": ring,
            "values": ring,
            "dq": halves,
            "deltas": plgpu.SMEM((CONSUMERS, HALF), jnp.float32),
            "tiles full": plgpu.Barrier(num_arrivals=3 * CONSUMERS, num_barriers=1),
            "tiles free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=1),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        },
    )
    return call(queries, keys, values, out, d_out, sums, bounds.limits, work.tiles)
