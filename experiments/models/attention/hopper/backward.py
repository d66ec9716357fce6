"""The two backward kernels: one owns queries and makes their gradient, the other owns keys and values.

Their pipelines follow tokamax' kernels for the same chips (Apache-2.0); what is new is that they begin and end where the
documents do.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from experiments.models.attention.hopper.bounds import BLOCK, TILE, Bounds
from experiments.models.attention.hopper.forward import queries_like
from experiments.models.attention.hopper.settings import (
    WARPGROUPS,
    Settings,
    along_columns,
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


def backward(queries: Any, keys: Any, values: Any, out: Any, sums: Any, d_out: Any, bounds: Bounds, settings: Settings):
    """Returns gradients of queries, keys and values; `sums` is `forward`'s second result."""
    # Σ_s p · dp of every query, which the gradient of a softmax subtracts.
    centres = jnp.einsum("btnd,btnd->bnt", out, d_out, preferred_element_type=jnp.float32)
    operands = (queries, keys, values, d_out, sums, centres)
    d_queries = _queries(*operands, bounds, settings)
    d_keys, d_values = _keys_and_values(*operands, bounds, settings)
    return d_queries, d_keys, d_values


def _queries(queries, keys, values, d_out, sums, centres, bounds: Bounds, settings: Settings):
    rows, length, heads, features = queries.shape
    group, dtype = heads // keys.shape[2], queries.dtype
    step_keys, stages = settings.d_queries
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    shape = (BLOCK, step_keys)

    def body(operands, outputs, q_smems, do_smems, barriers):
        q_gmem, k_gmem, v_gmem, do_gmem, sums_gmem, centres_gmem, first_gmem, lowest_gmem, highest_gmem = operands
        (dq_gmem,) = outputs
        row, head, tile, warpgroup = (lax.axis_index(name) for name in ("row", "head", "tile", "warpgroup"))
        kv_head = lax.div(head, jnp.asarray(group, head.dtype))
        begin = tile * TILE + warpgroup * BLOCK
        block = pl.ds(begin, BLOCK)
        low = lax.div(lowest_gmem[row, tile], step_keys)
        high = lax.div(tile * TILE + TILE + (step_keys - 1), step_keys)
        highest = highest_gmem[row, tile]
        q_smem, do_smem, barrier = (x.at[warpgroup] for x in (q_smems, do_smems, barriers))

        def compute(pipeline):
            plgpu.copy_gmem_to_smem(q_gmem.at[row, block, head], q_smem, barrier)
            plgpu.copy_gmem_to_smem(do_gmem.at[row, block, head], do_smem, barrier)
            per_query = (sums_gmem.at[row, head, block], centres_gmem.at[row, head, block], first_gmem.at[row, block])
            loaded = tuple(plgpu.load(x, layout=row_layout, optimized=False) for x in per_query)
            plgpu.barrier_wait(barrier)

            def all_steps(accumulator):
                pipeline((accumulator, *loaded))
                return accumulator[...] * settings.scale

            d_q = pl.run_scoped(all_steps, plgpu.ACC((BLOCK, features), jnp.float32))
            q_smem[...] = d_q.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem, dq_gmem.at[row, block, head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def step(index, k_smem, v_smem, k_consumed, v_consumed, carry):
            d_q, log_sum, centre, first = carry
            key = (low + index[0]) * step_keys

            def products(d_probabilities, products):
                plgpu.wgmma(d_probabilities, do_smem, v_smem.T)
                plgpu.wgmma(products, q_smem, k_smem.T)
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(v_consumed)
                return d_probabilities[...], products[...]

            accumulator = plgpu.ACC(shape, jnp.float32)
            d_probabilities, scores = pl.run_scoped(products, accumulator, accumulator)
            scores, slope = scores_in_bits(scores, settings)
            probabilities = jnp.exp2(scores - along_rows(log_sum, shape))

            def masked():
                slots = key + iota(shape, 1)
                visible = (slots <= begin + iota(shape, 0)) & (slots >= along_rows(first, shape))
                return jnp.where(visible, probabilities, 0.0)

            inside = (key + step_keys > begin) | (key < highest)
            probabilities = lax.cond(inside, masked, lambda: probabilities)
            d_scores = probabilities * (d_probabilities - along_rows(centre, shape))
            d_scores = d_scores if slope is None else d_scores * slope
            plgpu.wgmma(d_q, d_scores.astype(dtype), k_smem)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(k_consumed)
            return d_q, log_sum, centre, first

        pipelined(
            step,
            compute,
            grid=(high - low,),
            stages=stages,
            in_specs=[block_spec((step_keys, features), lambda i: (low + i, 0))] * 2,
        )(k_gmem.at[row, :, kv_head], v_gmem.at[row, :, kv_head])

    run = kernel(
        grouped(body, operands=9, outputs=1),
        name="attention_d_queries",
        out_type=queries_like(queries),
        scratch_types=(
            tile_buffer(BLOCK, features, dtype),
            tile_buffer(BLOCK, features, dtype),
            plgpu.Barrier(num_barriers=WARPGROUPS, num_arrivals=2),
        ),
        **launch(settings, (heads, length // TILE, rows)),
    )
    return run(queries, keys, values, d_out, sums, centres, bounds.first, bounds.lowest, bounds.highest)


def _keys_and_values(queries, keys, values, d_out, sums, centres, bounds: Bounds, settings: Settings):
    rows, length, heads, features = queries.shape
    kv_heads, dtype = keys.shape[2], queries.dtype
    step_queries, stages = settings.d_keys
    group = heads // kv_heads
    column_layout = plgpu.Layout.WGMMA.reduce(0)
    shape = (BLOCK, step_queries)

    def body(operands, outputs, k_smems, v_smems, barriers):
        q_gmem, k_gmem, v_gmem, do_gmem, sums_gmem, centres_gmem, first_gmem, highest_gmem, last_gmem = operands
        dk_gmem, dv_gmem = outputs
        row, kv_head, tile, warpgroup = (lax.axis_index(name) for name in ("row", "head", "tile", "warpgroup"))
        begin = tile * TILE + warpgroup * BLOCK
        block = pl.ds(begin, BLOCK)
        low = lax.div(tile * TILE, step_queries)
        high = lax.div(last_gmem[row, tile], step_queries) + 1
        k_smem, v_smem, barrier = (x.at[warpgroup] for x in (k_smems, v_smems, barriers))

        def compute(pipeline):
            plgpu.copy_gmem_to_smem(k_gmem.at[row, block, kv_head], k_smem, barrier)
            plgpu.copy_gmem_to_smem(v_gmem.at[row, block, kv_head], v_smem, barrier)
            plgpu.barrier_wait(barrier)

            def all_steps(d_k, d_v):
                pipeline((d_k, d_v))
                return d_k[...] * settings.scale, d_v[...]

            accumulator = plgpu.ACC((BLOCK, features), jnp.float32)
            d_k, d_v = pl.run_scoped(all_steps, accumulator, accumulator)
            k_smem[...] = d_k.astype(dtype)
            v_smem[...] = d_v.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_smem, dk_gmem.at[row, block, kv_head], commit_group=False)
            plgpu.copy_smem_to_gmem(v_smem, dv_gmem.at[row, block, kv_head], commit_group=False)
            plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def step(index, sums_smem, centres_smem, first_smem, do_smem, q_smem, *used_and_carry):
            *vectors_used, do_used, q_used, carry = used_and_carry
            d_k, d_v = carry
            query = (low + index[0]) * step_queries

            def products(accumulator):
                plgpu.wgmma(accumulator, k_smem, q_smem.T)
                vectors = [plgpu.load(x, layout=column_layout) for x in (sums_smem, centres_smem, first_smem)]
                for used in vectors_used:
                    plgpu.barrier_arrive(used)
                return accumulator[...], *vectors

            accumulator = plgpu.ACC(shape, jnp.float32)
            scores, log_sum, centre, first = pl.run_scoped(products, accumulator)
            scores, slope = scores_in_bits(scores, settings)
            probabilities = jnp.exp2(scores - along_columns(log_sum, shape))

            def masked():
                slots = begin + iota(shape, 0)
                visible = (slots <= query + iota(shape, 1)) & (slots >= along_columns(first, shape))
                return jnp.where(visible, probabilities, 0.0)

            inside = (begin + BLOCK > query) | (begin < highest_gmem[row, lax.div(query, TILE)])
            probabilities = lax.cond(inside, masked, lambda: probabilities)

            def d_products(accumulator):
                plgpu.wgmma(accumulator, v_smem, do_smem.T)
                plgpu.wgmma(d_v, probabilities.astype(dtype), do_smem)
                # The first product is read while the second runs.
                return plgpu.wgmma_accumulator_load(accumulator, wait_n=1)

            d_probabilities = pl.run_scoped(d_products, accumulator)
            d_scores = probabilities * (d_probabilities - along_columns(centre, shape))
            d_scores = d_scores if slope is None else d_scores * slope
            plgpu.wgmma(d_k, d_scores.astype(dtype), q_smem)
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(do_used)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(q_used)
            return d_k, d_v

        head_of = lambda j: kv_head * group + j  # noqa: E731
        vector = plgpu.BlockSpec((None, step_queries), lambda i, j: (head_of(j), low + i))
        first_spec = plgpu.BlockSpec((step_queries,), lambda i, j: (low + i,))
        features_spec = block_spec((step_queries, None, features), lambda i, j: (low + i, head_of(j), 0))
        pipelined(
            step,
            compute,
            grid=(high - low, group),
            stages=stages,
            in_specs=[vector, vector, first_spec, features_spec, features_spec],
        )(*(x.at[row] for x in (sums_gmem, centres_gmem, first_gmem, do_gmem, q_gmem)))

    run = kernel(
        grouped(body, operands=9, outputs=2),
        name="attention_d_keys_values",
        out_type=(queries_like(keys), queries_like(values)),
        scratch_types=(
            tile_buffer(BLOCK, features, dtype),
            tile_buffer(BLOCK, features, dtype),
            plgpu.Barrier(num_barriers=WARPGROUPS, num_arrivals=2),
        ),
        **launch(settings, (kv_heads, length // TILE, rows)),
    )
    return run(queries, keys, values, d_out, sums, centres, bounds.first, bounds.highest, bounds.last)
