"""Checkpoints that are durable when they are on the list, and that never return damaged numbers.

A thread copies the arrays to the host's memory and has Orbax write them, in every process its shards. Every step carries a
record and a sha256 of each file, and a digest that seals both (see `step_files`). A restore compares them before Orbax opens
anything. Process 0 alone makes, renames and removes folders.
"""

import errno
import itertools
import os
import re
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax

from experiments.models.placement import over_processes, total_bytes
from experiments.processes import processes
from experiments.runs.config_file import exact_json
from experiments.runs.files import (
    UNFINISHED,
    kind_of,
    make_folder,
    replace_file,
    require_kind,
    sync_folder,
    unfinished,
)
from experiments.runs.step_files import (
    ROOM_BESIDE_ARRAYS,
    CheckpointRecord,
    Manifest,
    compare_files,
    files_of_arrays,
    form_of,
    read_arrays,
    read_manifest,
    require_room,
    seal_files,
    write_arrays,
    write_manifest,
)
from jaxlogp.errors import require

QUARANTINE = "quarantine"
STEP_NAME = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)


class Restored(NamedTuple):
    """The result of a restore: `warnings` of names that look like steps, and what is wrong with newer steps."""

    arrays: Any
    record: CheckpointRecord
    step: int
    warnings: tuple[str, ...]
    damaged: dict[int, str]

    def damage(self, step: int) -> str:
        return f"checkpoint step {step} is damaged: {self.damaged[step]}; continuing from step {self.step}"


def restore(folder: Path, template: Any, step: int | None = None, *, whole: bool = True) -> Restored:
    """Reads one step of a folder, checked, into the template's structure and shardings; writes nothing.

    All processes call it, and each reads its shards. Without `step`, the newest intact one is read. A step requested
    by number is never replaced. A `whole` template has every array of the step; of others, only its arrays are read.
    ValueError if there is no such step, or an array is not the template's.
    """
    steps = processes().from_first("saved steps", lambda: step_folders(folder))
    require(bool(steps), "checkpoints", f"at least one complete step in {folder}", "none")
    require(step is None or step in steps, "step", f"one of {steps} in {folder}", step)
    manifest, damaged = _newest_intact(folder, steps if step is None else [step])
    wanted = _leaves_by_path(template)
    _check_template(manifest, wanted, whole=whole)
    read = read_arrays(folder / str(manifest.step), manifest, wanted)
    arrays = jax.tree.unflatten(jax.tree.structure(template), [read[path] for path in wanted])
    # int() takes 031 and digits of every script, so that two names could be one step.
    odd = sorted(name for name in os.listdir(folder) if name.isdecimal() and not STEP_NAME.fullmatch(name))
    warnings = tuple(f"{ascii(name)} in {folder} is not the name of a step; left alone" for name in odd)
    return Restored(arrays, manifest.record, manifest.step, warnings, damaged)


