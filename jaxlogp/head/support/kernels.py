"""Triton kernels, through Pallas, for the sums of a support: fp32, in an order that the support alone decides, no atomics.

`token_statistics` and `hidden_gradient` sum over the ids of a token, which lie one after the other. `weight_gradient` sums
over the tokens of a row, whose places are ordered by row, then by token. A row of many is summed in groups of `GROUP` places
in a row, counted from the first of that row: first the groups, then groups of groups, and at last these, the groups that are
left and the places that are left, in that order.

A group begins at some place i, and its sum has the slot i // GROUP. No two groups share one, because groups do not overlap.
Groups of groups are slots of slots in the same way. So there is no list of groups: each slot's program looks for the one
that begins among its places.

JAX 0.11 and 0.12 call Pallas' Triton backend deprecated, and warn of it where a kernel is compiled.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._stats import TileStats

GROUP = 32
"""Places of a row that are summed into one slot."""
MOST_COLUMNS = 512
"""Hidden columns of a program, at most."""
TILE = 1024
"""Numbers of a program's part of the weight's gradient."""
TOKEN_STEP = 8
"""Rows of the weight that a program of the hidden gradient has in flight."""
GROUP_STEP = 16
"""Rows of hidden states that a program of a group has in flight."""
STATISTICS_TILE = 4, 64
"""Tokens, and ids of each, that a program of the statistics reads at a time."""
WARPS = 4
"""Warps of a program that sums over the ids of a token, or over a group."""
GRADIENT_WARPS = 2
"""Warps of a program of the weight's gradient."""

Ref = Any


def find_runs(ordered: Int[Array, " places"], keys: int) -> Int[Array, "2 keys"]:
    """Returns the first place of each key in [0, keys) and the place after its last one; 0 and 0 for a key without a place.

    Keys lie in order; larger ones, at the end, are padding.
    """
    index = jnp.arange(ordered.shape[0], dtype=jnp.int32)
    differs, edge = ordered[1:] != ordered[:-1], jnp.ones_like(ordered[:1], bool)
    first, last = jnp.concatenate([edge, differs]), jnp.concatenate([differs, edge])

    def target(edges: Bool[Array, " places"], offset: int) -> Int[Array, " places"]:
        return jnp.where(edges & (ordered < keys), ordered + offset, 2 * keys)

    # One scatter for both, because each kernel of this size takes longer to start than to run.
    targets = jnp.concatenate([target(first, 0), target(last, keys)])
    zeros = jnp.zeros(2 * keys, jnp.int32) + jnp.zeros_like(ordered[0])
    values = jnp.concatenate([index, index + 1])
    return zeros.at[targets].set(values, mode="drop", unique_indices=True).reshape(2, keys)


def block_columns(hidden_size: int) -> int:
    """Returns the hidden columns of a program: the largest power of two that divides them, up to MOST_COLUMNS.

    Example:
        >>> block_columns(1024), block_columns(896), block_columns(24)
        (512, 128, 8)
    """
    return min(hidden_size & -hidden_size, MOST_COLUMNS)


# --- per token --------------------------------------------------------------------------------------------------------


