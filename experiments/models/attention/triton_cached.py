"""A kernel for the attention of one new token a row, from its projections on.

A program has one key-value head of a few rows. It norms and rotates their queries and keys, which as kernels of their own
would each cost several memory latencies. Softmax is online over blocks of slots (Milakov and Gimelshein 2018;
Flash-Decoding, Dao et al. 2023). The program begins with the new tokens, which it holds in registers and stores in the
cache, then reads the prompt that its rows share, once for all of them (Hydragen, Juravsky et al. 2024), then what one row
after the other has generated; blocks without a visible slot are not read. All queries of the program are in one matrix, in
every product: the matrix units have no smaller one, and what a row's block gives to the queries of other rows is masked.

A long row would keep its program busy long after the others. Where rows may become long, a program therefore has a share of
its rows' blocks, and long rows have several programs (`experiments.models.attention.shares`).
"""

import functools
from typing import Any, NamedTuple

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
from experiments.models.attention.shares import Shares, deal_blocks, put_together

BLOCK = 64
"""Slots of a block. Prompts and generated tokens have whole blocks of them."""
WARPS = 4
STAGES = 2
"""Blocks in flight. More of them leave room for fewer programs on a multiprocessor; FEWEST_PROGRAMS need no more."""
FEWEST_PROGRAMS = 512
"""Rows that share a prompt have programs of their own rather than leave fewer programs than this."""
MORE_PROGRAMS = 512
"""Where several programs share the blocks of a row, so many more than one a row, or as many again, may be at work."""
FEWEST_BLOCKS = 8
"""All programs that share the blocks of a row have so many at least, but for the last."""
LONG = 16
"""Rows are shared where their prompts and generated tokens have room for so many blocks: below, that costs more than it
saves."""
SMALLEST_PRODUCT = 16
"""Rows of the smallest matrix that the matrix units multiply."""
LOG2_E = 1.4426950408889634
Ref = Any


class NormAndRotation(NamedTuple):
    """What becomes of a projection before it is a query or a key: the norm of each head, if there is one, then the rotation.

    cos and sin are those of the new tokens' angles. The norms are multipliers of a query and of a key of mean square 1, to
    which `epsilon` is added, all in fp32; both are None where nothing is normed.
    """

    cos: Float[Array, "*tokens half"]
    sin: Float[Array, "*tokens half"]
    query_norm: Float[Array, " D"] | None = None
    key_norm: Float[Array, " D"] | None = None
    epsilon: float = 0.0


class Arithmetic(NamedTuple):
    epsilon: float
    scale: float
    softcap: float | None

    def in_bits(self, products: Array) -> Array:
        """Returns scores, in units of log 2, from products of queries and keys."""
        return capped(products * self.scale, self.softcap) * LOG2_E


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
    arithmetic = Arithmetic(preparation.epsilon, scale, softcap)
    call = functools.partial(_on_one_device, arithmetic, cache.copies, interpret)
    operands = (held, projections, own_rows, norms)
    if mesh is None or mesh.size == 1:
        return call(*operands)
    split = cache_spec(held.prompt_keys.shape, mesh)
    in_specs = (split, split, P(split[0]), P())
    return jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=split, check_vma=False)(*operands)


def _on_one_device(
    arithmetic: Arithmetic, copies: int, interpret: bool, held: LayerCache, projections, own_rows, norms
):
    rows, _, heads, head_dim = projections.shape
    kv_heads = held.keys.shape[1]
    num_heads = heads - 2 * kv_heads
    together = rows_of_program(copies, num_heads // kv_heads, rows * kv_heads)
    programs, shares = rows // together, None
    inputs = _Inputs(*held, projections[:, 0], *own_rows)
    if (held.prompt_keys.shape[2] + held.keys.shape[2]) // BLOCK >= LONG:
        shares = _deal(inputs, together, kv_heads)
        programs = len(shares.owner)
    operands = (*inputs, *(() if shares is None else shares[:3]), *norms)
    mixed = (programs, together, num_heads)
    results = _Results(
        held.keys,
        held.values,
        jax.ShapeDtypeStruct((*mixed, head_dim), projections.dtype if shares is None else jnp.float32),
        jax.ShapeDtypeStruct(mixed, jnp.float32),
    )
    whole = lambda x: pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)  # noqa: E731
    found = _Results(
        *pl.pallas_call(
            functools.partial(_kernel, shared=shares is not None, arithmetic=arithmetic),
            grid=(programs, kv_heads),
            in_specs=list(map(whole, operands)),
            out_specs=list(map(whole, results)),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
            input_output_aliases={
                _Inputs._fields.index(name): _Results._fields.index(name) for name in ("keys", "values")
            },
            compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
            interpret=interpret,
            name="cached_attention",
        )(*operands)
    )
    if shares is None:
        out = found.mixed.reshape(rows, num_heads, head_dim)
    else:
        out = put_together(found.mixed, found.log_sums, shares.of_owner, projections.dtype, interpret)
    return out, held._replace(keys=found.keys, values=found.values)


