"""The few places where supported JAX versions (0.10 to 0.12) or tracing modes differ."""

import functools
from collections.abc import Hashable, Iterable
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AxisName = Hashable
AxisNames = Hashable | tuple[Hashable, ...]


def axis_tuple(axis_name: AxisNames | None) -> tuple[Hashable, ...]:
    """Mesh axis name(s) as a tuple; None is no axis."""
    if axis_name is None:
        return ()
    return tuple(axis_name) if isinstance(axis_name, tuple) else (axis_name,)


def varying_axes(x: Any) -> frozenset[Hashable]:
    """Mesh axes of the surrounding ``shard_map`` over which the type of ``x`` says that it varies."""
    return jax.typeof(x).manual_axis_type.varying


def tracks_varying_axes(axis_name: AxisName) -> bool:
    """Whether the surrounding ``shard_map`` checks replication (``check_vma=True``)."""
    return axis_name in varying_axes(lax.axis_index(axis_name))


def vary_over(x: jax.Array, axes: Iterable[Hashable]) -> jax.Array:
    """``x`` typed as varying over ``axes``: no arithmetic, but its transpose is the psum over the axes added here."""
    missing = tuple(sorted(set(axes) - varying_axes(x), key=str))
    return lax.pcast(x, missing, to="varying") if missing else x


def place(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """``x`` as ``shard_map`` over ``mesh`` wants it: Explicit axes need the sharding in the type, Auto ones do not."""
    if AxisType.Explicit not in mesh.axis_types:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def gathered(x: jax.Array) -> jax.Array:
    """``x`` whole on every device where its type says that an Explicit mesh axis splits it; for small arrays.

    A type that says so forbids the reshapes and scatters that an Auto axis leaves to the compiler.
    """
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types or not any(sharding.spec):
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))


def union_of_varying_axes(*arrays: Any) -> frozenset[Hashable]:
    """All mesh axes over which at least one of ``arrays`` varies (None entries are passed over)."""
    return frozenset().union(*(varying_axes(x) for x in arrays if x is not None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def refuse_unchecked_gradient(x: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """The identity; differentiating it under ``shard_map(check_vma=False)`` raises.

    Without replication types a psum is its own transpose, and the gradient of a replicated loss comes out too large by
    the size of the axis, or not, depending on where ``jax.grad`` stands. Refusing is the only answer that is never wrong.
    """
    del axis_name
    return x


def _refusal_forward(x: jax.Array, axis_name: AxisName | None) -> tuple[jax.Array, None]:
    if axis_name is not None and not tracks_varying_axes(axis_name):
        raise ValueError(
            f"axis_name: expected shard_map(check_vma=True) to differentiate over axis {axis_name!r}, got check_vma=False"
        )
    return x, None


def _refusal_backward(axis_name: AxisName | None, residuals: None, g: jax.Array) -> tuple[jax.Array]:
    del axis_name, residuals
    return (g,)


refuse_unchecked_gradient.defvjp(_refusal_forward, _refusal_backward)
