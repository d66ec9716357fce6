"""Installation of jaxlogp in Tunix, and a report of what it replaced and ran."""

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax

from jaxlogp import PolicyLoss
from jaxlogp.errors import describe, require
from jaxlogp.head.registry import EngineChoice, named_engine
from jaxlogp.integrations.tunix import head_calls, replacements
from jaxlogp.integrations.tunix.policy_loss import loss_output, policy_loss_fn

VERSIONS = ("0.1.7", "0.1.8")
"""Versions of google-tunix whose functions were compared with their replacements."""

_undo: dict[str, Callable[[], Any]] = {}
"""What restores each replaced function of Tunix, by its full name."""


@dataclass(frozen=True)
class Report:
    """What was replaced in Tunix, and what ran; prints as text.

    Attributes:
        version: version of Tunix.
        replaced: full names of the functions that are replaced now.
        calls: (function of Tunix, engine, why, number of vocabulary shards, note, how often it was traced) for every head
            call traced since `install`.
    """

    version: str
    replaced: tuple[str, ...]
    calls: tuple[tuple[str, str, str, int, str, int], ...]

    def __str__(self) -> str:
        lines = [f"jaxlogp in google-tunix {self.version}: {'installed' if self.replaced else 'not installed'}"]
        lines += [f"  replaced: {name}" for name in self.replaced]
        for caller, engine, reason, shards, note, times in self.calls:
            lines.append(f"  traced: {caller}, {times} x, engine {engine} ({reason}), vocabulary shards: {shards}")
            lines += [f"    {note}"] if note else []
        if self.replaced and not self.calls:
            lines.append("  traced: nothing yet")
        return "\n".join(lines)


def install(*, engine: EngineChoice = "auto", policy_loss: PolicyLoss | None = None) -> None:
    """Makes every log-prob and entropy of Tunix's learners and trainers come from `jaxlogp.linear_log_probs`.

    Must be called before learners and trainers are built: a `PeftTrainer` takes its loss function when it is made. JAX
    recompiles every function of this process at its next call, because compiled programs may contain the stock functions.

    Args:
        engine: a name or an engine object, as in :func:`jaxlogp.linear_log_probs`.
        policy_loss: a loss of `jaxlogp.losses`, in place of Tunix's "grpo" for learners that are built from now on; see
            :func:`policy_loss_fn`. None keeps Tunix's losses.

    Raises:
        ValueError: if the version of google-tunix is not in `VERSIONS`, the engine is unknown, or jaxlogp is already
            installed in Tunix.
        ImportError: if google-tunix is not installed.
    """
    version = importlib.metadata.version("google-tunix")
    require(version in VERSIONS, "google-tunix", f"version {' or '.join(VERSIONS)}", version)
    if engine != "auto":
        named_engine(engine)
    ok = policy_loss is None or isinstance(policy_loss, PolicyLoss)
    require(ok, "policy_loss", "a loss of jaxlogp.losses, or None", describe(policy_loss))
    own_loss = None if policy_loss is None else policy_loss_fn(policy_loss, engine=engine)
    require(not _undo, "install", "one installation at a time (uninstall first)", "a second one")
    from tunix.rl import algo_core, common, function_registry
    from tunix.sft import peft_trainer

    def default_loss(*args: Any, **kwargs: Any) -> Any:
        total, count = replacements.supervised_sum(*args, engine=engine, **kwargs)
        return loss_output(total, count, eps=1e-8)

    per_token = functools.partial(replacements.compute_per_token_logps, engine=engine)
    _replace(common, "compute_per_token_logps", per_token)
    _replace(common, "get_per_token_logps", functools.partial(replacements.get_per_token_logps, engine=engine))
    _replace(peft_trainer, "_default_loss_fn", default_loss)
    # 0.1.8 asks compute_per_token_logps for the entropy.
    if hasattr(algo_core, "compute_entropy_from_logits"):
        stock = algo_core.compute_entropy_from_logits
        _replace(algo_core, "compute_entropy_from_logits", functools.partial(replacements.entropy_from_logits, stock))
    if own_loss is not None:
        register = function_registry.register_policy_loss_fn("grpo")
        stock = function_registry.get_policy_loss_fn("grpo")
        _undo["policy loss 'grpo' of tunix.rl.function_registry"] = functools.partial(register, stock)
        register(own_loss)
    head_calls.TRACED.clear()
    jax.clear_caches()


def uninstall() -> None:
    """Undoes `install`; does nothing if nothing is installed. Trainers that were built in between keep their loss."""
    if not _undo:
        return
    for restore in _undo.values():
        restore()
    _undo.clear()
    jax.clear_caches()


@contextlib.contextmanager
def installed(*, engine: EngineChoice = "auto", policy_loss: PolicyLoss | None = None) -> Generator[None, None, None]:
    """Installs for the duration of a `with` block; arguments as in `install`."""
    install(engine=engine, policy_loss=policy_loss)
    try:
        yield
    finally:
        uninstall()


def report() -> Report:
    """Returns what is replaced now, and the head calls that were traced since `install`."""
    calls = tuple(
        (caller, run.engine, run.reason, run.num_vocab_shards, note, times)
        for (caller, run, note), times in sorted(head_calls.TRACED.items(), key=lambda item: item[0].caller)
    )
    return Report(importlib.metadata.version("google-tunix"), tuple(_undo), calls)


def _replace(module: ModuleType, name: str, new: Any) -> None:
    _undo[f"{module.__name__}.{name}"] = functools.partial(setattr, module, name, getattr(module, name))
    setattr(module, name, new)
