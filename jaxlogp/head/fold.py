"""Log-probs and entropy from tile statistics, bitwise equal in every program, batch and shard layout.

A float sum depends on its order, and a compiler may contract a product with an addition. Here neither can happen: a
tile's contribution is a chain of products only, its bits are split into integers, and the integers are added. Their sum
is exact, so no order, block size, number of shards or collective changes a bit.

With M the largest logit of all tiles and d = m - M for a tile of maximum m:

    S = Σ_tiles e^d s,    U = Σ_tiles (e^d u + (e^d s) d),    log_prob = (z_target - M) - log S,    H = log S - U / S.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._agreement import counters, same_ids
from jaxlogp._arrays import nan_where
from jaxlogp._compat import AxisName, vary_over
from jaxlogp._stats import Normaliser, TokenLogProbs
from jaxlogp.errors import require
from jaxlogp.head.call import HeadCall
from jaxlogp.head.live_rows import LiveRows

# x = whole + middle 2^-18 + low 2^-36: the sum of 4096 tiles (a million columns), two terms each, fits int32, and what
# is truncated below 2^-36 adds up to 1e-8 over 600 tiles, where S is at least 1.
LIMB_BITS = 18
MOST_TILES = 4096
# Tiles that are added up at a time, to bound the memory of intermediate values.
GROUP = 320
_WORD_BITS = 31


class TileSums(NamedTuple):
    """Sums over the tiles of one shard, or of all shards, per token.

    Attributes:
        max: fp32, the largest logit of all shards.
        sum_exp: int32 [3, tokens], Σ e^(z - max) in limbs of 2^-18.
        sum_exp_shifted: int32 [3, tokens], Σ e^(z - max) (z - max), or None when entropy is not wanted.
        broken: int32, number of terms that were not finite.
        target: int32, the bits of the target's logit where a tile owns it, else 0.
        owners: int32, number of tiles that own the target; -1 where the target is not the same on all shards.
    """

    max: Float[Array, " tokens"]
    sum_exp: Int[Array, "3 tokens"]
    sum_exp_shifted: Int[Array, "3 tokens"] | None
    broken: Int[Array, " tokens"]
    target: Int[Array, " tokens"]
    owners: Int[Array, " tokens"]


def limbs(x: Float[Array, "*shape"]) -> tuple[Int[Array, "*shape"], ...]:
    """x, |x| < 2^13, as three integers a, b, c with its sign: a + b 2^-18 + c 2^-36, truncated; 0 for denormals.

    From its bits: a float addition might use a product before it is rounded.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits >> 23) & 255
    mantissa = jnp.where(exponent == 0, 0, (bits & 0x7FFFFF) | 0x800000)
    pieces = []
    for place in range(3):
        # x 2^(18 place) = mantissa 2^-right; bits that a left shift pushes out belong to the higher limbs.
        right = 150 - exponent - LIMB_BITS * place
        shifted = jnp.where(right >= 0, mantissa >> jnp.clip(right, 0, 31), mantissa << jnp.clip(-right, 0, 31))
        piece = shifted if place == 0 else shifted & (2**LIMB_BITS - 1)
        pieces.append(jnp.where(bits < 0, -piece, piece))
    return tuple(pieces)


def from_limbs(sums: Int[Array, "3 ..."]) -> Float[Array, "..."]:
    """The number that sums of limbs represent, in fp32."""
    # From the magnitude, as a carry into a negative limb would cancel; the sign is that of all limbs together.
    negative = carried(sums)[0] < 0
    whole, middle, low = carried(jnp.where(negative, -sums, sums))
    # Products with powers of two are exact, so contracting them with the additions changes nothing.
    small = middle.astype(jnp.float32) * 2.0**-LIMB_BITS + low.astype(jnp.float32) * 2.0 ** (-2 * LIMB_BITS)
    value = whole.astype(jnp.float32) + small
    return jnp.where(negative, -value, value)


def carried(sums: Int[Array, "3 ..."]) -> tuple[Array, Array, Array]:
    """The same number, with the two lower limbs in [0, 2^18)."""
    whole, middle, low = sums
    middle = middle + (low >> LIMB_BITS)
    whole = whole + (middle >> LIMB_BITS)
    return whole, middle & (2**LIMB_BITS - 1), low & (2**LIMB_BITS - 1)


