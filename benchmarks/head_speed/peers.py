"""Other implementations of the head, timed by ``benchmarks.head_speed`` where they are installed.

Nothing here is a dependency: a peer is imported on request, through its public function where it has one. Calls
were checked against cut-cross-entropy 25.1.1, liger-kernel 0.8.5, verl 0.9.1 and tokamax 0.0.17.
"""

import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import Case, Outputs
from benchmarks.head_speed.programs import BOTH, NO_ENTROPY, JaxProgram, Prepared, differentiated


@dataclass(frozen=True)
class TorchPeer:
    """A PyTorch function (hidden, weight, targets) -> (log-probs, entropy or None) on an NVIDIA GPU.

    Attributes:
        name: in tables.
        needs: modules that have to be installed.
        distribution: name under which it is installed.
        load: imports it and returns the function.
        gives: what it computes, for tables.
        per_token: False if the first value is one number for all tokens, whose upstream gradient is 1.
    """

    name: str
    needs: tuple[str, ...]
    distribution: str
    load: Callable[[], Callable[..., tuple[Any, Any]]]
    gives: str
    per_token: bool = True

    def why_not(self) -> str | None:
        """Why it cannot run here, or None."""
        return _missing(*self.needs, "torch", "triton") or _needs_gpu()

    def prepare(self, case: Case) -> Prepared:
        """The function on the case's arrays, which PyTorch reads in place."""
        torch = importlib.import_module("torch")
        _give_back_tritons_cache()
        function = self.load()
        arrays = jax.block_until_ready((case.hidden, case.weight, case.g_log_probs, case.g_entropy, case.targets))
        hidden, weight, g_log_probs, g_entropy, targets = (torch.from_dlpack(array).detach() for array in arrays)
        targets, with_gradients = targets.long(), [x.detach().requires_grad_() for x in (hidden, weight)]

        def forward():
            with torch.no_grad():
                return function(hidden, weight, targets)

        def forward_backward():
            values, entropy = function(*with_gradients, targets)
            outputs, upstream = [values], [g_log_probs.to(values.dtype) if self.per_token else None]
            if entropy is not None:
                outputs, upstream = [*outputs, entropy], [*upstream, g_entropy.to(entropy.dtype)]
            return torch.autograd.grad(outputs, with_gradients, upstream)

        values, entropy = (None if x is None else x.float().cpu().numpy() for x in forward())
        gradients = [
            gradient[torch.as_tensor(some, device=gradient.device)].float().cpu().numpy()
            for gradient, some in zip(forward_backward(), (case.rows, case.columns), strict=True)
        ]
        return Prepared(
            forward,
            forward_backward,
            lambda _: torch.cuda.synchronize(),
            _torch_temporaries(torch, forward),
            _torch_temporaries(torch, forward_backward),
            Outputs(values, entropy, *gradients, entropy is not None)
            if self.per_token
            else Outputs(None, None, None, None, False),
            self.gives,
        )


def _give_back_tritons_cache() -> None:
    """Undoes the empty TRITON_CACHE_DIR that importing jax-triton sets, and with which other Triton kernels fail."""
    if os.environ.get("TRITON_CACHE_DIR") == "":
        del os.environ["TRITON_CACHE_DIR"]


