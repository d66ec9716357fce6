"""One token for every row, and its log-probs, from hidden states or logits.

A draw inverts the cumulative distribution at one uniform number a row, first over blocks of the vocabulary, then inside
of one: the logits are read twice, and no number is drawn for each of them. The sums that the draw needs are those of the
log-probs.

Shapes: B rows, V vocabulary entries.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from experiments.models.mesh import TENSOR_AXIS, axes_of_rows, size_of
from experiments.sampling.options import SamplingOptions
from experiments.sampling.support import RecordedSupport
from jaxlogp import head_logits
from jaxlogp.head import HeadSpec
from jaxlogp.head.projection import finish_logits

BLOCK = 256
"""Entries of a block of the vocabulary."""


class SampledToken(NamedTuple):
    """One token per row, with log-probs in nats.

    `log_probs` are what a trainer computes: under softmax(logits / temperature) over the whole vocabulary, or over the
    support where that is recorded, as `kept`. `cut` says whether the room left out some of that; `mass` is the probability
    of the support in the whole distribution.
    """

    tokens: Int[Array, " B"]
    log_probs: Float[Array, " B"]
    kept: Bool[Array, "B V"] | None = None
    cut: Bool[Array, " B"] | None = None
    mass: Float[Array, " B"] | None = None


@dataclass(frozen=True)
class CompletionRule:
    """How rows are completed: by tokens drawn as `options` say, until one of `eos_ids`; then by `pad_id`.

    `options` have the temperature that is drawn at. Their stop texts are left to those who read texts.
    """

    options: SamplingOptions
    eos_ids: tuple[int, ...]
    pad_id: int

    def no_support(self, rows: int, vocab_size: int) -> RecordedSupport | None:
        options = self.options
        if not options.record_support:
            return None
        return RecordedSupport.empty(rows, options.max_new_tokens, min(options.support_room, vocab_size))

    def greedy_rows(self, row_ids: Int[Array, " B"], copies: int | Int[Array, ""]) -> Bool[Array, " B"] | None:
        """Returns which rows take the most likely token, of `copies` of each prompt side by side; None if all are alike."""
        return row_ids % copies == copies - 1 if self.options.greedy_last else None

    def next_tokens(
        self,
        hidden,
        head,
        row_keys,
        steps: Int[Array, " B"],
        done,
        greedy: Bool[Array, " B"] | None = None,
        support: RecordedSupport | None = None,
        rows: Int[Array, "ranks C"] | None = None,
        mesh: Mesh | None = None,
    ) -> tuple[SampledToken, Bool[Array, " B"], RecordedSupport | None]:
        """Returns one token per row, padding and a log-prob of 0.0 where the row is done, which are done after it, and the
        support with that of these tokens.

        `steps` are the tokens that each row has. Its support is that of `rows` (`RecordedSupport.extended`), if it has one.
        The `mesh` splits rows and vocabulary.
        """
        keys = jax.vmap(jax.random.fold_in)(row_keys, steps)
        room = None if support is None else support.room(rows, steps)
        sampled = sample_token(logits_of(hidden, *head), keys, self.options, room, greedy, mesh)
        if support is not None:
            kept, cut, mass = sampled.kept & ~done[:, None], sampled.cut & ~done, jnp.where(done, 0.0, sampled.mass)
            support = support.extended(rows, steps, kept, cut, mass)
        empty = (self.pad_id, 0.0)
        sampled = SampledToken(*(jnp.where(done, nothing, new) for nothing, new in zip(empty, sampled, strict=False)))
        return sampled, functools.reduce(jnp.logical_or, (sampled.tokens == end for end in self.eos_ids), done), support


def keys_of_rows(key: Key[Array, ""], row_ids: Int[Array, " B"]) -> Key[Array, " B"]:
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, row_ids)


def logits_of(
    hidden: Float[Array, "B H"],
    spec: HeadSpec,
    weight: Shaped[Array, "V H"],
    scales: Float[Array, " V"] | None = None,
) -> Float[Array, "B V"]:
    """Returns logits before the temperature, with the arithmetic of the trainer's head; an int8 weight has scales."""
    if scales is None:
        return head_logits(hidden, weight, logit_scale=spec.logit_scale, softcap=spec.softcap, fp32_head=spec.fp32_head)
    products = head_logits(hidden, weight.astype(hidden.dtype), fp32_head=spec.fp32_head)
    return finish_logits(products * scales, None, spec)


def sample_token(
    logits: Float[Array, "B V"],
    row_keys: Key[Array, " B"],
    options: SamplingOptions,
    room: Int[Array, " B"] | None = None,
    greedy: Bool[Array, " B"] | None = None,
    mesh: Mesh | None = None,
) -> SampledToken:
    """Draws one token for every row, by its own random key, from fp32 logits before the temperature.

    `room` is the most ids that each row may draw among, where the support is recorded. `greedy` rows take the most likely
    token, as all do with `options.greedy`. The `mesh` splits rows and vocabulary.
    """
    assert options.temperature is not None, "what draws has been told that of the run"
    scaled = logits.astype(jnp.float32) / options.temperature
    largest = scaled.max(axis=-1, keepdims=True)
    weights = jnp.exp(scaled - largest)
    total = weights.sum(axis=-1)
    drawn_from, drawn_total, kept, cut = weights, total, None, None
    if options.filters:
        kept, cut = _keep(scaled, weights, options, room)
        drawn_from = jnp.where(kept, weights, 0.0)
        drawn_total = drawn_from.sum(axis=-1)
    if options.greedy:
        tokens = most_likely(scaled)
    else:
        tokens = _invert(drawn_from, jax.vmap(jax.random.uniform)(row_keys), mesh)
    if greedy is not None:
        tokens = jnp.where(greedy, most_likely(scaled), tokens)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0] - largest[:, 0]
    if room is None:
        return SampledToken(tokens, chosen - jnp.log(total))
    return SampledToken(tokens, chosen - jnp.log(drawn_total), kept, cut, drawn_total / total)


