"""Where the parameters of a `Decoder` live on a device mesh."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from experiments.models.mesh import TENSOR_AXIS
from jaxlogp.errors import require

SHARDED_DIMENSION = {
    "embed_tokens": 0,
    "lm_head": 0,
    "q_proj": 2,
    "k_proj": 2,
    "v_proj": 2,
    "o_proj": 1,
    "q_bias": 1,
    "k_bias": 1,
    "v_bias": 1,
    "gate_proj": 2,
    "up_proj": 2,
    "down_proj": 1,
}
"""The dimension of each parameter that the tensor axis splits: vocabulary rows, heads, features inside the SwiGLU."""


def decoder_shardings(state: nnx.Module | nnx.State, mesh: Mesh):
    """Splits vocabulary rows, heads and SwiGLU features over the "tensor" axis; all else is on every device.

    Each parameter is split only if the axis divides the dimension in question, and is replicated otherwise: embedding
    and head by vocabulary rows, `q_proj` and `o_proj` by query heads, `k_proj` and `v_proj` by key-value heads, the
    SwiGLU's matrices by intermediate features. Nothing is split over "data". With the parameters placed so, a jitted
    step needs no further annotation; the mesh axes have to be of type Auto.

    Args:
        state: a `Decoder`, its `nnx.state`, or a tree that repeats the parameters under their names, such as the state
            of an optimiser; leaves under other names are replicated.
        mesh: has an axis "tensor", or all is replicated.

    Returns:
        The tree's structure with a `NamedSharding` for every array, fit for `jax.device_put` and `jax.jit`.

    Raises:
        ValueError: a mesh axis is not of type Auto.
    """
    if isinstance(state, nnx.Module):
        state = nnx.state(state)
    auto = all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)
    require(auto, "mesh", "axes of type Auto", mesh.axis_types)
    size = mesh.shape.get(TENSOR_AXIS, 1)

    def sharding_of(path, array):
        names = [getattr(entry, "key", getattr(entry, "name", None)) for entry in path]
        dimension = next((SHARDED_DIMENSION[name] for name in names if name in SHARDED_DIMENSION), None)
        if size == 1 or dimension is None or dimension >= array.ndim or array.shape[dimension] % size:
            return NamedSharding(mesh, P())
        return NamedSharding(mesh, P(*(None,) * dimension, TENSOR_AXIS))

    return jax.tree_util.tree_map_with_path(sharding_of, state)


def on_one_device(device: jax.Device) -> Callable[[nnx.State], Any]:
    """What places every array of a state whole on that device."""
    place = SingleDeviceSharding(device)
    return lambda state: jax.tree.map(lambda _: place, state)
