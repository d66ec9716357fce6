"""KL and Jensen-Shannon divergence between two heads over the whole vocabulary, without [tokens, V] logits.

Both log-sum-exps come from an engine of the head. The sum over the vocabulary, and the gradient, recompute the logits of
both heads in blocks of token chunks and vocabulary tiles; the tile loop is the outer one, as in engine ``chunked``.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxlogp._compat import (
    AnyMesh,
    AxisName,
    automatic_axes,
    leading_spec,
    require_checked_axes,
    union_of_varying_axes,
    vary_over,
)
from jaxlogp._vocab import VocabShards
from jaxlogp.errors import describe, is_number, require
from jaxlogp.head.call import WEIGHT_LAYOUTS, HeadCall, HeadGradients, HeadWeight, check_operands, head_call
from jaxlogp.head.chunked.blocks import Blocks, BlockSizes, usual_sizes
from jaxlogp.head.chunked.engine import ChunkedEngine
from jaxlogp.head.over_mesh import Layout, known_layout, layout_of, run_over_mesh, warn_of_unknown_layout
from jaxlogp.head.projection import HeadSpec, dot, finish_logits, product_gradient, take_rows, write_rows
from jaxlogp.head.registry import EngineChoice, HeadRun, choose_engine, report
from jaxlogp.head.values import cotangents_of, head_values, one_program

KINDS = ("reverse", "forward", "jensen_shannon")
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
            any device, of the sizes of a ``ChunkedEngine``, if that is the engine of the first.

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
    _check_heads((hidden, weight, bias), (ref_hidden, ref_weight, ref_bias), weight_layout)
    require(kind in KINDS, "kind", f"one of {KINDS}", repr(kind))
    good = is_number(ref_share) and 0.0 < ref_share < 1.0
    require(good, "ref_share", "a number in (0, 1)", describe(ref_share))
    require(kind == "jensen_shannon" or ref_share == 0.5, "ref_share", f"no value with kind {kind!r}", ref_share)
    for name, value in (("head", head), ("ref_head", ref_head)):
        require(isinstance(value, HeadSpec), name, "a HeadSpec", describe(value))
    if axis_name is None and vocab is None:
        mesh = known_layout(hidden, weight, weight_layout, engine)
        if mesh is not None:
            options = {"bias": bias, "ref_bias": ref_bias, "head": head, "ref_head": ref_head, "engine": engine, **mesh}
            options |= {"kind": kind, "ref_share": ref_share, "weight_layout": weight_layout}
            return sharded_linear_kl(hidden, weight, ref_hidden, ref_weight, mask, **options)
        # The caller's frame lies beyond that of this function.
        warn_of_unknown_layout("linear_kl", hidden, weight, stacklevel=3)
    tokens, rule = hidden.shape[:-1], Rule(kind, float(ref_share))
    of_call = {"axis_name": axis_name, "vocab": vocab, "weight_layout": weight_layout, "sequence_dim": None}
    of_call |= {"out_of_vocab": "error", "with_entropy": False, "frozen": True}

    def run(policy: tuple, reference: tuple, mask: Array | None) -> Array:
        targets = jnp.zeros(tokens, jnp.int32)
        of_policy = head_call(*policy, targets, mask, head, **of_call)
        of_reference = head_call(*jax.tree.map(lax.stop_gradient, reference), targets, mask, ref_head, **of_call)

        def lse(call: HeadCall) -> tuple[Array, BlockSizes]:
            call = jax.tree.map(lax.stop_gradient, call)
            chosen, reason = choose_engine(engine, call)
            report(HeadRun("linear_kl", chosen.name, reason, call.num_shards))
            found = head_values(chosen, call).lse
            assert found is not None, "every engine returns it"
            return found, chosen.sizes if isinstance(chosen, ChunkedEngine) else usual_sizes()

        (of_ours, sizes), (of_theirs, _) = lse(of_policy), lse(of_reference)
        axes = of_policy.axes | of_reference.axes
        calls = _over(of_policy, axes), _over(of_reference, axes)
        return _divergence(_Work(rule, sizes), *calls, (of_ours, of_theirs)).reshape(tokens)

    arrays = (hidden, weight, bias), (ref_hidden, ref_weight, ref_bias)
    return automatic_axes(run, *arrays, mask, out_specs=leading_spec(hidden, len(tokens)))


def sharded_linear_kl(
    hidden: Float[Array, "*tokens hidden"],
    weight: HeadWeight,
    ref_hidden: Float[Array, "*tokens ref_hidden"],
    ref_weight: Float[Array, "vocab ref_hidden"] | Float[Array, "ref_hidden vocab"],
    mask: Bool[Array, "*tokens"] | None = None,
    *,
    mesh: AnyMesh,
    vocab_axis: str = "tensor",
    token_axes: tuple[str, ...] = ("data",),
    weight_axis: str | None = None,
    vocab: VocabShards | None = None,
    bias: Float[Array, " vocab"] | None = None,
    ref_bias: Float[Array, " vocab"] | None = None,
    **options: Any,
) -> Float[Array, "*tokens"]:
    """Runs :func:`linear_kl` on global arrays, in a ``shard_map`` over ``mesh``, as one program.

    Args:
        hidden: [*tokens, H], split as in :func:`jaxlogp.sharded_linear_log_probs`.
        weight: [V, H] or [H, V], split as in :func:`jaxlogp.sharded_linear_log_probs`.
        ref_hidden: [*tokens, H_ref], split as hidden.
        ref_weight: [V, H_ref] or [H_ref, V], split as weight.
        mask: [*tokens], bool, or None.
        mesh: the device mesh; Explicit and Auto axes both work.
        vocab_axis: mesh axis that shards the vocabulary.
        token_axes: mesh axes that shard the first token dimension; () for none.
        weight_axis: one of token_axes, over which H and H_ref are split, or None.
        vocab: the shards, or None, as in :func:`jaxlogp.sharded_linear_log_probs`.
        bias: [V] or None.
        ref_bias: [V] or None.
        **options: further keyword arguments of :func:`linear_kl`, except ``axis_name``.

    Returns:
        fp32 [*tokens] in nats, a global array.

    Raises:
        ValueError: if ``mesh`` lacks an axis or does not divide a size, or linear_kl refuses an argument.

    Example:
        >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"))
        >>> hidden, weight = jnp.ones((2, 4)), jnp.eye(4)
        >>> sharded_linear_kl(hidden, weight, hidden, weight, mesh=mesh).tolist()
        [0.0, 0.0]
    """
    policy, reference = (hidden, weight, bias), (ref_hidden, ref_weight, ref_bias)
    _check_heads(policy, reference, options.get("weight_layout", "vh"))
    layout = layout_of(*policy, mesh, vocab_axis, token_axes, weight_axis, options)
    size = 1 if weight_axis is None else mesh.shape[weight_axis]
    divides = ref_hidden.shape[-1] % size == 0
    require(divides, "ref_weight", f"a hidden dimension divisible by {size}", describe(ref_weight))
    heads = {"": policy, "ref_": reference}
    return run_over_mesh(_of_rank, layout.tokens, layout, heads, {"mask": mask}, vocab, options)


def _of_rank(layout: Layout, **given: Any) -> Array:
    del layout
    return linear_kl(**given)


def _check_heads(policy: tuple, reference: tuple, weight_layout: str) -> None:
    """Refuses operands that are no two heads of the same tokens and one vocabulary."""
    check_operands(*policy, weight_layout)
    try:
        check_operands(*reference, weight_layout)
    except ValueError as error:
        # It begins with the name of an operand.
        raise ValueError(f"ref_{error}") from None
    (hidden, weight, _), (ref_hidden, ref_weight, _) = policy, reference
    tokens, vocab_dim = hidden.shape[:-1], WEIGHT_LAYOUTS.index(weight_layout)
    require(math.prod(tokens) > 0, "hidden", "at least one token", describe(hidden))
    require(ref_hidden.shape[:-1] == tokens, "ref_hidden", f"the tokens of hidden, {tokens}", describe(ref_hidden))
    expected = f"the vocabulary of weight, {weight.shape[vocab_dim]} ids"
    require(ref_weight.shape[vocab_dim] == weight.shape[vocab_dim], "ref_weight", expected, describe(ref_weight))


def _over(call: HeadCall, axes: Iterable[AxisName]) -> HeadCall:
    """The call with operands that vary over all axes of both, which is where their gradients are added."""
    # Ranks add their parts of the gradient in fp32.
    hidden = call.hidden if call.axis_name is None else call.hidden.astype(jnp.float32)
    operands = (hidden, call.weight, call.bias)
    return call.with_operands(*(None if x is None else vary_over(x, axes) for x in operands))


class _Sums(NamedTuple):
    value: Array
    mean: Array


@dataclasses.dataclass(frozen=True)
class Rule:
    """A divergence; static."""

    kind: str
    ref_share: float

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

    def __init__(self, work: "_Work", policy: HeadCall, reference: HeadCall, lses: tuple[Array, Array]) -> None:
        self.rule, self.policy, self.calls = work.rule, policy, (policy.masked(), reference.masked())
        self.blocks = Blocks.of(work.sizes, policy.hidden.shape[0], policy.num_columns)
        self.axes = union_of_varying_axes(policy.weight)
        self.dtypes = [_product_dtype(call) for call in self.calls]
        both = zip(self.calls, self.dtypes, strict=True)
        self.hidden = [self.blocks.chunks(call.hidden.astype(dtype), 0) for call, dtype in both]
        self.lses = [self.blocks.chunks(jnp.where(policy.targets.mask, lse, 0.0), 0) for lse in lses]

    def zeros(self, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return vary_over(jnp.zeros(shape, dtype), self.axes)

    def tile(self, index: Array) -> "_Tile":
        start, own, valid = self.blocks.tile_columns(index, self.policy.targets.width)
        weights, biases = [], []
        for call, dtype in zip(self.calls, self.dtypes, strict=True):
            weights.append(take_rows(call.weight, start, self.blocks.tile, call.vocab_dim).astype(dtype))
            biases.append(None if call.bias is None else take_rows(call.bias, start, self.blocks.tile))
        return _Tile(start, own, valid[None, :], tuple(weights), tuple(biases))

    def log_probs(self, tile: "_Tile", chunk: Array) -> tuple[Array, Array, Array]:
        """Logits of the policy, and log π and log ρ, of a block."""
        both = []
        for number, call in enumerate(self.calls):
            products = dot(self.hidden[number][chunk], tile.weights[number], contract=(1, 1))
            both.append(finish_logits(products, tile.biases[number], call.spec))
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
        return found if self.policy.axis_name is None else _Sums(*lax.psum(found, self.policy.axis_name))

    def gradients(self, mean: Array, g: Array) -> HeadGradients:
        policy, blocks = self.policy, self.blocks
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
                gradient = product_gradient(jnp.where(counts, cotangent * slope, 0.0), logits, policy.spec)
                rounded = gradient.astype(self.dtypes[0])
                d_hidden = d_hidden.at[chunk].add(dot(rounded, tile.weights[0], contract=(1, 0)))
                d_weight_tile = d_weight_tile + dot(rounded, self.hidden[0][chunk], contract=(0, 0))
                return d_hidden, d_weight_tile, d_bias_tile + gradient.sum(axis=0)

            zeros = self.zeros(tile.weights[0].shape), self.zeros((blocks.tile,))
            d_hidden, *of_this = lax.fori_loop(0, blocks.num_chunks, of_chunk, (d_hidden, *zeros))
            d_weight = write_rows(d_weight, of_this[0], tile.start, tile.own, policy.vocab_dim)
            return d_hidden, d_weight, write_rows(d_bias, of_this[1], tile.start, tile.own)

        zeros = self.zeros(self.hidden[0].shape), self.zeros(policy.weight.shape, policy.weight.dtype)
        carry = *zeros, self.zeros((policy.num_columns,))
        d_hidden, d_weight, d_bias = lax.fori_loop(0, blocks.num_tiles, of_tile, carry)
        d_hidden = jnp.where(policy.targets.mask[:, None], blocks.unchunk(d_hidden), 0.0).astype(policy.hidden.dtype)
        return HeadGradients(d_hidden, d_weight, None if policy.bias is None else d_bias.astype(policy.bias.dtype))


class _Tile(NamedTuple):
    start: Array
    own: Array
    valid: Array
    weights: tuple[Array, ...]
    biases: tuple[Array | None, ...]


def _product_dtype(call: HeadCall) -> jnp.dtype:
    # Gradients of logits would underflow in fp16.
    return jnp.dtype(jnp.float32) if call.scaled else call.operand_dtype


class _Work(NamedTuple):
    rule: Rule
    sizes: BlockSizes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@one_program
def _divergence(work: _Work, policy: HeadCall, reference: HeadCall, lses: tuple[Array, Array]) -> Array:
    """The divergence at every token; the operands of `policy` have a gradient."""
    return _forward(work, policy, reference, lses)[0]


@one_program
def _forward(work: _Work, policy: HeadCall, reference: HeadCall, lses: tuple[Array, Array]) -> tuple[Array, tuple]:
    sums = _Loops(work, policy, reference, lses).sums()
    return jnp.where(policy.targets.mask, sums.value, 0.0), (policy, reference, lses, sums.mean)


def _differentiated(
    work: _Work, policy: HeadCall, reference: HeadCall, lses: tuple[Array, Array]
) -> tuple[Array, tuple]:
    require_checked_axes(policy.axis_name)
    return _forward(work, policy, reference, lses)


@one_program
def _backward(work: _Work, residuals: tuple, g: Array) -> tuple[HeadCall, None, None]:
    policy, reference, lses, mean = residuals
    g = jnp.where(policy.targets.mask, g, 0.0)
    gradients = _Loops(work, policy, reference, lses).gradients(mean, g)
    return cotangents_of(policy, gradients), None, None


_divergence.defvjp(_differentiated, _backward)
