"""A checked head call: its operands, the static properties that an engine needs, and its gradients."""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._arrays import AnyArray
from jaxlogp._compat import (
    AxisName,
    require_axis_name,
    require_varying,
    union_of_varying_axes,
    vary_over,
    varying_axes,
)
from jaxlogp._stats import TokenLogProbs
from jaxlogp._targets import OUT_OF_VOCAB, LocalTargets, check_targets, localise, mask_cotangents
from jaxlogp._vocab import VocabShards, local_shard
from jaxlogp.errors import describe, require, require_integer, require_operand_dtype
from jaxlogp.head.projection import HeadSpec, dot
from jaxlogp.head.support.ids import Support, check_support, mask_by_support
from jaxlogp.head.support.local import LocalSupport, localise_support

HeadWeight = Float[Array, "vocab hidden"] | Float[Array, "hidden vocab"]
"""A head in either layout; see :data:`WEIGHT_LAYOUTS`."""

WEIGHT_LAYOUTS = ("vh", "hv")
"""[V, H], rows of an embedding table; [H, V], a kernel of a Flax ``Linear``."""


class HeadGradients(NamedTuple):
    """Gradients of the operands of a head call, for this rank's tokens and columns unless stated otherwise.

    Attributes:
        hidden: [tokens, H] in ``HeadCall.hidden_gradient_dtype``.
        weight: [V_local, H] in ``HeadCall.weight_gradient_dtype``; may be None if ``HeadCall.frozen``.
        bias: [V_local]; None without a bias, and may be None if ``HeadCall.frozen``.
    """

    hidden: Float[Array, "tokens hidden"]
    weight: HeadWeight | None
    bias: Float[Array, " vocab"] | None


class SequenceSplit(NamedTuple):
    """Sequence parallelism: hidden states split by tokens over the vocabulary axis.

    Attributes:
        part: shape of this rank's tokens.
        whole: shape of all tokens.
        dim: the dimension in which they differ.
    """

    part: tuple[int, ...]
    whole: tuple[int, ...]
    dim: int

    def gathered(self, hidden: Float[Array, "part hidden"], axis_name: AxisName) -> Float[Array, "tokens hidden"]:
        """Gathers the hidden states of all tokens on every rank."""
        whole = lax.all_gather(hidden.reshape(*self.part, -1), axis_name, axis=self.dim, tiled=True)
        return whole.reshape(-1, hidden.shape[-1])

    def scattered(self, gradient: Float[Array, "tokens hidden"], axis_name: AxisName) -> Float[Array, "part hidden"]:
        """Sums the gradients of all ranks and returns each rank's part of the tokens."""
        whole = gradient.reshape(*self.whole, -1)
        part = lax.psum_scatter(whole, axis_name, scatter_dimension=self.dim, tiled=True)
        return part.reshape(-1, gradient.shape[-1])


