"""What decides the numbers of a run besides its parameters, kept in every checkpoint and compared when it is resumed.

Another configuration, other data or other settings of random numbers make another run, and are refused. Other versions,
devices or meshes give other last bits, and are said: a run that goes on is then not bitwise the one without a break.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from experiments.runs.config_file import to_json
from experiments.runs.environment import library_versions
from jaxlogp.errors import require

SETTINGS = ("jax_threefry_partitionable", "jax_default_prng_impl", "jax_enable_x64")
"""Settings of JAX that change every random number."""
DEVICES_FLAG = "--xla_force_host_platform_device_count"


@dataclass(frozen=True)
class RunParts:
    """Parts of a run that its options do not describe; the sha256 digests are hexadecimal."""

    examples: str | None = None
    """sha256 of the task's file; None for a task that makes its examples."""
    task: str | None = None
    """Class of a task passed from Python; None for the one of the options."""
    rewards: tuple[tuple[str, float], ...] | None = None
    """Name and weight of each reward passed from Python; None for those of the options."""
    files: tuple[tuple[str, str], ...] = ()
    """Name and sha256 of each file of a model from disk, other than its weights."""
    sources: tuple[tuple[str, str], ...] = ()
    """Name and sha256 of the source code of the user's own task, rewards, model and source, where it can be read."""

    def fixed(self) -> dict[str, Any]:
        """Returns the parts that may not change, as JSON values."""
        return to_json(replace(self, sources=()))


@dataclass(frozen=True)
class Identity:
    """Plain values: options by dotted name, but for those that a resume may change; the run's other parts, see
    `RunParts.fixed`; JAX's settings of random numbers; and what may change the last bits, by a name for the reader."""

    options: dict[str, Any]
    parts: dict[str, Any]
    settings: dict[str, Any]
    numerics: dict[str, Any]


def identity_of(options: Mapping[str, Any], mesh: str, parts: RunParts) -> Identity:
    """Returns the identity of a run, in this process, with a mesh as on the command line."""
    device = jax.devices()[0]
    flags = sorted(flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(DEVICES_FLAG))
    numerics = {
        **library_versions(),
        "device": f"{device.platform} {device.device_kind}",
        "mesh": mesh,
        "matmul precision": str(_setting("jax_default_matmul_precision")),
        "XLA_FLAGS": " ".join(flags),
    }
    settings = {name: _setting(name) for name in SETTINGS}
    return Identity(to_json(options), parts.fixed(), settings, numerics)


def compared(then: Identity, now: Identity, step: int) -> tuple[str, ...]:
    """Returns one warning that lists the differences that break bitwise equality, or none; ValueError for another run."""
    for field, words in (("options", "options"), ("settings", "settings of JAX"), ("parts", "parts")):
        differences = _differences(getattr(then, field), getattr(now, field))
        expected = f"the {words} that it was saved with"
        require(not differences, f"checkpoint step {step}", expected, ", ".join(differences))
    differences = _differences(then.numerics, now.numerics)
    words = "resuming, but not bitwise identical to an uninterrupted run"
    return (f"changed since step {step}: {', '.join(differences)}; {words}",) if differences else ()


def require_settings() -> None:
    """Raises ValueError for settings of JAX that the trainer does not run with: 64 bits, or a generator but threefry."""
    require(not _setting("jax_enable_x64"), "JAX_ENABLE_X64", "off: the trainer computes in 32 bits", "on")
    generator = _setting("jax_default_prng_impl")
    require(generator == "threefry2x32", "JAX_DEFAULT_PRNG_IMPL", "threefry2x32", generator)


def _setting(name: str) -> Any:
    return getattr(jax.config, name)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    names: Collection[str] = sorted(old.keys() | new.keys())
    changed = [name for name in names if old.get(name) != new.get(name)]
    return [f"{name} {old.get(name)!r} -> {new.get(name)!r}" for name in changed]
