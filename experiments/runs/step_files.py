"""The files of one checkpoint: arrays as Orbax writes them, each process its shards, and one manifest that seals them.

    20/arrays/          every array under its path, as `orbax.checkpoint.PyTreeCheckpointer` reads it too
    20/manifest.json    {"content": {"step", "record", "leaves", "files"}, "sha256"}

"files" maps the files of arrays/ to their sha256, and "leaves" the paths of the arrays to dtype and shape. Orbax has no
checksums, reads flipped bits as if they were numbers and answers other damage with any exception, so all files are
compared before it opens one. A folder under a number is complete: it was renamed to it after everything in it was durable.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from experiments.models.placement import copies_to_pinned
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
CHUNK_BYTES = 1 << 26
"""Arrays are written in pieces of about so many bytes: a process that reads a part of one reads no more than its pieces."""
WRITE_TIMEOUT_SECONDS = 600
"""Processes wait at most so long for the shards of the others."""
FILES_AT_ONCE = 8
"""Threads that read files for their sha256: one reads about 1 GB a second."""
_SAVES = itertools.count()


@dataclass(frozen=True)
class CheckpointRecord:
    """What is saved with the arrays; the mappings hold JSON values.

    `progress` and `learner` are counters. `feed` is the state of the source, with the documents that wait for a step.
    `before` are held-out scores from before the first step; None until they are known.
    """

    identity: Identity
    logs: LogMarks
    progress: dict[str, Any]
    learner: dict[str, Any]
    feed: dict[str, Any]
    before: dict[str, Any] | None


@dataclass(frozen=True)
class Manifest:
    step: int
    record: CheckpointRecord
    leaves: dict[str, str]
    files: dict[str, str]


def form_of(leaf: Any) -> str:
    """Returns dtype and shape of an array, or of the template of one: "float32[8, 4]"."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def write_arrays(folder: Path, arrays: Mapping[str, jax.Array], copied: Callable[[], None]) -> None:
    """Writes this process's shards while all others write theirs; calls `copied` once they are in the host's memory.

    On a CPU they are there already: JAX leaves memory that Orbax looks at to its array, whatever is donated. OSError if the
    disk is full or cannot be written to, or another process has not written its shards.
    """
    every = set(range(jax.process_count()))
    try:
        pinned = copies_to_pinned(arrays)
        with _orbax(every, f"save{next(_SAVES)}", _largest(arrays.values()), pinned=pinned) as (handler, options):
            at_once = ocp.options.AsyncOptions(WRITE_TIMEOUT_SECONDS, create_directories_asynchronously=False)
            with ocp.AsyncCheckpointer(handler, async_options=at_once, multiprocessing_options=options) as checkpointer:
                chunks = dict.fromkeys(arrays, ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES))
                checkpointer.save(folder / ARRAYS, args=ocp.args.PyTreeSave(dict(arrays), chunks))
                copied()
                checkpointer.wait_until_finished()
    except Exception as error:
        if isinstance(error, OSError | MemoryError):
            raise
        # Faults of the disk arrive as ValueError, with the file that could not be written in a long first line.
        raise OSError(errno.EIO, f"Orbax: {_first_line(error)}") from error


