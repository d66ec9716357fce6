"""Tile statistics, which every engine computes for every tile, chunk and shard, and the one way to combine them.

For the logits z of one vocabulary tile and one token, :class:`TileStats` holds the running maximum m, Σ e^(z-m),
Σ e^(z-m) (z-m) and the logit of the target if the tile owns it. Combining two of them is associative, so tiles, chunks
and devices are reduced in the same way, and exactness, tail masking and ownership are handled here and nowhere else.

Entropy is accumulated around the maximum, as log S - U / S with U = Σ e^(z-m) (z-m), because lse - Σ p z cancels when
the logits are large. For the same reason log-probs are (z_target - m) - log S, never z_target - (m + log S).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._agreement import counters, same_ids
from jaxlogp._arrays import nan_where
from jaxlogp._compat import AxisName
from jaxlogp.errors import require

# Integers up to here are exact in fp32.
_EXACT_BITS = 24


class TileStats(NamedTuple):
    """Statistics of some columns of the logits, one value per token; all fp32.

    Attributes:
        max: largest logit, -inf if there is no column.
        sum_exp: Σ e^(z - max).
        sum_exp_shifted: Σ e^(z - max) (z - max), or None if entropy is not wanted.
        target: logit of the target if one of the columns owns it, otherwise 0.
        owners: number of columns that own the target, as fp32; -1 if the shards have different targets.
    """

    max: Float[Array, "*tokens"]
    sum_exp: Float[Array, "*tokens"]
    sum_exp_shifted: Float[Array, "*tokens"] | None
    target: Float[Array, "*tokens"]
    owners: Float[Array, "*tokens"]


class Normaliser(NamedTuple):
    """Softmax statistics per token, with which the backward turns a logit into its probability.

    p = exp((z - max) - log_sum_exp), and mean = Σ p (z - max), or None if entropy is not wanted.
    """

    max: Float[Array, "*tokens"]
    log_sum_exp: Float[Array, "*tokens"]
    mean: Float[Array, "*tokens"] | None


class TokenLogProbs(NamedTuple):
    """Log-probs of the targets and entropies of the distributions, in nats, fp32.

    Attributes:
        log_probs: [*tokens], log p(target) <= 0; exactly 0 where masked.
        entropy: [*tokens], -Σ p log p in [0, log V]; exactly 0 where masked; None unless asked for.
        lse: [*tokens], log Σ e^z over the vocabulary; exactly 0 where masked; None unless asked for. A constant: no gradient
            flows through it.
    """

    log_probs: Float[Array, "*tokens"]
    entropy: Float[Array, "*tokens"] | None
    lse: Float[Array, "*tokens"] | None = None


def empty_stats(shape: tuple[int, ...], with_entropy: bool) -> TileStats:
    """Returns the identity of :func:`combine`, the statistics of no column."""
    zeros = jnp.zeros(shape, jnp.float32)
    minus_infinity = jnp.full(shape, -jnp.inf, jnp.float32)
    return TileStats(minus_infinity, zeros, zeros if with_entropy else None, zeros, zeros)


def _distance(value: Float[Array, "..."], reference: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes value - reference, and -inf (not NaN) where both are -inf."""
    return jnp.where(jnp.isneginf(value), -jnp.inf, value - reference)


def tile_stats(
    logits: Float[Array, "tokens columns"],
    targets: Int[Array, " tokens"],
    valid: Bool[Array, " columns"] | None,
    with_entropy: bool,
) -> TileStats:
    """Computes the statistics of one tile.

    Args:
        logits: fp32 [tokens, columns], final (scaled, capped, divided by the temperature).
        targets: [tokens], column of the target inside this tile; anything outside [0, columns) if the tile does not own it.
        valid: [columns], False for columns that are padding or belong to another tile; None if all count.
        with_entropy: whether to accumulate the sums that entropy needs.
    """
    columns = logits.shape[-1]
    seen = logits if valid is None else jnp.where(valid[None, :], logits, -jnp.inf)
    maximum = jnp.max(seen, axis=-1)
    shift = _distance(seen, maximum[:, None])
    exp = jnp.exp(shift)
    owned = (targets >= 0) & (targets < columns)
    column = jnp.where(owned, targets, 0)
    if valid is not None:
        owned &= valid[column]
    target = jnp.take_along_axis(logits, column[:, None], axis=-1)[:, 0]
    weighted = jnp.sum(exp * jnp.where(jnp.isneginf(shift), 0.0, shift), axis=-1) if with_entropy else None
    return TileStats(maximum, jnp.sum(exp, axis=-1), weighted, jnp.where(owned, target, 0.0), owned.astype(jnp.float32))