def sum_tiles(
    partials: Float[Array, "tiles 4 tokens"],
    maximum: Float[Array, " tokens"],
    column: Int[Array, " tokens"],
    with_entropy: bool,
) -> TileSums:
    """Adds up the tiles of one shard around ``maximum``, the largest logit of all shards.

    Args:
        partials: the statistics of each tile: max, Σ e^(z - max), Σ e^(z - max) (z - max), target logit or 0.
        maximum: M, at least every tile's maximum.
        column: the target's row of the weight, -1 where there is none.
        with_entropy: whether to add up the terms that entropy needs.
    """
    # Integers may be grouped in any way.
    groups = range(0, partials.shape[0], GROUP)
    added = sum(_sum_group(partials[start : start + GROUP], maximum, with_entropy) for start in groups)
    shifted = added[3:6] if with_entropy else None
    return TileSums(maximum, added[:3], shifted, added[-2], added[-1], (column >= 0).astype(jnp.int32))


def _sum_group(partials: Array, maximum: Array, with_entropy: bool) -> Int[Array, "terms tokens"]:
    maxima, sums, shifted, target = (partials[:, place] for place in range(4))
    distance = maxima - maximum[None, :]
    factor = jnp.exp(distance)
    mass = factor * sums
    terms = list(limbs(mass))
    broken = ~jnp.isfinite(mass)
    if with_entropy:
        # e^d d tends to 0, but the distance of a masked tile is -1e30.
        own, moved = factor * shifted, mass * jnp.maximum(distance, -1000.0)
        broken = broken | ~jnp.isfinite(own) | ~jnp.isfinite(moved)
        terms += [a + b for a, b in zip(limbs(own), limbs(moved), strict=True)]
    # At most one tile owns the target; the bits of +0 are 0.
    terms += [broken.astype(jnp.int32), lax.bitcast_convert_type(target + 0.0, jnp.int32)]
    # One array and one reduction, into which XLA fuses the terms; with several it would store them all.
    # With x64 the sum of int32 would be int64, whose bits are not those of a float32.
    return jnp.sum(jnp.stack(terms, axis=1), axis=0, dtype=jnp.int32)


def sum_shards(
    sums: TileSums,
    axis_name: AxisName | None,
    codes: Int[Array, "*tokens"] | None = None,
    origin: Int[Array, "*tokens"] | None = None,
) -> TileSums:
    """Sums over all vocabulary shards: one integer psum of token-sized vectors (after the pmax that gave the maximum).

    Args:
        sums: of the tiles of this shard.
        axis_name: mesh axis of the surrounding ``shard_map`` that shards the vocabulary, or None.
        codes: ``LocalTargets.codes``; where they are not the same on all shards, owners becomes -1. None with one shard.
        origin: codes of the places that packed tokens come from, compared likewise; None where no mask can differ.
    """
    if axis_name is None:
        return sums
    rows = [sums.sum_exp, sums.broken[None], sums.target[None], sums.owners[None]]
    if sums.sum_exp_shifted is not None:
        rows.append(sums.sum_exp_shifted)
    several = lax.axis_size(axis_name) > 1
    if several:
        require(codes is not None, "codes", "LocalTargets.codes over several shards", codes)
        rows += [counters(x, axis_name, _WORD_BITS) for x in (codes, origin) if x is not None]
    total = lax.psum(jnp.concatenate(rows), axis_name)
    first = 6 if sums.sum_exp_shifted is None else 9
    owners = jnp.where(same_ids(total[first:], axis_name, _WORD_BITS), total[5], -1) if several else total[5]
    return TileSums(sums.max, total[:3], total[6:9] if first == 9 else None, total[3], total[4], owners)


def spoiled_together(sums: TileSums) -> TileSums:
    """Sums of packed tokens: if any token's target differs between shards, all tokens count as differing.

    Each shard packs tokens by its own mask: after a difference, its tokens were added to other tokens of other shards.
    """
    return sums._replace(owners=jnp.where(jnp.any(sums.owners < 0), -1, sums.owners))


