"""Opt-in gradient filter, which skips nearly zero blocks of the logits' gradient in every product of the backward.

A block is some tokens × some vocabulary columns. The forward pass has the largest logit of every token and tile, so the
largest probability of a block is known as soon as the normalizer is, and a skipped block is not even recomputed.
docs/gradient_filter.md tells what it changes and when it pays.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._stats import Normaliser
from jaxlogp.errors import describe, require


@dataclasses.dataclass(frozen=True)
class GradientFilter:
    """Skips a block of the gradient if every probability in it is below ``threshold``; lossy, off by default.

    With p the probability of a column, g and g_H the cotangents of its log-prob and entropy H, an entry of the
    logits' gradient without a target is dz = -p (g + g_H (log p + H)), so every skipped entry is bounded:

        |dz| < θ |g| + |g_H| max(b(θ), θ H),   b(θ) = θ log(1/θ) for θ <= 1/e, else 1/e,

    times logit_scale / temperature. The bound is on entries, not on sums: a distribution that is flat over V > 1/θ
    columns loses all of its softmax term. A block is kept if one of its tokens

    * has a probability of at least ``threshold`` in it, or one that is NaN,
    * has its target in it (the one-hot is exact),
    * has a non-finite cotangent (errors are never filtered).

    Tokens whose cotangents are 0, masked ones among them, keep nothing: their rows of the gradient are exact zeros.

    Attributes:
        threshold: θ, a Python number in [0, 1); 0 skips only blocks that are exactly zero. The default is 2^-16, because
            at 2^-12 the error on a trained policy is above that of bf16.

    Raises:
        ValueError: if the threshold is not a number in [0, 1).

    Example:
        >>> GradientFilter().threshold == 2.0**-16
        True

    References:
        Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024 (gradient filtering).
    """

    threshold: float = 2.0**-16

    def __post_init__(self) -> None:
        """Raises ``ValueError`` unless the threshold is a number in [0, 1)."""
        value = self.threshold
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value < 1
        require(ok, "threshold", "a Python number in [0, 1)", describe(value))


def check_filter(value: object) -> None:
    """Raises ``ValueError`` unless ``value`` is a :class:`GradientFilter` or None."""
    ok = value is None or isinstance(value, GradientFilter)
    require(ok, "gradient_filter", "a GradientFilter or None", describe(value))


class KeptBlocks(NamedTuple):
    """The blocks that are kept, for a loop over the chunks of one tile at a time.

    Attributes:
        order: int32 [tiles, chunks], for each tile the chunks to visit, in ascending order, then the other chunks.
        count: int32 [tiles], for each tile the number of chunks to visit.
    """

    order: Int[Array, "tiles chunks"]
    count: Int[Array, " tiles"]


def kept_blocks(
    gradient_filter: GradientFilter,
    peaks: Float[Array, "tiles chunks tokens"],
    tile_of_target: Int[Array, "chunks tokens"],
    normaliser: Normaliser,
    g_log_probs: Float[Array, "chunks tokens"],
    g_entropy: Float[Array, "chunks tokens"] | None,
) -> Bool[Array, "tiles chunks"]:
    """Returns True for each block of the logits' gradient that has to be computed.

    Args:
        gradient_filter: the filter, whose threshold applies.
        peaks: [tiles, chunks, tokens], largest logit of each tile and token, -inf for a tile without a column.
        tile_of_target: [chunks, tokens], tile that holds the target; negative if none does.
        normaliser: softmax statistics over the whole vocabulary, one value per token.
        g_log_probs: [chunks, tokens], cotangents of the log-probs; exactly 0 for tokens without one.
        g_entropy: [chunks, tokens], cotangents of the entropies; exactly 0 for tokens without one; or None.

    Returns:
        bool [tiles, chunks].
    """
    shift = jnp.where(jnp.isneginf(peaks), -jnp.inf, peaks - normaliser.max[None])
    largest = jnp.exp(shift - normaliser.log_sum_exp[None])
    live, finite = g_log_probs != 0.0, jnp.isfinite(g_log_probs)
    if g_entropy is not None:
        live, finite = live | (g_entropy != 0.0), finite & jnp.isfinite(g_entropy)
    tiles = jnp.arange(peaks.shape[0], dtype=jnp.int32).reshape(-1, *[1] * tile_of_target.ndim)
    # Negated comparison, so that a NaN keeps its block.
    counts = ~(largest < gradient_filter.threshold) | (tile_of_target[None] == tiles) | ~finite[None]
    return jnp.any(counts & live[None], axis=-1)


def visits(kept: Bool[Array, "tiles chunks"]) -> KeptBlocks:
    """Lists the chunks that each tile has to visit first; loops bounded by their number never reach the other chunks."""
    order = jnp.argsort(~kept, axis=1, stable=True).astype(jnp.int32)
    return KeptBlocks(order, jnp.sum(kept, axis=1, dtype=jnp.int32))
