"""Meshes by name: what is accepted, what is refused and with which message, and how devices are arranged."""

import dataclasses
import re

import jax
import pytest

from experiments.models.mesh import MeshSpec, make_mesh, parse_mesh


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("data=2,tensor=4", MeshSpec(data=2, tensor=4)), ("tensor=4,data=2", MeshSpec(data=2, tensor=4)),
        (" data = 2 , tensor = 4 ", MeshSpec(data=2, tensor=4)), ("tensor=8", MeshSpec(tensor=8)),
        ("data=1", MeshSpec()), ("", MeshSpec()), ("  ", MeshSpec()), ("fsdp=-1,tensor=2", MeshSpec(fsdp=4, tensor=2)),
    ],
)  # fmt: skip
def test_parses(text, spec):
    assert parse_mesh(text) == spec
    assert parse_mesh(str(spec)) == spec
    assert hash(spec) == hash(dataclasses.replace(spec))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model=2", "'model'"), ("data=2,data=2", "twice"), ("data=2,data=4", "twice"), ("data=0", "positive"),
        ("data=-2", "positive"), ("data=-1,fsdp=-1", "at most one"), ("data=-1,tensor=3", "divides 8 devices"),
        ("data=1.5", "positive"), ("data=", "positive"), ("data=²", "positive"), ("data=two", "positive"),
        ("data", "axis=size"), ("data=2,", "axis=size"), ("2x4", "axis=size"),
    ],
)  # fmt: skip
def test_refuses_text(text, words):
    with pytest.raises(ValueError, match=rf"^.*{words}.*{re.escape(repr(text))}.*\Z"):
        parse_mesh(text)


def test_takes_the_first_devices_with_neighbours_along_tensor():
    mesh = make_mesh(MeshSpec(data=2, tensor=3))
    assert mesh.axis_names == ("data", "fsdp", "sequence", "tensor")
    assert mesh.devices.tolist() == [[[jax.devices()[:3]]], [[jax.devices()[3:6]]]]
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert dict(make_mesh(parse_mesh("")).shape) == {"data": 1, "fsdp": 1, "sequence": 1, "tensor": 1}


def test_says_how_to_get_more_devices():
    found = len(jax.devices())
    advice = f"XLA_FLAGS=--xla_force_host_platform_device_count={found * 2}"
    with pytest.raises(ValueError, match=rf"^.*expected {found * 2} devices.*got {found} cpu devices.*{advice}.*\Z"):
        make_mesh(MeshSpec(data=found, tensor=2))