def _rescale(stats: TileStats, maximum: Float[Array, "*tokens"]) -> TileStats:
    shift = _distance(stats.max, maximum)
    factor = jnp.exp(shift)
    shifted = stats.sum_exp_shifted
    if shifted is not None:
        # A side without columns has sum_exp 0 and shift -inf, and adds 0 rather than 0 * inf.
        finite_shift = jnp.where(jnp.isneginf(shift), 0.0, shift)
        shifted = factor * (shifted + finite_shift * stats.sum_exp)
    return TileStats(maximum, factor * stats.sum_exp, shifted, stats.target, stats.owners)


def combine(left: TileStats, right: TileStats) -> TileStats:
    """Combines the statistics of disjoint columns."""
    maximum = jnp.maximum(left.max, right.max)
    left, right = _rescale(left, maximum), _rescale(right, maximum)
    shifted = None if left.sum_exp_shifted is None else left.sum_exp_shifted + right.sum_exp_shifted
    return TileStats(
        maximum, left.sum_exp + right.sum_exp, shifted, left.target + right.target, left.owners + right.owners
    )


def combine_segments(stats: TileStats, token: Int[Array, " places"], tokens: int) -> TileStats:
    """Combines statistics of disjoint columns that lie one after the other, ordered by token.

    Args:
        stats: [places] statistics.
        token: token of each place, never decreasing; places from ``tokens`` on count nowhere.
        tokens: number of tokens. Those without a place get the statistics of no column.
    """
    maximum = jax.ops.segment_max(stats.max, token, tokens, indices_are_sorted=True)
    local = _rescale(stats, maximum.at[token].get(mode="fill", fill_value=0.0))
    parts = [local.sum_exp, local.target, local.owners]
    if local.sum_exp_shifted is not None:
        parts.append(local.sum_exp_shifted)
    sums = [jax.ops.segment_sum(part, token, tokens, indices_are_sorted=True) for part in parts]
    return TileStats(maximum, sums[0], sums[3] if len(parts) == 4 else None, sums[1], sums[2])


def all_reduce(stats: TileStats, axis_name: AxisName | None, codes: Int[Array, "*tokens"] | None = None) -> TileStats:
    """Reduces statistics over all vocabulary shards, by one pmax and one psum of token-sized vectors.

    Neither entropy nor the comparison of the targets adds a collective.

    Args:
        stats: statistics of the columns of this shard.
        axis_name: mesh axis of the surrounding ``shard_map`` that shards the vocabulary, or None.
        codes: ``LocalTargets.codes``; owners becomes -1 where they differ between shards. None with one shard.
    """
    if axis_name is None:
        return stats
    # Results do not depend on the maximum, so second derivatives need none of it, and pmax has none.
    maximum = lax.pmax(lax.stop_gradient(stats.max), axis_name)
    local = _rescale(stats, maximum)
    parts = [local.sum_exp, local.target, local.owners]
    if local.sum_exp_shifted is not None:
        parts.append(local.sum_exp_shifted)
    words = jnp.zeros((0, *stats.max.shape), jnp.float32)
    if lax.axis_size(axis_name) > 1:
        require(codes is not None, "codes", "LocalTargets.codes over several shards", codes)
        words = counters(codes, axis_name, _EXACT_BITS).astype(jnp.float32)
    sums = lax.psum(jnp.concatenate([jnp.stack(parts), words]), axis_name)
    owners = sums[2]
    if words.shape[0]:
        same = same_ids(sums[len(parts) :].astype(jnp.int32), axis_name, _EXACT_BITS)
        owners = jnp.where(same, owners, -1.0)
    return TileStats(maximum, sums[0], sums[3] if len(parts) == 4 else None, sums[1], owners)