def _keep(
    scaled: Float[Array, "B V"], weights: Float[Array, "B V"], options: SamplingOptions, room: Int[Array, " B"] | None
) -> tuple[Bool[Array, "B V"], Bool[Array, " B"] | None]:
    """Returns what top_k, top_p and min_p leave, at most `room` ids of each row, and the rows of which that leaves some out.

    `weights` are exp(scaled - its largest).
    """
    left = scaled >= _threshold(scaled, weights, options)
    return (left, None) if room is None else _cut_to_room(scaled, left, room)


def most_likely(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _cut_to_room(
    scaled: Float[Array, "B V"], left: Bool[Array, "B V"], room: Int[Array, " B"]
) -> tuple[Bool[Array, "B V"], Bool[Array, " B"]]:
    """Returns the most likely entries left, of equals the lowest ids, as many as have room, and where some had none."""
    cut = jnp.sum(left, axis=1) > room

    def shortened() -> Bool[Array, "B V"]:
        wanted = room[:, None].astype(jnp.float32)
        lowest = _nucleus(scaled, left.astype(jnp.float32), wanted)
        above, equal = left & (scaled > lowest), left & (scaled == lowest)
        first = jnp.cumsum(equal, axis=1) <= room[:, None] - jnp.sum(above, axis=1, keepdims=True)
        return jnp.where(cut[:, None], above | (equal & first), left)

    return lax.cond(jnp.any(cut), shortened, lambda: left), cut


def _invert(weights: Float[Array, "B V"], uniform: Float[Array, " B"], mesh: Mesh | None) -> Int[Array, " B"]:
    """Returns the first entry at which the cumulative sum of the weights exceeds uniform · their sum.

    Tensor ranks that split the vocabulary add their own entries alone; what they exchange is a sum and an id for each row.
    """
    ranks = size_of(mesh, TENSOR_AXIS)
    if mesh is None or ranks == 1 or weights.shape[1] % ranks:
        sums = _BlockSums.of(weights)
        return sums.entry_beyond(uniform * sums.cumulative[:, -1])
    rows = axes_of_rows(len(weights), mesh)
    split = jax.shard_map(_invert_part, mesh=mesh, in_specs=(P(rows, TENSOR_AXIS), P(rows)), out_specs=P(rows))
    return split(weights, uniform)


def _invert_part(weights: Float[Array, "B v"], uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """As `_invert`, on a rank that has the weights of a part of the vocabulary."""
    sums, here = _BlockSums.of(weights), lax.axis_index(TENSOR_AXIS)
    totals = lax.all_gather(sums.cumulative[:, -1], TENSOR_AXIS, axis=1)
    ends = jnp.cumsum(totals, axis=1)
    goal = uniform * ends[:, -1]
    owner = _first_beyond(ends, goal)
    before = jnp.take_along_axis(ends - totals, owner[:, None], axis=1)[:, 0]
    entry = here * weights.shape[1] + sums.entry_beyond(goal - before)
    return lax.psum(jnp.where(owner == here, entry, 0), TENSOR_AXIS)


class _BlockSums(NamedTuple):
    """Weights of each row, and the sums of their blocks of so many entries; the last block may be short."""

    weights: Float[Array, "B V"]
    block: int
    sums: Float[Array, "B blocks"]
    cumulative: Float[Array, "B blocks"]

    @classmethod
    def of(cls, weights: Float[Array, "B V"]) -> "_BlockSums":
        rows, vocab = weights.shape
        block = min(BLOCK, vocab)
        sums = jnp.pad(weights, ((0, 0), (0, -vocab % block))).reshape(rows, -1, block).sum(axis=-1)
        return cls(weights, block, sums, jnp.cumsum(sums, axis=-1))

    def entry_beyond(self, goal: Float[Array, " B"]) -> Int[Array, " B"]:
        index = _first_beyond(self.cumulative, goal)
        before = jnp.take_along_axis(self.cumulative - self.sums, index[:, None], axis=-1)[:, 0]
        # The slice of a short block begins earlier, and entries of the block before it weigh nothing.
        start = jnp.minimum(index * self.block, self.weights.shape[1] - self.block)
        columns = start[:, None] + jnp.arange(self.block, dtype=jnp.int32)
        inside = jnp.take_along_axis(self.weights, columns, axis=-1)
        inside = jnp.where(columns >= (index * self.block)[:, None], inside, 0.0)
        return start + _first_beyond(jnp.cumsum(inside, axis=-1), goal - before)


def _first_beyond(cumulative: Float[Array, "B n"], goal: Float[Array, " B"]) -> Int[Array, " B"]:
    """Returns the first index beyond the goal; never an entry of weight 0.

    Where rounding put the goal at the end, it is the last that added anything; also where the goal is below 0.
    """
    beyond = (cumulative > goal[:, None]) & (cumulative > 0.0)
    return jnp.argmax(beyond | (cumulative == cumulative[:, -1:]), axis=-1).astype(jnp.int32)


def _threshold(scaled, weights, options: SamplingOptions) -> Float[Array, "B 1"]:
    """Returns the smallest scaled logit of each row that is drawn."""
    largest = scaled.max(axis=-1, keepdims=True)
    lowest = jnp.full_like(largest, -jnp.inf)
    if options.top_k is not None and options.top_k < scaled.shape[-1]:
        # XLA's own top-k would gather the rows of all ranks.
        lowest = _nucleus(scaled, jnp.ones_like(scaled), options.top_k)
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
