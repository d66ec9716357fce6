"""Attention a block of queries by a block of keys at a time, in plain JAX: memory grows with T, not with T².

Softmax is online (Milakov and Gimelshein 2018; Rabe and Staats 2021; FlashAttention, Dao et al. 2022): the forward pass
keeps the log-sum-exp of every query, from which the backward pass makes each block's probabilities again. Key blocks that
no query of a block may read are not visited, forward or backward: a long row of short documents costs what its documents
cost. Loops run over blocks, and their bounds are data.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from experiments.models.attention.call import padded_first
from experiments.models.attention.einsum import MASKED_SCORE, capped, precision_of
from experiments.models.remat import named

BLOCK = 128
"""Queries, and keys, of a block: on a CPU four times faster than 512."""


class Options(NamedTuple):
    block: int
    scale: float
    softcap: float | None


def attend_chunked(
    queries: Float[Array, "B T N D"],
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K D"],
    first: Int[Array, "B T"],
    *,
    scale: float,
    softcap: float | None = None,
    block: int = BLOCK,
) -> Float[Array, "B T N D"]:
    """Computes `attend_packed`, block by block."""
    rows, length, heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    block = min(block, length)
    padding = -length % block
    pad = lambda x: jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))  # noqa: E731
    grouped = pad(queries).reshape(rows, length + padding, kv_heads, heads // kv_heads, head_dim)
    by_head = (
        grouped.transpose(0, 2, 3, 1, 4),
        pad(keys).transpose(0, 2, 1, 3),
        pad(values).transpose(0, 2, 1, 3),
    )
    out = _attend(Options(block, scale, softcap), *by_head, padded_first(first, block))
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, -1, heads, head_dim)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, queries, keys, values, first):
    """Queries [B, K, G, T, D], keys and values [B, K, T, D], T a multiple of the block."""
    return _forward(options, queries, keys, values, first)[0]


def _forward(options: Options, queries, keys, values, first):
    block, num_blocks = options.block, keys.shape[2] // options.block
    lowest = _lowest_key_blocks(options, first)

    def one_block(_, index):
        q = _slice(queries, index, block, axis=3)

        def step(key_index, carry):
            largest, total, mixed = carry
            scores, visible = _scores(options, q, keys, first, index, key_index)[:2]
            scores = jnp.where(visible, scores, MASKED_SCORE)
            larger = jnp.maximum(largest, scores.max(-1))
            kept = jnp.exp(largest - larger)
            exponentials = jnp.where(visible, jnp.exp(scores - larger[..., None]), 0.0)
            v = _slice(values, key_index, block, axis=2)
            mixed = mixed * kept[..., None] + _product("bkgts,bksd->bkgtd", exponentials.astype(v.dtype), v)
            return larger, total * kept + exponentials.sum(-1), mixed

        shape = q.shape[:-1]
        start = (jnp.full(shape, MASKED_SCORE), jnp.zeros(shape), jnp.zeros((*shape, values.shape[-1])))
        start = jax.tree.map(lambda x: x.astype(jnp.float32), start)
        largest, total, mixed = lax.fori_loop(lowest[index], index + 1, step, start)
        return None, ((mixed / total[..., None]).astype(values.dtype), largest + jnp.log(total))

    _, (out, log_sums) = lax.scan(one_block, None, jnp.arange(num_blocks, dtype=jnp.int32))
    return _joined(out, axis=3), _joined(log_sums, axis=3)


def _forward_rule(options: Options, queries, keys, values, first):
    out, log_sums = (named("attended", x) for x in _forward(options, queries, keys, values, first))
    return out, (queries, keys, values, first, out, log_sums)


def _backward_rule(options: Options, residuals, d_out):
    queries, keys, values, first, out, log_sums = residuals
    block, num_blocks = options.block, keys.shape[2] // options.block
    lowest = _lowest_key_blocks(options, first)
    # Σ_s p · dp, which the gradient of a softmax subtracts.
    centres = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)

    def one_block(carry, index):
        q, d_o, log_sum, centre = (_slice(x, index, block, axis=3) for x in (queries, d_out, log_sums, centres))

        def step(key_index, carry):
            d_q, d_keys, d_values = carry
            scores, visible, k, slope = _scores(options, q, keys, first, index, key_index)
            v = _slice(values, key_index, block, axis=2)
            probabilities = jnp.where(visible, jnp.exp(scores - log_sum[..., None]), 0.0)
            d_v = _product("bkgts,bkgtd->bksd", probabilities.astype(v.dtype), d_o)
            d_scores = probabilities * (_product("bkgtd,bksd->bkgts", d_o, v) - centre[..., None]) * slope
            d_scores = d_scores.astype(k.dtype)
            d_k = _product("bkgts,bkgtd->bksd", d_scores, q)
            d_q = d_q + _product("bkgts,bksd->bkgtd", d_scores, k)
            return d_q, _add(d_keys, d_k, key_index * block), _add(d_values, d_v, key_index * block)

        d_q, *carry = lax.fori_loop(lowest[index], index + 1, step, (jnp.zeros(q.shape, jnp.float32), *carry))
        return tuple(carry), (d_q * options.scale).astype(q.dtype)

    start = (jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32))
    (d_keys, d_values), d_queries = lax.scan(one_block, start, jnp.arange(num_blocks, dtype=jnp.int32))
    d_keys = (d_keys * options.scale).astype(keys.dtype)
    return _joined(d_queries, axis=3), d_keys, d_values.astype(values.dtype), None


_attend.defvjp(_forward_rule, _backward_rule)


def _scores(options: Options, q, keys, first, index, key_index):
    """Returns capped scores [B, K, G, t, s] of two blocks, which of them count, the keys, and d score / d (scale · q·k)."""
    k = _slice(keys, key_index, options.block, axis=2)
    scores = capped(_product("bkgtd,bksd->bkgts", q, k) * options.scale, options.softcap)
    slope = 1.0 if options.softcap is None else 1.0 - jnp.square(scores / options.softcap)
    slots = jnp.arange(options.block, dtype=jnp.int32)
    key_slots = key_index * options.block + slots
    begins = _slice(first, index, options.block, axis=1)
    visible = (begins[:, :, None] <= key_slots) & (key_slots <= (index * options.block + slots)[:, None])
    return scores, visible[:, None, None], k, slope


def _lowest_key_blocks(options: Options, first: Int[Array, "B T"]) -> Int[Array, " blocks"]:
    """Returns the first key block that any query of each query block may read, over all rows."""
    return first.min(0).reshape(-1, options.block).min(1) // options.block


def _product(spec: str, left: Array, right: Array) -> Array:
    return jnp.einsum(spec, left, right, precision=precision_of(right.dtype), preferred_element_type=jnp.float32)


def _slice(x: Array, index: Array, block: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, index * block, block, axis)


def _add(x: Array, part: Array, start: Array) -> Array:
    block = part.shape[2]
    return lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(x, start, block, 2) + part, start, 2)


def _joined(blocks: Array, axis: int) -> Array:
    """Returns [blocks, ..., block, ...] as [..., blocks · block, ...], the blocks' slots at `axis` of what results."""
    moved = jnp.moveaxis(blocks, 0, axis)
    return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])
