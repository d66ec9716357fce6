"""Where the parameters of a model live on a device mesh: one rule for every name of an axis."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from experiments.models.mesh import TENSOR_AXIS
from jaxlogp.errors import require

RULES: tuple[tuple[str, str | None], ...] = (
    ("vocab", TENSOR_AXIS),
    ("heads", TENSOR_AXIS),
    ("kv_heads", TENSOR_AXIS),
    ("mlp", TENSOR_AXIS),
    ("embed", None),
    ("head_dim", None),
    ("layers", None),
)
"""The mesh axis that splits an axis of parameters, by its name (Flax's `out_sharding` metadata), or None.

`nnx.logical_axis_rules` takes the same table. Nothing is split over "data".
"""


def parameter_shardings(state: nnx.Module | nnx.State, mesh: Mesh):
    """Splits the axes of parameters as `RULES` says, where the mesh axis divides them.

    Vocabulary rows, query heads, key-value heads and the features inside the gated products are split over "tensor"; an
    axis that it does not divide, and a parameter that does not name its axes, is whole on every device. With the
    parameters placed so, a jitted step needs no further annotation; the mesh axes have to be of type Auto.

    Args:
        state: a model, its `nnx.state`, or a tree that repeats the parameters with their metadata, such as the state of an
            optimizer; other leaves are replicated.
        mesh: has an axis "tensor", or all is replicated.

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
        axis = None if name is None else rules[name]
        ranks = mesh.shape.get(axis, 1)
        axes.append(axis if ranks > 1 and size % ranks == 0 else None)
    while axes and axes[-1] is None:
        axes.pop()
    return P(*axes)


def on_one_device(device: jax.Device) -> Callable[[nnx.State], Any]:
    """What places every array of a state whole on that device."""
    place = SingleDeviceSharding(device)
    return lambda state: jax.tree.map(lambda _: place, state)
