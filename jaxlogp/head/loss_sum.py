"""The sum of a policy loss over this part of a step, with its gradient: in the forward pass, or in two steps."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlogp._compat import require_checked_axes
from jaxlogp._stats import TokenLogProbs
from jaxlogp.errors import EngineUnavailable, require
from jaxlogp.head.call import HeadCall, HeadGradients, scaled_cotangents
from jaxlogp.head.engine import Engine
from jaxlogp.head.projection import product_gradient
from jaxlogp.head.registry import EngineChoice, HeadRun, choose_engine, report
from jaxlogp.head.values import (
    cotangents_of,
    differentiable_once,
    head_values,
    one_program,
    operands_of,
    owned_gradients,
    refuse_derivative,
)
from jaxlogp.losses import LossTokens, PolicyLoss, weighted_losses

ONE_PASS, KNOWN_LSE, TWO_STEPS = "in one pass", "from the known log-sum-exp", "in two steps"


def loss_and_values(
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