def token_statistics(
    logits: Float[Array, " capacity"],
    row: Int[Array, " capacity"],
    column: Int[Array, " tokens"],
    runs: Int[Array, "2 tokens"],
    with_entropy: bool,
    interpret: bool = False,
) -> TileStats:
    """Computes the statistics of the logits of each token.

    Args:
        logits: fp32, ordered by token.
        row: row of the weight of each logit.
        column: row of each token's target; -1 if it is not here.
        runs: the first place of each token, and the place after its last one.
        with_entropy: whether the sums that entropy needs are wanted.
        interpret: whether to run the kernel in Pallas' interpreter.
    """
    tokens = column.shape[0]
    shapes = [(tokens,)] * (5 if with_entropy else 4)
    call = _call(_statistics, -(-tokens // STATISTICS_TILE[0]), shapes, jnp.float32, logits, 1, interpret)
    maximum, sums, target, owners, *shifted = call(logits, row, column, runs)
    return TileStats(maximum, sums, shifted[0] if with_entropy else None, target, owners)


def _statistics(
    logits: Ref,
    row: Ref,
    column: Ref,
    runs: Ref,
    maximum: Ref,
    total: Ref,
    target: Ref,
    owners: Ref,
    *shifted,
) -> None:
    size, lanes = STATISTICS_TILE
    token = pl.program_id(0) * size + lax.iota(jnp.int32, size)
    inside = token < column.shape[0]
    begin, end = _load_runs(runs, token, inside)
    wanted = plgpu.load(column.at[token], mask=inside, other=0)
    steps = pl.cdiv(jnp.max(end - begin), lanes)

    def place(step: Array) -> tuple[Array, Array]:
        at = begin[:, None] + step * lanes + lax.broadcasted_iota(jnp.int32, (size, lanes), 1)
        return at, at < end[:, None]

    def load_logits(step: Array) -> Array:
        at, valid = place(step)
        return plgpu.load(logits.at[at], mask=valid, other=-jnp.inf)

    lowest = jnp.full((size, lanes), -jnp.inf, jnp.float32)
    largest = lax.fori_loop(0, steps, lambda step, seen: jnp.maximum(seen, load_logits(step)), lowest)
    peak = jnp.max(largest, axis=1)

    def add(step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        at, valid = place(step)
        z = load_logits(step)
        # -inf, a removed column or no logit at all, adds 0, also where the peak is -inf.
        removed = z == -jnp.inf
        shift = jnp.where(removed, 0.0, z - peak[:, None])
        exp = jnp.where(removed, 0.0, jnp.exp(shift))
        owned = valid & (plgpu.load(row.at[at], mask=valid, other=-1) == wanted[:, None])
        new = (exp, jnp.where(owned, z, 0.0), owned.astype(jnp.float32), exp * shift)
        return tuple(old + more for old, more in zip(sums, new, strict=False))

    results = (total, target, owners, *shifted)
    sums = lax.fori_loop(0, steps, add, (jnp.zeros((size, lanes), jnp.float32),) * len(results))
    plgpu.store(maximum.at[token], peak, mask=inside)
    for ref, each in zip(results, sums, strict=True):
        plgpu.store(ref.at[token], jnp.sum(each, axis=1), mask=inside)


def hidden_gradient(
    weight: Float[Array, "vocab hidden"],
    row: Int[Array, " capacity"],
    dz: Float[Array, " capacity"],
    runs: Int[Array, "2 tokens"],
    invalid: Bool[Array, " tokens"],
    dtype: Any,
    interpret: bool = False,
) -> Float[Array, "tokens hidden"]:
    """Sums dz weight[v] over the ids of each token, one after the other.

    Args:
        weight: [V, H].
        row: row of the weight of each id, ordered by token.
        dz: fp32 gradient of each id's logit.
        runs: the first place of each token, and the place after its last one.
        invalid: True for tokens whose gradient is NaN.
        dtype: dtype of the result.
        interpret: whether to run the kernel in Pallas' interpreter.
    """
    tokens, width = invalid.shape[0], weight.shape[1]
    grid = tokens, width // block_columns(width)
    call = _call(_hidden_gradient, grid, [(tokens, width)], dtype, dz, WARPS, interpret)
    return call(weight, row, dz, runs, invalid.astype(jnp.int32))[0]


def _hidden_gradient(weight: Ref, row: Ref, dz: Ref, runs: Ref, invalid: Ref, out: Ref) -> None:
    token, columns = pl.program_id(0), block_columns(weight.shape[1])
    block = pl.ds(pl.program_id(1) * columns, columns)
    begin, end = runs[0, token], runs[1, token]

    def step(index: Array, total: Array) -> Array:
        return _add_rows(total, weight, block, (row, dz), begin + index * TOKEN_STEP, TOKEN_STEP, end)

    total = lax.fori_loop(0, pl.cdiv(end - begin, TOKEN_STEP), step, jnp.zeros(columns, jnp.float32))
    out[token, block] = jnp.where(invalid[token] != 0, jnp.nan, total).astype(out.dtype)


# --- per row ----------------------------------------------------------------------------------------------------------


def weight_gradient(
    source: Float[Array, "tokens hidden"],
    token: Int[Array, " capacity"],
    dz: Float[Array, " capacity"],
    row: Int[Array, " capacity"],
    runs: Int[Array, "2 vocab"],
    dtype: Any,
    interpret: bool = False,
) -> Float[Array, "vocab hidden"]:
    """Sums dz source[t] over the places of each row, and writes 0 to rows without one.

    Args:
        source: [tokens, H].
        token: token of each place, ordered by row, then by token.
        dz: fp32 gradient of each place's logit.
        row: row of each place; V for padding, at the end.
        runs: the first place of each row, and the place after its last one.
        dtype: dtype of the result.
        interpret: whether to run the kernel in Pallas' interpreter.
    """
    rows, width = runs.shape[1], source.shape[1]
    groups, runs_of_groups = _group_sums(source, runs, row.shape[0], (row, token, dz), interpret)
    groups_of_groups, _ = _group_sums(groups, runs_of_groups, groups.shape[0], (), interpret)
    columns = block_columns(width)
    grid = -(-rows // _tile_rows(columns)), width // columns
    call = _call(_weight_gradient, grid, [(rows, width)], dtype, dz, GRADIENT_WARPS, interpret)
    return call(runs, groups_of_groups, groups, source, token, dz)[0]


def _group_sums(
    source: Float[Array, "entries hidden"],
    runs: Int[Array, "2 keys"],
    places: int,
    given: tuple[Array, ...],
    interpret: bool,
) -> tuple[Float[Array, "slots hidden"], Int[Array, "2 slots"]]:
    """Sums every whole group of places into its slot; slots without a group hold anything.

    Args:
        source: what is summed.
        runs: the first place of each key, and the place after its last one.
        places: number of places.
        given: key, entry of the source and factor of each place; none if each place is its own key and entry, with a factor
            of 1.
        interpret: whether to run the kernel in Pallas' interpreter.

    Returns:
        The sums, and for each slot the run of slots that it belongs to, or one without a slot.
    """
    slots, width = max(places // GROUP, 1), source.shape[1]
    grid = slots, width // block_columns(width)
    shapes, dtypes = [(slots, width), (2, slots)], [jnp.float32, jnp.int32]
    sums, runs_of_slots = _call(_sum_group, grid, shapes, dtypes, source, WARPS, interpret)(source, runs, *given)
    return sums, runs_of_slots


def _sum_group(source: Ref, runs: Ref, *others: Ref) -> None:
    *given, sums, runs_of_slots = others
    slot, columns = pl.program_id(0), block_columns(source.shape[1])
    block = pl.ds(pl.program_id(1) * columns, columns)
    place, keys = slot * GROUP + lax.iota(jnp.int32, GROUP), runs.shape[1]
    key = plgpu.load(given[0].at[place], mask=place < given[0].shape[0], other=keys) if given else place
    begin, end = _load_runs(runs, key, key < keys)
    begins = (lax.rem(place - begin, jnp.int32(GROUP)) == 0) & (place + GROUP <= end)
    # At most one place does, and the largest number is its own.
    start, begin, end = (jnp.max(jnp.where(begins, x, -1)) for x in (place, begin, end))

    @pl.when(pl.program_id(1) == 0)
    def _():
        before = lax.div(begin, jnp.int32(GROUP))
        runs_of_slots[0, slot] = jnp.where(start < 0, 0, before)
        runs_of_slots[1, slot] = jnp.where(start < 0, 0, before + lax.div(end - begin, jnp.int32(GROUP)))

    @pl.when(start >= 0)
    def _():
        def step(number: Array, total: Array) -> Array:
            return _add_rows(total, source, block, given[1:], start + number * GROUP_STEP, GROUP_STEP)

        sums[slot, block] = lax.fori_loop(0, GROUP // GROUP_STEP, step, jnp.zeros(columns, jnp.float32))


def _weight_gradient(runs: Ref, groups_of_groups: Ref, groups: Ref, source: Ref, token: Ref, dz: Ref, out: Ref) -> None:
    columns = block_columns(source.shape[1])
    size = _tile_rows(columns)
    row = pl.program_id(0) * size + lax.iota(jnp.int32, size)
    block = pl.program_id(1) * columns + lax.broadcasted_iota(jnp.int32, (size, columns), 1)
    inside = row < out.shape[0]
    begin, end = _load_runs(runs, row, inside)

    def add(total: Array, begin: Array, count: Array, load: Callable[[Array, Array], Array]) -> Array:
        return lax.fori_loop(0, jnp.max(count), lambda k, total: total + load(begin + k, k < count), total)

    def load_rows(ref: Ref, index: Array, valid: Array) -> Array:
        mask = jnp.broadcast_to(valid[:, None], (size, columns))
        return plgpu.load(ref.at[index[:, None], block], mask=mask, other=0).astype(jnp.float32)

    def load_products(place: Array, valid: Array) -> Array:
        index, factor = (plgpu.load(ref.at[place], mask=valid, other=0) for ref in (token, dz))
        return factor[:, None] * load_rows(source, index, valid)

    group = jnp.int32(GROUP)
    left, slot = lax.div(end - begin, group), lax.div(begin, group)
    whole = lax.div(left, group)
    total = jnp.zeros((size, columns), jnp.float32)
    total = add(total, lax.div(slot, group), whole, lambda *at: load_rows(groups_of_groups, *at))
    total = add(total, slot + whole * GROUP, left - whole * GROUP, lambda *at: load_rows(groups, *at))
    total = add(total, begin + left * GROUP, end - begin - left * GROUP, load_products)
    mask = jnp.broadcast_to(inside[:, None], (size, columns))
    plgpu.store(out.at[row[:, None], block], total.astype(out.dtype), mask=mask)


def _tile_rows(columns: int) -> int:
    return min(TILE // columns, 32)


# --- all of them ------------------------------------------------------------------------------------------------------


def _load_runs(runs: Ref, key: Array, valid: Array) -> tuple[Array, Array]:
    """Loads the first place of each key, and the place after its last one; 0 and 0 for a key that is not valid."""
    first, stop = (plgpu.load(runs.at[edge, key], mask=valid, other=0) for edge in (0, 1))
    return first, stop


def _add_rows(
    total: Array, source: Ref, block: Any, given: Sequence[Ref], start: Array, size: int, end: Array | None = None
) -> Float[Array, " columns"]:
    """Adds ``factor source[index, block]`` of the places [start, start + size) one after the other.

    Args:
        total: what they are added to.
        source: [entries, H].
        block: columns.
        given: index and factor of each place; none if its row of the source is its own, with a factor of 1.
        start: the first place.
        size: number of places.
        end: the place before which they count; None if all do.
    """
    places = [start + each for each in range(size)]
    valid = [None if end is None else place < end for place in places]

    def load(ref: Ref, at: Any, ok: Array | None, shape: tuple[int, ...] = ()) -> Array:
        options = {} if ok is None else {"mask": jnp.broadcast_to(ok, shape), "other": 0}
        return plgpu.load(ref.at[at], **options)

    indices, factors = places, None
    if given:
        indices, factors = ([load(ref, *each) for each in zip(places, valid, strict=True)] for ref in given)
    # All loads come before the first sum, so that they are in flight together.
    rows = [load(source, (at, block), ok, (block.size,)) for at, ok in zip(indices, valid, strict=True)]
    for number, row in enumerate(rows):
        term = row.astype(jnp.float32)
        total = total + (term if factors is None else factors[number] * term)
    return total


def _call(
    kernel: Any, grid: Any, shapes: list, dtypes: Any, like: Array, warps: int, interpret: bool
) -> Callable[..., Any]:
    """Returns ``pallas_call`` of whole arrays, with results that vary over the mesh axes that ``like`` varies over."""
    dtypes = dtypes if isinstance(dtypes, list) else [dtypes] * len(shapes)
    varying = jax.typeof(like).manual_axis_type
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=[
            jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ],
        compiler_params=plgpu.CompilerParams(num_warps=warps),
        interpret=interpret,
        name=f"support{kernel.__name__}",
    )
