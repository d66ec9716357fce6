"""Compiled programs kept between runs, by JAX's persistent compilation cache: on by default in every command.

A program is found again if its code, the compiler's options, the version of JAX and the device are the same. A damaged entry
is compiled again, with a warning by JAX. Processes may share a folder.
"""

import contextlib
import functools
import hashlib
import os
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxlogp.errors import require

OPTION, VARIABLE, NONE = "--cache", "JAXLOGP_CACHE", "none"
MAX_BYTES = 2 * 2**30
"""Size above which the entries that were used least recently are removed at the start of a command."""
_EVENTS = {"/jax/compilation_cache/cache_hits": "from the cache", "/jax/compilation_cache/cache_misses": "compiled"}
_COUNTS: Counter[str] = Counter()


def take_cache_option(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Returns the value of `--cache`, None without one, and the other arguments.

    Example:
        >>> take_cache_option(["--seed", "1", "--cache", "none"])
        ('none', ['--seed', '1'])
    """
    value, others = None, []
    left = iter(arguments)
    for each in left:
        if each == OPTION or each.startswith(f"{OPTION}="):
            value = each.partition("=")[2] if "=" in each else next(left, "")
            require(bool(value) and not value.startswith("--"), OPTION, f"a folder or {NONE}", repr(value))
        else:
            others.append(each)
    return value, others


def use_compilation_cache(choice: str | None, *, distributed: bool = False) -> None:
    """Sets the folder of compiled programs: a path, or "none".

    None takes the environment's `JAXLOGP_CACHE`, else the folder that JAX has been told of, else one in the user's cache,
    but no folder for a run of several processes.
    """
    if choice == NONE:
        # JAX may have been told of a folder by its own variable.
        jax.config.update("jax_enable_compilation_cache", False)
    choice = choice or os.environ.get(VARIABLE)
    if choice == NONE:
        return
    if choice is None and (distributed or _folder_of_jax() is not None):
        return
    try:
        folder = _default_folder() if choice is None else Path(choice).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        # Without a home that can be written to there is no cache; a folder that was asked for has to be there. A user
        # without a home is a RuntimeError.
        require(choice is None, OPTION, f"a folder, or {NONE}", f"{choice}: {getattr(error, 'strerror', error)}")
        return
    remove_oldest(folder, MAX_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _listen()


def cache_report() -> str | None:
    """Returns how many programs were compiled so far and how many came from the cache, and where it is; None without one."""
    if not _COUNTS:
        return None
    counts = ", ".join(f"{_COUNTS[name]} {name}" for name in ("compiled", "from the cache"))
    return f"programs: {counts} ({_folder_of_jax()})"


def _folder_of_jax() -> str | None:
    config: Any = jax.config
    return config.jax_compilation_cache_dir


def remove_oldest(folder: Path, limit: int) -> None:
    """Removes files that were used least recently until those of the folder have at most `limit` bytes."""
    found = []
    for path in folder.iterdir():
        # Another process may remove it at the same time.
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= limit:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size


def _default_folder() -> Path:
    """In the user's cache, apart for every kind of processor: programs for a CPU use all that it has."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    features = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return Path(base) / "jaxlogp" / f"programs-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


@functools.cache
def _listen() -> None:
    def count(event: str, **_) -> None:
        if event in _EVENTS:
            _COUNTS[_EVENTS[event]] += 1

    jax.monitoring.register_event_listener(count)