def _deal(inputs: "_Inputs", together: int, kv_heads: int) -> Shares:
    """Deals the blocks of all rows, so many to a program as the mean has of those that are read together, or fewer."""
    firsts = slice(None, None, together)
    rows = _Rows(*(x[firsts] for x in (inputs.prompt, inputs.length, inputs.first, inputs.filled)))
    groups = len(rows.length)
    more = max(groups, pl.cdiv(MORE_PROGRAMS, kv_heads))
    return deal_blocks(rows.blocks(together), groups + more, FEWEST_BLOCKS)


def rows_of_program(copies: int, group: int, pairs: int) -> int:
    """Returns how many rows that share a prompt a program takes.

    `copies` adjacent rows surely share one; `group` query heads share a key-value head; `pairs` is rows times key-value
    heads.
    """
    rows = 1
    while copies % (2 * rows) == 0 and 2 * rows * group <= SMALLEST_PRODUCT and pairs // (2 * rows) >= FEWEST_PROGRAMS:
        rows *= 2
    return rows


def tables_of_features(load, size: int) -> tuple[Array, Array]:
    """Returns cos and sin for every feature, which `load` gives by indices of pairs; sin is negative for a pair's first."""
    features = lax.iota(jnp.int32, size)
    cos, sin = load(features % (size // 2))
    return cos, sin * jnp.where(features < size // 2, -1.0, 1.0)


def rotated(load, norm_ref, cos, sin, epsilon):
    """Returns queries or keys [M, D] after norm and rotation; fp32 inside, each step rounded to the dtype of what is loaded.

    `load` maps indices of features [D] to the projections'. `cos` and `sin`, [D] or [M, D], are of `tables_of_features`, and
    `norm_ref` is [D], or None.
    """
    size = cos.shape[-1]
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


class _Inputs(NamedTuple):
    """Whole arrays in the GPU's memory: a layer's cache, then what the new tokens and their rows bring."""

    prompt_keys: Ref
    prompt_values: Ref
    keys: Ref
    values: Ref
    projected: Ref
    prompt: Ref
    length: Ref
    first: Ref
    cos: Ref
    sin: Ref
    filled: Ref


class _Results(NamedTuple):
    """Whole arrays: the cache's keys and values, then what each program has found, of its rows."""

    keys: Ref
    values: Ref
    mixed: Ref
    log_sums: Ref


class _Rows(NamedTuple):
    """What the rows of a program read: their prompt, then what one after the other has generated."""

    prompt: Int[Array, "..."]
    length: Int[Array, "..."]
    first: Int[Array, "..."]
    filled: Int[Array, "..."]

    def of_prompt(self) -> tuple[Array, Array]:
        """Returns the first block of the prompt that is read, and how many are."""
        begin = self.first // BLOCK
        return begin, jnp.maximum(pl.cdiv(self.length, BLOCK) - begin, 0)

    def of_row(self) -> tuple[Array, Array]:
        """Returns the first block of a row's generated tokens that is read, and how many are."""
        begin = jnp.maximum(self.first - self.length, 0) // BLOCK
        return begin, pl.cdiv(self.filled, BLOCK) - begin

    def blocks(self, together: int) -> Int[Array, "..."]:
        return self.of_prompt()[1] + together * self.of_row()[1]


class _Queries(NamedTuple):
    """Those of a program, row after row, of one key-value head: int32 [M]; the last repeats as padding.

    `row` is the first row, and each query is of row `row + within`.
    """

    row: Array
    kv_head: Array
    within: Array
    heads: Array


def _kernel(*refs: Ref, shared: bool, arithmetic: Arithmetic) -> None:
    """Reads a program's blocks, or its share of them; a share without an owner has nothing to do."""
    inputs, results = _Inputs(*refs[: len(_Inputs._fields)]), _Results(*refs[-len(_Results._fields) :])
    others = refs[len(_Inputs._fields) : -len(_Results._fields)]
    program, kv_head = pl.program_id(0), pl.program_id(1)
    if not shared:
        _read_share(inputs, others, results, arithmetic, program, kv_head, program, None)
        return
    (owner_ref, begin_ref, end_ref), norms = others[:3], others[3:]
    owner = owner_ref[program]
    share = begin_ref[program], end_ref[program]
    read = functools.partial(_read_share, inputs, norms, results, arithmetic, program, kv_head, owner, share)
    pl.when(owner * results.mixed.shape[1] < inputs.length.shape[0])(read)


def _read_share(inputs: _Inputs, norms, results: _Results, arithmetic: Arithmetic, program, kv_head, owner, share):
    """Reads the blocks of a share, or all, numbered from the prompt's on; the first share also has the new tokens."""
    _, together, num_heads, _ = results.mixed.shape
    group = num_heads // inputs.keys.shape[1]
    number = together * group
    place = jnp.minimum(lax.iota(jnp.int32, max(SMALLEST_PRODUCT, pl.next_power_of_2(number))), number - 1)
    asked = _Queries(owner * together, kv_head, place // group, kv_head * group + place % group)
    rows = _Rows(*(ref[asked.row] for ref in (inputs.prompt, inputs.length, inputs.first, inputs.filled)))
    begin, end = (0, rows.blocks(together)) if share is None else share
    queries, new_keys, new_values = _new_tokens(inputs, norms or (None, None), arithmetic, asked)
    features = lax.iota(jnp.int32, queries.shape[1])

    def store():
        # Queries of one row store the same key and value.
        here = (asked.row + asked.within)[:, None], kv_head, rows.filled, features[None, :]
        results.keys[here], results.values[here] = new_keys, new_values

    def read(keys_ref, values_ref, index, block, seen, readers, carry):
        """The state after a block of one row of the arrays: `seen` says which slots are read, `readers` [M] by whom."""
        here = (index, kv_head, pl.ds(block * BLOCK, BLOCK), slice(None))
        scores = arithmetic.in_bits(plgpu.dot(queries, keys_ref[here], trans_b=True))
        visible = seen(block * BLOCK + lax.broadcasted_iota(jnp.int32, scores.shape, 1)) & readers[:, None]
        # Zeros times what is not finite would spoil other rows' queries.
        return add_block(carry, scores, visible, values_ref[here], readers)

    (prompt_begin, of_prompt), (own_begin, of_row) = rows.of_prompt(), rows.of_row()

    def of_prompts(step, carry):
        seen = lambda slots: (slots >= rows.first) & (slots < rows.length)  # noqa: E731
        block, everyone = prompt_begin + step, asked.within >= 0
        return read(inputs.prompt_keys, inputs.prompt_values, rows.prompt, block, seen, everyone, carry)

    def of_generated(step, carry):
        # One loop over the blocks of all rows: a row's first block is fetched while the previous row's last is in use.
        owner, block = step // of_row, own_begin + step % of_row
        seen = lambda slots: (slots >= rows.first - rows.length) & (slots < rows.filled)  # noqa: E731
        return read(inputs.keys, inputs.values, asked.row + owner, block, seen, asked.within == owner, carry)

    scores = arithmetic.in_bits(jnp.sum(queries.astype(jnp.float32) * new_keys.astype(jnp.float32), axis=1))
    carry = (scores, jnp.ones_like(scores), new_values.astype(jnp.float32))
    if share is None:
        store()
    else:
        pl.when(begin == 0)(store)
        nothing = (MASKED_SCORE, 0.0, 0.0)
        carry = tuple(jnp.where(begin == 0, new, none) for new, none in zip(carry, nothing, strict=True))
    carry = lax.fori_loop(jnp.minimum(begin, of_prompt), jnp.minimum(end, of_prompt), of_prompts, carry)
    own = (jnp.maximum(step - of_prompt, 0) for step in (begin, end))
    largest, total, mixed = lax.fori_loop(*own, of_generated, carry)
    results.log_sums[program, asked.within, asked.heads] = largest + jnp.log2(total)
    # Rows without a block in this share have nothing: their sum is 0.
    found = (mixed / total[:, None]).astype(results.mixed.dtype)
    results.mixed[program, asked.within[:, None], asked.heads[:, None], features[None, :]] = found


def nothing_seen(queries: Array) -> tuple[Array, Array, Array]:
    """Returns the state of an online softmax of queries [M, D]: their largest score, the sum, and the mixed values."""
    of_query = jnp.zeros(queries.shape[0], jnp.float32)
    return of_query + MASKED_SCORE, of_query, jnp.zeros(queries.shape, jnp.float32)


def add_block(carry, scores, visible, values, readers=None) -> tuple[Array, Array, Array]:
    """Returns the state after scores [M, S] in bits, where they are visible; values mix for `readers` [M] alone, or all."""
    largest, total, mixed = carry
    scores = jnp.where(visible, scores, MASKED_SCORE)
    larger = jnp.maximum(largest, scores.max(axis=1))
    kept = jnp.exp2(largest - larger)
    exponentials = jnp.where(visible, jnp.exp2(scores - larger[:, None]), 0.0)
    part = plgpu.dot(exponentials.astype(values.dtype), values)
    part = part if readers is None else jnp.where(readers[:, None], part, 0.0)
    return larger, total * kept + exponentials.sum(axis=1), mixed * kept[:, None] + part


def _new_tokens(inputs: _Inputs, norms, arithmetic: Arithmetic, asked: _Queries):
    """Returns queries, keys and values [M, D] of the new tokens: normed and rotated, but for the values."""
    kv_heads, size = inputs.keys.shape[1], inputs.keys.shape[3]
    num_heads = inputs.projected.shape[1] - 2 * kv_heads
    features, row = lax.iota(jnp.int32, size), asked.row
    # Rows that share a prompt are at one position.
    cos, sin = tables_of_features(lambda pair: (inputs.cos[row, pair], inputs.sin[row, pair]), size)

    def projected(heads):
        return lambda index: inputs.projected[(row + asked.within)[:, None], heads[:, None], index[None, :]]

    of_keys = jnp.full_like(asked.heads, num_heads + asked.kv_head)
    query_norm, key_norm = norms
    queries = rotated(projected(asked.heads), query_norm, cos, sin, arithmetic.epsilon)
    keys = rotated(projected(of_keys), key_norm, cos, sin, arithmetic.epsilon)
    return queries, keys, projected(of_keys + kv_heads)(features)
