"""The files of one checkpoint: arrays as Orbax writes them, and one manifest that seals them.

    20/arrays/          every array under its path, as `orbax.checkpoint.PyTreeCheckpointer` reads it too
    20/manifest.json    {"content": {"step", "record", "leaves", "files"}, "sha256"}

"files" maps the files of arrays/ to their sha256, and "leaves" the paths of the arrays to dtype and shape. Orbax has no
checksums, reads flipped bits as if they were numbers and answers other damage with any exception, so all files are
compared before it opens one. A folder under a number is complete: it was renamed to it after everything in it was durable.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments.models.placement import whole_on_host
from experiments.runs.config_file import from_json, read_sealed
from experiments.runs.files import (
    create_file,
    digest_of_json,
    open_file,
    replace_file,
    require_kind,
    sync_folder,
    unfinished,
)
from experiments.runs.identity import Identity
from experiments.runs.log_file import LogMarks
from jaxlogp.errors import require

ARRAYS = "arrays"
MANIFEST = "manifest.json"
ROOM_BESIDE_ARRAYS = 1 << 20
"""Bytes that metadata and manifest may take."""


@dataclass(frozen=True)
class CheckpointRecord:
    """What is saved with the arrays; the mappings hold JSON values.

    Attributes:
        identity: what decides the numbers of the run.
        logs: how far the logs had come.
        progress: counters of the loop.
        learner: counters of the learner.
        feed: state of the source, and the documents that wait for a step.
        before: held-out scores from before the first step; None until they are known.
    """

    identity: Identity
    logs: LogMarks
    progress: dict[str, Any]
    learner: dict[str, Any]
    feed: dict[str, Any]
    before: dict[str, Any] | None


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest, as the module's docstring has it."""

    step: int
    record: CheckpointRecord
    leaves: dict[str, str]
    files: dict[str, str]


def on_host(leaves: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Copies arrays to the memory of this process; nothing on a device shares them. All processes have to call it."""
    for leaf in leaves.values():
        if leaf.is_fully_addressable:
            leaf.copy_to_host_async()
    # On a CPU the host's view is the device's memory, which the next step takes over.
    return {
        path: np.array(whole_on_host(leaf), order="C", copy=True).reshape(leaf.shape) for path, leaf in leaves.items()
    }


def form_of(leaf: Any) -> str:
    """Returns dtype and shape of an array, or of the template of one: "float32[8, 4]"."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def write_step(folder: Path, step: int, record: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes everything; it is durable when this returns. OSError if the disk is full, or cannot be written to.

    The record is a `CheckpointRecord` as JSON values.
    """
    _require_room(folder, sum(array.nbytes for array in arrays.values()) + ROOM_BESIDE_ARRAYS)
    try:
        with _orbax() as checkpointer:
            checkpointer.save(folder / ARRAYS, args=ocp.args.PyTreeSave(dict(arrays)))
    except Exception as error:
        if isinstance(error, OSError | MemoryError):
            raise
        # Faults of the disk arrive as ValueError, with the file that could not be written in a long first line.
        raise OSError(f"Orbax: {_first_line(error)}") from error
    files = {name: _sealed(folder / ARRAYS / name) for name in _files(folder / ARRAYS)}
    for parent, _, _ in os.walk(folder):
        sync_folder(Path(parent))
    leaves = {path: form_of(array) for path, array in arrays.items()}
    content = {"step": step, "record": record, "leaves": leaves, "files": files}
    replace_file(folder / MANIFEST, json.dumps({"content": content, "sha256": digest_of_json(content)}).encode())


def read_manifest(folder: Path, step: int) -> Manifest:
    """Returns the manifest of a step, once the seal and all files have been compared.

    ValueError if anything is missing, too many, or not what was written; OSError if a file cannot be read.
    """
    require_kind(folder, "folder")
    path, arrays = folder / MANIFEST, folder / ARRAYS
    require_kind(path, "file")
    manifest = from_json(read_sealed(path, "content"), Manifest, str(path))
    require(manifest.step == step, str(path), f"that of step {step}", f"that of step {manifest.step}")
    require_kind(arrays, "folder")
    present, written = set(_files(arrays)), manifest.files.keys()
    seen = f"missing {sorted(written - present)}, unknown {sorted(present - written)}"
    require(present == written, str(arrays), "the files that were written", seen)
    for name, sha256 in manifest.files.items():
        # A pipe in the place of a file would block, and a device never end.
        require_kind(arrays / name, "file")
        with (arrays / name).open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        require(found == sha256, str(arrays / name), f"the file that was written, of sha256 {sha256}", found)
    return manifest


def read_arrays(folder: Path, manifest: Manifest, wanted: Collection[str]) -> dict[str, np.ndarray]:
    """Reads the arrays with the `wanted` paths of an intact step; of the others nothing comes into memory.

    ValueError if Orbax cannot read them, or finds others than the manifest has.
    """
    as_numpy = dict.fromkeys(wanted, ocp.RestoreArgs(restore_type=np.ndarray))
    args = ocp.args.PyTreeRestore(item=dict.fromkeys(wanted, 0), restore_args=as_numpy, partial_restore=True)
    place = f"checkpoint step {manifest.step}"
    try:
        with _orbax() as checkpointer:
            arrays = checkpointer.restore(folder / ARRAYS, args=args)
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        raise ValueError(f"{place}: Orbax cannot read it: {type(error).__name__}: {_first_line(error)}") from error
    for path in wanted:
        seen = form_of(arrays[path])
        require(seen == manifest.leaves[path], f"{place}: array {path!r}", manifest.leaves[path], seen)
    return arrays


@contextlib.contextmanager
def _orbax() -> Generator[ocp.Checkpointer, None, None]:
    """Yields Orbax, without the tracebacks that it logs from each of its threads beside the exception that it raises."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    # Whole arrays, by this process alone: it waits for no other.
    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"process{here}"
    )
    try:
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
            yield checkpointer
    finally:
        logger.setLevel(level)


def _require_room(folder: Path, size: int) -> None:
    """Raises OSError if the disk has less room: Orbax would print a traceback for each of its threads before it raised."""
    place = unfinished(folder / "room")
    try:
        with create_file(place) as stream:
            os.posix_fallocate(stream.fileno(), 0, size)
    finally:
        place.unlink(missing_ok=True)


def _files(folder: Path) -> list[str]:
    """Returns names of everything in a folder that is not a folder, links included, relative to it."""
    found = []
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        found += [str(Path(parent, name).relative_to(folder)) for name in (*files, *links)]
    return sorted(found)


def _sealed(path: Path) -> str:
    """Returns the sha256 of a file, which is durable when this returns."""
    with open_file(path) as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
    return found


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]
