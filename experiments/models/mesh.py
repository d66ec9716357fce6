"""Device meshes by name: `data=2,tensor=4` on the command line becomes a `jax.sharding.Mesh`.

Ranks: the data x fsdp groups of devices that hold different documents.
"""

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, Shaped

from experiments.models.placement import placed
from jaxlogp.errors import require

DATA_AXIS = "data"
"""Splits the documents; every rank along it holds the same parameters."""
FSDP_AXIS = "fsdp"
"""Splits the documents too, and features of the residual stream in parameters, gradients and optimizer state."""
SEQUENCE_AXIS = "sequence"
"""Splits the tokens of every row, and parameters, gradients and optimizer state as "fsdp" does."""
TENSOR_AXIS = "tensor"
"""Splits vocabulary, heads and SwiGLU features; with sequence parallelism also the tokens of the residual stream."""
AXIS_NAMES = (DATA_AXIS, FSDP_AXIS, SEQUENCE_AXIS, TENSOR_AXIS)
ROW_AXES = (DATA_AXIS, FSDP_AXIS)
"""The axes that split documents."""
PARAMETER_AXES = (FSDP_AXIS, SEQUENCE_AXIS)
"""The axes that split parameters which are put together where they are used."""
HEAD_AXES = (TENSOR_AXIS, SEQUENCE_AXIS)
"""The axes that split heads in the attention over whole rows."""
REST = -1
"""The size of an axis that takes all devices that the others leave."""


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of the mesh axes, at least 1 each.

    `data` copies of the parameters each have `fsdp` shards, which are gathered layer by layer where they are used.
    `sequence` parts of every row split the parameters too. `tensor` splits the vocabulary and the hidden features inside one
    group.

    Example:
        >>> MeshSpec(data=2, tensor=4).num_devices
        8
    """

    data: int = 1
    fsdp: int = 1
    sequence: int = 1
    tensor: int = 1

    @property
    def num_devices(self) -> int:
        return self.ranks * self.sequence * self.tensor

    @property
    def ranks(self) -> int:
        return self.data * self.fsdp

    def of_rollouts(self, *, keep_tensor: bool) -> "MeshSpec":
        """Returns the same devices for rollouts, which have one token of a row at a time.

        Sequence ranks take rows of their own. So do tensor ranks, unless they are kept: each then has all matrices for as
        long as it draws, and sends nothing between two tokens.
        """
        apart = 1 if keep_tensor else self.tensor
        return replace(self, fsdp=self.fsdp * self.sequence * apart, sequence=1, tensor=self.tensor // apart)

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def parse_mesh(text: str) -> MeshSpec:
    """Reads `axis=size` pairs, separated by commas; an axis that is not named has size 1, and -1 is the rest of the devices.

    ValueError for anything else, or if the other axes do not divide the devices.

    Example:
        >>> parse_mesh("data=2,tensor=4")
        MeshSpec(data=2, fsdp=1, sequence=1, tensor=4)
        >>> parse_mesh("")
        MeshSpec(data=1, fsdp=1, sequence=1, tensor=1)
    """
    sizes: dict[str, int] = {}
    for part in text.split(",") if text.strip() else ():
        axis, separator, size = (piece.strip() for piece in part.partition("="))
        require(separator == "=", "mesh", "axis=size pairs such as data=2,tensor=4", repr(text))
        require(axis in AXIS_NAMES, "mesh", f"axes named {' or '.join(AXIS_NAMES)}", f"{axis!r} in {text!r}")
        require(axis not in sizes, "mesh", "every axis at most once", f"{axis!r} twice in {text!r}")
        is_size = re.fullmatch(r"[0-9]{1,9}|-1", size) is not None and int(size) != 0
        require(is_size, "mesh", f"a positive integer, or -1 for the rest, as {axis}", f"{size!r} in {text!r}")
        sizes[axis] = int(size)
    return MeshSpec(**_with_rest(sizes, text))


def _with_rest(sizes: dict[str, int], text: str) -> dict[str, int]:
    rest = [axis for axis, size in sizes.items() if size == REST]
    if not rest:
        return sizes
    require(len(rest) == 1, "mesh", "at most one axis of size -1", repr(text))
    others, found = math.prod(size for size in sizes.values() if size != REST), jax.device_count()
    require(found % others == 0, "mesh", f"other axes whose product divides {found} devices", f"{others} in {text!r}")
    return sizes | {rest[0]: found // others}


def row_axes(mesh: Mesh) -> tuple[str, ...]:
    return tuple(axis for axis in ROW_AXES if axis in mesh.shape)


def axes_of_rows(rows: int, mesh: Mesh | None) -> tuple[str, ...]:
    """Returns what so many rows are split over: the axes that split documents, or none if their ranks do not divide them."""
    return () if mesh is None or rows % num_ranks(mesh) else row_axes(mesh)


def num_ranks(mesh: Mesh) -> int:
    return size_of(mesh, *ROW_AXES)


def token_axes(mesh: Mesh) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the axes of the mesh that split rows, and those that split the tokens of each row."""
    sequence = document_axis(mesh)
    return row_axes(mesh), () if sequence is None else (sequence,)


