"""Copies of the same numbers on several devices, compared bit for bit by integer sums.

    fingerprint = Σ_i bits(x_i) mod 2^32

Integers add up to the same in any order, so that equal copies have equal fingerprints on any device. A flipped bit of one
element always changes it, by a power of two.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree, UInt32

from experiments.learner.soundness import path_name


class Replicas:
    """Compares the copies of trees of one structure, in one compiled program.

    Leaves that are not sharded over the mesh are not compared. `over_mesh` makes such a tree of what every process has.
    """

    def __init__(self, mesh: Mesh, over_mesh: Callable[[PyTree], PyTree] = lambda tree: tree) -> None:
        self._mesh, self._over_mesh = mesh, over_mesh
        self._sums = None

    def first_mismatch(self, tree: PyTree) -> str | None:
        """Returns a phrase that names a leaf and the devices whose copy differs from the most; None if all are equal."""
        named = [
            (path_name(path), leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(self._over_mesh(tree))
            if isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh == self._mesh
        ]
        if self._mesh.size == 1 or not named:
            return None
        leaves = [leaf for _, leaf in named]
        if self._sums is None:
            self._sums = self._program([leaf.sharding.spec for leaf in leaves])
        by_device = np.asarray(jax.block_until_ready(self._sums(leaves)))
        for (name, leaf), sums in zip(named, by_device.T.tolist(), strict=True):
            found = _odd_ones(
                leaf.sharding.devices_indices_map(leaf.shape), dict(zip(self._devices, sums, strict=True))
            )
            if found is not None:
                return f"{name} on {found}"
        return None

    @property
    def _devices(self) -> list[jax.Device]:
        return list(self._mesh.devices.flat)

    def _program(self, specs: list[P]) -> Any:
        """Returns a program that tells every device the fingerprints [devices, leaves] of what each of them holds."""
        axes = self._mesh.axis_names

        def local(leaves: list[Array]) -> UInt32[Array, "devices leaves"]:
            return lax.all_gather(jnp.stack([sum_of_bits(leaf) for leaf in leaves]), axes)

        # What is compared is whether replicated values are equal, which the types of varying values presuppose.
        mapped = jax.shard_map(local, mesh=self._mesh, in_specs=(specs,), out_specs=P(), check_vma=False)
        return jax.jit(mapped)


def sum_of_bits(x: Array) -> UInt32[Array, ""]:
    """Returns the sum of the bits of all elements as integers, modulo 2^32.

    Example:
        >>> int(sum_of_bits(jnp.array([1.0, -0.0], jnp.float32))) == 0x3F800000 + 0x80000000
        True
    """
    if x.dtype == jnp.bool_:
        return jnp.sum(x, dtype=jnp.uint32)
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return jnp.sum(bits, dtype=jnp.uint32)


def fingerprint(frozen: Any) -> list[int]:
    """Returns the sum of every array's bits as integers: the same on every mesh, and other weights have others."""
    return [int(total) for total in jax.device_get(_sums_of_bits(frozen))]


def require_same_frozen(counters: Mapping[str, Any], frozen: Any) -> None:
    """Raises ValueError if what is not trained differs from that whose fingerprint a checkpoint's counters hold."""
    if counters["frozen"] != fingerprint(frozen):
        raise ValueError("model: its frozen parameters differ from those that the run began with; pass the same model")


@jax.jit
def _sums_of_bits(state: Any) -> list[jax.Array]:
    def numbers(leaf: jax.Array) -> jax.Array:
        return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    return [sum_of_bits(numbers(leaf)) for leaf in jax.tree.leaves(state)]


def _odd_ones(places: dict[jax.Device, Any], sums: dict[jax.Device, int]) -> str | None:
    """Names the devices whose sum differs from the majority of those that hold the same part, or all if there is none."""
    parts: dict[str, list[jax.Device]] = {}
    for device, place in places.items():
        parts.setdefault(str(place), []).append(device)
    for devices in parts.values():
        counts = Counter(sums[device] for device in devices).most_common()
        if len(counts) == 1:
            continue
        tie = counts[0][1] == counts[1][1]
        odd = [device for device in devices if tie or sums[device] != counts[0][0]]
        names = ", ".join(f"device {device.id}" for device in odd)
        return f"{names}, which hold different copies" if tie else f"{names}, unlike {counts[0][1]} equal copies"
    return None