def seal_files(folder: Path, names: Sequence[str]) -> list[str]:
    """Returns the sha256 of files of the arrays, which are durable when this returns."""
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        return list(pool.map(lambda name: _sealed(folder / ARRAYS / name), names))


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Completes a step with the content of its manifest, as JSON values; all of it is durable when this returns."""
    for parent, _, _ in os.walk(folder):
        sync_folder(Path(parent))
    replace_file(folder / MANIFEST, json.dumps({"content": manifest, "sha256": digest_of_json(manifest)}).encode())


def read_manifest(folder: Path, step: int) -> Manifest:
    """Returns the manifest of a step, once its seal, and the names of all files, have been compared.

    ValueError if anything is missing, too many, or not what was written; OSError if it cannot be read.
    """
    require_kind(folder, "folder")
    path, arrays = folder / MANIFEST, folder / ARRAYS
    require_kind(path, "file")
    manifest = from_json(read_sealed(path, "content"), Manifest, str(path))
    require(manifest.step == step, str(path), f"that of step {step}", f"that of step {manifest.step}")
    require_kind(arrays, "folder")
    present, written = set(files_of_arrays(folder)), manifest.files.keys()
    seen = f"missing {sorted(written - present)}, unknown {sorted(present - written)}"
    require(present == written, str(arrays), "the files that were written", seen)
    return manifest


def compare_files(folder: Path, files: Mapping[str, str]) -> None:
    """Raises ValueError if a file of the arrays is not what was written; OSError if it cannot be read."""

    def compare(name: str) -> None:
        path, sha256 = folder / ARRAYS / name, files[name]
        # A pipe in the place of a file would block, and a device never end.
        require_kind(path, "file")
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        require(found == sha256, str(path), f"the file that was written, of sha256 {sha256}", found)

    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        list(pool.map(compare, files))


def read_arrays(folder: Path, manifest: Manifest, template: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Reads the arrays of a template into its shardings, in every process its shards; ValueError if Orbax cannot."""
    places = {path: ocp.ArrayRestoreArgs(sharding=leaf.sharding) for path, leaf in template.items()}
    args = ocp.args.PyTreeRestore(item=dict.fromkeys(template, 0), restore_args=places, partial_restore=True)
    place, here = f"checkpoint step {manifest.step}", jax.process_index()
    try:
        with _orbax({here}, f"process{here}", _largest(template.values())) as (handler, options):
            with ocp.Checkpointer(handler, multiprocessing_options=options) as checkpointer:
                arrays = checkpointer.restore(folder / ARRAYS, args=args)
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        raise ValueError(f"{place}: Orbax cannot read it: {type(error).__name__}: {_first_line(error)}") from error
    for path in template:
        seen = form_of(arrays[path])
        require(seen == manifest.leaves[path], f"{place}: array {path!r}", manifest.leaves[path], seen)
    return arrays


@contextlib.contextmanager
def _orbax(
    processes: set[int], key: str, most_bytes: int, *, pinned: bool = False
) -> Generator[tuple[ocp.PyTreeCheckpointHandler, ocp.options.MultiprocessingOptions], None, None]:
    """Yields what Orbax needs for work of these processes that holds so many bytes at a time, beside the arrays.

    Meanwhile it does not log the tracebacks of each of its threads, beside the exception that it raises.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    # Named processes wait for each other in JAX's coordination service, and not in a collective of the main thread.
    options = ocp.options.MultiprocessingOptions(min(processes), processes, key)
    # Replicas would be cut in parts on the device, by a program for each shape.
    whole = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    gigabytes = (most_bytes + 1) / 1e9
    try:
        yield (
            ocp.PyTreeCheckpointHandler(
                save_concurrent_gb=gigabytes,
                restore_concurrent_gb=gigabytes,
                use_compression=False,
                enable_pinned_host_transfer=pinned,
                multiprocessing_options=options,
                type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, whole)),
            ),
            options,
        )
    finally:
        logger.setLevel(level)


def _largest(leaves: Iterable[Any]) -> int:
    return max(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def require_room(folder: Path, size: int) -> None:
    """Raises OSError if the disk has less room: Orbax would print a traceback for each of its threads before it raised."""
    place = unfinished(folder / "room")
    try:
        with create_file(place) as stream:
            os.posix_fallocate(stream.fileno(), 0, size)
    finally:
        place.unlink(missing_ok=True)


def files_of_arrays(folder: Path) -> list[str]:
    """Returns names of everything in the arrays of a step that is not a folder, links included, relative to them."""
    found, arrays = [], folder / ARRAYS
    for parent, folders, files in os.walk(arrays):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        found += [str(Path(parent, name).relative_to(arrays)) for name in (*files, *links)]
    return sorted(found)


def _sealed(path: Path) -> str:
    """Returns the sha256 of a file, which is durable when this returns."""
    with open_file(path) as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
    return found


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]
