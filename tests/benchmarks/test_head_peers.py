"""Adapters of the head's benchmark to other systems: which modules are loaded, and how a missing one is reported."""

import os
import sys

import pytest

from benchmarks.head_speed import peers as head_peers


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Writes modules into a folder of the path; none of them stays imported."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def written(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    yield written
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("verl", "xprof", "tokamax", "cut_cross_entropy", "liger_kernel"):
            del sys.modules[name]


def test_verl_s_kernel_is_loaded_without_its_package_and_again_for_the_next_shape(packages):
    fails = "raise ImportError('ray')"
    packages(
        {
            "verl/__init__.py": fails,
            "verl/utils/__init__.py": fails,
            "verl/utils/kernel/__init__.py": fails,
            "verl/utils/kernel/kernels.py": "from verl.utils.device import number",
            "verl/utils/device.py": "number = 7",
            "verl/utils/kernel/linear_cross_entropy.py": (
                "from . import kernels\ndef linear_cross_entropy(*arguments):\n    return arguments, kernels.number\n"
            ),
        }
    )
    for _ in range(2):
        assert head_peers._missing("verl") is None
        assert head_peers._verl()("h", "w", "t") == (("h", "w", "t", 1.0, "none"), 7)


@pytest.mark.parametrize("installed", [False, True])
def test_tokamax_is_loaded_with_or_without_xprof(packages, installed):
    packages(
        {
            "tokamax/__init__.py": (
                "from xprof.cli.tools import get_kernel_stats_tool as tool\n"
                "def linear_softmax_cross_entropy_loss(hidden, targets, weight, *, reduction, implementation):\n"
                "    assert reduction == 'none' and weight.shape == (4, 8)\n"
                "    return hidden.sum(1) * (2.0 if implementation == 'chunked_xla' else 1.0)\n"
            )
        }
    )
    if installed:
        packages({f"xprof/{x}__init__.py": "" for x in ("", "cli/", "cli/tools/")})
        packages({"xprof/cli/tools/get_kernel_stats_tool.py": "real = True"})
    jnp = pytest.importorskip("jax.numpy")
    for implementation, scale in ((None, 1.0), ("chunked_xla", 2.0)):
        log_probs, entropy = head_peers._tokamax(implementation)(jnp.ones((3, 4)), jnp.ones((8, 4)), None)
        assert entropy is None and log_probs.tolist() == [-4.0 * scale] * 3
    assert hasattr(sys.modules["tokamax"].tool, "real") == installed


def test_signs_and_arguments_of_functions_that_give_losses(packages):
    packages(
        {
            "cut_cross_entropy.py": (
                "def linear_cross_entropy(e, c, targets, *, reduction, filter_eps):\n"
                "    assert (reduction, e, c, targets) == ('none', 'h', 'w', 't')\n"
                "    return 3.0 if filter_eps is None else 4.0\n"
            ),
            "liger_kernel/transformers/functional.py": (
                "def liger_fused_linear_cross_entropy(input, weight, target, *, reduction):\n"
                "    assert (input, weight, target) == ('h', 'w', 't')\n"
                "    return {'none': 5.0, 'sum': 6.0}[reduction]\n"
            ),
        }
    )
    loads = {peer.name: peer.load for peer in head_peers.PEERS}
    wanted = {"cut-cross-entropy": -4.0, "cut-cross-entropy, no filter": -3.0, "Liger": -5.0, "Liger, sum": -6.0}
    assert {name: loads[name]()("h", "w", "t") for name in wanted} == {name: (x, None) for name, x in wanted.items()}


def test_what_is_missing_is_named():
    assert head_peers._missing("no_such_peer", "jax") == "not installed"
    assert head_peers._missing("jax", "no_such_module") == "no_such_module is not installed"
    assert head_peers.version("no-such-distribution") is None
    assert {"jax", "jaxlib"} <= set(head_peers.versions())


@pytest.mark.parametrize("value, kept", [("", None), ("here", "here")])
def test_an_empty_cache_folder_of_triton_is_given_back(monkeypatch, value, kept):
    monkeypatch.setenv("TRITON_CACHE_DIR", value)
    head_peers._give_back_tritons_cache()
    assert os.environ.get("TRITON_CACHE_DIR") == kept