# JAX rebuilds it with leaves that are not arrays (sentinels, None), so functions check the fields that they use.
@no_type_check
@partial(
    jax.tree_util.register_dataclass,
    data_fields=["hidden", "weight", "bias", "targets", "support"],
    meta_fields=[
        "spec",
        "vocab_size",
        "shards",
        "axis_name",
        "num_shards",
        "with_entropy",
        "all_live",
        "weight_layout",
        "split",
        "frozen",
    ],
)
@dataclasses.dataclass(frozen=True)
class HeadCall:
    """Operands and static properties of one head call, checked, with flat tokens.

    Attributes:
        hidden: [tokens, H]; if the tokens are split, this rank's part until :meth:`gathered`.
        weight: [V, H], or the local shard [V_local, H].
        bias: [V_local] or None.
        targets: the targets relative to this shard, including the mask.
        spec: the arithmetic of the head.
        vocab_size: V.
        shards: the vocabulary shards; None for equal ones.
        axis_name: mesh axis over which the vocabulary is sharded, or None; engines reduce their statistics over it.
        num_shards: number of ranks of that axis; 1 if this rank holds all columns.
        with_entropy: whether entropy is wanted.
        all_live: whether every token counts because no mask was given.
        weight_layout: "vh" for [V, H], "hv" for [H, V].
        split: how the hidden states are split over ``axis_name``; None if each rank has all of them.
        frozen: whether weight and bias are constants, so that an engine need not compute their gradients.
        support: the ids of this shard that each token's distribution is restricted to; None for the whole vocabulary.
    """

    hidden: Float[Array, "tokens hidden"]
    weight: HeadWeight
    bias: Float[Array, " vocab"] | None
    targets: LocalTargets
    spec: HeadSpec = HeadSpec()
    vocab_size: int = 0
    shards: VocabShards | None = None
    axis_name: AxisName | None = None
    num_shards: int = 1
    with_entropy: bool = False
    all_live: bool = False
    weight_layout: str = "vh"
    split: SequenceSplit | None = None
    frozen: bool = False
    support: LocalSupport | None = None

    @property
    def vocab_dim(self) -> int:
        """The dimension of the weight that runs over the vocabulary."""
        return WEIGHT_LAYOUTS.index(self.weight_layout)

    @property
    def num_columns(self) -> int:
        """Vocabulary columns of this rank, padding of uneven shards included."""
        return self.weight.shape[self.vocab_dim]

    @property
    def operand_dtype(self) -> jnp.dtype:
        """Dtype in which hidden and weight enter the product."""
        return self.spec.operand_dtype(self.weight)

    @property
    def packing_mask(self) -> Bool[Array, " tokens"]:
        """The mask by which tokens may be packed and chunks skipped; None if other shards may have a different one.

        All shards must process the same tokens in the same chunk: their targets are compared, and they wait for each other
        in its collectives.
        """
        mask = self.targets.mask
        return jnp.ones_like(mask) if self.axis_name in varying_axes(mask) else mask

    @property
    def axes(self) -> frozenset:
        """Mesh axes of the surrounding ``shard_map`` over which the call varies, including that of the vocabulary."""
        named = frozenset() if self.axis_name is None else {self.axis_name}
        support = () if self.support is None else self.support
        return union_of_varying_axes(self.hidden, self.weight, self.bias, *self.targets, *support) | named

    @property
    def value_axes(self) -> frozenset:
        """Mesh axes over which the values vary; includes the vocabulary's only if targets or mask vary over it by type."""
        named = {self.axis_name} - union_of_varying_axes(self.targets.mask, self.targets.invalid)
        return self.axes - named

    @property
    def hidden_gradient_dtype(self) -> jnp.dtype:
        """fp32 if ranks of the vocabulary axis add to it or a factor is still to come, otherwise that of hidden.

        The factor is that of scaled cotangents or, in one pass, the cotangent of the loss: fp16 lacks the range for it.
        """
        wide = self.num_shards > 1 or self.scaled or self.hidden.dtype == jnp.float16
        return jnp.dtype(jnp.float32) if wide else self.hidden.dtype

    @property
    def weight_gradient_dtype(self) -> jnp.dtype:
        """fp32 if the weight is fp16, because a factor is still to come, otherwise that of the weight."""
        return jnp.dtype(jnp.float32) if self.weight.dtype == jnp.float16 else self.weight.dtype

    @property
    def scaled(self) -> bool:
        """Whether cotangents are multiplied by a power of two, since the gradient of the logits is rounded to fp16."""
        return self.operand_dtype == jnp.float16

    def gathered(self) -> "HeadCall":
        """Returns the call with the hidden states of all tokens."""
        if self.split is None:
            return self
        hidden = self.split.gathered(self.hidden, self.axis_name)
        return dataclasses.replace(self, hidden=hidden, split=None)

    def typed(self) -> "HeadCall":
        """Types the operands as varying over all :attr:`axes`, as the loops of an engine need them."""
        axes = self.axes
        typed = (None if x is None else vary_over(x, axes) for x in (self.hidden, self.weight, self.bias))
        return self.with_operands(*typed)

    def masked(self) -> "HeadCall":
        """Sets hidden states of masked tokens to 0, because 0 * NaN would reach the whole gradient of the weight."""
        if self.all_live:
            return self
        hidden = jnp.where(self.targets.mask[:, None], self.hidden, jnp.zeros_like(self.hidden))
        return self.with_operands(hidden, self.weight, self.bias)

    def onehot_column(self, column: Int[Array, " tokens"]) -> Int[Array, " tokens"]:
        """Returns the targets' columns for a gradient: -1 also if a bias of -inf has removed the column.

        So a removed column gets exact zeros as a target too, where the log-prob is the constant -inf.
        """
        if self.bias is None:
            return column
        removed = vary_over(jnp.isneginf(self.bias), self.axes)[jnp.maximum(column, 0)]
        return jnp.where(removed, -1, column)

    def without_removed_targets(self) -> "HeadCall":
        """Returns the call with :meth:`onehot_column`, for a backward."""
        return dataclasses.replace(self, targets=self.targets._replace(column=self.onehot_column(self.targets.column)))

    def with_operands(self, hidden: Any, weight: Any, bias: Any) -> "HeadCall":
        """Returns the same call with other arrays."""
        return dataclasses.replace(self, hidden=hidden, weight=weight, bias=bias)

    def without_targets(self) -> "HeadCall":
        """Puts None in place of targets and support, by which a custom_vjp tells that integers have no gradient."""
        return dataclasses.replace(self, targets=None, support=None)


