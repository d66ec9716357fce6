"""Attention by the Hopper kernels: what they take, and the function with its gradient."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from experiments.models.attention.call import AttentionCall, by_head, needs_nvidia_gpu, why_not_by_head
from experiments.models.attention.hopper.bounds import Bounds
from experiments.models.attention.hopper.settings import Settings
from experiments.models.remat import named
from jaxlogp._mosaic_gpu import why_not_available


def why_not(call: AttentionCall) -> str | None:
    """Returns why the kernels cannot take the call here, or None."""
    capability = needs_nvidia_gpu(9) or _not_hopper()
    return capability or why_not_available() or why_not_by_head(call)


def _not_hopper() -> str | None:
    found = str(jax.devices()[0].compute_capability)
    return None if found.startswith("9.") else f"it needs compute capability 9.0, not {found}"


def attend_hopper(
    queries: Float[Array, "B T N D"],
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K D"],
    bounds: Bounds,
    settings: Settings,
    mesh: Mesh | None = None,
) -> Float[Array, "B T N D"]:
    """Computes `attend_packed` for 16-bit operands; `bounds` may be of a longer, padded row."""
    length = queries.shape[1]
    padding = bounds.limits.shape[2] - length
    padded = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (queries, keys, values))
    return by_head(functools.partial(_attend, settings), mesh, *padded, bounds)[:, :length]


def _attend(settings: Settings, queries: Array, keys: Array, values: Array, bounds: Bounds) -> Array:
    # Imported where a GPU is there: older versions of JAX have no backend for them.
    from experiments.models.attention.hopper.forward import forward

    # The kernel stands outside of the function with the gradient: so a policy that keeps its results runs it once.
    constants = lax.stop_gradient((queries, keys, values))
    out, sums = forward(*constants, bounds, settings)
    return _with_gradient(settings, queries, keys, values, bounds, named("attended", out), named("attended", sums))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(settings, queries, keys, values, bounds, out, sums):
    """Returns `out`, with the gradient of attention."""
    return out


def _forward_rule(settings, queries, keys, values, bounds, out, sums):
    return out, (queries, keys, values, bounds, out, sums)


def _backward_rule(settings, residuals, d_out):
    from experiments.models.attention.hopper.backward import backward

    queries, keys, values, bounds, out, sums = residuals
    return *backward(queries, keys, values, out, sums, d_out, bounds, settings), None, None, None


_with_gradient.defvjp(_forward_rule, _backward_rule)
