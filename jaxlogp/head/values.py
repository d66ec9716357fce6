"""Log-probs, entropy and log-sum-exp by an engine, with their gradient: the same rule for all engines."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxlogp._compat import require_checked_axes
from jaxlogp._stats import TokenLogProbs
from jaxlogp.head.call import HeadCall, HeadGradients, scaled_cotangents, sum_gradients
from jaxlogp.head.engine import Engine

# Each pass is one program outside of jit too, where the loops of an engine would be compiled again in every call.
one_program = functools.partial(jax.jit, static_argnums=0, inline=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@one_program
def head_values(engine: Engine, call: HeadCall) -> TokenLogProbs:
    """Computes log-probs, entropy and lse by one engine; the only place that defines their gradient, for all engines."""
    return engine.forward(operands_of(engine, call))[0]


@one_program
def _forward(engine: Engine, call: HeadCall) -> tuple[TokenLogProbs, tuple[HeadCall, Any]]:
    require_checked_axes(call.axis_name)
    call = differentiable_once(engine, call)
    values, kept = engine.forward(operands_of(engine, call))
    return values, (call, kept)


@one_program
def _backward(engine: Engine, residuals: tuple[HeadCall, Any], g: TokenLogProbs) -> tuple[HeadCall]:
    call, kept = residuals
    g = differentiable_once(engine, g if call.with_entropy else g._replace(entropy=None))
    cotangents = scaled_cotangents(call, g, engine.reduces_gradients)
    operands = operands_of(engine, call).without_removed_targets()
    gradients = cotangents.finish(engine.backward(operands, kept, cotangents.values))
    return (cotangents_of(call, owned_gradients(engine, call, gradients)),)


head_values.defvjp(_forward, _backward)


def differentiable_once(engine: Engine, inputs: Any) -> Any:
    """Returns the inputs of a gradient; their derivative raises unless the engine supports a second one."""
    refusal = engine.why_not_second_derivative()
    if refusal is None:
        return inputs
    expected = "one whose gradient can be differentiated again (reference, or chunked without a gradient filter)"
    return refuse_derivative(f"engine: expected {expected}", f"{engine.name!r}: {refusal}", inputs)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def refuse_derivative(expected: str, seen: str, inputs: Any) -> Any:
    """Returns ``inputs``, whose derivative raises ``ValueError``."""
    del expected, seen
    return inputs


@refuse_derivative.defjvp
def _refused(expected: str, seen: str, primals: tuple, tangents: tuple) -> tuple:
    del primals, tangents
    raise ValueError(f"{expected}, or jax.lax.stop_gradient of its inputs, got {seen}")


def operands_of(engine: Engine, call: HeadCall) -> HeadCall:
    """Casts the call's operands to varying and masks them, unless the engine does that itself."""
    call = call.gathered()
    call = call if engine.reduces_gradients else call.typed()
    return call if engine.masks_hidden else call.masked()


def owned_gradients(engine: Engine, call: HeadCall, gradients: HeadGradients) -> HeadGradients:
    """Turns an engine's results into gradients of the operands: exact zeros where masked, psums done, dtypes restored."""
    hidden = gradients.hidden
    if not (engine.masks_hidden or call.all_live):
        # Selected, because a zero row of dz times a non-finite weight is NaN.
        hidden = jnp.where(call.targets.mask[:, None], hidden, jnp.zeros((), hidden.dtype))
    gradients = HeadGradients(hidden, None, None) if call.frozen else gradients._replace(hidden=hidden)
    if not engine.reduces_gradients:
        return sum_gradients(call, gradients)
    operands = (call.hidden, call.weight, call.bias)
    given = zip(gradients, operands, strict=True)
    return HeadGradients(*(None if g is None or x is None else g.astype(x.dtype) for g, x in given))


def cotangents_of(call: HeadCall, gradients: HeadGradients) -> HeadCall:
    """Returns the gradients in the structure of their call; targets have none."""
    return call.with_operands(*gradients).without_targets()