def head_call(
    hidden: Float[Array, "*hidden_tokens hidden"],
    weight: HeadWeight,
    bias: Float[Array, " vocab"] | None,
    targets: Any,
    mask: Bool[AnyArray, "*tokens"] | None,
    spec: HeadSpec,
    *,
    axis_name: AxisName | None,
    vocab: VocabShards | None,
    out_of_vocab: str,
    with_entropy: bool,
    weight_layout: str,
    sequence_dim: int | None,
    frozen: bool = False,
    support: Support | None = None,
) -> HeadCall:
    """Checks the operands of a public function and makes a call of them.

    Raises:
        ValueError: if shapes, dtypes, ids or shards do not match, or the weight is the same on all vocabulary shards.
    """
    check_operands(hidden, weight, bias, weight_layout)
    require(out_of_vocab in OUT_OF_VOCAB, "out_of_vocab", f"one of {OUT_OF_VOCAB}", repr(out_of_vocab))
    columns = weight.shape[WEIGHT_LAYOUTS.index(weight_layout)]
    shard = local_shard(columns, axis_name, vocab, "weight")
    require_varying(weight, axis_name, "weight")
    all_live = mask is None and support is None
    split = _sequence_split(hidden, axis_name, sequence_dim, shard.num_shards)
    if axis_name is None:
        require_axis_name(weight, hidden, targets, mask)
    tokens = hidden.shape[:-1] if split is None else split.whole
    if support is not None:
        require(out_of_vocab == "error", "out_of_vocab", "'error' with a support", repr(out_of_vocab))
        mask = mask_by_support(support, mask, tokens)
    labels = check_targets(targets, mask, tokens, shard.vocab_size, out_of_vocab)
    hidden, weight, mask = (jnp.asarray(x) for x in (hidden, weight, labels))
    local, local_support = localise(targets.reshape(-1), mask.reshape(-1), shard, out_of_vocab), None
    if support is not None:
        check_support(support, targets, labels, shard.vocab_size)
        local, local_support = localise_support(support, targets, local, shard, columns)
    flat = hidden.reshape(-1, hidden.shape[-1])
    bias = None if bias is None else jnp.asarray(bias)
    layout = (
        shard.vocab_size,
        vocab,
        axis_name,
        shard.num_shards,
        with_entropy,
        all_live,
        weight_layout,
        split,
        frozen,
    )
    return HeadCall(flat, weight, bias, local, spec, *layout, support=local_support)


def _sequence_split(
    hidden: Array, axis_name: AxisName | None, dim: int | None, num_shards: int
) -> SequenceSplit | None:
    if dim is None:
        return None
    require(axis_name is not None, "axis_name", "the mesh axis that splits hidden along sequence_dim", None)
    inside = isinstance(dim, int) and not isinstance(dim, bool) and 0 <= dim < hidden.ndim - 1
    require(inside, "sequence_dim", f"a dimension of the tokens {hidden.shape[:-1]}", repr(dim))
    require_varying(hidden, axis_name, "hidden")
    part = hidden.shape[:-1]
    return SequenceSplit(part, (*part[:dim], part[dim] * num_shards, *part[dim + 1 :]), dim)


def check_operands(hidden: Any, weight: Any, bias: Any, weight_layout: str = "vh") -> None:
    """Raises ``ValueError`` unless hidden [*tokens, H], weight [V, H] (or [H, V]) and bias [V] match."""
    require(weight_layout in WEIGHT_LAYOUTS, "weight_layout", f"one of {WEIGHT_LAYOUTS}", repr(weight_layout))
    require_operand_dtype(hidden, "hidden")
    require_operand_dtype(weight, "weight")
    require(hidden.ndim >= 1, "hidden", "shape [*tokens, H]", describe(hidden))
    shape = "[V, H]" if weight_layout == "vh" else "[H, V]"
    require(weight.ndim == 2 and weight.size > 0, "weight", f"shape {shape} with V, H > 0", describe(weight))
    columns, size = weight.shape if weight_layout == "vh" else weight.shape[::-1]
    transposed = hidden.shape[-1] == columns != size
    other = {"vh": "hv", "hv": "vh"}[weight_layout]
    cause = f"{describe(weight)} ([{', '.join(other.upper())}]? pass weight_layout={other!r})"
    require(not transposed, "weight", f"shape {shape} with H = {hidden.shape[-1]}, as in hidden", cause)
    require(hidden.shape[-1] == size, "hidden", f"a last dimension of H = {size}, as in weight", describe(hidden))
    if bias is not None:
        require_operand_dtype(bias, "bias")
        require(bias.shape == (columns,), "bias", f"shape {(columns,)}", describe(bias))


