"""Where the parameters of a model live on a device mesh: a rule for every name of an axis."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from experiments.models.mesh import PARAMETER_AXES, TENSOR_AXIS, size_of
from experiments.models.placement import placed
from jaxlogp.errors import require

ModuleT = TypeVar("ModuleT", bound=nnx.Module)

RULES: tuple[tuple[str, str | tuple[str, ...] | None], ...] = (
    ("vocab", TENSOR_AXIS),
    ("heads", TENSOR_AXIS),
    ("kv_heads", TENSOR_AXIS),
    ("mlp", TENSOR_AXIS),
    ("embed", PARAMETER_AXES),
    ("head_dim", None),
    ("layers", None),
)
"""The mesh axis, or axes, that split an axis of parameters, by its name (Flax's `out_sharding` metadata), or None.

`nnx.logical_axis_rules` takes the same table. The one exception is a table of vocabulary rows that "tensor" does not
divide, see `parameter_shardings`. Nothing is split over "data". Whoever computes with parameters that are
split over "fsdp" or "sequence" asks `gathered` for them.
"""


def place_parameters(tree: Any, mesh: Mesh) -> Any:
    """Puts parameters, or an optimizer's state for them, where `parameter_shardings` says."""
    return placed(tree, parameter_shardings(tree, mesh))


def parameter_shardings(state: nnx.Module | nnx.State, mesh: Mesh):
    """Returns a `NamedSharding` for every array: axes of parameters are split as `RULES` says if the mesh axis divides them.

    Vocabulary rows, query heads, key-value heads and the features inside the gated products are split over "tensor",
    features of the residual stream over "fsdp" and "sequence"; an axis that they do not divide, and a parameter that does
    not name its axes, is whole on every device. A table of vocabulary rows that "tensor" does not divide is split over it
    by features; ValueError if it does not divide these either, or if an axis has a name without a rule. The mesh axes have
    to be of type Auto; without "tensor", "fsdp" and "sequence" all is replicated.

    `state` is a model, its `nnx.state`, or a tree that repeats the parameters with their metadata, such as the state of an
    optimizer; other leaves are replicated. The shardings have the tree's structure, fit for `jax.device_put` and `jax.jit`.
    """
    if isinstance(state, nnx.Module):
        state = nnx.state(state)
    auto = all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)
    require(auto, "mesh", "axes of type Auto", mesh.axis_types)
    replicated = NamedSharding(mesh, P())

    def sharding_of(path, leaf):
        if not _is_variable(leaf):
            return replicated
        # A part of an optimizer that leaves a parameter to another part keeps nothing of it.
        if not jax.tree.leaves(leaf):
            return leaf
        names = leaf.get_metadata("out_sharding", None) or ()
        # What an optimizer keeps of a parameter may have fewer axes than it.
        spec = _spec(path, names, leaf.shape, mesh) if len(names) == len(leaf.shape) else P()
        return leaf.replace(NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(sharding_of, state, is_leaf=_is_variable)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _spec(path: tuple, names: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh) -> P:
    rules, where = dict(RULES), jax.tree_util.keystr(path, simple=True, separator=".")
    for name in names:
        known = name is None or name in rules
        require(known, f"parameter {where}", f"axes named {', '.join(rules)}", repr(name))
    sizes = dict(zip(names, shape, strict=True))
    if sizes.get("vocab", 0) % size_of(mesh, TENSOR_AXIS) and "embed" in sizes:
        axes = [_feature_axes(where, sizes, mesh) if name == "embed" else None for name in names]
    else:
        axes = [
            None if name is None else _split(size, rules[name], mesh) for name, size in zip(names, shape, strict=True)
        ]
    while axes and axes[-1] is None:
        axes.pop()
    return P(*axes)


def _feature_axes(where: str, sizes: dict[str | None, int], mesh: Mesh) -> tuple[str, ...] | str:
    """Returns axes that split the features of a table whose rows cannot be split; ValueError rather than whole copies."""
    rows, features = sizes["vocab"], sizes["embed"]
    # Tensor ranks first: what the others then give to each of them lies side by side.
    with_tensor = ((TENSOR_AXIS, *PARAMETER_AXES), *((TENSOR_AXIS, axis) for axis in PARAMETER_AXES), TENSOR_AXIS)
    axes = next((axes for axes in (_split(features, wanted, mesh) for wanted in with_tensor) if axes is not None), None)
    expected = f"tensor ranks that divide the {rows} rows or the {features} features of {where}"
    require(axes is not None, "mesh", expected, size_of(mesh, TENSOR_AXIS))
    assert axes is not None
    return axes


def _split(size: int, wanted: str | tuple[str, ...] | None, mesh: Mesh) -> tuple[str, ...] | str | None:
    """Returns those of the wanted mesh axes that have ranks, if these divide the size."""
    axes = tuple(axis for axis in _as_tuple(wanted) if size_of(mesh, axis) > 1)
    if not axes or size % size_of(mesh, *axes):
        return None
    return axes if len(axes) > 1 else axes[0]


def _as_tuple(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return axes if isinstance(axes, tuple) else () if axes is None else (axes,)


def gathered(module: ModuleT, mesh: Mesh | None) -> ModuleT:
    """Returns the module to compute with: parameters whole along "fsdp" and "sequence", and split as before over "tensor".

    Their gradient is summed over the ranks along these axes and split again in one step, a reduce-scatter, so that no
    device keeps more than its shard.
    """
    if mesh is None or size_of(mesh, *PARAMETER_AXES) == 1:
        return module
    graph, state = nnx.split(module)

    def whole(path, leaf):
        names = leaf.get_metadata("out_sharding", None) or ()
        shape = jnp.shape(leaf.get_value())
        names = names[len(names) - len(shape) :]
        split = _spec(path, names, shape, mesh) if names else P()
        rest = P(*(TENSOR_AXIS if TENSOR_AXIS in _as_tuple(axes) else None for axes in split))
        if rest == split:
            return leaf
        return leaf.replace(resharded(leaf.get_value(), NamedSharding(mesh, rest), NamedSharding(mesh, split)))

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(whole, state, is_leaf=_is_variable))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def resharded(x: Array, forward: NamedSharding, backward: NamedSharding) -> Array:
    """Returns `x` split as `forward` says, and its gradient as `backward` says.

    The transpose of a constraint alone would put the gradient where x has been put, and a gradient that ranks have to add
    up would be whole on each of them before it is split again.
    """
    return lax.with_sharding_constraint(x, forward)


def _resharded_forward(x: Array, forward: NamedSharding, backward: NamedSharding) -> tuple[Array, None]:
    return resharded(x, forward, backward), None


def _resharded_backward(forward: NamedSharding, backward: NamedSharding, _: None, gradient: Array) -> tuple[Array]:
    return (lax.with_sharding_constraint(gradient, backward),)


resharded.defvjp(_resharded_forward, _resharded_backward)


def on_one_device(device: jax.Device) -> Callable[[nnx.State], Any]:
    """Returns a function that places every array of a state whole on that device."""
    place = SingleDeviceSharding(device)
    return lambda state: jax.tree.map(lambda _: place, state)
