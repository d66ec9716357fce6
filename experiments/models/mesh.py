"""Device meshes by name: `data=2,tensor=4` on the command line becomes a `jax.sharding.Mesh`."""

import re
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlogp.errors import require

DATA_AXIS = "data"
"""Splits the documents."""
TENSOR_AXIS = "tensor"
"""Splits vocabulary, heads and SwiGLU features."""
AXIS_NAMES = (DATA_AXIS, TENSOR_AXIS)


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of the two mesh axes.

    Args:
        data: number of groups that hold different documents.
        tensor: number of shards of the vocabulary and of the hidden features inside one group.

    Raises:
        ValueError: a size is not a positive integer.

    Example:
        >>> MeshSpec(data=2, tensor=4).num_devices
        8
    """

    data: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            is_size = isinstance(size, int) and not isinstance(size, bool) and size >= 1
            require(is_size, f"mesh axis {field.name!r}", "a positive integer", repr(size))

    @property
    def num_devices(self) -> int:
        """Devices that the mesh takes."""
        return self.data * self.tensor

    def __str__(self) -> str:
        return f"data={self.data},tensor={self.tensor}"


def parse_mesh(text: str) -> MeshSpec:
    """Reads `axis=size` pairs, separated by commas; an axis that is not named has size 1.

    Args:
        text: for example `data=2,tensor=4`, `tensor=2`, or nothing for a single device.

    Returns:
        The sizes.

    Raises:
        ValueError: unknown or repeated axis, or a size that is not a positive integer.

    Example:
        >>> parse_mesh("data=2,tensor=4")
        MeshSpec(data=2, tensor=4)
        >>> parse_mesh("")
        MeshSpec(data=1, tensor=1)
    """
    sizes: dict[str, int] = {}
    for part in text.split(",") if text.strip() else ():
        axis, separator, size = (piece.strip() for piece in part.partition("="))
        require(separator == "=", "mesh", "axis=size pairs such as data=2,tensor=4", repr(text))
        require(axis in AXIS_NAMES, "mesh", f"axes named {' or '.join(AXIS_NAMES)}", f"{axis!r} in {text!r}")
        require(axis not in sizes, "mesh", "every axis at most once", f"{axis!r} twice in {text!r}")
        is_size = re.fullmatch(r"[0-9]+", size) is not None and int(size) >= 1
        require(is_size, f"mesh axis {axis!r}", "a positive integer", f"{size!r} in {text!r}")
        sizes[axis] = int(size)
    return MeshSpec(**sizes)


def split_rows(arrays: Any, mesh: Mesh) -> Any:
    """Host arrays, placed with their rows split over the data axis where it divides them, else whole on every device."""
    (rows,) = {len(array) for array in jax.tree.leaves(arrays)}
    spec = P(DATA_AXIS) if rows % mesh.shape[DATA_AXIS] == 0 else P()
    return jax.device_put(arrays, NamedSharding(mesh, spec))


def make_mesh(spec: MeshSpec) -> jax.sharding.Mesh:
    """Lays the first `data * tensor` devices out as a mesh, neighbours along the tensor axis.

    The axes are of type Auto: the compiler places what the caller has not placed.

    Args:
        spec: the sizes.

    Returns:
        A mesh with axis names ("data", "tensor"), both present even at size 1.

    Raises:
        ValueError: fewer devices than the mesh takes; on the CPU the message says how to simulate them.
    """
    devices = jax.devices()
    needed, found = spec.num_devices, len(devices)
    on_cpu = devices[0].platform == "cpu"
    remedy = f" (set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before the start)" if on_cpu else ""
    seen = f"{found} {devices[0].platform} device{'s' if found > 1 else ''}{remedy}"
    require(needed <= found, "mesh", f"{needed} devices for {spec}", seen)
    grid = np.asarray(devices[:needed], dtype=object).reshape(spec.data, spec.tensor)
    axis_types = (jax.sharding.AxisType.Auto,) * len(AXIS_NAMES)
    return jax.sharding.Mesh(grid, AXIS_NAMES, axis_types=axis_types)
