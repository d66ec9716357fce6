"""Checkpoints that are durable when they are on the list, and that never return damaged numbers.

A save returns once the arrays are in the host's memory; a thread has Orbax write them. Every step carries the caller's
record and a sha256 of each file, and a digest that seals both (see `step_files`). A restore compares them before Orbax
opens anything.
"""

import errno
import json
import os
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from experiments.models.placement import placed
from experiments.runs.files import (
    UNFINISHED,
    create_file,
    kind_of,
    make_folder,
    require_folder,
    require_readable_path,
    sync_folder,
    unfinished,
    write_whole,
)
from experiments.runs.step_files import (
    Manifest,
    form_of,
    on_host,
    read_arrays,
    read_manifest,
    write_step,
)
from jaxlogp.errors import require

QUARANTINE = "quarantine"
STEP_NAME = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)


class Restored(NamedTuple):
    """The result of a restore; `warnings` holds one line per step or name that was not used, `damaged` the reasons."""

    arrays: Any
    extra: dict[str, Any]
    step: int
    warnings: tuple[str, ...]
    damaged: dict[int, str]


class SavedSteps:
    """The checkpoints in a folder, to read; nothing is written, so that a run may be writing there."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        require_readable_path(self.folder)

    def steps(self) -> list[int]:
        """Steps that are complete on disk, in ascending order; a save in progress is not among them."""
        return complete_steps(self.folder)

    def latest_step(self) -> int | None:
        """The newest complete step on disk, or None."""
        return max(self.steps(), default=None)

    def restore(self, template: Any, step: int | None = None, *, whole: bool = True) -> Restored:
        """Reads one step back, checked, into the template's structure, shapes, dtypes and shardings.

        Without `step`, the newest undamaged step is read, and every damaged newer one adds a line to `warnings`. A step
        requested by number is never replaced.

        Args:
            template: pytree of jax Arrays or `jax.ShapeDtypeStruct` with shardings, see `restore_template`.
            step: the step to read; None for the newest undamaged one.
            whole: whether the template has to have every array of the step; else the others are not read.

        Raises:
            ValueError: no such step, no undamaged step, or a pytree leaf whose path, shape or dtype is not the
                template's.
        """
        wanted = _named_leaves(template, "template")
        _check_placement(wanted)
        numbered, warnings = self._numbered(), self._odd_names()
        require(bool(numbered), "checkpoints", f"at least one complete step in {self.folder}", "none")
        require(step is None or step in numbered, "step", f"one of {numbered} in {self.folder}", step)
        manifest, damaged = self._newest_intact(numbered if step is None else [step])
        warnings += [_damage(*bad, manifest.step) for bad in damaged.items()]
        _check_template(manifest, wanted, whole=whole)
        host = read_arrays(self.folder / str(manifest.step), manifest, wanted.keys())
        there = [placed(host.pop(name), leaf.sharding) for name, leaf in wanted.items()]
        arrays = jax.tree.unflatten(jax.tree.structure(template), there)
        return Restored(arrays, manifest.extra, manifest.step, tuple(warnings), damaged)

    def _newest_intact(self, steps: list[int]) -> tuple[Manifest, dict[int, str]]:
        """The manifest of the newest intact one of the steps, and what is wrong with newer ones."""
        damaged: dict[int, str] = {}
        for step in reversed(steps):
            try:
                return read_manifest(self.folder / str(step), step), damaged
            except (ValueError, OSError) as reason:
                damaged[step] = str(reason)
        reasons = "; ".join(f"step {bad}: {reason}" for bad, reason in damaged.items())
        raise ValueError(f"checkpoints: expected an undamaged step in {self.folder}, got {reasons}")

    def _numbered(self) -> list[int]:
        return numbered(self.folder)

    def _odd_names(self) -> list[str]:
        # int() takes 031 and digits of every script, so that two names could be one step.
        odd = sorted(name for name in os.listdir(self.folder) if name.isdecimal() and not STEP_NAME.fullmatch(name))
        return [f"{ascii(name)} in {self.folder} is not the name of a step; left alone" for name in odd]


class Checkpoints(SavedSteps):
    """The newest `keep` (at least 1) checkpoints of one run, in a folder that is created if missing, to write and read.

    `continue_from` moves damaged steps to the quarantine folder, with a file that holds the reason. The caller holds the
    run's lock.
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        require(keep >= 1, "keep", "at least 1", keep)
        super().__init__(folder)
        self._keep = keep
        self.folder.mkdir(parents=True, exist_ok=True)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, step: int, arrays: Any, extra: dict[str, Any]) -> None:
        """Saves one step; returns once the arrays are in the host's memory. Durable means on the list of `steps`.

        Args:
            step: training step, larger than every saved one.
            arrays: pytree of jax Arrays; random keys must be given as `jax.random.key_data`.
            extra: a record that JSON returns unchanged: string keys, lists, finite numbers.

        Raises:
            ValueError: a step that is not newer, a pytree leaf that is not an array, an extra that JSON would change.
            OSError: the save before this one could not be written.
        """
        self.wait_until_finished()
        latest = max(self._numbered(), default=None)
        require(latest is None or step > latest, "step", f"a step after {latest}, the newest saved one", step)
        require(_survives_json(extra), "extra", "a dict that JSON returns unchanged", repr(extra)[:200])
        leaves = leaves_to_save(arrays)
        # A copy through JSON: the caller may change its record while the thread writes.
        self._pending = self._thread.submit(self._write, step, json.loads(json.dumps(extra)), on_host(leaves))

    def wait_until_finished(self) -> None:
        """Returns once the save in progress is durable.

        Raises:
            OSError: it could not be written; nothing of it is left, and older steps are as they were.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits for the save in progress and ends the thread; raises as `wait_until_finished`."""
        try:
            self.wait_until_finished()
        finally:
            self._thread.shutdown()

    def restore(self, template: Any, step: int | None = None, *, whole: bool = True) -> Restored:
        """As `SavedSteps.restore`; of damaged steps, `continue_from` says what became of them."""
        self.wait_until_finished()
        restored = super().restore(template, step, whole=whole)
        shelf = self.folder / QUARANTINE
        if self._numbered()[-1] > restored.step and kind_of(shelf) != "nothing":
            require_folder(shelf)
        return restored._replace(warnings=tuple(self._odd_names()))

    def continue_from(self, restored: Restored) -> list[str]:
        """Moves the steps after the restored one, damaged or not, to the quarantine; returns a sentence for each."""
        sentences, back = [], f"the run went back to step {restored.step}"
        for newer in reversed([each for each in self._numbered() if each > restored.step]):
            reason = restored.damaged.get(newer)
            place = self._quarantine(newer, reason or back)
            line = f"checkpoint step {newer}: {back}" if reason is None else _damage(newer, reason, restored.step)
            sentences.append(f"{line}; moved to {place}")
        return sentences

    def _write(self, step: int, extra: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        fresh = unfinished(self.folder / str(step))
        try:
            self._remove_unfinished()
            fresh.mkdir()
            write_step(fresh, step, extra, arrays)
            fresh.rename(self.folder / str(step))
            sync_folder(self.folder)
            for old in self.steps()[: -self._keep]:
                self._remove(old)
        except OSError as error:
            shutil.rmtree(fresh, ignore_errors=True)
            words = f"checkpoint step {step} could not be written: {error.strerror or error}"
            raise OSError(error.errno or errno.EIO, words, str(self.folder)) from error

    def _remove_unfinished(self) -> None:
        """What a process left that was killed."""
        for entry in list(self.folder.iterdir()):
            if UNFINISHED.search(entry.name) and kind_of(entry) == "folder":
                shutil.rmtree(entry)

    def _remove(self, step: int) -> None:
        # Renamed first: killed on the way, half a step must not look like a damaged one.
        doomed = unfinished(self.folder / str(step))
        (self.folder / str(step)).rename(doomed)
        shutil.rmtree(doomed)

    def _quarantine(self, step: int, reason: str) -> Path:
        shelf = self.folder / QUARANTINE
        make_folder(shelf)
        taken = set(os.listdir(shelf))
        number = next(n for n in range(len(taken) + 1) if taken.isdisjoint({f"{step}-{n}", f"{step}-{n}.txt"}))
        place = shelf / f"{step}-{number}"
        (self.folder / str(step)).rename(place)
        with create_file(place.with_name(place.name + ".txt")) as stream:
            write_whole(stream, f"{reason}\n".encode())
        return place


def numbered(folder: Path) -> list[int]:
    """Everything under the name of a step, damaged ones included, in ascending order; nothing where there is no folder."""
    names = [] if kind_of(folder) == "nothing" else os.listdir(folder)
    return sorted(int(name) for name in names if STEP_NAME.fullmatch(name))


def complete_steps(folder: Path) -> list[int]:
    """Steps that are complete in a folder of checkpoints, in ascending order."""
    return [step for step in numbered(folder) if kind_of(folder / str(step)) == "folder"]


def restore_template(arrays: Any, mesh: jax.sharding.Mesh) -> Any:
    """The same structure of `jax.ShapeDtypeStruct`, on a mesh that need not be the one that the arrays were saved from."""

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        # Only a named sharding has a spec that can be used on another mesh.
        spec = getattr(leaf.sharding, "spec", jax.sharding.PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

    return jax.tree.map(place, arrays)


def _damage(step: int, reason: str, restored: int) -> str:
    return f"checkpoint step {step} is damaged: {reason}; continuing from step {restored}"


def _named_leaves(tree: Any, argument: str) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        require(name not in named, argument, "leaves with distinct paths", f"{name!r} twice")
        named[name] = leaf
    require(bool(named), argument, "at least one array", "none")
    return named


def leaves_to_save(arrays: Any) -> dict[str, jax.Array]:
    """Arrays by their paths, as checkpoints hold them.

    Raises:
        ValueError: a pytree leaf that is not an array.
    """
    leaves = _named_leaves(arrays, "arrays")
    for name, leaf in leaves.items():
        _require_array(name, leaf)
    return leaves


def _require_array(name: str, leaf: Any) -> None:
    require(isinstance(leaf, jax.Array), f"arrays leaf {name!r}", "a jax Array", type(leaf).__name__)
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    require(not is_key, f"arrays leaf {name!r}", "uint32 data from jax.random.key_data", leaf.dtype)


def _survives_json(extra: Any) -> bool:
    try:
        return isinstance(extra, dict) and json.loads(json.dumps(extra, allow_nan=False)) == extra
    except (TypeError, ValueError):
        return False


def _check_placement(wanted: dict[str, Any]) -> None:
    first = next(iter(wanted))
    for name, leaf in wanted.items():
        sharding: Any = getattr(leaf, "sharding", None)
        require(sharding is not None, f"template leaf {name!r}", "a sharding (see restore_template)", "none")
        together = sharding.device_set == wanted[first].sharding.device_set
        require(together, f"template leaf {name!r}", f"the devices of {first!r} (see restore_template)", sharding)


def _check_template(manifest: Manifest, wanted: dict[str, Any], *, whole: bool) -> None:
    saved, place = manifest.leaves, f"checkpoint step {manifest.step}"
    missing, unknown = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys() if whole else ())
    seen = f"missing {missing}, unknown {unknown}"
    require(not missing and not unknown, place, "the leaves of the template", seen)
    for name, leaf in wanted.items():
        require(saved[name] == form_of(leaf), f"{place} leaf {name!r}", form_of(leaf), saved[name])