def finish_sums(
    sums: TileSums, mask: Bool[Array, " tokens"], vocab_size: int, invalid: Bool[Array, " tokens"] | None
) -> tuple[TokenLogProbs, Normaliser]:
    """:func:`jaxlogp._stats.finish` without any addition of a product.

    Args:
        sums: over the whole vocabulary.
        mask: True where a token counts; others get exactly 0.
        vocab_size: V; entropy is at most log V.
        invalid: tokens whose log-prob becomes NaN (active targets that no column owns); None means log-prob 0 for them.
    """
    sum_exp = from_limbs(sums.sum_exp)
    counted = (sums.owners == 0) | (sums.owners == 1)
    live = mask | ~counted
    whole = (sums.broken == 0) & (sum_exp > 0) & counted
    # The selections separate a last product inside log or the division from what is subtracted.
    log_sum_exp = nan_where(~whole, jnp.log(sum_exp))
    target = lax.bitcast_convert_type(sums.target, jnp.float32)
    log_probs = jnp.minimum((target - sums.max) - log_sum_exp, 0.0)
    log_probs = jnp.where(live & (sums.owners != 0), log_probs, 0.0)
    log_probs = log_probs if invalid is None else nan_where(live & (sums.owners == 0), log_probs)
    lse = jnp.where(live, sums.max + log_sum_exp, 0.0)
    if sums.sum_exp_shifted is None:
        return TokenLogProbs(log_probs, None, lse), Normaliser(sums.max, log_sum_exp, None)
    mean = nan_where(~whole, from_limbs(sums.sum_exp_shifted) / sum_exp)
    entropy = jnp.clip(log_sum_exp - mean, 0.0, _below(math.log(vocab_size)))
    return TokenLogProbs(log_probs, jnp.where(live, entropy, 0.0), lse), Normaliser(sums.max, log_sum_exp, mean)


def _below(bound: float) -> np.float32:
    """The largest fp32 number not above the bound."""
    rounded = np.float32(bound)
    return np.nextafter(rounded, np.float32(0.0)) if float(rounded) > bound else rounded


def block_tokens(tokens: int, blocks: int, multiple: int) -> int:
    """Tokens per block, a multiple of ``multiple``, for at least ``blocks`` blocks.

    Up to twice as many blocks if these hold the tokens exactly: padding the last one would copy the hidden states.
    """
    exact = (tokens // number for number in range(blocks, 2 * blocks) if tokens % (number * multiple) == 0)
    return next(exact, -(-tokens // (blocks * multiple)) * multiple)


def fold_blocks(
    call: HeadCall,
    statistics: Callable[[Array, Array, Array], Array],
    rows: LiveRows,
    block: int,
    keep_maxima: bool = False,
) -> tuple[TokenLogProbs, Normaliser, Float[Array, "tiles padded"] | None]:
    """Log-probs and entropies of packed tokens, with tile statistics computed one block of tokens at a time.

    Args:
        call: the call, with its targets in the order before packing.
        statistics: (first place, columns of the targets, live tokens of the block) -> fp32 [tiles, 4, block].
        rows: places of the tokens; a multiple of ``block``.
        block: tokens per block.
        keep_maxima: also return the largest logit of every tile and packed token.
    """
    targets, axes = call.targets, call.axes

    def step(start: Array) -> tuple[TileSums, Array | None]:
        column = rows.pack_block(targets.column, -1, start, block)
        partials = vary_over(statistics(start, column, jnp.clip(rows.count - start, 0, block)), axes)
        maximum = jnp.max(partials[:, 0], axis=0)
        if call.axis_name is not None:
            maximum = lax.pmax(maximum, call.axis_name)
        return sum_tiles(partials, maximum, column, call.with_entropy), partials[:, 0] if keep_maxima else None

    if rows.padded == block:
        sums, maxima = step(jnp.int32(0))
    else:
        found = lax.map(step, jnp.arange(rows.padded // block, dtype=jnp.int32) * block)
        sums, maxima = jax.tree.map(lambda x: jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1), found)
    sums = jax.tree.map(lambda x: jnp.moveaxis(rows.unpack(jnp.moveaxis(x, -1, 0)), 0, -1), sums)
    sums = spoiled_together(sum_shards(sums, call.axis_name, targets.codes))
    return *finish_sums(sums, targets.mask, call.vocab_size, targets.invalid), maxima
