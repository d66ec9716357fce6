"""KL and Jensen-Shannon divergence between two heads over the whole vocabulary, without [tokens, V] logits.

Both log-sum-exps come from an engine of the head. The sum over the vocabulary, and the gradient, recompute the logits of
both heads in blocks of token chunks and vocabulary tiles; the tile loop is the outer one, as in engine ``chunked``.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxlogp._compat import (
    AxisName,
    automatic_axes,
    leading_spec,
    require_checked_axes,
    union_of_varying_axes,
    vary_over,
)
from jaxlogp._vocab import VocabShards, local_shard
from jaxlogp.errors import describe, is_number, require
from jaxlogp.head.call import WEIGHT_LAYOUTS, HeadWeight, check_operands, head_call
from jaxlogp.head.chunked.blocks import Blocks
from jaxlogp.head.projection import HeadSpec, dot, finish_logits, product_gradient, take_rows, write_rows
from jaxlogp.head.registry import EngineChoice, HeadRun, choose_engine, report
from jaxlogp.head.values import head_values

KINDS = ("reverse", "forward", "jensen_shannon")
TOKEN_CHUNK, VOCAB_TILE = 512, 2048
PLAIN = HeadSpec()


def linear_kl(
    hidden: Float[Array, "*tokens hidden"],
    weight: HeadWeight,
    ref_hidden: Float[Array, "*tokens ref_hidden"],
    ref_weight: Float[Array, "vocab ref_hidden"] | Float[Array, "ref_hidden vocab"],
    mask: Bool[Array, "*tokens"] | None = None,
    *,
    kind: str = "reverse",
    ref_share: float = 0.5,
    bias: Float[Array, " vocab"] | None = None,
    ref_bias: Float[Array, " vocab"] | None = None,
    head: HeadSpec = PLAIN,
    ref_head: HeadSpec = PLAIN,
    axis_name: AxisName | None = None,
    vocab: VocabShards | None = None,
    weight_layout: str = "vh",
    engine: EngineChoice = "auto",
) -> Float[Array, "*tokens"]:
    """Computes the divergence of a policy from a reference at every token, exactly, without [tokens, V] logits.

    With π = softmax(z) of the first head and ρ of the reference, and m = ref_share ρ + (1 - ref_share) π:

    * "reverse": KL(π ‖ ρ) = Σ π (log π - log ρ);
    * "forward": KL(ρ ‖ π) = Σ ρ (log ρ - log π);
    * "jensen_shannon": ref_share KL(ρ ‖ m) + (1 - ref_share) KL(π ‖ m).

    Differentiable in hidden, weight and bias; the reference is a constant. Two equal heads give exactly 0, and a gradient of
    exactly 0. Inside ``shard_map``, with ``axis_name``, both weights are local shards of the vocabulary, and gradients are
    summed as in :func:`jaxlogp.linear_log_probs`. Reverse mode only, and once.

    Args:
        hidden: [*tokens, H], bf16, fp16 or fp32, the same on all ranks of ``axis_name``.
        weight: [V, H], or the local shard [V_local, H].
        ref_hidden: [*tokens, H_ref] of the reference, whose size of hidden states is its own.
        ref_weight: [V, H_ref], or the local shard: the same vocabulary, split alike.
        mask: [*tokens], bool; False gives exactly 0 with exactly zero gradients. None for all tokens.
        kind: "reverse", "forward" or "jensen_shannon".
        ref_share: share of the reference in the mixture of "jensen_shannon", a Python number in (0, 1).
        bias: [V] or [V_local], or None.
        ref_bias: the reference's, or None.
        head: arithmetic of the first head: temperature, scale, soft cap, product in fp32.
        ref_head: that of the reference.
        axis_name: mesh axis over which the vocabulary is sharded.
        vocab: the shards; None for equal ones.
        weight_layout: "vh" or "hv", of both weights.
        engine: engine of both log-sum-exps, as in :func:`jaxlogp.linear_log_probs`; the divergence itself runs in blocks on
            any device.

    Returns:
        fp32 [*tokens] in nats, never negative. Infinite where the distribution in front of the bar has a token that the
        other one excludes by a bias of -inf; the gradient is NaN there.

    Raises:
        ValueError: if a shape, dtype or option is wrong, or :func:`jaxlogp.linear_log_probs` refuses an argument.

    Example:
        >>> hidden, weight = jnp.ones((2, 4)), jnp.eye(4)
        >>> linear_kl(hidden, weight, hidden, weight).tolist()
        [0.0, 0.0]
        >>> certain = jnp.array([0.0, -jnp.inf, -jnp.inf, -jnp.inf])
        >>> round(float(linear_kl(hidden, weight, hidden, weight, kind="forward", ref_bias=certain)[0]), 4)
        1.3863

    References:
        Agarwal et al., On-Policy Distillation of Language Models, arXiv:2306.13649 (generalized Jensen-Shannon divergence);
        Gu et al., MiniLLM, arXiv:2306.08543 (reverse KL).
    """
    check_operands(hidden, weight, bias, weight_layout)
    try:
        check_operands(ref_hidden, ref_weight, ref_bias, weight_layout)
    except ValueError as error:
        # It begins with the name of an operand.
        raise ValueError(f"ref_{error}") from None
    vocab_dim = WEIGHT_LAYOUTS.index(weight_layout)
    require(kind in KINDS, "kind", f"one of {KINDS}", repr(kind))
    good = is_number(ref_share) and 0.0 < ref_share < 1.0
    require(good, "ref_share", "a number in (0, 1)", describe(ref_share))
    require(kind == "jensen_shannon" or ref_share == 0.5, "ref_share", f"no value with kind {kind!r}", ref_share)
    for name, value in (("head", head), ("ref_head", ref_head)):
        require(isinstance(value, HeadSpec), name, "a HeadSpec", describe(value))
    tokens, columns = hidden.shape[:-1], weight.shape[vocab_dim]
    require(math.prod(tokens) > 0, "hidden", "at least one token", describe(hidden))
    require(ref_hidden.shape[:-1] == tokens, "ref_hidden", f"the tokens of hidden, {tokens}", describe(ref_hidden))
    same = ref_weight.shape[vocab_dim] == columns
    require(same, "ref_weight", f"the vocabulary of weight, {columns} ids", describe(ref_weight))
    rule = Rule(kind, float(ref_share), head, ref_head, vocab_dim, axis_name)
    of_call = {"axis_name": axis_name, "vocab": vocab, "weight_layout": weight_layout, "sequence_dim": None}
    of_call |= {"out_of_vocab": "error", "with_entropy": False, "frozen": True}

    def run(policy: Operands, reference: Operands, mask: Array | None) -> Array:
        targets = jnp.zeros(tokens, jnp.int32)

        def lse(own: Operands, spec: HeadSpec) -> Array:
            call = head_call(*jax.tree.map(lax.stop_gradient, own), targets, mask, spec, **of_call)
            chosen, reason = choose_engine(engine, call)
            report(HeadRun("linear_kl", chosen.name, reason, call.num_shards))
            found = head_values(chosen, call).lse
            assert found is not None, "every engine returns it"
            return found

        lses = lse(policy, head), lse(reference, ref_head)
        reference = jax.tree.map(lax.stop_gradient, reference)
        width = local_shard(columns, axis_name, vocab, "weight").width
        live = jnp.ones(math.prod(tokens), bool) if mask is None else mask.reshape(-1)
        problem = Problem(_flat(policy, axis_name), _flat(reference, axis_name), lses, live, jnp.asarray(width))
        axes = union_of_varying_axes(*jax.tree.leaves(problem)) | ({axis_name} - {None})
        policy, reference = jax.tree.map(lambda x: vary_over(x, axes), (problem.policy, problem.reference))
        return _divergence(rule, policy, problem._replace(reference=reference)).reshape(tokens)

    operands = Operands(*(None if x is None else jnp.asarray(x) for x in (hidden, weight, bias)))
    of_reference = Operands(*(None if x is None else jnp.asarray(x) for x in (ref_hidden, ref_weight, ref_bias)))
    specs = leading_spec(operands.hidden, len(tokens))
    return automatic_axes(run, operands, of_reference, mask, out_specs=specs)


class Operands(NamedTuple):
    """Hidden states, weight and bias of a head."""

    hidden: Array
    weight: Array
    bias: Array | None


class Problem(NamedTuple):
    """The operands of a divergence, with flat tokens."""

    policy: Operands
    reference: Operands
    lses: tuple[Array, Array]
    live: Array
    width: Array


def _flat(own: Operands, axis_name: AxisName | None) -> Operands:
    # Ranks add their parts of the gradient in fp32.
    hidden = own.hidden if axis_name is None else own.hidden.astype(jnp.float32)
    return own._replace(hidden=hidden.reshape(-1, hidden.shape[-1]))


class _Sums(NamedTuple):
    value: Array
    mean: Array


@dataclasses.dataclass(frozen=True)
class Rule:
    """A divergence and the layout of its operands; static."""

    kind: str
    ref_share: float
    head: HeadSpec
    ref_head: HeadSpec
    vocab_dim: int
    axis_name: AxisName | None

    def terms(self, log_policy: Array, log_reference: Array) -> tuple[Array, Array]:
        """Returns each id's terms of the value, and of the mean over π of what the gradient compares (:meth:`slope`)."""
        if self.kind == "forward":
            return _excess(log_reference, log_policy), jnp.zeros_like(log_policy)
        compared = self._compared(log_policy, log_reference)
        policy = jnp.exp(log_policy)
        # Not where it is above 0: a NaN stays one.
        mean = jnp.where(policy != 0.0, policy * (log_policy - compared), 0.0)
        if self.kind == "reverse":
            return _excess(log_policy, log_reference), mean
        value = self.ref_share * _excess(log_reference, compared) + (1.0 - self.ref_share) * _excess(
            log_policy, compared
        )
        return value, mean

    def slope(self, log_policy: Array, log_reference: Array, mean: Array) -> Array:
        """Returns the derivative by the logits z: π - ρ, or π (log π - log q - its mean) with q = ρ or (…) m."""
        policy = jnp.exp(log_policy)
        if self.kind == "forward":
            return policy - jnp.exp(log_reference)
        compared = self._compared(log_policy, log_reference)
        slope = jnp.where(policy != 0.0, policy * (log_policy - compared - mean), 0.0)
        return slope if self.kind == "reverse" else (1.0 - self.ref_share) * slope

    def _compared(self, log_policy: Array, log_reference: Array) -> Array:
        return log_reference if self.kind == "reverse" else _log_mixture(log_policy, log_reference, self.ref_share)