def check_kinds(targets: Any, mask: Any, support: Any) -> None:
    """Raises ``ValueError`` for what is no array of the right dtype: JAX reads the types of all operands first."""
    require_integer(targets, "targets")
    ok = mask is None or getattr(mask, "dtype", None) == jnp.bool_
    require(ok, "mask", "an array of dtype bool", describe(mask))
    require(support is None or isinstance(support, Support), "support", "a Support", describe(support))


def sum_gradients(call: HeadCall, gradients: HeadGradients) -> HeadGradients:
    """Every psum of the backward: each gradient over the mesh axes over which its operand is the same.

    dHidden is summed over the vocabulary axis, dWeight and dBias over the data axes. The gradient of an
    operand that varies over an axis is not summed over it (a weight over the vocabulary axis; hidden states that were
    gathered over it, whose gradient the gather's own transpose sums). dHidden of tokens that the vocabulary axis splits is
    summed and split over it in one step.
    """
    axes = call.axes
    if call.split is not None:
        d_hidden = call.split.scattered(vary_over(gradients.hidden, {call.axis_name}), call.axis_name)
        gradients = gradients._replace(hidden=d_hidden)

    def summed(gradient: Array | None, operand: Array | None) -> Array | None:
        if operand is None or gradient is None:
            return None
        same_over = tuple(sorted(axes - varying_axes(operand), key=str))
        if same_over:
            gradient = lax.psum(vary_over(gradient, same_over), same_over)
        return gradient.astype(operand.dtype)

    return HeadGradients(*map(summed, gradients, (call.hidden, call.weight, call.bias)))


def weight_gradient(
    call: HeadCall, gradient: Float[Array, "tokens columns"], hidden: Float[Array, "tokens hidden"]
) -> Float[Array, "..."]:
    """gradientᵀ · hidden in fp32, in the layout of the weight."""
    left, right = (gradient, hidden) if call.weight_layout == "vh" else (hidden, gradient)
    return dot(left, right, contract=(0, 0))


class ScaledCotangents(NamedTuple):
    """Cotangents as an engine takes them, and the factor by which its gradients have to be multiplied.

    Attributes:
        values: cotangents of (log_probs, entropy), exactly 0 where masked and NaN where the target is invalid.
        unscale: a power of two, or None for 1.
    """

    values: TokenLogProbs
    unscale: Float[Array, ""] | None

    def finish(self, gradients: HeadGradients) -> HeadGradients:
        """The gradients of the unscaled cotangents."""
        if self.unscale is None:
            return gradients
        return HeadGradients(*(None if x is None else x.astype(jnp.float32) * self.unscale for x in gradients))


def scaled_cotangents(call: HeadCall, g: TokenLogProbs, same_on_all_ranks: bool) -> ScaledCotangents:
    """The cotangents ``g``, masked, and scaled where the gradient of the logits is rounded to fp16.

    fp16 represents nothing below 6e-8, and the cotangent of a mean over many labels is smaller. A power of two, the
    same for all tokens of this rank, raises the largest bound of |dz| to 2^13; products accumulate in fp32, where it is
    divided out.

    Args:
        call: the call.
        g: cotangents of its values.
        same_on_all_ranks: take one power of two for all ranks of the mesh, which costs the pmax of a number: where an
            engine adds up gradients of several ranks before they are divided.
    """
    g_log_probs, g_entropy = mask_cotangents(g, call.targets)
    if not call.scaled:
        return ScaledCotangents(TokenLogProbs(g_log_probs, g_entropy), None)
    bound = jnp.max(jnp.abs(g_log_probs))
    if g_entropy is not None:
        # |dz| <= |g| + |g_H| p |log p + H|, and p |log p + H| <= log V + 1.
        bound = bound + jnp.max(jnp.abs(g_entropy)) * (math.log(call.vocab_size) + 1.0)
    bound = bound * abs(call.spec.logit_scale / call.spec.temperature)
    axes = tuple(sorted(varying_axes(bound), key=str))
    bound = lax.pmax(bound, axes) if same_on_all_ranks and axes else bound
    usable = jnp.isfinite(bound) & (bound > 0)
    exponent = jnp.clip(13.0 - jnp.ceil(jnp.log2(jnp.where(usable, bound, 1.0))), -120.0, 120.0)
    # ldexp, because exp2 of an integer may be off in the last bit.
    scale = jnp.where(usable, jnp.ldexp(jnp.float32(1.0), exponent.astype(jnp.int32)), 1.0)
    values = TokenLogProbs(g_log_probs * scale, None if g_entropy is None else g_entropy * scale)
    return ScaledCotangents(values, 1.0 / scale)
