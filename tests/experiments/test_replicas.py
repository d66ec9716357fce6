"""A copy with a flipped bit is found on simulated devices, and its device named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from experiments.learner.replicas import Replicas, sum_of_bits
from experiments.models.mesh import MeshSpec, make_mesh


def tree_on(mesh):
    """Whole and sharded leaves of several dtypes; the axes of a mesh's devices are data, fsdp, sequence and tensor."""
    random = np.random.default_rng(0)
    values = {
        "whole": (random.normal(size=(5, 3)).astype(np.float32), P()),
        "rows": (random.normal(size=(8, 3)).astype(np.float32), P("tensor")),
        "narrow": (jnp.asarray(random.normal(size=6), jnp.bfloat16), P()),
        "count": (np.int32(7), P()),
        "signs": (np.array([True, False]), P()),
    }
    return {name: jax.device_put(value, NamedSharding(mesh, spec)) for name, (value, spec) in values.items()}


def flipped(array, device, bit=0):
    """The array with one bit of one element changed on one device."""
    parts = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device == device:
            data.reshape(-1)[:1].view(np.uint8)[0] ^= 1 << bit
        parts.append(jax.device_put(data, SingleDeviceSharding(shard.device)))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


@pytest.fixture(scope="module")
def four_by_two():
    mesh = make_mesh(MeshSpec(data=4, tensor=2))
    return mesh, tree_on(mesh), Replicas(mesh)


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize(("name", "copies"), [("whole", 8), ("rows", 4), ("narrow", 8), ("count", 8)])
@pytest.mark.parametrize("place", [(0, 0, 0, 0), (2, 0, 0, 1)])
def test_a_flipped_bit_is_found_with_its_device(four_by_two, name, copies, place, bit):
    mesh, tree, replicas = four_by_two
    assert replicas.first_mismatch(tree) is None
    device = mesh.devices[place]
    found = replicas.first_mismatch({**tree, name: flipped(tree[name], device, bit)})
    assert found == f"{name} on device {device.id}, unlike {copies - 1} equal copies"


def test_of_two_copies_neither_is_right(four_by_two):
    mesh = make_mesh(MeshSpec(data=2, tensor=2))
    tree, replicas = tree_on(mesh), Replicas(mesh)
    found = replicas.first_mismatch({**tree, "rows": flipped(tree["rows"], mesh.devices[1, 0, 0, 1])})
    names = ", ".join(f"device {device.id}" for device in mesh.devices[:, 0, 0, 1])
    assert found == f"rows on {names}, which hold different copies"


def test_one_device_has_nothing_to_compare():
    mesh = make_mesh(MeshSpec())
    assert Replicas(mesh).first_mismatch(tree_on(mesh)) is None
    # Nor have leaves that live elsewhere, as those of an invariant run do.
    alone = jax.device_put(np.ones(3), jax.devices()[0])
    assert Replicas(make_mesh(MeshSpec(data=2))).first_mismatch({"alone": alone}) is None


def test_the_order_of_elements_does_not_matter_and_every_bit_does():
    values = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    assert int(sum_of_bits(jnp.asarray(values))) == int(np.sum(values.view(np.uint32), dtype=np.uint32))
    assert int(sum_of_bits(jnp.asarray(values))) == int(sum_of_bits(jnp.asarray(values[::-1].copy())))
    assert int(sum_of_bits(jnp.float32(0.0))) != int(sum_of_bits(jnp.float32(-0.0)))
