"""A kernel for the attention of one new token a row: a program for each row and key-value head.

Softmax is online over blocks of slots (Milakov and Gimelshein 2018; Flash-Decoding, Dao et al. 2023). The program begins
with the new token, which it holds in registers and stores in the cache, then reads the row's prompt, then the generated
tokens; blocks without a visible slot are not read. Programs of rows that share a prompt run side by side, so that most of
them find it in the second-level cache of the GPU.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from experiments.models.attention.cache import KVCache, LayerCache
from experiments.models.attention.einsum import MASKED_SCORE, capped

BLOCK = 64
"""Slots of a block. Prompts and generated tokens have whole blocks of them."""
SMALLEST_PRODUCT = 16
"""Rows of the smallest matrix that the matrix units multiply."""
LOG2_E = 1.4426950408889634


def attend_triton(
    queries: Float[Array, "B N D"],
    new_keys: Float[Array, "B K D"],
    new_values: Float[Array, "B K D"],
    cache: KVCache,
    layer: int,
    first: Int[Array, " B"],
    *,
    scale: float,
    softcap: float | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B N D"], LayerCache]:
    """What `experiments.models.attention.cached.attend_cached` computes.

    Args:
        queries: [B, N, D].
        new_keys: [B, K, D].
        new_values: [B, K, D].
        cache: before this token, its slots multiples of BLOCK.
        layer: which one.
        first: int32 [B], the first position that each row may read.
        scale: multiplier of the products.
        softcap: bound of the scaled products, or None.
        interpret: run the kernel in Pallas' interpreter.
    """
    held = cache.layers[layer]
    rows, kv_heads = new_keys.shape[:2]
    assert cache.prompt_of_row is not None
    scalars = (cache.prompt_of_row, cache.prompt_lengths, first, cache.filled[None])
    operands = (*scalars, queries, new_keys, new_values, *held)
    results = (queries, held.keys, held.values)
    whole = lambda x: pl.BlockSpec(x.shape, lambda b, k: (0,) * x.ndim)  # noqa: E731
    out, keys, values = pl.pallas_call(
        functools.partial(_kernel, scale=scale, softcap=softcap),
        grid=(rows, kv_heads),
        in_specs=list(map(whole, operands)),
        out_specs=list(map(whole, results)),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        input_output_aliases={len(operands) - 2: 1, len(operands) - 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="cached_attention",
    )(*operands)
    return out, held._replace(keys=keys, values=values)


def _kernel(
    prompt_ref, length_ref, first_ref, filled_ref, q_ref, new_k_ref, new_v_ref, prompt_k_ref, prompt_v_ref, k_ref, v_ref,
    out_ref, k_out_ref, v_out_ref, *, scale: float, softcap: float | None,
):  # fmt: skip
    """All refs are whole arrays in the GPU's memory."""
    row, head = pl.program_id(0), pl.program_id(1)
    prompt, length, first, filled = prompt_ref[row], length_ref[row], first_ref[row], filled_ref[0]
    group = q_ref.shape[1] // new_k_ref.shape[1]
    # Repeated up to a matrix that the matrix units can multiply.
    padded = lax.iota(jnp.int32, max(SMALLEST_PRODUCT, pl.next_power_of_2(group)))
    heads = head * group + jnp.minimum(padded, group - 1)
    queries, new_key, new_value = q_ref[row, heads, :], new_k_ref[row, head, :], new_v_ref[row, head, :]
    k_out_ref[row, head, filled, :] = new_key
    v_out_ref[row, head, filled, :] = new_value

    def in_bits(products):
        return capped(products * scale, softcap) * LOG2_E

    def visit(keys_ref, values_ref, index, begin, end):
        """A step over the visible slots [begin, end) of one row of the arrays."""

        def step(block, carry):
            largest, total, mixed = carry
            here = (index, head, pl.ds(block * BLOCK, BLOCK), slice(None))
            scores = in_bits(plgpu.dot(queries, keys_ref[here], trans_b=True))
            slots = block * BLOCK + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            visible = (slots >= begin) & (slots < end)
            scores = jnp.where(visible, scores, MASKED_SCORE)
            larger = jnp.maximum(largest, scores.max(axis=1))
            kept = jnp.exp2(largest - larger)
            exponentials = jnp.where(visible, jnp.exp2(scores - larger[:, None]), 0.0)
            part = plgpu.dot(exponentials.astype(queries.dtype), values_ref[here])
            return larger, total * kept + exponentials.sum(axis=1), mixed * kept[:, None] + part

        return step

    scores = in_bits(jnp.sum(queries.astype(jnp.float32) * new_key.astype(jnp.float32)[None], axis=1))
    mixed = jnp.broadcast_to(new_value.astype(jnp.float32)[None], queries.shape)
    carry = (scores, jnp.ones_like(scores), mixed)
    own_first = jnp.maximum(first - length, 0)
    for refs, index, begin, end in (
        ((prompt_k_ref, prompt_v_ref), prompt, first, length),
        ((k_ref, v_ref), row, own_first, filled),
    ):
        blocks = (begin // BLOCK, pl.cdiv(end, BLOCK))
        carry = lax.fori_loop(*blocks, visit(*refs, index, begin, end), carry)
    _, total, mixed = carry
    result = (mixed / total[:, None]).astype(out_ref.dtype)
    own = (head * group + padded)[:, None]
    features = lax.broadcasted_iota(jnp.int32, result.shape, 1)
    visible = jnp.broadcast_to((padded < group)[:, None], result.shape)
    plgpu.store(out_ref.at[row, own, features], result, mask=visible)
