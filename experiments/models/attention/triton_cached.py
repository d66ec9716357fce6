"""A kernel for the attention of one new token a row, from its projections on: a program for each row and key-value head.

It norms and rotates its queries and its key, which as kernels of their own would each cost several memory latencies.
Softmax is online over blocks of slots (Milakov and Gimelshein 2018; Flash-Decoding, Dao et al. 2023). The program begins
with the new token, which it holds in registers and stores in the cache, then reads the row's prompt, then the generated
tokens; blocks without a visible slot are not read. Programs of rows that share a prompt run side by side, so that most of
them find it in the second-level cache of the GPU.
"""

import functools
from typing import NamedTuple

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
WARPS = 4
MANY_PROGRAMS = 1024
"""From here on programs wait for each other anyway, and three blocks in flight are best. Fewer programs take two, which
leaves room for more of them on a multiprocessor (64 rows of 8 heads: 40 instead of 48 microseconds)."""
SMALLEST_PRODUCT = 16
"""Rows of the smallest matrix that the matrix units multiply."""
LOG2_E = 1.4426950408889634


class Rotation(NamedTuple):
    """What becomes of a projection before it is a query or a key: the norm of each head, if there is one, then the rotation.

    Attributes:
        cos: fp32 [B, D / 2], of the new tokens' angles.
        sin: likewise.
        query_norm: fp32 [D], multiplier of a query of mean square 1, or None where queries are not normed.
        key_norm: the same of keys; None where `query_norm` is.
        epsilon: added to the mean square.
    """

    cos: Float[Array, "B half"]
    sin: Float[Array, "B half"]
    query_norm: Float[Array, " D"] | None = None
    key_norm: Float[Array, " D"] | None = None
    epsilon: float = 0.0


def attend_triton(
    projections: Float[Array, "B heads D"],
    rotation: Rotation,
    cache: KVCache,
    layer: int,
    first: Int[Array, " B"],
    *,
    scale: float,
    softcap: float | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B N D"], LayerCache]:
    """What `experiments.models.attention.cached.attend_cached` computes, of queries and keys that it norms and rotates.

    Args:
        projections: [B, N + 2 K, D] of the new tokens: queries, then keys, then values.
        rotation: of queries and keys; each of its two steps rounds to the dtype of `projections`, as the trainer's do.
        cache: before this token, its slots multiples of BLOCK.
        layer: which one.
        first: int32 [B], the first position that each row may read.
        scale: multiplier of the products.
        softcap: bound of the scaled products, or None.
        interpret: run the kernel in Pallas' interpreter.
    """
    held = cache.layers[layer]
    rows, heads, head_dim = projections.shape
    kv_heads = held.keys.shape[1]
    assert cache.prompt_of_row is not None
    scalars = (cache.prompt_of_row, cache.prompt_lengths, first, cache.filled[None])
    norms = () if rotation.query_norm is None else (rotation.query_norm, rotation.key_norm)
    operands = (*held, *scalars, projections, rotation.cos, rotation.sin, *norms)
    out_shape = jax.ShapeDtypeStruct((rows, heads - 2 * kv_heads, head_dim), projections.dtype)
    results = (out_shape, held.keys, held.values)
    whole = lambda x: pl.BlockSpec(x.shape, lambda b, k: (0,) * x.ndim)  # noqa: E731
    out, keys, values = pl.pallas_call(
        functools.partial(_kernel, epsilon=rotation.epsilon, scale=scale, softcap=softcap),
        grid=(rows, kv_heads),
        in_specs=list(map(whole, operands)),
        out_specs=list(map(whole, results)),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        input_output_aliases={LayerCache._fields.index("keys"): 1, LayerCache._fields.index("values"): 2},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=3 if rows * kv_heads >= MANY_PROGRAMS else 2),
        interpret=interpret,
        name="cached_attention",
    )(*operands)
    return out, held._replace(keys=keys, values=values)


def _rotated(load, norm_ref, cos, sin, epsilon):
    """One query a row, or one key, after norm and rotation; fp32 inside, each step rounded to the dtype of what is loaded.

    Args:
        load: from indices of features [D] to the projection's.
        norm_ref: [D], or None.
        cos: [D], of both features of each pair.
        sin: likewise, negative for the first of each pair.
        epsilon: of the norm.
    """
    size = cos.shape[0]
    features = lax.iota(jnp.int32, size)
    # A pair's features come from two loads, the second from the L1 cache: a kernel cannot swap halves of a register.
    pairs = [load(index) for index in (features, (features + size // 2) % size)]
    dtype = pairs[0].dtype
    own, other = (x.astype(jnp.float32) for x in pairs)
    if norm_ref is not None:
        inverse = lax.rsqrt(jnp.sum(own * own, axis=-1) / size + epsilon)
        inverse = inverse[:, None] if own.ndim == 2 else inverse
        own = (own * inverse * norm_ref[features]).astype(dtype).astype(jnp.float32)
        other = (other * inverse * norm_ref[(features + size // 2) % size]).astype(dtype).astype(jnp.float32)
    return (own * cos + other * sin).astype(dtype)


def _kernel(
    prompt_k_ref, prompt_v_ref, k_ref, v_ref, prompt_ref, length_ref, first_ref, filled_ref, projected_ref, cos_ref,
    sin_ref, *norm_and_result_refs, epsilon: float, scale: float, softcap: float | None,
):  # fmt: skip
    """All refs are whole arrays in the GPU's memory."""
    *norms, out_ref, k_out_ref, v_out_ref = norm_and_result_refs
    query_norm, key_norm = norms or (None, None)
    row, head = pl.program_id(0), pl.program_id(1)
    prompt, length, first, filled = prompt_ref[row], length_ref[row], first_ref[row], filled_ref[0]
    num_heads, size, kv_heads = out_ref.shape[1], out_ref.shape[2], k_ref.shape[1]
    group = num_heads // kv_heads
    # Repeated up to a matrix that the matrix units can multiply.
    padded = lax.iota(jnp.int32, max(SMALLEST_PRODUCT, pl.next_power_of_2(group)))
    heads = head * group + jnp.minimum(padded, group - 1)
    features = lax.iota(jnp.int32, size)
    cos = cos_ref[row, features % (size // 2)]
    sin = sin_ref[row, features % (size // 2)] * jnp.where(features < size // 2, -1.0, 1.0)
    of_queries = lambda index: projected_ref[row, heads[:, None], index[None, :]]  # noqa: E731
    of_key = lambda index: projected_ref[row, num_heads + head, index]  # noqa: E731
    queries = _rotated(of_queries, query_norm, cos, sin, epsilon)
    new_key = _rotated(of_key, key_norm, cos, sin, epsilon)
    new_value = projected_ref[row, num_heads + kv_heads + head, :]
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
