"""A kernel for the attention of one new token a row, from its projections on.

A program has one key-value head of a few rows. It norms and rotates their queries and keys, which as kernels of their own
would each cost several memory latencies. Softmax is online over blocks of slots (Milakov and Gimelshein 2018;
Flash-Decoding, Dao et al. 2023). The program begins with the new tokens, which it holds in registers and stores in the
cache, then reads the prompt that its rows share, once for all of them (Hydragen, Juravsky et al. 2024), then what one row
after the other has generated; blocks without a visible slot are not read. All queries of the program are in one matrix, in
every product: the matrix units have no smaller one, and what a row's block gives to the queries of other rows is masked.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from experiments.models.attention.cache import KVCache, LayerCache, cache_spec
from experiments.models.attention.einsum import MASKED_SCORE, capped

BLOCK = 64
"""Slots of a block. Prompts and generated tokens have whole blocks of them."""
WARPS = 4
STAGES = 2
"""Blocks in flight. More of them leave room for fewer programs on a multiprocessor; FEWEST_PROGRAMS need no more."""
FEWEST_PROGRAMS = 512
"""Rows that share a prompt have programs of their own rather than leave fewer programs than this."""
SMALLEST_PRODUCT = 16
"""Rows of the smallest matrix that the matrix units multiply."""
LOG2_E = 1.4426950408889634


class NormAndRotation(NamedTuple):
    """What becomes of a projection before it is a query or a key: the norm of each head, if there is one, then the rotation.

    cos and sin are those of the new tokens' angles. The norms are multipliers of a query and of a key of mean square 1, to
    which `epsilon` is added, all in fp32; both are None where nothing is normed.
    """

    cos: Float[Array, "B half"]
    sin: Float[Array, "B half"]
    query_norm: Float[Array, " D"] | None = None
    key_norm: Float[Array, " D"] | None = None
    epsilon: float = 0.0


class _Arithmetic(NamedTuple):
    epsilon: float
    scale: float
    softcap: float | None


def attend_triton(
    projections: Float[Array, "B shards heads D"],
    preparation: NormAndRotation,
    cache: KVCache,
    first: Int[Array, " B"],
    *,
    mesh: Mesh | None = None,
    scale: float,
    softcap: float | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B N D"], LayerCache]:
    """Computes `experiments.models.attention.cached.attend_cached`, of queries and keys that it norms and rotates.

    `projections` are [B, shards, (N + 2 K) / shards, D] of the new tokens: for each tensor rank its queries, then its keys,
    then its values. Each step of `preparation` rounds to their dtype, as the trainer's do. The slots of the cache are
    multiples of BLOCK, and `first` is the first position that each row may read. Rows and heads are split over the mesh:
    each device runs the kernel on its own. `interpret` runs the kernel in Pallas' interpreter.
    """
    (held,) = cache.layers
    assert cache.prompt_of_row is not None
    filled = jnp.broadcast_to(cache.filled, cache.prompt_lengths.shape)
    own_rows = (cache.prompt_of_row, cache.prompt_lengths, first, preparation.cos, preparation.sin, filled)
    norms = () if preparation.query_norm is None else (preparation.query_norm, preparation.key_norm)
    arithmetic = _Arithmetic(preparation.epsilon, scale, softcap)
    call = functools.partial(_on_one_device, arithmetic, cache.copies, interpret)
    operands = (held, projections, own_rows, norms)
    if mesh is None or mesh.size == 1:
        return call(*operands)
    split = cache_spec(held.prompt_keys.shape, mesh)
    in_specs = (split, split, P(split[0]), P())
    return jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=split, check_vma=False)(*operands)


def _on_one_device(
    arithmetic: _Arithmetic, copies: int, interpret: bool, held: LayerCache, projections, own_rows, shared
):
    rows, _, heads, head_dim = projections.shape
    kv_heads = held.keys.shape[1]
    operands = (*held, projections[:, 0], *own_rows, *shared)
    out_shape = jax.ShapeDtypeStruct((rows, heads - 2 * kv_heads, head_dim), projections.dtype)
    results = (out_shape, held.keys, held.values)
    whole = lambda x: pl.BlockSpec(x.shape, lambda b, k: (0,) * x.ndim)  # noqa: E731
    together = rows_of_program(copies, out_shape.shape[1] // kv_heads, rows * kv_heads)
    out, keys, values = pl.pallas_call(
        functools.partial(_kernel, together=together, arithmetic=arithmetic),
        grid=(rows // together, kv_heads),
        in_specs=list(map(whole, operands)),
        out_specs=list(map(whole, results)),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        input_output_aliases={LayerCache._fields.index("keys"): 1, LayerCache._fields.index("values"): 2},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="cached_attention",
    )(*operands)
    return out, held._replace(keys=keys, values=values)


def rows_of_program(copies: int, group: int, pairs: int) -> int:
    """Returns how many rows that share a prompt a program takes.

    `copies` adjacent rows surely share one; `group` query heads share a key-value head; `pairs` is rows times key-value
    heads.
    """
    rows = 1
    while copies % (2 * rows) == 0 and 2 * rows * group <= SMALLEST_PRODUCT and pairs // (2 * rows) >= FEWEST_PROGRAMS:
        rows *= 2
    return rows


def _queries(together: int, group: int, kv_head) -> tuple[Array, Array]:
    """Returns batch rows and heads, int32 [M], of a program's queries, row after row; the last repeats as padding."""
    number = together * group
    place = jnp.minimum(lax.iota(jnp.int32, max(SMALLEST_PRODUCT, pl.next_power_of_2(number))), number - 1)
    return pl.program_id(0) * together + place // group, kv_head * group + place % group


