"""A kernel for the attention of a block of tokens a row over a cache of whole rows, from their projections on.

A program has some tokens' query heads of one key-value head. It norms and rotates their queries and keys, and stores keys
and values in the cache; then it reads the slots before the row's block, and the tokens of the block from their projections:
no program waits for what another one stores. Softmax is online (Milakov and Gimelshein 2018). Where a row's block begins
decides in which order its slots are read, so that the result has the same bits whatever other rows and later slots hold.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from experiments.models.attention.cache import RowCache
from experiments.models.attention.triton_cached import (
    SMALLEST_PRODUCT,
    Arithmetic,
    NormAndRotation,
    add_block,
    nothing_seen,
    rotated,
)

MOST_QUERIES = 64
"""Rows of the largest product; a longer block has several programs."""
SLOTS = 32
"""Slots that are read at a time."""
WARPS = 2
STAGES = 2
"""Blocks in flight. So the kernel reads at four fifths of what the memory of an H100 gives; 16 to 128 slots, 2 and 3 blocks
in flight and 1 to 4 warps were slower, by up to a half (benchmarks/results/invariant_gpu.md)."""
Ref = Any


def attend_block_triton(
    projections: Float[Array, "B C heads D"],
    preparation: NormAndRotation,
    cache: RowCache,
    starts: Int[Array, " B"],
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B C N D"], RowCache]:
    """Attends from a block of each row's tokens to its row up to each; returns the result, and the cache with the block.

    `projections` are N queries, K keys and K values of each token, and `preparation` is of these tokens; the block begins at
    slot `starts`. The slots of the cache are a multiple of SLOTS. A window counts the token itself.
    """
    rows, length, heads, head_dim = projections.shape
    kv_heads = cache.keys.shape[1]
    tokens = min(length, max(1, MOST_QUERIES * kv_heads // (heads - 2 * kv_heads)))
    norms = () if preparation.query_norm is None else (preparation.query_norm, preparation.key_norm)
    operands = (*cache, projections, starts, preparation.cos, preparation.sin, *norms)
    results = (*cache, jax.ShapeDtypeStruct((rows, length, heads - 2 * kv_heads, head_dim), projections.dtype))
    whole = lambda x: pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)  # noqa: E731
    arithmetic = Arithmetic(preparation.epsilon, scale, softcap)
    *held, mixed = pl.pallas_call(
        functools.partial(_kernel, tokens=tokens, window=window, arithmetic=arithmetic),
        grid=(rows, kv_heads, pl.cdiv(length, tokens)),
        in_specs=list(map(whole, operands)),
        out_specs=list(map(whole, results)),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="block_attention",
    )(*operands)
    return mixed, RowCache(*held)


class _Inputs(NamedTuple):
    """Whole arrays in the GPU's memory."""

    keys: Ref
    values: Ref
    projected: Ref
    starts: Ref
    cos: Ref
    sin: Ref
    query_norm: Ref | None = None
    key_norm: Ref | None = None


def _kernel(*refs: Ref, tokens: int, window: int | None, arithmetic: Arithmetic) -> None:
    inputs, (held_keys_ref, held_values_ref, mixed_ref) = _Inputs(*refs[:-3]), refs[-3:]
    row, kv_head, first = pl.program_id(0), pl.program_id(1), pl.program_id(2) * tokens
    (_, length, num_heads, size), kv_heads = mixed_ref.shape, inputs.keys.shape[1]
    group, start = num_heads // kv_heads, inputs.starts[row]
    features = lax.iota(jnp.int32, size)

    def rows_of(number: int) -> Array:
        """The numbers below this one, as many as a product takes rows; the last one again as padding."""
        return jnp.minimum(lax.iota(jnp.int32, max(SMALLEST_PRODUCT, pl.next_power_of_2(number))), number - 1)

    def projected(token: Array, head: Array, norm_ref: Ref | None) -> Array:
        half = features[None, :] % (size // 2)
        sign = jnp.where(features < size // 2, -1.0, 1.0)
        tables = inputs.cos[row, token[:, None], half], inputs.sin[row, token[:, None], half] * sign[None, :]
        load = lambda index: inputs.projected[row, token[:, None], head[:, None], index[None, :]]  # noqa: E731
        return rotated(load, norm_ref, *tables, arithmetic.epsilon)

    def new_keys_and_values(token: Array) -> tuple[Array, Array]:
        of_key = jnp.full_like(token, num_heads + kv_head)
        values = inputs.projected[row, token[:, None], (of_key + kv_heads)[:, None], features[None, :]]
        return projected(token, of_key, inputs.key_norm), values

    own = jnp.minimum(first + rows_of(tokens), length - 1)
    stored = (row, kv_head, (start + own)[:, None], features[None, :])
    held_keys_ref[stored], held_values_ref[stored] = new_keys_and_values(own)

    place = rows_of(tokens * group)
    token, head = jnp.minimum(first + place // group, length - 1), kv_head * group + place % group
    queries = projected(token, head, inputs.query_norm)

    def read(keys: Array, values: Array, slot: Array, carry: tuple[Array, ...], known: Any = True) -> tuple[Array, ...]:
        scores = arithmetic.in_bits(plgpu.dot(queries, keys, trans_b=True))
        position = (start + token)[:, None]
        visible = known & (slot[None, :] <= position)
        if window is not None:
            visible &= slot[None, :] > position - window
        return add_block(carry, scores, visible, values)

    def held(block: Array) -> tuple[Array, Array, Array]:
        here = (row, kv_head, pl.ds(block * SLOTS, SLOTS), slice(None))
        return inputs.keys[here], inputs.values[here], block * SLOTS + lax.iota(jnp.int32, SLOTS)

    def whole_block(block: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        return read(*held(block), carry)

    def part_of_block(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        keys, values, slot = held(start // SLOTS)
        # What follows is being written, and zeros times what is not finite are not zeros.
        return read(keys, jnp.where((slot < start)[:, None], values, 0), slot, carry, (slot < start)[None, :])

    def new_block(block: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        number = block * SLOTS + rows_of(min(SLOTS, length))
        keys, values = new_keys_and_values(jnp.minimum(number, length - 1))
        new = block * SLOTS + lax.iota(jnp.int32, len(number))
        return read(keys, values, start + new, carry, (new < length)[None, :])

    begin = 0 if window is None else jnp.maximum(start + first + 1 - window, 0) // SLOTS
    carry = lax.fori_loop(begin, start // SLOTS, whole_block, nothing_seen(queries))
    carry = lax.cond(start % SLOTS > 0, part_of_block, lambda carry: carry, carry)
    if length <= SLOTS:
        carry = new_block(0, carry)
    else:
        carry = lax.fori_loop(0, pl.cdiv(jnp.minimum(first + tokens, length), SLOTS), new_block, carry)
    _, total, mixed = carry
    mixed_ref[row, token[:, None], head[:, None], features[None, :]] = (mixed / total[:, None]).astype(mixed_ref.dtype)
