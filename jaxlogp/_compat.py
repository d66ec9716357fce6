"""The few places where supported JAX versions (0.10 to 0.12) or tracing modes differ."""

import functools
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlogp.errors import require

AxisName = Hashable
AxisNames = Hashable | tuple[Hashable, ...]
AnyMesh = Mesh | AbstractMesh
"""Types of arrays on Explicit axes name a mesh without its devices."""


def axis_tuple(axis_name: AxisNames | None) -> tuple[Hashable, ...]:
    """Mesh axis name(s) as a tuple; empty for None."""
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


def require_axes(mesh: AnyMesh, **named: tuple[str, ...]) -> None:
    """Raises ``ValueError`` unless ``mesh`` has all axes, given by the names of their arguments, and none is given twice."""
    require(isinstance(mesh, AnyMesh), "mesh", "a Mesh", repr(mesh))
    owner: dict[str, str] = {}
    for argument, axes in named.items():
        require(isinstance(axes, tuple), argument, "a tuple of mesh axes", repr(axes))
        for axis in axes:
            require(axis in mesh.axis_names, argument, f"an axis of the mesh {tuple(mesh.axis_names)}", repr(axis))
            # Over one axis that splits both, ranks would hold different tokens and add up their vocabularies.
            require(axis not in owner, argument, "each mesh axis once", f"{axis!r}, also in {owner.get(axis)}")
            owner[axis] = argument


def place(x: Any, mesh: AnyMesh, spec: PartitionSpec) -> Any:
    """``x`` as ``shard_map`` over ``mesh`` wants it: Explicit axes need the sharding in the type, Auto ones must not."""
    explicit = _explicit_axes(mesh)
    if not explicit:
        return x
    named = (tuple(axis for axis in axis_tuple(axes) if axis in explicit) for axes in spec)
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*(axes if axes else None for axes in named))))


def automatic_axes(function: Callable[..., Any], *operands: Any, out_specs: Any) -> Any:
    """``function(*operands)``; Explicit mesh axes in the operands' types are Auto ones inside of it.

    Gathers, scatters, reshapes and loops need no explicit sharding there. Without an Explicit axis it is a plain call.

    Args:
        function: maps pytrees of arrays to a pytree of arrays.
        operands: every array that may have an Explicit axis in its type; ``function`` closes over none of them.
        out_specs: PartitionSpecs, a prefix of what ``function`` returns; see :func:`leading_spec`.
    """
    mesh = _explicit_mesh(operands)
    if mesh is None:
        return function(*operands)

    def sharding(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, spec)

    shardings = jax.tree.map(sharding, out_specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return jax.sharding.auto_axes(function, axes=_explicit_axes(mesh), out_sharding=shardings)(*operands)


def leading_spec(x: Any, dimensions: int) -> PartitionSpec:
    """How the type of ``x`` says that its first ``dimensions`` are split over Explicit mesh axes."""
    return PartitionSpec(*jax.typeof(x).sharding.spec[:dimensions])


def known_sharding(x: Any) -> NamedSharding:
    """The sharding of ``x`` over a mesh as far as it is known: of a concrete array all, else what its type says."""
    sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    sharding = sharding if isinstance(sharding, NamedSharding) else jax.typeof(x).sharding
    padding = [None] * (x.ndim - len(sharding.spec))
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, *padding))


def automatic_mesh_axes() -> tuple[str, ...]:
    """Auto axes of more than one device in the mesh context of ``jax.set_mesh``; those of a ``shard_map`` are Manual."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Auto and mesh.shape[name] > 1)


def resized_spec(x: Any, rows: int, dim: int = 0) -> PartitionSpec:
    """How ``x`` is split, with ``rows`` for the size of dimension ``dim``: not where the axes do not divide them."""
    sharding = jax.typeof(x).sharding
    spec = list(sharding.spec)
    split = math.prod(sharding.mesh.shape[axis] for axis in axis_tuple(spec[dim]))
    spec[dim] = spec[dim] if rows % split == 0 else None
    return PartitionSpec(*spec)


def _explicit_axes(mesh: AnyMesh) -> tuple[str, ...]:
    return tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)


def _explicit_mesh(operands: Any) -> Any:
    """The mesh of the first operand whose type names an Explicit axis; None where there is none."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(operands))
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def union_of_varying_axes(*arrays: Any) -> frozenset[Hashable]:
    """All mesh axes over which at least one of ``arrays`` varies (None entries are ignored)."""
    return frozenset().union(*(varying_axes(x) for x in arrays if x is not None))


