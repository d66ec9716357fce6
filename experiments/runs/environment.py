"""What a run ran on: versions, devices, git revision, command."""

import functools
import os
import platform
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
GIT_TIMEOUT_SECONDS = 10


def describe_environment() -> dict[str, Any]:
    """Returns what a reader needs to repeat the run; of the environment variables, only XLA_FLAGS."""
    devices = jax.devices()
    kinds = Counter(device.device_kind for device in devices)
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(sys.orig_argv),
        "versions": {"python": platform.python_version(), **library_versions()},
        "platform": platform.platform(),
        "devices": {"platform": devices[0].platform, "count": len(devices), "kinds": dict(kinds)},
        "xla_flags": os.environ.get("XLA_FLAGS"),
        "git": describe_git(Path(__file__).resolve().parents[2]),
    }


def describe_git(root: Path) -> dict[str, Any]:
    """Returns the revision of the code in `root` and whether files differ from it; None with a reason if git cannot tell."""
    try:
        revision, changes = _git(root, "rev-parse", "--verify", "HEAD"), _git(root, "status", "--porcelain")
        return {"revision": revision, "dirty": bool(changes), "reason": None}
    except subprocess.CalledProcessError as error:
        reason = next(iter(error.stderr.strip().splitlines()), f"git exited with status {error.returncode}")
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"git could not run: {error}"
    return {"revision": None, "dirty": None, "reason": reason}


def library_versions() -> dict[str, str | None]:
    """Returns installed versions of what computes numbers; None for one that is not installed."""
    return {name: _version(name) for name in LIBRARIES}


def versions_text() -> str:
    return ", ".join(
        [f"Python {platform.python_version()}", *(f"{name} {v}" for name, v in library_versions().items())]
    )


@functools.cache
def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=GIT_TIMEOUT_SECONDS)
    return done.stdout.strip()
