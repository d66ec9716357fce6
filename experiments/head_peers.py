"""Other systems with the function of the head, timed by ``experiments.head_speed`` where they are installed.

Nothing here is a dependency: a peer is imported when it is asked for. Each adapter is a name, the module it needs, and a
function from a case to something that can be timed.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from experiments.head_cases import Case, Prepared, prepare_jax


class Peer(Protocol):
    """A program of somebody else's.

    Attributes:
      name: in tables.
      module: what has to be importable.
    """

    name: str
    module: str

    def why_not(self) -> str | None:
        """Why it cannot run here, or None."""
        ...

    def version(self) -> str:
        """The installed version."""
        ...

    def prepare(self, case: Case) -> Prepared:
        """The program on one case."""
        ...


@dataclass(frozen=True)
class TorchPeer:
    """A PyTorch function (hidden, weight, targets) -> (log-probs, entropy or None) on an NVIDIA GPU.

    Attributes:
      name: in tables.
      module: what has to be importable.
      distribution: name under which it is installed.
      load: imports it and returns the function.
    """

    name: str
    module: str
    distribution: str
    load: Callable[[], Callable[..., tuple[Any, Any]]]

    def why_not(self) -> str | None:
        """Why it cannot run here, or None."""
        return _missing(self.module, "torch") or _needs_gpu()

    def version(self) -> str:
        """The installed version."""
        return _version(self.distribution)

    def prepare(self, case: Case) -> Prepared:
        """The function on the case's arrays, which PyTorch reads in place."""
        torch = importlib.import_module("torch")
        function = self.load()
        hidden, weight, g_log_probs, g_entropy = (
            torch.from_dlpack(array).detach() for array in (case.hidden, case.weight, case.g_log_probs, case.g_entropy)
        )
        targets = torch.from_dlpack(case.targets).long()
        hidden, weight = hidden.requires_grad_(), weight.requires_grad_()

        def forward():
            with torch.no_grad():
                return function(hidden, weight, targets)

        def forward_backward():
            log_probs, entropy = function(hidden, weight, targets)
            outputs, upstream = [log_probs], [g_log_probs.to(log_probs.dtype)]
            if entropy is not None:
                outputs, upstream = [*outputs, entropy], [*upstream, g_entropy.to(entropy.dtype)]
            return torch.autograd.grad(outputs, (hidden, weight), upstream)

        def temporaries(call):
            call()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = [x for x in call() if x is not None]
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before - sum(x.numel() * x.element_size() for x in out)

        log_probs, entropy = forward()
        return Prepared(
            forward,
            forward_backward,
            lambda _: torch.cuda.synchronize(),
            temporaries(forward),
            temporaries(forward_backward),
            log_probs.float().cpu().numpy()[case.rows],
            None if entropy is None else entropy.float().cpu().numpy()[case.rows],
        )


@dataclass(frozen=True)
class Tokamax:
    """tokamax, whose public function gives one sum and no entropy: nothing per token to check."""

    name: str = "tokamax"
    module: str = "tokamax"

    def why_not(self) -> str | None:
        """Why it cannot run here, or None."""
        return _missing("tokamax")

    def version(self) -> str:
        """The installed version."""
        return _version("tokamax")

    def prepare(self, case: Case) -> Prepared:
        """Its default implementation; the weight is transposed inside, as a trainer with [V, H] would have to."""
        loss = importlib.import_module("tokamax").linear_softmax_cross_entropy_loss

        def program(hidden, weight, targets):
            total = -loss(hidden, targets, weight.T, reduction="sum")
            # One value for all tokens, in the shape that the timing expects.
            return jnp.broadcast_to(total / targets.shape[0], targets.shape), jnp.zeros(targets.shape)

        prepared = prepare_jax(program, case)
        return Prepared(
            prepared.forward,
            prepared.forward_backward,
            prepared.wait,
            prepared.forward_bytes,
            prepared.forward_backward_bytes,
            None,
            None,
        )


def _cut_cross_entropy():
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, targets: (-function(hidden, weight, targets, reduction="none"), None)


def _liger():
    function = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy

    def program(hidden, weight, targets):
        # Per-token losses; some versions return them first of a tuple.
        out = function(hidden, weight, targets, reduction="none")
        return -(out[0] if isinstance(out, tuple) else out), None

    return program


def _liger_cute():
    function = importlib.import_module(LIGER_CUTE).LigerFusedLinearScaledCrossEntropyFunction

    def program(hidden, weight, targets):
        # Temperature, id that is ignored, row tiles of a cluster, with entropy.
        nll, entropy = function.apply(hidden, weight, targets, 1.0, -100, 1, True)[:2]
        return -nll, entropy

    return program


def _verl():
    function = importlib.import_module(VERL).linear_cross_entropy
    return lambda hidden, weight, targets: function(hidden, weight, targets, 1.0, "none")[:2]


LIGER_CUTE = "liger_kernel.ops.fused_linear_scaled_cross_entropy"
VERL = "verl.utils.kernel.linear_cross_entropy"
PEERS: tuple[Peer, ...] = (
    TorchPeer("cut-cross-entropy", "cut_cross_entropy", "cut-cross-entropy", _cut_cross_entropy),
    TorchPeer("Liger", "liger_kernel", "liger-kernel", _liger),
    TorchPeer("Liger CuTe DSL", LIGER_CUTE, "liger-kernel", _liger_cute),
    TorchPeer("verl", VERL, "verl", _verl),
    Tokamax(),
)


def largest_error(seen: np.ndarray | None, wanted: np.ndarray) -> float | None:
    """Largest absolute difference, None where there is nothing to compare."""
    return None if seen is None else float(np.max(np.abs(np.asarray(seen, np.float64) - wanted)))


def _missing(*modules: str) -> str | None:
    for module in modules:
        try:
            found = importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            return "not installed" if module == modules[0] else f"{module} is not installed"
    return None


def _needs_gpu() -> str | None:
    platform = jax.devices()[0].platform
    return None if platform == "gpu" else f"it needs an NVIDIA GPU, the default device is {platform}"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