def require_varying(x: Any, axis_name: AxisName | None, argument: str) -> None:
    """Refuses ``x``, of which each rank of the axis must hold its own shard, if its type says that all hold the same.

    Every rank would take the whole for its shard, and every log-prob would be too low by the logarithm of the number of
    ranks. Under ``shard_map(check_vma=False)`` types say nothing, and the shards have to be given instead
    (:func:`jaxlogp._vocab.local_shard`); over an axis of one rank nothing is refused.

    Raises:
        ValueError: naming ``argument``.
    """
    if axis_name is None or lax.axis_size(axis_name) == 1 or not tracks_varying_axes(axis_name):
        return
    expected = f"the local shard of each rank of axis {axis_name!r}"
    require(axis_name in varying_axes(x), argument, expected, "an array that is the same on all of them")


def require_manual_axis(axis_name: AxisName) -> None:
    """Refuses an axis that is not one of the surrounding ``shard_map``: of another mesh, or of a ``vmap``.

    Raises:
        ValueError: naming ``axis_name``.
    """
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    expected = f"an axis of the surrounding shard_map, {axes if axes else 'of which there is none'}"
    require(axis_name in axes, "axis_name", expected, repr(axis_name))


def require_axis_name(weight: Any, *operands: Any) -> None:
    """Refuses a call without ``axis_name`` whose weight alone varies over an axis of the surrounding ``shard_map``.

    Its rows would be taken for the whole vocabulary. Where an operand varies as well, each rank may have its own model.

    Raises:
        ValueError: naming ``axis_name``.
    """
    alone = varying_axes(weight) - union_of_varying_axes(*operands)
    split = sorted((axis for axis in alone if lax.axis_size(axis) > 1), key=str)
    if split:
        raise ValueError(f"axis_name: expected {split[0]!r}, because weight varies over it, got None")


def require_checked_axes(axis_name: AxisName | None) -> None:
    """Refuses to differentiate over a mesh axis under ``shard_map(check_vma=False)``.

    Without replication types the right psum depends on where ``jax.grad`` stands: outside of the ``shard_map`` the boundary
    has divided the cotangent of a replicated result by the size of the axis, inside nobody has. No rule serves both.

    Raises:
        ValueError: the surrounding ``shard_map`` does not check replication over ``axis_name``.
    """
    if axis_name is not None and not tracks_varying_axes(axis_name):
        raise _unchecked(axis_name)


def _unchecked(axis_name: AxisName) -> ValueError:
    return ValueError(
        f"axis_name: expected shard_map(check_vma=True) to differentiate over axis {axis_name!r}, got check_vma=False"
    )


def refuse_unchecked_gradient(x: jax.Array, axis_name: AxisNames | None) -> jax.Array:
    """``x``; differentiating it under ``shard_map(check_vma=False)`` over one of the axes raises.

    See :func:`require_checked_axes`: a psum would be its own transpose, and the gradient too large by the size of the axis.
    """
    for axis in axis_tuple(axis_name):
        if not tracks_varying_axes(axis):
            x = _undifferentiable(x, axis)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _undifferentiable(x: jax.Array, axis_name: AxisName) -> jax.Array:
    del axis_name
    return x


def _refusal(x: jax.Array, axis_name: AxisName) -> tuple[jax.Array, None]:
    raise _unchecked(axis_name)


def _no_backward(axis_name: AxisName, residuals: None, g: jax.Array) -> tuple[jax.Array]:
    del axis_name, residuals
    return (g,)


_undifferentiable.defvjp(_refusal, _no_backward)
