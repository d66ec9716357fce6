"""`python -m jaxlogp`: what a bug report needs."""

import importlib.metadata
import platform
import runpy

import jax
import pytest

from jaxlogp.head.registry import ENGINES


def report(capsys) -> list[str]:
    runpy.run_module("jaxlogp", run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_it_names_versions_devices_and_every_engine(capsys):
    lines = report(capsys)
    assert lines[0].startswith(f"Python {platform.python_version()} on ")
    for package in ("jax", "jaxlib", "numpy", "flax", "optax"):
        assert f"{package} {importlib.metadata.version(package)}" in lines
    assert f"devices: {jax.device_count()} {jax.default_backend()} ({jax.devices()[0].device_kind})" in lines
    engines = dict(line.strip().split(": ", 1) for line in lines[-len(ENGINES) :])
    assert set(engines) == set(ENGINES)
    assert engines["chunked"] == "bfloat16, float16, float32: can run here"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the reasons of a CPU")
def test_an_engine_that_cannot_run_says_why(capsys):
    reason = "bfloat16, float16, float32: no, it needs an NVIDIA Hopper GPU, the default device is cpu"
    assert f"  hopper: {reason}" in report(capsys)


def test_without_devices_it_still_prints_the_versions(capsys, monkeypatch):
    def devices():
        raise RuntimeError("no GPU/TPU found")

    monkeypatch.setattr(jax, "devices", devices)
    lines = report(capsys)
    assert f"jax {jax.__version__}" in lines and lines[-1] == "devices: none, RuntimeError('no GPU/TPU found')"