class Checkpoints:
    """Writes a run's checkpoints, whose lock is the caller's; keeps the newest `keep`. Every process calls the same."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self._keep, self._here = folder, keep, processes("checkpoints/")
        if self._here.first:
            make_folder(folder)
            if kind_of(folder / QUARANTINE) != "nothing":
                require_kind(folder / QUARANTINE, "folder")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._copied = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, step: int, arrays: Any, record: CheckpointRecord) -> None:
        """Saves one step, which is durable once `complete_steps` has it; the arrays are those of `wait_until_copied`.

        ValueError if the step is not newer than all others, or JSON would change the record; OSError if the save before this
        one could not be written.
        """
        self.wait_until_finished()
        latest = max(step_folders(self.folder), default=None)
        require(latest is None or step > latest, "step", f"a step after {latest}, the newest saved one", step)
        values = exact_json(record, "record")
        self._copied.clear()
        self._pending = self._thread.submit(self._write, step, values, _leaves_by_path(arrays))

    def wait_until_copied(self) -> None:
        """Returns once nothing reads the arrays of the last save any more; OSError if a save has failed so far."""
        if self._pending is not None:
            self._copied.wait()
            if self._pending.done():
                self.wait_until_finished()

    def wait_until_finished(self) -> None:
        """Returns once the save in progress is durable; OSError if it could not be written, and nothing of it is left."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits for the save in progress and ends the thread; raises as `wait_until_finished`."""
        try:
            self.wait_until_finished()
        finally:
            self._thread.shutdown()

    def quarantine_newer(self, restored: Restored) -> list[str]:
        """Moves the steps after the restored one to the quarantine, with the reasons; returns a sentence for each."""
        sentences, back = [], f"the run went back to step {restored.step}"
        for newer in reversed([step for step in step_folders(self.folder) if step > restored.step]):
            reason = restored.damaged.get(newer)
            sentence = f"checkpoint step {newer}: {back}" if reason is None else restored.damage(newer)
            sentences.append(f"{sentence}; moved to {self._quarantine(newer, reason or back)}")
        return sentences

    def _write(self, step: int, record: dict[str, Any], leaves: dict[str, jax.Array]) -> None:
        here, place = self._here, self.folder / str(step)
        fresh = Path(here.from_first("name of a checkpoint", lambda: str(unfinished(place))))
        try:
            size = total_bytes(leaves)
            here.attempt("folder of a checkpoint", lambda: self._make(fresh, size) if here.first else None)
            forms = {path: form_of(leaf) for path, leaf in leaves.items()}
            saved = {path: over_processes(leaves.pop(path)) for path in forms}
            here.attempt("arrays of a checkpoint", lambda: write_arrays(fresh, saved, self._copied.set))
            files = here.from_first("files of a checkpoint", lambda: files_of_arrays(fresh))
            mine = [files[number] for number in here.own_indices(len(files))]
            sealed = here.interleave(here.attempt("sha256 of files", lambda: seal_files(fresh, mine)))
            manifest = {"step": step, "record": record, "leaves": forms, "files": dict(zip(files, sealed, strict=True))}
            here.attempt("a checkpoint", lambda: self._complete(fresh, place, manifest) if here.first else None)
        except OSError as error:
            if here.first:
                shutil.rmtree(fresh, ignore_errors=True)
            words = f"checkpoint step {step} could not be written: {error.strerror or error}"
            raise OSError(error.errno or errno.EIO, words, str(self.folder)) from error
        finally:
            self._copied.set()

    def _make(self, fresh: Path, size: int) -> None:
        self._remove_unfinished()
        fresh.mkdir()
        require_room(fresh, size + ROOM_BESIDE_ARRAYS)

    def _complete(self, fresh: Path, place: Path, manifest: dict[str, Any]) -> None:
        write_manifest(fresh, manifest)
        fresh.rename(place)
        sync_folder(self.folder)
        for old in complete_steps(self.folder)[: -self._keep]:
            self._remove(old)

    def _remove_unfinished(self) -> None:
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
        places = (shelf / f"{step}-{number}" for number in itertools.count())
        place = next(place for place in places if kind_of(place) == "nothing")
        (self.folder / str(step)).rename(place)
        # A run folder can be moved: nothing in it names the folder itself.
        replace_file(shelf / f"{place.name}.txt", f"{reason}\n".replace(f"{self.folder}/", "").encode())
        return place


def step_folders(folder: Path) -> list[int]:
    """Everything under the name of a step, damaged ones included, in ascending order; nothing where there is no folder."""
    names = [] if kind_of(folder) == "nothing" else os.listdir(folder)
    return sorted(int(name) for name in names if STEP_NAME.fullmatch(name))


def complete_steps(folder: Path) -> list[int]:
    """Steps that are complete in a folder of checkpoints, in ascending order; a save in progress is not among them."""
    return [step for step in step_folders(folder) if kind_of(folder / str(step)) == "folder"]


def restore_template(arrays: Any, mesh: jax.sharding.Mesh) -> Any:
    """The same structure of `jax.ShapeDtypeStruct`, on a mesh that need not be the one that the arrays were saved from."""

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        # Only a named sharding has a spec that can be used on another mesh.
        spec = getattr(leaf.sharding, "spec", jax.sharding.PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

    return jax.tree.map(place, arrays)


def _newest_intact(folder: Path, steps: list[int]) -> tuple[Manifest, dict[int, str]]:
    """The manifest of the newest intact one of the steps, and what is wrong with newer ones."""
    damaged: dict[int, str] = {}
    for step in reversed(steps):
        manifest = _checked(folder / str(step), step)
        if isinstance(manifest, Manifest):
            return manifest, damaged
        damaged[step] = manifest
    reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
    raise ValueError(f"checkpoints: expected an undamaged step in {folder}, got {reasons}")


def _checked(folder: Path, step: int) -> Manifest | str:
    """The manifest of a step, each of whose files one of the processes has compared; a phrase if it is damaged."""
    here, manifest, damage = processes(), None, None
    try:
        manifest = read_manifest(folder, step)
        files = sorted(manifest.files.items())
        compare_files(folder, dict(files[number] for number in here.own_indices(len(files))))
    except (ValueError, OSError) as reason:
        # It may quote names from the folder.
        damage = " ".join(str(reason).splitlines())
    found = next(filter(None, here.gather("checkpoint compared", damage)), None)
    return found if found is not None or manifest is None else manifest


def _leaves_by_path(tree: Any) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        require(name not in named, "arrays", "leaves with distinct paths", f"{name!r} twice")
        named[name] = leaf
    return named


def _check_template(manifest: Manifest, wanted: dict[str, Any], *, whole: bool) -> None:
    saved, place = manifest.leaves, f"checkpoint step {manifest.step}"
    missing, unknown = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys() if whole else ())
    seen = f"missing {missing}, unknown {unknown}"
    require(not missing and not unknown, place, "the leaves of the template", seen)
    for path, leaf in wanted.items():
        require(saved[path] == form_of(leaf), f"{place} leaf {path!r}", form_of(leaf), saved[path])