def finish(
    stats: TileStats, mask: Bool[Array, "*tokens"], vocab_size: int, invalid: Bool[Array, "*tokens"] | None
) -> tuple[TokenLogProbs, Normaliser]:
    """Computes log-probs, entropy and lse, and the softmax statistics, from statistics over the whole vocabulary.

    A token whose target has more than one owner, or is not the same on all shards, gets NaN values and gradients, even
    on a shard that masks it.

    Args:
        stats: statistics of all columns.
        mask: True where a token counts; others get exactly 0.
        vocab_size: V; entropy is at most log V.
        invalid: True for tokens whose log-prob becomes NaN (active targets that no column owns); None gives them log-prob 0.
    """
    counted = (stats.owners == 0) | (stats.owners == 1)
    log_sum_exp = nan_where(~counted, jnp.log(stats.sum_exp))
    live = mask | ~counted
    # Rounding may push a log-prob just above 0 or an entropy just outside of [0, log V].
    log_probs = jnp.minimum(_distance(stats.target, stats.max) - log_sum_exp, 0.0)
    log_probs = jnp.where(live & (stats.owners != 0), log_probs, 0.0)
    log_probs = log_probs if invalid is None else nan_where(live & (stats.owners == 0), log_probs)
    lse = jnp.where(live, stats.max + log_sum_exp, 0.0)
    if stats.sum_exp_shifted is None:
        return TokenLogProbs(log_probs, None, lse), Normaliser(stats.max, log_sum_exp, None)
    mean = stats.sum_exp_shifted / stats.sum_exp
    entropy = jnp.clip(log_sum_exp - mean, 0.0, jnp.log(jnp.float32(vocab_size)))
    return TokenLogProbs(log_probs, jnp.where(live, entropy, 0.0), lse), Normaliser(stats.max, log_sum_exp, mean)


def logit_gradient(
    logits: Float[Array, "tokens columns"],
    targets: Int[Array, " tokens"],
    valid: Bool[Array, " columns"] | None,
    normaliser: Normaliser,
    g_log_probs: Float[Array, " tokens"],
    g_entropy: Float[Array, " tokens"] | None,
) -> Float[Array, "tokens columns"]:
    """Computes dL/dz = g (onehot - p) + g_H p (Σ p z - z) for one tile in fp32; subtracts the one-hot before rounding."""
    shift = _distance(logits, normaliser.max[:, None])
    probs = jnp.exp(shift - normaliser.log_sum_exp[:, None])
    factor = -g_log_probs[:, None]
    if g_entropy is not None:
        finite_shift = jnp.where(jnp.isneginf(shift), 0.0, shift)
        factor = factor + g_entropy[:, None] * (normaliser.mean[:, None] - finite_shift)
    columns = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    onehot = columns == targets[:, None]
    gradient = probs * factor + jnp.where(onehot, g_log_probs[:, None], 0.0)
    # A token without a cotangent (masked) must give exact zeros even where its logits are NaN or inf.
    live = g_log_probs != 0.0 if g_entropy is None else (g_log_probs != 0.0) | (g_entropy != 0.0)
    gradient = _zero_unless(live[:, None], gradient)
    return gradient if valid is None else jnp.where(valid[None, :], gradient, 0.0)


@jax.custom_jvp
def _zero_unless(live: Bool[Array, "tokens 1"], x: Float[Array, "tokens columns"]) -> Float[Array, "tokens columns"]:
    return jnp.where(live, x, 0.0)


@_zero_unless.defjvp
def _zero_unless_jvp(primals: tuple, tangents: tuple) -> tuple:
    # A cotangent that is 0 here, such as that of a squared error at its minimum, has a derivative all the same.
    return _zero_unless(*primals), tangents[1]