def _excess(log_a: Array, log_b: Array) -> Array:
    """Terms of KL(a ‖ b) as Σ (a log(a / b) + b - a): none is negative, and an error of a log-sum-exp cancels."""
    there = log_a != -jnp.inf
    a, b = jnp.exp(log_a), jnp.exp(log_b)
    difference = jnp.where(there, log_b - jnp.where(there, log_a, 0.0), 0.0)
    near = jnp.abs(difference) < 1.0
    small = jnp.where(near, difference, 0.0)
    far = b - a - jnp.where(a != 0.0, a * difference, 0.0)
    return jnp.where(there, jnp.where(near, a * jnp.maximum(jnp.expm1(small) - small, 0.0), far), b)


def _log_mixture(log_policy: Array, log_reference: Array, share: float) -> Array:
    """log(share ρ + (1 - share) π), and exactly log π where both are equal."""
    both = (log_policy > -jnp.inf) & (log_reference > -jnp.inf)
    ratio = jnp.where(both, log_reference - log_policy, 0.0)
    below = log_policy + jnp.log1p(share * jnp.expm1(jnp.minimum(ratio, 0.0)))
    above = log_reference + jnp.log1p((1.0 - share) * jnp.expm1(-jnp.maximum(ratio, 0.0)))
    alone = jnp.maximum(log_policy + math.log1p(-share), log_reference + math.log(share))
    return jnp.where(both, jnp.where(ratio > 0.0, above, below), alone)


