"""One token for every row from its logits, and the log-probs of it.

A draw inverts the cumulative distribution at one uniform number a row, first over blocks of the vocabulary, then inside
of one: the logits are read twice, and no number is drawn for each of them. The sums that the draw needs are those of the
log-probs.

Shapes: B rows, V vocabulary entries.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from jaxlogp.errors import require

BLOCK = 256
"""Entries of a block of the vocabulary."""


@dataclass(frozen=True)
class DrawOptions:
    """How a token is drawn from softmax(logits / temperature).

    Args:
        temperature: divisor of the logits, positive.
        greedy: take the likeliest token (the lowest id among equals).
        top_k: draw among this many likeliest tokens only, and those as likely as the last of them; None for all.
        top_p: of these, draw among the fewest likeliest whose probabilities (renormalised after top_k) sum to at least
            this, and those as likely as the last of them; 1.0 for all.
        min_p: draw among tokens at least this many times as likely as the likeliest; 0.0 for all.
    """

    temperature: float = 1.0
    greedy: bool = False
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        require(0.0 < self.temperature < math.inf, "temperature", "a positive, finite number", self.temperature)
        require(self.top_k is None or self.top_k >= 1, "top_k", "at least 1, or None", self.top_k)
        require(0.0 < self.top_p <= 1.0, "top_p", "a number above 0, at most 1", self.top_p)
        require(0.0 <= self.min_p <= 1.0, "min_p", "a number in [0, 1]", self.min_p)

    @property
    def filters(self) -> bool:
        """Whether some tokens are not drawn at all."""
        return self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0


class SampledToken(NamedTuple):
    """One token per row.

    Attributes:
        log_probs: in nats, under softmax(logits / temperature) over the whole vocabulary: what a trainer computes.
        drawn_log_probs: in nats, under the distribution that the token was drawn from, renormalised over what top_k, top_p
            and min_p leave; equal to `log_probs` without them.
    """

    tokens: Int[Array, " B"]
    log_probs: Float[Array, " B"]
    drawn_log_probs: Float[Array, " B"]


def sample_token(logits: Float[Array, "B V"], row_keys: Key[Array, " B"], options: DrawOptions) -> SampledToken:
    """Draws one token for every row, by its own random key, from fp32 logits before the temperature."""
    scaled = logits.astype(jnp.float32) / options.temperature
    largest = scaled.max(axis=-1, keepdims=True)
    weights = jnp.exp(scaled - largest)
    total = weights.sum(axis=-1)
    kept, kept_total = weights, total
    if options.filters:
        kept = jnp.where(scaled >= _threshold(scaled, largest, weights, options), weights, 0.0)
        kept_total = kept.sum(axis=-1)
    if options.greedy:
        tokens = jnp.argmax(scaled, axis=-1).astype(jnp.int32)
    else:
        uniform = jax.vmap(jax.random.uniform)(row_keys)
        tokens = _invert(kept, uniform)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0] - largest[:, 0]
    return SampledToken(tokens, chosen - jnp.log(total), chosen - jnp.log(kept_total))


def _invert(weights: Float[Array, "B V"], uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """Returns the first entry at which the cumulative sum of the weights exceeds uniform · their sum."""
    rows, vocab = weights.shape
    block = min(BLOCK, vocab)
    padded = jnp.pad(weights, ((0, 0), (0, -vocab % block)))
    block_sums = padded.reshape(rows, -1, block).sum(axis=-1)
    cumulative = jnp.cumsum(block_sums, axis=-1)
    goal = uniform * cumulative[:, -1]
    index = _first_beyond(cumulative, goal)
    before = jnp.take_along_axis(cumulative - block_sums, index[:, None], axis=-1)[:, 0]
    # The last block may be short: its slice begins earlier, and entries of the block before it weigh nothing.
    start = jnp.minimum(index * block, vocab - block)
    columns = start[:, None] + jnp.arange(block, dtype=jnp.int32)
    inside = jnp.take_along_axis(weights, columns, axis=-1)
    inside = jnp.where(columns >= (index * block)[:, None], inside, 0.0)
    return start + _first_beyond(jnp.cumsum(inside, axis=-1), goal - before)


def _first_beyond(cumulative: Float[Array, "B n"], goal: Float[Array, " B"]) -> Int[Array, " B"]:
    """Returns the first index beyond the goal; never an entry of weight 0.

    Where rounding put the goal at the end, it is the last that added anything; also where the goal is below 0.
    """
    beyond = (cumulative > goal[:, None]) & (cumulative > 0.0)
    return jnp.argmax(beyond | (cumulative == cumulative[:, -1:]), axis=-1).astype(jnp.int32)


def _threshold(scaled, largest, weights, options: DrawOptions) -> Float[Array, "B 1"]:
    """Returns the smallest scaled logit of each row that is drawn."""
    lowest = jnp.full_like(largest, -jnp.inf)
    if options.top_k is not None and options.top_k < scaled.shape[-1]:
        lowest = lax.top_k(scaled, options.top_k)[0][:, -1:]
    if options.top_p < 1.0:
        weights = jnp.where(scaled >= lowest, weights, 0.0)
        lowest = jnp.maximum(lowest, _nucleus(scaled, weights, options.top_p * weights.sum(axis=-1, keepdims=True)))
    if options.min_p > 0.0:
        lowest = jnp.maximum(lowest, largest + math.log(options.min_p))
    return lowest


def _nucleus(scaled, weights, mass) -> Float[Array, "B 1"]:
    """Returns the largest threshold at which the weights of the entries not below it sum to at least `mass`.

    By bisection over all fp32 numbers in their order: 32 sums, and no sorting.
    """
    as_bits = lambda x: _in_order(lax.bitcast_convert_type(x, jnp.int32))  # noqa: E731
    ordered = as_bits(scaled)

    def halve(_, bounds):
        enough, too_high = bounds
        middle = (enough & too_high) + ((enough ^ too_high) >> 1)
        sums = jnp.where(ordered >= middle, weights, 0.0).sum(axis=-1, keepdims=True)
        return jnp.where(sums >= mass, middle, enough), jnp.where(sums >= mass, too_high, middle)

    bounds = ordered.min(axis=-1, keepdims=True), ordered.max(axis=-1, keepdims=True) + 1
    enough, _ = lax.fori_loop(0, 32, halve, bounds)
    return lax.bitcast_convert_type(_in_order(enough), jnp.float32)


def _in_order(bits: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Returns the bits of fp32 numbers as integers in the numbers' order; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
