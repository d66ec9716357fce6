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
    tables_of_features,
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
    kv_heads, slots = cache.shape[1] // 2, cache.shape[2]
    assert slots % SLOTS == 0, "the last slots would be read beyond their row"
    tokens = min(length, max(1, MOST_QUERIES * kv_heads // (heads - 2 * kv_heads)))
    norms = () if preparation.query_norm is None else (preparation.query_norm, preparation.key_norm)
    operands = (cache, projections, starts, preparation.cos, preparation.sin, *norms)
    results = (cache, jax.ShapeDtypeStruct((rows, length, heads - 2 * kv_heads, head_dim), projections.dtype))
    whole = lambda x: pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)  # noqa: E731
    arithmetic = Arithmetic(preparation.epsilon, scale, softcap)
    held, mixed = pl.pallas_call(
        functools.partial(_kernel, tokens=tokens, window=window, arithmetic=arithmetic),
        grid=(rows, kv_heads, pl.cdiv(length, tokens)),
        in_specs=list(map(whole, operands)),
        out_specs=list(map(whole, results)),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="block_attention",
    )(*operands)
    return mixed, held


class _Inputs(NamedTuple):
    """Whole arrays in the GPU's memory."""

    cache: Ref
    projected: Ref
    starts: Ref
    cos: Ref
    sin: Ref
    query_norm: Ref | None = None
    key_norm: Ref | None = None


class _Head(NamedTuple):
    """What a program reads: one row, by one key-value head."""

    inputs: _Inputs
    row: Array
    kv_head: Array
    epsilon: float

    @property
    def kv_heads(self) -> int:
        return self.inputs.cache.shape[1] // 2

    @property
    def features(self) -> Array:
        return lax.iota(jnp.int32, self.inputs.cache.shape[3])

    def rotated(self, token: Array, head: Array, norm_ref: Ref | None) -> Array:
        """Returns a head [M] of a token [M] of the block, normed and rotated: [M, D]."""
        inputs, of_token = self.inputs, (self.row, token[:, None])
        both = lambda pair: (inputs.cos[*of_token, pair[None, :]], inputs.sin[*of_token, pair[None, :]])  # noqa: E731
        load = lambda index: inputs.projected[*of_token, head[:, None], index[None, :]]  # noqa: E731
        return rotated(load, norm_ref, *tables_of_features(both, inputs.cache.shape[3]), self.epsilon)

    def new(self, token: Array) -> tuple[Array, Array]:
        """Returns keys and values [M, D] of tokens [M] of the block."""
        of_key = jnp.full_like(token, self.inputs.projected.shape[2] - 2 * self.kv_heads + self.kv_head)
        of_value = (self.row, token[:, None], (of_key + self.kv_heads)[:, None], self.features[None, :])
        return self.rotated(token, of_key, self.inputs.key_norm), self.inputs.projected[of_value]

    def held(self, number: Array) -> tuple[Array, Array, Array]:
        """Returns keys and values [SLOTS, D] of the cache's slots from SLOTS times this number on, and these slots."""
        keys, values = (
            self.inputs.cache[self.row, head, pl.ds(number * SLOTS, SLOTS), :]
            for head in (self.kv_head, self.kv_heads + self.kv_head)
        )
        return keys, values, number * SLOTS + lax.iota(jnp.int32, SLOTS)


def _padded(number: int) -> Array:
    """Returns the numbers below this one, as many as a product takes rows; the last one again as padding."""
    return jnp.minimum(lax.iota(jnp.int32, max(SMALLEST_PRODUCT, pl.next_power_of_2(number))), number - 1)


def _kernel(*refs: Ref, tokens: int, window: int | None, arithmetic: Arithmetic) -> None:
    """Stores keys and values of `tokens` tokens of the block, and attends from these to their row up to each."""
    inputs, (cache_ref, mixed_ref) = _Inputs(*refs[:-2]), refs[-2:]
    read, first = _Head(inputs, pl.program_id(0), pl.program_id(1), arithmetic.epsilon), pl.program_id(2) * tokens
    length, start, features = mixed_ref.shape[1], inputs.starts[read.row], read.features[None, :]
    own = jnp.minimum(first + _padded(tokens), length - 1)
    stored = (start + own)[:, None], features
    keys, values = read.new(own)
    cache_ref[read.row, read.kv_head, *stored] = keys
    cache_ref[read.row, read.kv_heads + read.kv_head, *stored] = values
    group = mixed_ref.shape[2] // read.kv_heads
    place = _padded(tokens * group)
    token, head = jnp.minimum(first + place // group, length - 1), read.kv_head * group + place % group
    queries, position = read.rotated(token, head, inputs.query_norm), (start + token)[:, None]

    def after(
        carry: tuple[Array, ...], keys: Array, values: Array, slot: Array, known: Any = True
    ) -> tuple[Array, ...]:
        visible = known & (slot[None, :] <= position)
        if window is not None:
            visible &= slot[None, :] > position - window
        return add_block(carry, arithmetic.in_bits(plgpu.dot(queries, keys, trans_b=True)), visible, values)

    def after_last_held(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        keys, values, slot = read.held(start // SLOTS)
        # What follows is being written, and zeros times what is not finite are not zeros.
        return after(carry, keys, jnp.where((slot < start)[:, None], values, 0), slot, (slot < start)[None, :])

    def after_new(number: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        new = number * SLOTS + _padded(min(SLOTS, length))
        slot = number * SLOTS + lax.iota(jnp.int32, len(new))
        return after(carry, *read.new(jnp.minimum(new, length - 1)), start + slot, (slot < length)[None, :])

    begin = 0 if window is None else jnp.maximum(start + first + 1 - window, 0) // SLOTS
    whole = lambda number, carry: after(carry, *read.held(number))  # noqa: E731
    carry = lax.fori_loop(begin, start // SLOTS, whole, nothing_seen(queries))
    carry = lax.cond(start % SLOTS > 0, after_last_held, lambda carry: carry, carry)
    if length <= SLOTS:
        carry = after_new(0, carry)
    else:
        carry = lax.fori_loop(0, pl.cdiv(jnp.minimum(first + tokens, length), SLOTS), after_new, carry)
    _, total, mixed = carry
    mixed_ref[read.row, token[:, None], head[:, None], features] = (mixed / total[:, None]).astype(mixed_ref.dtype)
