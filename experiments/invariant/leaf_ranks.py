"""The ranks of a mesh as one process sees them, for programs that run on one device of each.

A process computes for every rank that has a device of its own, on the first of these devices. A rank whose tensor ranks
belong to several processes is computed in all of them: the same program on the same numbers gives the same bits, and
nothing has to be sent. Lists hold one item for each of these ranks, on its device.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from experiments.models.mesh import TENSOR_AXIS, devices_by_rank, ranks_here, row_axes
from experiments.models.placement import first_of_processes, over_first, whole_on_host


class LeafRanks:
    """Where leaves are computed, and how they become arrays over the mesh; copies only.

    The mesh has axes "data", "fsdp" and "tensor", of type Auto; `axes` are those that split documents. `count` is the number
    of ranks in all processes, `here` the numbers of those that this process computes, and `devices` where it computes them.
    `state_mesh` is one device of each process, with its copy of the parameters and of the optimizer's state, and
    `state_device` that of this process.
    """

    def __init__(self, mesh: Mesh) -> None:
        grid, process = devices_by_rank(mesh), jax.process_index()
        self.mesh, self.axes, self.count, self.here = mesh, row_axes(mesh), len(grid), ranks_here(mesh)
        self._devices = [[device for device in grid[rank] if device.process_index == process] for rank in self.here]
        self.devices: list[jax.Device] = [devices[0] for devices in self._devices]
        self.state_mesh = first_of_processes(grid.flat)
        (self.state_device,) = self.state_mesh.local_devices
        self.split = NamedSharding(mesh, P(self.axes))
        self._called: set[Callable] = set()

    def side_by_side(self, function: Callable[..., Any], *operands: Sequence[Any]) -> list[Any]:
        """Returns the function's results for each rank's operands, whose programs one thread alone would start too slowly.

        A first call goes rank by rank, so that everything is traced once.
        """
        config: Any = jax.config
        precision = config.jax_default_matmul_precision

        def call(own: tuple) -> Any:
            # What the caller has set for its own thread: all ranks multiply alike.
            with jax.default_matmul_precision(precision):
                return function(*own)

        of_ranks = list(zip(*operands, strict=True))
        if function not in self._called or len(of_ranks) == 1:
            self._called.add(function)
            return list(map(call, of_ranks))
        with ThreadPoolExecutor(len(of_ranks)) as pool:
            return list(pool.map(call, of_ranks))

    def to_global(self, parts: Sequence[Array]) -> Array:
        """Returns one array over the mesh, split over the ranks and replicated on the tensor ranks."""
        ranks = zip(parts, self._devices, strict=True)
        copies = [jax.device_put(part, device) for part, devices in ranks for device in devices]
        shape = (self.count * copies[0].shape[0], *copies[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.split, copies)

    def to_local(self, whole: Array) -> list[Array]:
        """Undoes `to_global`."""
        parts = {shard.device: shard.data for shard in whole.addressable_shards}
        here = [(parts[device], SingleDeviceSharding(device)) for device in self.devices]
        # Typed alike on every mesh: the shard of a mesh of one device is an array over that mesh.
        return [jax.make_array_from_single_device_arrays(part.shape, place, [part]) for part, place in here]

    def on_host(self, parts: Sequence[Array]) -> np.ndarray:
        """Returns the parts of all ranks, joined, in every process; all of them have to call it."""
        return whole_on_host(self.to_global(parts))

    def replicate_over_processes(self, tree: Any) -> Any:
        """Makes arrays of the state's device copies of one array over all processes; nothing is compared or sent."""
        return jax.tree.map(lambda x: over_first(x, self.state_mesh), tree)

    def over_tensor(self, rows: Float[Array, "blocks H"]) -> Float[Array, "blocks H"]:
        """Returns an array of this process, the same in all of them, split over the tensor ranks."""
        place = NamedSharding(self.mesh, P(TENSOR_AXIS))
        parts = place.addressable_devices_indices_map(rows.shape).items()
        copies = [jax.device_put(rows[index], device) for device, index in parts]
        return jax.make_array_from_single_device_arrays(rows.shape, place, copies)
