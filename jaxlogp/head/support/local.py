"""Rows of one vocabulary shard that a support names: ``localise_support``."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Integer

from jaxlogp._agreement import ID_BITS
from jaxlogp._arrays import AnyArray, as_int32
from jaxlogp._targets import LocalTargets
from jaxlogp._vocab import LocalShard
from jaxlogp.head.support.ids import Support, tokens_of_places, values_at


class LocalSupport(NamedTuple):
    """The ids of a support that one vocabulary shard owns, one place for each, ordered by token.

    Attributes:
        row: int32 [capacity], row of the local weight; the number of rows after the last id.
        token: int32 [capacity], token of each id; the number of tokens after the last id.
        count: int32, number of ids.
        runs: int32 [2, tokens], first place of each token's ids, and the place after its last one.
        broken: bool [tokens], True where the ids of an active token exceed the capacity or the vocabulary.
    """

    row: Int[Array, " capacity"]
    token: Int[Array, " capacity"]
    count: Int[Array, ""]
    runs: Int[Array, "2 tokens"]
    broken: Bool[Array, " tokens"]


def localise_support(
    support: Support, targets: Integer[AnyArray, "*tokens"], local: LocalTargets, shard: LocalShard, rows: int
) -> tuple[LocalTargets, LocalSupport]:
    """Translates a support into rows of the local shard, for active tokens alone.

    Returns:
        The targets, invalid also where the support is broken or lacks the target, with codes by which shards compare
        their supports too; and the local support.
    """
    ids, counts, flat = (as_int32(x.reshape(-1)) for x in (support.ids, support.counts, targets))
    return _localise(ids, counts, flat, local, shard, rows)


# One program also outside of jit.
@functools.partial(jax.jit, static_argnames="rows", inline=True)
def _localise(
    ids: Array, counts: Array, targets: Array, local: LocalTargets, shard: LocalShard, rows: int
) -> tuple[LocalTargets, LocalSupport]:
    (tokens,), (capacity,) = counts.shape, ids.shape
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    token = tokens_of_places(ends, capacity)

    def per_token(values: Array) -> Array:
        return jax.ops.segment_sum(values, token, tokens, indices_are_sorted=True)

    # A negative count, or a sum that wraps, misplaces the ids of all tokens.
    misplaced = jnp.any(ends < ends - counts)
    inside = (ids >= 0) & (ids < shard.vocab_size)
    outside = per_token((~inside).astype(jnp.int32)) > 0
    missing = per_token((ids == values_at(targets, token, -1)).astype(jnp.int32)) == 0
    broken = local.mask & (misplaced | (ends > capacity) | outside)
    invalid = local.invalid | broken | (local.mask & missing)
    codes = None if local.codes is None else _mix(local.codes, per_token(_hash(ids)))

    row = jnp.where(inside, ids, 0) - shard.start
    owned = inside & (row >= 0) & (row < shard.width) & values_at(local.mask, token, False)
    # The number of owned ids before each place, and of all of them.
    before = jnp.cumsum(jnp.pad(owned, (1, 0)), dtype=jnp.int32)
    place, count = jnp.where(owned, before[:-1], capacity), before[-1]

    def pack(values: Array, fill: int) -> Array:
        # Zeros of an operand, so that the array varies over the mesh axes that the ids vary over.
        filled = jnp.full(capacity, fill, jnp.int32) + jnp.zeros_like(count)
        return filled.at[place].set(values, mode="drop", unique_indices=True)

    runs = before[jnp.clip(jnp.stack([ends - counts, ends]), 0, capacity)]
    kept = LocalSupport(pack(row, rows), pack(token, tokens), count, runs, broken)
    return local._replace(invalid=invalid, codes=codes), kept


def _hash(ids: Int[Array, " places"]) -> Int[Array, " places"]:
    """Scatters ids over int32 (the finalizer of MurmurHash3), so that sums of different sets differ."""
    bits = ids.astype(jnp.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return (bits ^ (bits >> 16)).astype(jnp.int32)


def _mix(codes: Int[Array, " tokens"], hashes: Int[Array, " tokens"]) -> Int[Array, " tokens"]:
    """Returns codes that differ where targets differ, and in all but 2^-24 of cases where supports do.

    A token that does not count keeps its code of 0.
    """
    mixed = (codes + (hashes & (2**ID_BITS - 1))) & (2**ID_BITS - 1)
    return jnp.where(codes == 0, 0, mixed)