def _rotated(load, norm_ref, cos, sin, epsilon):
    """Returns queries or keys [M, D] after norm and rotation; fp32 inside, each step rounded to the dtype of what is loaded.

    `load` maps indices of features [D] to the projections'. `cos` and `sin`, [D], are of both features of each pair; `sin`
    is negative for the first. `norm_ref` is [D], or None.
    """
    size = cos.shape[0]
    features = lax.iota(jnp.int32, size)
    # A pair's features come from two loads, the second from the L1 cache: a kernel cannot swap halves of a register.
    pairs = [load(index) for index in (features, (features + size // 2) % size)]
    dtype = pairs[0].dtype
    own, other = (x.astype(jnp.float32) for x in pairs)
    if norm_ref is not None:
        inverse = lax.rsqrt(jnp.sum(own * own, axis=-1) / size + epsilon)[:, None]
        own = (own * inverse * norm_ref[features]).astype(dtype).astype(jnp.float32)
        other = (other * inverse * norm_ref[(features + size // 2) % size]).astype(dtype).astype(jnp.float32)
    return (own * cos + other * sin).astype(dtype)


def _kernel(
    prompt_k_ref, prompt_v_ref, k_ref, v_ref, projected_ref, prompt_ref, length_ref, first_ref, cos_ref, sin_ref,
    filled_ref, *norm_and_result_refs, together: int, arithmetic: _Arithmetic,
):  # fmt: skip
    """All refs are whole arrays in the GPU's memory."""
    *norms, out_ref, k_out_ref, v_out_ref = norm_and_result_refs
    query_norm, key_norm = norms or (None, None)
    row, head = pl.program_id(0) * together, pl.program_id(1)
    prompt, length, first, filled = prompt_ref[row], length_ref[row], first_ref[row], filled_ref[row]
    num_heads, size, kv_heads = out_ref.shape[1], out_ref.shape[2], k_ref.shape[1]
    group = num_heads // kv_heads
    rows, heads = _queries(together, group, head)
    features = lax.iota(jnp.int32, size)
    # Rows that share a prompt are at one position.
    cos = cos_ref[row, features % (size // 2)]
    sin = sin_ref[row, features % (size // 2)] * jnp.where(features < size // 2, -1.0, 1.0)

    def projected(of_query):
        return lambda index: projected_ref[rows[:, None], of_query[:, None], index[None, :]]

    queries = _rotated(projected(heads), query_norm, cos, sin, arithmetic.epsilon)
    new_keys = _rotated(projected(jnp.full_like(heads, num_heads + head)), key_norm, cos, sin, arithmetic.epsilon)
    new_values = projected(jnp.full_like(heads, num_heads + kv_heads + head))(features)
    # Queries of one row store the same key and value.
    k_out_ref[rows[:, None], head, filled, features[None, :]] = new_keys
    v_out_ref[rows[:, None], head, filled, features[None, :]] = new_values

    def in_bits(products):
        return capped(products * arithmetic.scale, arithmetic.softcap) * LOG2_E

    def read(keys_ref, values_ref, index, block, seen, readers, carry):
        """The state after a block of one row of the arrays: `seen` says which slots are read, `readers` [M] by whom."""
        largest, total, mixed = carry
        here = (index, head, pl.ds(block * BLOCK, BLOCK), slice(None))
        scores = in_bits(plgpu.dot(queries, keys_ref[here], trans_b=True))
        visible = seen(block * BLOCK + lax.broadcasted_iota(jnp.int32, scores.shape, 1)) & readers[:, None]
        scores = jnp.where(visible, scores, MASKED_SCORE)
        larger = jnp.maximum(largest, scores.max(axis=1))
        kept = jnp.exp2(largest - larger)
        exponentials = jnp.where(visible, jnp.exp2(scores - larger[:, None]), 0.0)
        # Zeros times what is not finite would spoil other rows' queries.
        part = jnp.where(readers[:, None], plgpu.dot(exponentials.astype(queries.dtype), values_ref[here]), 0.0)
        return larger, total * kept + exponentials.sum(axis=1), mixed * kept[:, None] + part

    def of_prompt(block, carry):
        seen = lambda slots: (slots >= first) & (slots < length)  # noqa: E731
        everyone = rows >= row
        return read(prompt_k_ref, prompt_v_ref, prompt, block, seen, everyone, carry)

    own_first = jnp.maximum(first - length, 0)
    begin, end = own_first // BLOCK, pl.cdiv(filled, BLOCK)

    def of_generated(step, carry):
        # One loop over the blocks of all rows: a row's first block is fetched while the previous row's last is in use.
        owner, block = row + step // (end - begin), begin + step % (end - begin)
        seen = lambda slots: (slots >= own_first) & (slots < filled)  # noqa: E731
        return read(k_ref, v_ref, owner, block, seen, rows == owner, carry)

    scores = in_bits(jnp.sum(queries.astype(jnp.float32) * new_keys.astype(jnp.float32), axis=1))
    carry = (scores, jnp.ones_like(scores), new_values.astype(jnp.float32))
    carry = lax.fori_loop(first // BLOCK, pl.cdiv(length, BLOCK), of_prompt, carry)
    _, total, mixed = lax.fori_loop(0, together * (end - begin), of_generated, carry)
    out_ref[rows[:, None], heads[:, None], features[None, :]] = (mixed / total[:, None]).astype(out_ref.dtype)
