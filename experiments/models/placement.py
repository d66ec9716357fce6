"""Arrays between hosts and a mesh whose devices may belong to several processes.

Each process has the same host arrays, and copies to its own devices what belongs there; nothing is sent.
"""

import math
import os
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

MOST_PINNED = 32 << 30
"""Bytes of pinned memory that a process takes: XLA has at most 64 GiB of it."""


def placed(tree: Any, shardings: Any) -> Any:
    """Puts the arrays of a tree where `shardings`, one or a tree of them, say; as `jax.device_put` with one process.

    The arrays are host arrays or those of one process, the same in every process, or arrays over all processes; the
    shardings are of all processes' devices.
    """
    # With several processes device_put compares every host array with those of the other processes, by a broadcast.
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    if isinstance(shardings, Sharding):
        return jax.tree.map(lambda x: _placed(x, shardings), tree)
    return jax.tree.map(_placed, tree, shardings)


def _placed(x: Any, sharding: Sharding) -> jax.Array:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_placed(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def on_device(tree: Any, device: jax.Device) -> Any:
    """Puts whole arrays on a device of this process; those over all processes have to be whole on one of its devices."""

    def of_this_process(x: Any) -> Any:
        return x if not isinstance(x, jax.Array) or x.is_fully_addressable else x.addressable_data(0)

    return jax.device_put(jax.tree.map(of_this_process, tree), device)


def whole_on_host(tree: Any) -> Any:
    """Returns whole NumPy arrays, in every process; all of them have to call it."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(_whole, tree)


def _whole(x: jax.Array | np.ndarray) -> np.ndarray:
    if isinstance(x, np.ndarray) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)


def over_processes(x: jax.Array) -> jax.Array:
    """Returns an array that every process has whole as one over a device of each, and any other as it is."""
    if jax.process_count() == 1 or not x.is_fully_addressable:
        return x
    mesh = first_of_processes(jax.devices())
    return over_first(jax.device_put(x, mesh.local_devices[0]), mesh)


def over_first(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Returns the copies that the devices of `first_of_processes` have as one array; nothing is compared or sent."""
    return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, PartitionSpec()), [x])


def first_of_processes(devices: Iterable[jax.Device]) -> Mesh:
    """Returns a mesh of the first of these devices in each process."""
    first: dict[int, jax.Device] = {}
    for device in devices:
        first.setdefault(device.process_index, device)
    grid = np.array(list(first.values()), dtype=object)
    return Mesh(grid, ("process",), axis_types=(jax.sharding.AxisType.Auto,))


def bytes_of_process(tree: Any) -> int:
    """Returns the bytes of a tree's shards on this process's devices, equal ones once; shapes, dtypes and places suffice."""

    def shards(leaf: Any) -> int:
        places = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        return len(set(map(str, places))) * math.prod(leaf.sharding.shard_shape(leaf.shape))

    return sum(shards(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_a_device(tree: Any) -> int:
    """Returns the bytes of a tree's shards on a device that has one of each array; shapes, dtypes and places suffice."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def total_bytes(tree: Any) -> int:
    """Returns the bytes of a tree's arrays, each counted once; shapes and dtypes suffice."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def copies_to_pinned(tree: Any) -> bool:
    """Whether this process's shards are copied to the host through pinned memory, which a GPU writes to by itself.

    The process keeps what it once took of it, so they are at most a quarter of the machine's memory.
    """
    return jax.default_backend() == "gpu" and bytes_of_process(tree) <= min(MOST_PINNED, machine_bytes() // 4)


def machine_bytes() -> int:
    """Returns the bytes of memory of this machine; 0 where it does not say so."""
    known = {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(os.sysconf_names)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else 0