class _Loops:
    """The loops over blocks: vocabulary tiles outside, token chunks inside."""

    def __init__(self, rule: Rule, problem: Problem) -> None:
        self.rule, self.problem = rule, problem
        vocab = problem.policy.weight.shape[rule.vocab_dim]
        self.blocks = Blocks.of(TOKEN_CHUNK, VOCAB_TILE, problem.policy.hidden.shape[0], vocab)
        self.axes = union_of_varying_axes(problem.policy.weight, problem.policy.hidden)
        heads = (problem.policy, rule.head), (problem.reference, rule.ref_head)
        self.dtypes = [_product_dtype(own, spec) for own, spec in heads]
        live = problem.live[:, None]
        self.hidden = [
            # 0 * NaN of a masked token would reach the whole gradient of the weight.
            self.blocks.chunks(jnp.where(live, own.hidden, 0.0).astype(dtype), 0)
            for (own, _), dtype in zip(heads, self.dtypes, strict=True)
        ]
        self.lses = [self.blocks.chunks(jnp.where(problem.live, lse, 0.0), 0) for lse in problem.lses]

    def zeros(self, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return vary_over(jnp.zeros(shape, dtype), self.axes)

    def tile(self, index: Array) -> "_Tile":
        start, own, valid = self.blocks.tile_columns(index, self.problem.width)
        weights, biases = [], []
        for operands, dtype in zip((self.problem.policy, self.problem.reference), self.dtypes, strict=True):
            weights.append(take_rows(operands.weight, start, self.blocks.tile, self.rule.vocab_dim).astype(dtype))
            biases.append(None if operands.bias is None else take_rows(operands.bias, start, self.blocks.tile))
        return _Tile(start, own, valid[None, :], tuple(weights), tuple(biases))

    def log_probs(self, tile: "_Tile", chunk: Array) -> tuple[Array, Array, Array]:
        """Logits of the policy, and log π and log ρ, of a block."""
        both = []
        for number, spec in enumerate((self.rule.head, self.rule.ref_head)):
            products = dot(self.hidden[number][chunk], tile.weights[number], contract=(1, 1))
            both.append(finish_logits(products, tile.biases[number], spec))
        logits, of_reference = both
        return logits, logits - self.lses[0][chunk][:, None], of_reference - self.lses[1][chunk][:, None]

    def sums(self) -> _Sums:
        blocks = self.blocks

        def of_tile(index: Array, sums: _Sums) -> _Sums:
            tile = self.tile(index)

            def of_chunk(chunk: Array, sums: _Sums) -> _Sums:
                _, *log_probs = self.log_probs(tile, chunk)
                terms = (jnp.where(tile.valid, x, 0.0).sum(axis=1) for x in self.rule.terms(*log_probs))
                return _Sums(*(total.at[chunk].add(new) for total, new in zip(sums, terms, strict=True)))

            return lax.fori_loop(0, blocks.num_chunks, of_chunk, sums)

        zeros = _Sums(*(self.zeros((blocks.num_chunks, blocks.chunk)) for _ in _Sums._fields))
        found = lax.fori_loop(0, blocks.num_tiles, of_tile, zeros)
        found = _Sums(*map(blocks.unchunk, found))
        return found if self.rule.axis_name is None else _Sums(*lax.psum(found, self.rule.axis_name))

    def gradients(self, mean: Array, g: Array) -> Operands:
        policy, blocks = self.problem.policy, self.blocks
        means, cotangents = (blocks.chunks(vary_over(x, self.axes), 0) for x in (mean, g))

        def of_tile(index: Array, carry: tuple) -> tuple:
            d_hidden, d_weight, d_bias = carry
            tile = self.tile(index)

            def of_chunk(chunk: Array, sums: tuple) -> tuple:
                d_hidden, d_weight_tile, d_bias_tile = sums
                logits, *log_probs = self.log_probs(tile, chunk)
                cotangent = cotangents[chunk][:, None]
                counts = tile.valid & (cotangent != 0.0)
                slope = self.rule.slope(*log_probs, means[chunk][:, None])
                gradient = product_gradient(jnp.where(counts, cotangent * slope, 0.0), logits, self.rule.head)
                rounded = gradient.astype(self.dtypes[0])
                d_hidden = d_hidden.at[chunk].add(dot(rounded, tile.weights[0], contract=(1, 0)))
                d_weight_tile = d_weight_tile + dot(rounded, self.hidden[0][chunk], contract=(0, 0))
                return d_hidden, d_weight_tile, d_bias_tile + gradient.sum(axis=0)

            zeros = self.zeros(tile.weights[0].shape), self.zeros((blocks.tile,))
            d_hidden, *of_this = lax.fori_loop(0, blocks.num_chunks, of_chunk, (d_hidden, *zeros))
            d_weight = write_rows(d_weight, of_this[0], tile.start, tile.own, self.rule.vocab_dim)
            return d_hidden, d_weight, write_rows(d_bias, of_this[1], tile.start, tile.own)

        columns = policy.weight.shape[self.rule.vocab_dim]
        zeros = self.zeros(self.hidden[0].shape), self.zeros(policy.weight.shape, policy.weight.dtype)
        carry = *zeros, self.zeros((columns,))
        d_hidden, d_weight, d_bias = lax.fori_loop(0, blocks.num_tiles, of_tile, carry)
        d_hidden = jnp.where(self.problem.live[:, None], blocks.unchunk(d_hidden), 0.0).astype(policy.hidden.dtype)
        return Operands(d_hidden, d_weight, None if policy.bias is None else d_bias.astype(policy.bias.dtype))


class _Tile(NamedTuple):
    start: Array
    own: Array
    valid: Array
    weights: tuple[Array, ...]
    biases: tuple[Array | None, ...]


def _product_dtype(own: Operands, spec: HeadSpec) -> jnp.dtype:
    # Gradients of logits would underflow in fp16.
    dtype = spec.operand_dtype(own.weight)
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype


# Each pass is one program outside of jit too.
_one_program = functools.partial(jax.jit, static_argnums=0, inline=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@_one_program
def _divergence(rule: Rule, policy: Operands, problem: Problem) -> Array:
    """The divergence at every token; only `policy`, which takes the place of the problem's own, has a gradient."""
    sums = _Loops(rule, problem._replace(policy=policy)).sums()
    return jnp.where(problem.live, sums.value, 0.0)


@_one_program
def _forward(rule: Rule, policy: Operands, problem: Problem) -> tuple[Array, tuple[Problem, Array]]:
    require_checked_axes(rule.axis_name)
    problem = problem._replace(policy=policy)
    sums = _Loops(rule, problem).sums()
    return jnp.where(problem.live, sums.value, 0.0), (problem, sums.mean)


@_one_program
def _backward(rule: Rule, residuals: tuple[Problem, Array], g: Array) -> tuple[Operands, None]:
    problem, mean = residuals
    g = jnp.where(problem.live, g, 0.0)
    return _Loops(rule, problem).gradients(mean, g), None


_divergence.defvjp(_forward, _backward)
