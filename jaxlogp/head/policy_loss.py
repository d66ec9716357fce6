"""Policy losses of linear log-probs whose gradient is computed in the forward pass: ``linear_policy_loss``."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._arrays import AnyArray, refuse_gradient
from jaxlogp._compat import AxisName, automatic_axes, leading_spec, require_checked_axes
from jaxlogp._reduce import WeightedSum
from jaxlogp._stats import TokenLogProbs
from jaxlogp._vocab import VocabShards
from jaxlogp.errors import EngineUnavailable, describe, require
from jaxlogp.head.call import (
    HeadCall,
    HeadGradients,
    HeadWeight,
    check_operands,
    head_call,
    scaled_cotangents,
)
from jaxlogp.head.engine import Engine
from jaxlogp.head.projection import HeadSpec, product_gradient
from jaxlogp.head.registry import EngineChoice, HeadRun, choose_engine, report
from jaxlogp.head.support.ids import Support, mask_by_support
from jaxlogp.head.values import (
    cotangents_of,
    differentiable_once,
    head_values,
    one_program,
    operands_of,
    owned_gradients,
    refuse_derivative,
)
from jaxlogp.losses import LossTokens, PolicyLoss, grpo, weighted_losses
from jaxlogp.losses import loss_tokens as make_loss_tokens
from jaxlogp.losses.inputs import labels_of
from jaxlogp.losses.options import suggest_options

ONE_PASS, KNOWN_LSE, TWO_STEPS = "in one pass", "from the known log-sum-exp", "in two steps"


@suggest_options()
def linear_policy_loss(
    hidden: Float[Array, "*hidden_tokens hidden"],
    weight: HeadWeight,
    targets: Int[AnyArray, "*tokens"],
    old_log_probs: Float[AnyArray, "*tokens"] | None,
    advantages: Float[AnyArray, "*rows"],
    mask: Bool[AnyArray, "*tokens"] | None = None,
    *,
    sampler_log_probs: Float[AnyArray, "*tokens"] | None = None,
    loss: PolicyLoss | None = None,
    ref_log_probs: Float[AnyArray, "*tokens"] | None = None,
    penalized: Bool[AnyArray, "*tokens"] | None = None,
    document_ids: Int[AnyArray, "*tokens"] | None = None,
    num_documents: int | np.integer | Int[AnyArray, ""] | None = None,
    document_axis_name: AxisName | tuple[AxisName, ...] | None = None,
    labels_per_document: float | np.floating | Float[AnyArray, ""] | None = None,
    mean_weight: float | np.floating | Float[AnyArray, ""] | None = None,
    entropy_scale: float | np.floating | Float[AnyArray, ""] | None = None,
    lse: Float[AnyArray, "*tokens"] | None = None,
    with_entropy: bool = False,
    with_lse: bool = False,
    bias: Float[Array, " vocab"] | None = None,
    support: Support | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    axis_name: AxisName | None = None,
    vocab: VocabShards | None = None,
    sequence_dim: int | None = None,
    out_of_vocab: str = "error",
    fp32_head: bool = False,
    weight_layout: str = "vh",
    frozen_head: bool = False,
    engine: EngineChoice = "auto",
) -> tuple[WeightedSum, TokenLogProbs]:
    """Computes a policy loss of linear log-probs without [tokens, V] logits, and its gradient in the same pass.

    loss.sum = policy_loss(linear_log_probs(hidden, weight, targets, ...), old_log_probs, ...).sum, differentiable in hidden,
    weight and bias. The forward pass computes the gradient and the backward multiplies it by the cotangent of the sum:
    three products instead of four. A loss or an engine that does not allow that takes two steps; a document's ratio, for
    example, needs the log-probs of all its tokens first. :func:`jaxlogp.head.record_head_runs` reports the reason. Without
    differentiation only values are computed.

    Inside ``shard_map`` everything is as in :func:`jaxlogp.linear_log_probs`; the caller psums the WeightedSum over the
    axes that shard its tokens. Over ``document_axis_name`` the sum must have the same cotangent on all ranks, as a psum of
    it does. Reverse mode only, and no second derivatives.

    Args:
        hidden: [*tokens, H], bf16, fp16 or fp32.
        weight: [V, H], or the local shard [V_local, H].
        targets: [*tokens], integer ids of the whole vocabulary.
        old_log_probs: [*tokens], log-probs of the targets under the old policy, in nats, as in :func:`jaxlogp.policy_loss`.
            None if the sampler is this head on these hidden states (strictly on policy): every ratio is 1, and the call
            still takes one pass.
        advantages: [*tokens]; or [B] or [B, 1], one per row of [B, T].
        mask: [*tokens], True where the target is a label; the other tokens cost nothing and get exact zeros. None makes
            every token a label.
        sampler_log_probs: [*tokens], log-probs of the targets under the sampler, in nats, or None for old_log_probs; read
            by a correction or a rejection.
        loss: the loss; None for ``jaxlogp.losses.grpo()``.
        ref_log_probs: [*tokens], log-probs of the targets under the reference, in nats, or None.
        penalized: bool [*tokens], True for labels whose drift is penalized, or None; as in :func:`jaxlogp.policy_loss`.
        document_ids: [*tokens], integer document index of each token; None for the rows of [B, T].
        num_documents: number of documents; None along with document_ids. See :func:`jaxlogp.policy_loss`.
        document_axis_name: mesh axis (or axes) over which documents are split.
        labels_per_document: labels of the whole step divided by its documents, for a token mean of the entropy.
        mean_weight: mean of the correction's weights over the whole step, for a correction that normalizes.
        entropy_scale: factor of the entropy coefficient, as in :func:`jaxlogp.policy_loss`.
        lse: [*tokens], log Σ_v e^z of exactly the logits that this call would compute, in nats
            (:func:`jaxlogp.linear_log_probs` with ``with_lse``), for a step strictly on policy. old_log_probs, of the same
            call, are then taken as the log-probs, every ratio is 1, and only the gradients are computed. Excludes entropy.
            The probabilities' relative error is that of lse.
        with_entropy: whether to return the entropy; a loss with an entropy coefficient always returns it.
        with_lse: whether to return log Σ e^z.
        bias: [V] or [V_local], added to the product; None for no bias.
        support: ids that each token was drawn from, as in :func:`jaxlogp.linear_log_probs`, or None; old_log_probs and all
            others are then log-probs on this support. A token without ids is no label. Takes two steps.
        temperature: T, as in :func:`jaxlogp.linear_log_probs`.
        logit_scale: multiplier of the logits, a finite Python number other than 0.
        softcap: cap, as in :func:`jaxlogp.linear_log_probs`, or None.
        axis_name: mesh axis over which the vocabulary is sharded.
        vocab: the shards; None for equal ones.
        sequence_dim: dimension of the tokens along which ``axis_name`` splits hidden, or None.
        out_of_vocab: treatment of active targets outside [0, V): "error" or "zero".
        fp32_head: whether to multiply in fp32 regardless of the dtypes.
        weight_layout: "vh" or "hv", as in :func:`jaxlogp.linear_log_probs`.
        frozen_head: whether to treat weight and bias as constants.
        engine: a name, an engine object, or a sequence of these, as in :func:`jaxlogp.linear_log_probs`.

    Returns:
        (WeightedSum of this part of the step, TokenLogProbs [*tokens] in nats). The values are for reports, such as the
        auxiliary output of ``jax.value_and_grad``. With ``lse`` the log-probs are old_log_probs, 0 where masked.

    Raises:
        ValueError: if linear_log_probs or policy_loss refuses an argument; if entropy or a second derivative is asked for
            along with ``lse``; or if a gradient through the values is asked for, such as that of an entropy bonus on
            ``values.entropy`` (``jax.lax.stop_gradient`` makes them plain constants).

    Example:
        >>> hidden, weight = jnp.ones((2, 4)), jnp.zeros((8, 4))
        >>> old, ones = jnp.full(2, -jnp.log(8.0)), jnp.ones(2)
        >>> def mean(hidden):
        ...     return linear_policy_loss(hidden, weight, jnp.array([1, 2]), old, ones, ones > 0)[0].mean()
        >>> value, gradient = jax.value_and_grad(mean)(hidden)
        >>> round(float(value), 4), gradient.shape
        (-1.0, (2, 4))

    References:
        Hsu et al., Liger Kernel, 2024 (gradients in the forward pass); the presets of ``jaxlogp.losses``.
    """
    from jaxlogp.head import sharded  # it imports this module

    loss = grpo() if loss is None else loss
    spec = HeadSpec(temperature, logit_scale, softcap, fp32_head)
    layout = {"axis_name": axis_name, "vocab": vocab, "weight_layout": weight_layout, "out_of_vocab": out_of_vocab}
    layout |= {"sequence_dim": sequence_dim, "frozen": frozen_head}

    def run(hidden, weight, bias, targets, mask, support, lse, given):
        # A token without ids is no label, in the denominators too.
        mask = mask if support is None else mask_by_support(support, mask, targets.shape)
        labels = labels_of(mask, targets.shape)

        def tokens_of(log_probs: Array | None) -> tuple[LossTokens, Array]:
            log_probs = None if log_probs is None else log_probs.reshape(targets.shape)
            further = {"log_probs": log_probs, "document_axis_name": document_axis_name}
            return loss_tokens(loss, mask=labels, **further, **given)

        wants_entropy = with_entropy or loss.entropy_coefficient != 0.0
        call = head_call(
            hidden, weight, bias, targets, mask, spec, with_entropy=wants_entropy, support=support, **layout
        )
        total, count, values = _evaluate(loss, call, tokens_of, _checked_lse(lse, call, targets.shape), engine)
        values = values if with_lse else values._replace(lse=None)
        values = TokenLogProbs(*map(_constant_value, TokenLogProbs._fields, values))
        values = jax.tree.map(lambda x: x.reshape(targets.shape), values)
        return WeightedSum(total, count, loss.grad_divisor), values

    check_operands(hidden, weight, bias, weight_layout)
    missing = lse is not None and old_log_probs is None
    require(not missing, "old_log_probs", "the log-probs that lse belongs to", None)
    of_step = {"labels_per_document": labels_per_document, "mean_weight": mean_weight, "entropy_scale": entropy_scale}
    unsharded = (axis_name, vocab, sequence_dim, document_axis_name) == (None,) * 4
    mesh = sharded.known_layout(hidden, weight, weight_layout, engine) if unsharded else None
    if mesh is not None:
        options = {"with_entropy": with_entropy, "with_lse": with_lse, "out_of_vocab": out_of_vocab, "engine": engine}
        options |= {"weight_layout": weight_layout, "frozen_head": frozen_head, **spec.keywords(), **mesh}
        options |= {"sampler_log_probs": sampler_log_probs, "ref_log_probs": ref_log_probs, "penalized": penalized}
        options |= {"document_ids": document_ids, "num_documents": num_documents}
        options |= {"support": support, **of_step}
        arguments = hidden, weight, targets, old_log_probs, advantages, mask
        return sharded.sharded_linear_policy_loss(*arguments, loss=loss, lse=lse, bias=bias, **options)
    if unsharded:
        # The caller's frame lies beyond that of the decorator.
        sharded.warn_of_unknown_layout("linear_policy_loss", hidden, weight, stacklevel=4)
    given = {"old_log_probs": old_log_probs, "advantages": advantages, "ref_log_probs": ref_log_probs}
    given |= {"sampler_log_probs": sampler_log_probs, "penalized": penalized}
    if isinstance(num_documents, int | np.integer):
        # A static upper bound of the number of documents.
        loss_tokens = functools.partial(make_loss_tokens, num_documents=num_documents)
    else:
        loss_tokens, given = make_loss_tokens, given | {"num_documents": num_documents}
    given |= {"document_ids": document_ids, **of_step}
    specs = PartitionSpec(), leading_spec(hidden, hidden.ndim - 1)
    return automatic_axes(run, hidden, weight, bias, targets, mask, support, lse, given, out_specs=specs)


def _constant_value(name: str, value: Array | None) -> Array | None:
    """Returns the value as a constant whose gradient raises: a gradient of 0 would go unnoticed."""
    instead = {
        "log_probs": "use linear_log_probs and policy_loss",
        "entropy": "set the loss's entropy_coefficient",
        "lse": "set the loss's z_loss_coefficient",
    }
    expected = "no gradient through it, for the values of linear_policy_loss are constant"
    return None if value is None else refuse_gradient(value, f"values.{name}", expected, f"one ({instead[name]})")


def _evaluate(
    loss: PolicyLoss,
    call: HeadCall,
    tokens_of: Callable[[Array | None], tuple[LossTokens, Array]],
    lse: Array | None,
    engine: EngineChoice,
) -> tuple[Array, Array, TokenLogProbs]:
    """Computes the loss sum, its count and the values by the engine and path that suit the call, and records both.

    ``tokens_of`` makes the tokens and the count from the log-probs, or from None while these are unknown.
    """
    chosen, reason = choose_engine(engine, call)
    gradient = _how(chosen, call, loss, lse is not None)
    report(HeadRun("linear_policy_loss", chosen.name, reason, call.num_shards, gradient))
    if gradient in (ONE_PASS, KNOWN_LSE):
        tokens, count = tokens_of(None)
        total, values = _loss_sum(_Static(chosen, loss), call, tokens, lse)
        return total, count, values
    if loss.z_loss_coefficient == 0.0:
        values = head_values(chosen, call)
    else:
        expected = f"0 with engine {chosen.name}, which fixes the order of its sums"
        require(not chosen.reduces_gradients, "loss.z_loss_coefficient", expected, loss.z_loss_coefficient)
        values = _values_with_lse(chosen, call)
    tokens, count = tokens_of(values.log_probs)
    return _total(loss, values, tokens), count, values


class _Static(NamedTuple):
    """The static properties of a call."""

    engine: Engine
    loss: PolicyLoss


def _checked_lse(lse: Any, call: HeadCall, shape: tuple[int, ...]) -> Array | None:
    if lse is None:
        return None
    require(not call.with_entropy, "lse", "None along with entropy (its gradient needs Σ p z)", describe(lse))
    ok = getattr(lse, "shape", None) == shape and jnp.issubdtype(lse.dtype, jnp.floating)
    require(ok, "lse", f"a floating-point array of shape {shape}", describe(lse))
    lse = jax.lax.stop_gradient(jnp.asarray(lse)).reshape(-1).astype(jnp.float32)
    return jnp.where(call.targets.mask, lse, 0.0)


def _how(engine: Engine, call: HeadCall, loss: PolicyLoss, known_lse: bool) -> str:
    """Returns how the gradient is computed, with the reason if it takes two steps."""
    if known_lse:
        refusal = engine.why_not_known_lse(call)
        expected = "None where engine, call or loss do not allow a backward from it"
        if loss.rejects_by_log_probs:
            refusal = "the rejection compares the policy with the old one"
        if refusal is not None:
            raise EngineUnavailable(f"lse: expected {expected}, got an array, but {engine.name}: {refusal}")
        return KNOWN_LSE
    if engine.reduces_gradients:
        refusal = "it sums gradients over mesh axes in its own order"
    elif call.scaled:
        refusal = "fp16 operands need the largest cotangent first"
    else:
        refusal = engine.why_not_one_pass(call, loss.entropy_coefficient != 0.0)
    if refusal is None and loss.ratio != "token":
        refusal = "the ratio of a document needs the log-probs of all its tokens first"
    if refusal is None and loss.rejects_by_log_probs:
        refusal = "the rejection reads log-probs of the policy, and denominators follow it"
    return ONE_PASS if refusal is None else f"{TWO_STEPS}: {refusal}"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@one_program
def _loss_sum(static: _Static, call: HeadCall, tokens: LossTokens, lse: Array | None) -> tuple[Array, TokenLogProbs]:
    """Computes the loss sum of this part of the step, and its values; the gradient comes from the forward rule."""
    engine = static.engine
    values = engine.forward(operands_of(engine, call))[0] if lse is None else _given_values(tokens, lse)
    return _total(static.loss, values, tokens), values


def _given_values(tokens: LossTokens, lse: Array) -> TokenLogProbs:
    return TokenLogProbs(tokens.old_log_probs.astype(jnp.float32), None, lse)


def _total(loss: PolicyLoss, values: TokenLogProbs, tokens: LossTokens) -> Array:
    losses = weighted_losses(loss, values.log_probs, tokens, entropy=values.entropy, lse=values.lse)
    return jnp.sum(losses)


def _value_cotangents(loss: PolicyLoss, values: TokenLogProbs, tokens: LossTokens) -> TokenLogProbs:
    """Computes the gradient of the loss sum with respect to the values that the loss reads."""
    entropy = None if loss.entropy_coefficient == 0.0 else values.entropy
    lse = None if loss.z_loss_coefficient == 0.0 else values.lse
    return jax.grad(lambda read: _total(loss, read, tokens))(TokenLogProbs(values.log_probs, entropy, lse))


def _without_lse(g: TokenLogProbs) -> TokenLogProbs:
    """Rewrites cotangents for engines: g (onehot - p) + q p = (g - q) (onehot - p) + q onehot for a cotangent q of lse.

    :func:`_with_targets` adds the last term.
    """
    return g if g.lse is None else TokenLogProbs(g.log_probs - g.lse, g.entropy)


def _cotangents(loss: PolicyLoss, values: TokenLogProbs, tokens: LossTokens) -> TokenLogProbs:
    return _without_lse(_value_cotangents(loss, values, tokens))


def _with_targets(
    call: HeadCall, gradients: HeadGradients, values: TokenLogProbs, q: Float[Array, " tokens"] | None
) -> HeadGradients:
    """Adds the gradients of Σ_t q_t z_t[target]: one row of the weight for each token, on the rank that owns it."""
    if q is None:
        return gradients
    column, dim = call.targets.column, call.vocab_dim
    owned = call.targets.mask & (column >= 0)
    # A target without an owner would be the last row.
    column = jnp.where(owned, column, 0)
    logits = (values.log_probs + values.lse)[:, None]
    dz = jnp.where(owned, product_gradient(q[:, None], logits, call.spec)[:, 0], 0.0)
    rows = jnp.moveaxis(jnp.take(call.weight, column, axis=dim), dim, 0).astype(jnp.float32)
    hidden = jnp.where(owned[:, None], call.hidden, jnp.zeros((), call.hidden.dtype)).astype(jnp.float32)
    d_hidden = gradients.hidden.astype(jnp.float32) + dz[:, None] * rows
    d_weight, d_bias = gradients.weight, gradients.bias
    if d_weight is not None:
        place = (column,) if dim == 0 else (slice(None), column)
        update = dz[:, None] * hidden
        d_weight = d_weight.astype(jnp.float32).at[place].add(update if dim == 0 else update.T).astype(d_weight.dtype)
    if d_bias is not None:
        d_bias = d_bias.astype(jnp.float32).at[column].add(dz).astype(d_bias.dtype)
    return HeadGradients(d_hidden.astype(gradients.hidden.dtype), d_weight, d_bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _values_with_lse(engine: Engine, call: HeadCall) -> TokenLogProbs:
    """Computes `head_values`, differentiable in lse too."""
    return engine.forward(operands_of(engine, call))[0]


def _values_forward(engine: Engine, call: HeadCall) -> tuple[TokenLogProbs, tuple]:
    require_checked_axes(call.axis_name)
    call = differentiable_once(engine, call)
    values, kept = engine.forward(operands_of(engine, call))
    return values, (call, kept, values)


def _values_backward(engine: Engine, residuals: tuple, g: TokenLogProbs) -> tuple[HeadCall]:
    call, kept, values = residuals
    operands = operands_of(engine, call).without_removed_targets()
    g = differentiable_once(engine, g if call.with_entropy else g._replace(entropy=None))
    cotangents = scaled_cotangents(call, _without_lse(g), engine.reduces_gradients)
    gradients = cotangents.finish(engine.backward(operands, kept, cotangents.values))
    gradients = _with_targets(operands, gradients, values, g.lse)
    return (cotangents_of(call, owned_gradients(engine, call, gradients)),)


_values_with_lse.defvjp(_values_forward, _values_backward)


@one_program
def _loss_forward(
    static: _Static, call: HeadCall, tokens: LossTokens, lse: Array | None
) -> tuple[tuple[Array, TokenLogProbs], tuple]:
    """Computes values and loss, and from the same logits this rank's gradients of the loss sum."""
    require_checked_axes(call.axis_name)
    engine, loss = static.engine, static.loss
    if lse is None:
        call, tokens = differentiable_once(engine, (call, tokens))
    else:
        # Log-probs and lse are given constants, so the derivative of the gradient would miss theirs.
        expected = "lse: expected None where the gradient is differentiated again"
        call, tokens = refuse_derivative(expected, "an array", (call, tokens))
    operands = operands_of(engine, call)
    if lse is None:
        # Without an entropy bonus the sampler's log-probs give an estimate of log Σ e^z.
        near = tokens.old_log_probs if loss.entropy_coefficient == 0.0 else None
        values, gradients = engine.one_pass(operands, functools.partial(_cotangents, loss), tokens, near)
        unscale = None
    else:
        values = _given_values(tokens, lse)
        cotangents = scaled_cotangents(call, _cotangents(loss, values, tokens), engine.reduces_gradients)
        gradients = engine.backward_of_lse(operands.without_removed_targets(), lse, cotangents.values)
        unscale = cotangents.unscale
    q = _value_cotangents(loss, values, tokens).lse
    q = q if q is None or unscale is None else q / unscale
    gradients = _with_targets(operands.without_removed_targets(), gradients, values, q)
    return (_total(loss, values, tokens), values), (call, gradients, unscale)


@one_program
def _loss_backward(static: _Static, residuals: tuple, g: tuple[Array, TokenLogProbs]) -> tuple[HeadCall, None, None]:
    """Multiplies the gradients by the cotangent of the loss sum, then psums them; the values have no cotangent."""
    call, gradients, unscale = residuals
    factor = g[0] if unscale is None else g[0] * unscale
    scaled = HeadGradients(
        *(None if x is None else (x.astype(jnp.float32) * factor).astype(x.dtype) for x in gradients)
    )
    return cotangents_of(call, owned_gradients(static.engine, call, scaled)), None, None


_loss_sum.defvjp(_loss_forward, _loss_backward)
