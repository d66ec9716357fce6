"""Attention by the Hopper kernels: what they take, and the function with its gradient."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from experiments.models.attention.call import AttentionCall, by_head, needs_nvidia_gpu, why_not_by_head
from experiments.models.attention.hopper.bounds import Bounds
from experiments.models.attention.hopper.settings import Settings
from experiments.models.remat import named
from jaxlogp.head.hopper._pallas_compat import why_not_available


def why_not(call: AttentionCall) -> str | None:
    """Why the kernels cannot take the call here, or None."""
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
    """What `attend_packed` computes, for 16-bit operands; `bounds` may be of a longer, padded row."""
    length = queries.shape[1]
    padding = bounds.first.shape[1] - length
    padded = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (queries, keys, values))
    return by_head(functools.partial(_attend, settings), mesh, *padded, bounds)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings, queries, keys, values, bounds):
    # Imported where a GPU is there: older versions of JAX have no backend for them.
    from experiments.models.attention.hopper.forward import forward

    return forward(queries, keys, values, bounds, settings)[0]


def _forward_rule(settings, queries, keys, values, bounds):
    from experiments.models.attention.hopper.forward import forward

    out, sums = forward(queries, keys, values, bounds, settings)
    out, sums = named("attended", out), named("attended", sums)
    return out, (queries, keys, values, bounds, out, sums)


def _backward_rule(settings, residuals, d_out):
    from experiments.models.attention.hopper.backward import backward

    queries, keys, values, bounds, out, sums = residuals
    return *backward(queries, keys, values, out, sums, d_out, bounds, settings), None


_attend.defvjp(_forward_rule, _backward_rule)