def _torch_temporaries(torch: Any, call: Callable[[], Any]) -> int:
    """Peak of PyTorch's allocator, excluding earlier allocations and the results of the call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = [x for x in call() if x is not None]
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(x.numel() * x.element_size() for x in out)


@dataclass(frozen=True)
class JaxPeer:
    """A JAX function (hidden, weight, targets) -> (log-probs, entropy or None).

    Attributes:
        name: in tables.
        needs: modules that have to be installed.
        distribution: name under which it is installed.
        load: imports it and returns the function.
        gives: what it computes, for tables.
    """

    name: str
    needs: tuple[str, ...]
    distribution: str
    load: Callable[[], Callable[..., tuple[Any, Any]]]
    gives: str

    def why_not(self) -> str | None:
        """Why it cannot run here, or None."""
        return _missing(*self.needs)

    def program(self) -> JaxProgram:
        """The program, to be compiled together with ours."""
        return differentiated(self.load(), self.gives)


Peer = TorchPeer | JaxPeer


def _cut_cross_entropy(filter_eps: str | None):
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy

    def program(hidden, weight, targets):
        return -function(hidden, weight, targets, reduction="none", filter_eps=filter_eps), None

    return program


def _liger(reduction: str):
    function = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return lambda hidden, weight, targets: (-function(hidden, weight, targets, reduction=reduction), None)


def _liger_cute():
    # Named directly: the function that dispatches by device would import it at the first call.
    module = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"
    function = importlib.import_module(module).LigerFusedScaledCrossEntropySM90Function

    def program(hidden, weight, targets):
        # Temperature, ignored id, a number without effect, with entropy.
        nll, entropy = function.apply(hidden, weight, targets, 1.0, -100, 1, True)
        return -nll, entropy

    return program


def _verl():
    """verl's kernel only: ``import verl`` loads the trainer's dependencies, of which the kernel uses none."""
    root = importlib.util.find_spec("verl").submodule_search_locations[0]
    for name in ("verl", "verl.utils", "verl.utils.kernel"):
        _bare_package(name, Path(root, *name.split(".")[1:]))
    function = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, targets: function(hidden, weight, targets, 1.0, "none")


def _bare_package(name: str, *folders: Path) -> types.ModuleType:
    """A package whose own __init__ is not run, unless it has been imported."""
    if name not in sys.modules:
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder) for folder in folders]
        sys.modules[name] = importlib.util.module_from_spec(spec)
    return sys.modules[name]


def _tokamax(implementation: str | None):
    if importlib.util.find_spec("xprof") is None:
        # Read only by tokamax's own benchmarking, which is not called here.
        for name in ("xprof", "xprof.cli", "xprof.cli.tools"):
            _bare_package(name).get_kernel_stats_tool = None
    loss = importlib.import_module("tokamax").linear_softmax_cross_entropy_loss

    def program(hidden, weight, targets):
        # It takes [H, V]; a trainer with [V, H] has to transpose too.
        nll = loss(hidden, targets, weight.T, reduction="none", implementation=implementation)
        return -nll.astype(jnp.float32), None

    return program


def _missing(*modules: str) -> str | None:
    for module in modules:
        # A name without a dot: looking up a submodule would import its package.
        if importlib.util.find_spec(module.split(".")[0]) is None:
            return "not installed" if module == modules[0] else f"{module} is not installed"
    return None


def _needs_gpu() -> str | None:
    platform = jax.devices()[0].platform
    return None if platform == "gpu" else f"it needs an NVIDIA GPU, the default device is {platform}"


PEERS: tuple[Peer, ...] = (
    TorchPeer(
        "cut-cross-entropy",
        ("cut_cross_entropy",),
        "cut-cross-entropy",
        functools.partial(_cut_cross_entropy, "high"),
        f"{NO_ENTROPY}; gradient filter on, its default",
    ),
    TorchPeer(
        "cut-cross-entropy, no filter",
        ("cut_cross_entropy",),
        "cut-cross-entropy",
        functools.partial(_cut_cross_entropy, None),
        f"{NO_ENTROPY}; gradient filter off",
    ),
    TorchPeer("Liger", ("liger_kernel",), "liger-kernel", functools.partial(_liger, "none"), NO_ENTROPY),
    TorchPeer(
        "Liger, sum",
        ("liger_kernel",),
        "liger-kernel",
        functools.partial(_liger, "sum"),
        "scalar loss, gradients in the forward pass",
        per_token=False,
    ),
    TorchPeer("Liger CuTe DSL", ("liger_kernel", "cutlass"), "liger-kernel", _liger_cute, BOTH),
    TorchPeer("verl", ("verl",), "verl", _verl, f"{BOTH}; kernel files alone"),
    JaxPeer("tokamax", ("tokamax",), "tokamax", functools.partial(_tokamax, None), NO_ENTROPY),
    JaxPeer("tokamax, chunked_xla", ("tokamax",), "tokamax", functools.partial(_tokamax, "chunked_xla"), NO_ENTROPY),
)


def version(distribution: str) -> str | None:
    """The installed version, None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Versions of every peer and what it runs on, as far as installed."""
    names = ("jax", "jaxlib", "torch", "triton", "nvidia-cutlass-dsl", *(peer.distribution for peer in PEERS))
    return {name: found for name in dict.fromkeys(names) if (found := version(name)) is not None}
