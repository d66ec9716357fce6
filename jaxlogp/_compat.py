"""The few places where supported JAX versions (0.10 to 0.12) or tracing modes differ."""

from collections.abc import Hashable, Iterable
from typing import Any

import jax
from jax import lax

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


def union_of_varying_axes(*arrays: Any) -> frozenset[Hashable]:
    """All mesh axes over which at least one of ``arrays`` varies (None entries are passed over)."""
    return frozenset().union(*(varying_axes(x) for x in arrays if x is not None))