def document_axis(mesh: Mesh) -> str | None:
    """Returns the axis over which the tokens of a document may be split, or None."""
    return SEQUENCE_AXIS if size_of(mesh, SEQUENCE_AXIS) > 1 else None


def size_of(mesh: Mesh | None, *axes: str) -> int:
    """Returns the ranks along these axes together; 1 along one that the mesh does not have, and without a mesh."""
    return 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in axes)


def devices_by_rank(mesh: Mesh) -> np.ndarray:
    """Returns devices [ranks, sequence x tensor], in the order in which documents are dealt."""
    return mesh.devices.reshape(num_ranks(mesh), -1)


def ranks_here(mesh: Mesh) -> tuple[int, ...]:
    """Returns the numbers of the ranks that have a device in this process."""
    here = jax.process_index()
    return tuple(
        number for number, row in enumerate(devices_by_rank(mesh)) if any(each.process_index == here for each in row)
    )


def split_rows(arrays: Any, mesh: Mesh) -> Any:
    """Shards host arrays by row over the ranks, repeating the last row until the ranks divide them."""
    (rows,) = {len(array) for array in jax.tree.leaves(arrays)}
    more = -rows % num_ranks(mesh)
    padded = jax.tree.map(lambda x: np.concatenate([x, np.repeat(x[-1:], more, axis=0)]), arrays)
    return placed(padded, NamedSharding(mesh, P(row_axes(mesh))))


def rows_of_ranks(x: Shaped[Array, "B ..."], kept: Int[Array, "ranks C"]) -> Shaped[Array, "ranks*C ..."]:
    """Returns the rows with these indices among those of each rank, in this order; nothing is sent between ranks."""
    ranks = len(kept)
    taken = jax.vmap(lambda own, indices: own[indices])(x.reshape(ranks, -1, *x.shape[1:]), kept)
    return taken.reshape(-1, *x.shape[1:])


def put_in_ranks(
    x: Shaped[Array, "T N"],
    places: tuple[Int[Array, "ranks C ..."], Int[Array, "ranks C ..."]],
    new: Shaped[Array, "ranks*C ..."],
) -> Shaped[Array, "T N"]:
    """Returns `x` with numbers at these rows, counted among those of each rank, and columns.

    No place may occur twice, and those that do not exist are left out. Nothing is sent between ranks.
    """
    ranks = len(places[0])
    # Unless it is known that no place occurs twice, a GPU with xla_gpu_deterministic_ops puts what belongs beyond the end of
    # a row into the next row (benchmarks/results/invariant_gpu.md).
    put = jax.vmap(
        lambda own, rows, columns, values: own.at[rows, columns].set(values, mode="drop", unique_indices=True)
    )
    return put(x.reshape(ranks, -1, x.shape[1]), *places, new.reshape(ranks, -1, *new.shape[1:])).reshape(x.shape)


def wait_if_simulated(result: Any, mesh: Mesh) -> Any:
    """Waits for the results of a program with collectives over a mesh if its devices are simulated.

    Those share one pool of threads: the collectives of several programs in flight can wait for each other's threads until
    XLA aborts the process.
    """
    simulated = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
    return jax.block_until_ready(result) if simulated else result


def make_mesh(spec: MeshSpec) -> jax.sharding.Mesh:
    """Lays the first `data * fsdp * sequence * tensor` devices out as a mesh, neighbours along the tensor axis.

    The axes are of type Auto: the compiler places what the caller has not placed. Raises as `require_devices`.
    """
    require_devices(spec)
    devices = jax.devices()[: spec.num_devices]
    grid = np.asarray(devices, dtype=object).reshape([getattr(spec, axis) for axis in AXIS_NAMES])
    axis_types = (jax.sharding.AxisType.Auto,) * len(AXIS_NAMES)
    return jax.sharding.Mesh(grid, AXIS_NAMES, axis_types=axis_types)


def require_devices(spec: MeshSpec) -> None:
    """Raises ValueError if there are fewer devices than the mesh takes, or more than it takes of several processes."""
    devices = jax.devices()
    needed, found = spec.num_devices, len(devices)
    on_cpu = devices[0].platform == "cpu"
    remedy = f" (set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before the start)" if on_cpu else ""
    seen = f"{found} {devices[0].platform} device{'s' if found > 1 else ''}{remedy}"
    require(needed <= found, "mesh", f"{needed} devices for {spec}", seen)
    together = jax.process_count() == 1 or needed == found
    require(together, "mesh", f"all {found} devices of the {jax.process_count()} processes", f"{needed} for {spec}")
