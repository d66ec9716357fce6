"""Where the parameters of a model live on a device mesh: one rule for every name of an axis."""

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

`nnx.logical_axis_rules` takes the same table. Nothing is split over "data". Whoever computes with parameters that are
split over "fsdp" or "sequence" asks `gathered` for them.
"""


def parameter_shardings(state: nnx.Module | nnx.State, mesh: Mesh):
    """Splits the axes of parameters as `RULES` says, where the mesh axis divides them.

    Vocabulary rows, query heads, key-value heads and the features inside the gated products are split over "tensor",
    features of the residual stream over "fsdp" and "sequence"; an axis that they do not divide, and a parameter that does
    not name its axes, is whole on every device. The mesh axes have to be of type Auto.

    Args:
        state: a model, its `nnx.state`, or a tree that repeats the parameters with their metadata, such as the state of an
            optimizer; other leaves are replicated.
        mesh: may have axes "tensor", "fsdp" and "sequence"; without them all is replicated.

    Returns:
        The tree's structure with a `NamedSharding` for every array, fit for `jax.device_put` and `jax.jit`.

    Raises:
        ValueError: a mesh axis is not of type Auto, or an axis of a parameter has a name without a rule.
    """
    if isinstance(state, nnx.Module):
        state = nnx.state(state)
    auto = all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)
    require(auto, "mesh", "axes of type Auto", mesh.axis_types)
    replicated = NamedSharding(mesh, P())

    def sharding_of(path, leaf):
        if not isinstance(leaf, nnx.Variable):
            return replicated
        # A part of an optimizer that leaves a parameter to another part keeps nothing of it.
        if not jax.tree.leaves(leaf):
            return leaf
        names = leaf.get_metadata("out_sharding", None) or ()
        # What an optimizer keeps of a parameter may have fewer axes than it.
        spec = _spec(path, names, leaf.shape, mesh) if len(names) == len(leaf.shape) else P()
        return leaf.replace(NamedSharding(mesh, spec))

    is_leaf = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    return jax.tree_util.tree_map_with_path(sharding_of, state, is_leaf=is_leaf)


def _spec(path: tuple, names: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh) -> P:
    rules, axes = dict(RULES), []
    for name, size in zip(names, shape, strict=True):
        known = name is None or name in rules
        expected = f"axes named {', '.join(rules)}"
        require(known, f"parameter {jax.tree_util.keystr(path, simple=True, separator='.')}", expected, repr(name))
        rule = None if name is None else rules[name]
        wanted = rule if isinstance(rule, tuple) else (rule,)
        split = tuple(axis for axis in wanted if axis is not None and size_of(mesh, axis) > 1)
        divides = size % size_of(mesh, *split) == 0
        axes.append((split if len(split) > 1 else split[0]) if split and divides else None)
    while axes and axes[-1] is None:
        axes.pop()
    return P(*axes)


def gathered(module: ModuleT, mesh: Mesh | None) -> ModuleT:
    """The module with parameters that are whole along "fsdp" and "sequence" and split as before over "tensor": what is
    computed with.

    Their gradient is summed over the ranks along these axes and split again in one step, a reduce-scatter, so that no
    device keeps more than its shard.

    Args:
        module: its parameters lie as `parameter_shardings` says; leading axes may have been taken off by a scan.
        mesh: the mesh, or None.
    """
    if mesh is None or size_of(mesh, *PARAMETER_AXES) == 1:
        return module
    graph, state = nnx.split(module)

    def whole(path, leaf):
        names = leaf.get_metadata("out_sharding", None) or ()
        shape = jnp.shape(leaf.get_value())
        names = names[len(names) - len(shape) :]
        split = _spec(path, names, shape, mesh) if names else P()
        rest = P(*(axis if axis in (None, TENSOR_AXIS) else None for axis in split))
        if rest == split:
            return leaf
        return leaf.replace(resharded(leaf.get_value(), NamedSharding(mesh, rest), NamedSharding(mesh, split)))

    is_leaf = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    return nnx.merge(graph, jax.tree_util.tree_map_with_path(whole, state, is_leaf=is_leaf))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def resharded(x: Array, forward: NamedSharding, backward: NamedSharding) -> Array:
    """`x` split as `forward` says, and its gradient as `backward` says.

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
    """What places every array of a state whole on that device."""
    place = SingleDeviceSharding(device)
    return lambda state: jax.tree.map(lambda _: place, state)
