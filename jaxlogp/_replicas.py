"""Check of arrays that must be the same on all ranks of a mesh axis."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxlogp._arrays import nan_where
from jaxlogp._compat import AxisName, require_manual_axis, vary_over
from jaxlogp.errors import describe, require, require_floating

_BITS = {2: jnp.int16, 4: jnp.int32}


def nan_unless_equal(x: Float[Array, "*tokens hidden"], axis_name: AxisName) -> Float[Array, "*tokens hidden"]:
    """Puts NaN in each row that is not bitwise the same on all ranks of a mesh axis; the gradient passes through.

    Vocabulary-parallel functions need hidden states that are the same on all shards. Types cannot tell for states that were
    gathered over the axis, so this function compares them: ``linear_log_probs(nan_unless_equal(hidden, "tensor"), ...)``.

    Args:
        x: [*tokens, H], 16-bit or 32-bit floats.
        axis_name: mesh axis of the surrounding ``shard_map``.

    Returns:
        [*tokens, H] in the dtype of x.

    Raises:
        ValueError: if the dtype is another one, x is a scalar, or ``axis_name`` is no axis of the surrounding ``shard_map``.

    Example:
        >>> mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
        >>> check = jax.shard_map(lambda x: nan_unless_equal(x, "tensor"), mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
        >>> check(jnp.ones((1, 2))).tolist()
        [[1.0, 1.0]]
    """
    require_floating(x, "x")
    require(x.ndim >= 1 and x.dtype.itemsize in _BITS, "x", "16-bit or 32-bit floats [*tokens, H]", describe(x))
    require_manual_axis(axis_name)
    bits = lax.bitcast_convert_type(lax.stop_gradient(x), _BITS[x.dtype.itemsize]).astype(jnp.int32)
    bits = vary_over(bits, {axis_name})
    equal = jnp.all(lax.pmax(bits, axis_name) == lax.pmin(bits, axis_name), axis=-1, keepdims=True)
    return nan_where(~equal, x)
