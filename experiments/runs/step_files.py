"""The files of one checkpoint: arrays as Orbax writes them, and one manifest that seals them.

    20/arrays/          every array under its path, as `orbax.checkpoint.PyTreeCheckpointer` reads it too
    20/manifest.json    {"content": {"step", "extra", "leaves", "files"}, "sha256"}

A leaf is {"path", "dtype", "shape", "sha256"}: sha256 is over the bytes of the whole array in C order, so that it does not
depend on the mesh. "files" maps the files of arrays/ to their sha256: Orbax has no checksums, reads flipped bits as if
they were numbers and answers other damage with any exception, so files are compared before it sees them. A folder under
a number is complete: it was renamed to it after everything in it was durable.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Collection, Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (registers bfloat16 by name)
import numpy as np
import orbax.checkpoint as ocp

from experiments.models.placement import whole_on_host
from experiments.runs.files import create_file, digest_of_json, kind_of, open_file, sync_folder, unfinished, write_whole

ARRAYS = "arrays"
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 1 << 30
ROOM_BESIDE_ARRAYS = 1 << 20
"""Bytes that metadata and manifest may take."""

Record = dict[str, Any]


class DamagedStep(Exception):
    """A step on disk that cannot be read, or whose content is not what was saved."""


def on_host(leaves: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Copies arrays to the memory of this process; nothing on a device shares them. All processes have to call it."""
    for leaf in leaves.values():
        if leaf.is_fully_addressable:
            leaf.copy_to_host_async()
    # On a CPU the host's view is the device's memory, which the next step takes over.
    return {
        path: np.array(whole_on_host(leaf), order="C", copy=True).reshape(leaf.shape) for path, leaf in leaves.items()
    }


def write_step(folder: Path, step: int, extra: Record, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes everything; it is durable when this returns. OSError if the disk is full, or cannot be written to."""
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
    leaves = [_record(path, array) for path, array in arrays.items()]
    content = {"step": step, "extra": extra, "leaves": leaves, "files": files}
    with create_file(folder / MANIFEST) as stream:
        write_whole(
            stream, json.dumps({"content": content, "sha256": digest_of_json(content)}, allow_nan=False).encode()
        )
        os.fsync(stream.fileno())
    sync_folder(folder)


def read_manifest(folder: Path, step: int) -> Record:
    """Returns the content of a step's manifest; DamagedStep if there is none that is whole and of this step."""
    if kind_of(folder) != "folder":
        raise DamagedStep(f"it is a {kind_of(folder)}, not a folder")
    path = folder / MANIFEST
    if kind_of(path) != "file" or path.stat().st_size > LARGEST_MANIFEST:
        raise DamagedStep(f"{MANIFEST} is {kind_of(path)}, not a file of at most {LARGEST_MANIFEST} bytes")
    try:
        manifest = json.loads(path.read_bytes())
        content = manifest["content"]
        sealed = manifest["sha256"] == digest_of_json(content)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedStep(f"{MANIFEST} cannot be read ({type(error).__name__})") from error
    except OSError as error:
        raise DamagedStep(f"{MANIFEST} cannot be read ({error.strerror})") from error
    if not sealed:
        raise DamagedStep(f"{MANIFEST} does not match its own digest")
    if not _well_formed(content):
        raise DamagedStep(f"{MANIFEST} is not one of a checkpoint")
    if content["step"] != step:
        raise DamagedStep(f"{MANIFEST} is that of step {content['step']}")
    return content


def read_arrays(folder: Path, content: Record, wanted: Collection[str]) -> dict[str, np.ndarray]:
    """Reads the arrays with the `wanted` paths, checked; of the others nothing comes into memory.

    `content` is that of the manifest. Raises DamagedStep for files that are not those that were written, or arrays that are
    not those that were saved.
    """
    _check_files(folder / ARRAYS, content["files"])
    as_numpy = dict.fromkeys(wanted, ocp.RestoreArgs(restore_type=np.ndarray))
    args = ocp.args.PyTreeRestore(item=dict.fromkeys(wanted, 0), restore_args=as_numpy, partial_restore=True)
    try:
        with _orbax() as checkpointer:
            arrays = checkpointer.restore(folder / ARRAYS, args=args)
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        raise DamagedStep(f"the arrays cannot be read ({type(error).__name__}: {_first_line(error)})") from error
    for record in content["leaves"]:
        if record["path"] in wanted and _record(record["path"], arrays[record["path"]]) != record:
            raise DamagedStep(f"array {record['path']!r} does not match its digest")
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
        links = [name for name in folders if kind_of(Path(parent, name)) != "folder"]
        found += [str(Path(parent, name).relative_to(folder)) for name in (*files, *links)]
    return sorted(found)


def _sealed(path: Path) -> str:
    """Returns the sha256 of a file, which is durable when this returns."""
    with open_file(path) as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
    return found


def _check_files(folder: Path, wanted: Mapping[str, str]) -> None:
    if kind_of(folder) != "folder":
        raise DamagedStep(f"{ARRAYS} is a {kind_of(folder)}, not a folder")
    for name in sorted(wanted.keys() ^ set(_files(folder))):
        raise DamagedStep(f"{ARRAYS}/{name} is {'missing' if name in wanted else 'not one of its files'}")
    for name, sha256 in wanted.items():
        # A pipe in the place of a file would block, and a device never end.
        kind = kind_of(folder / name)
        if kind != "file":
            raise DamagedStep(f"{ARRAYS}/{name} is a {kind}, not a file")
        try:
            with (folder / name).open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise DamagedStep(f"{ARRAYS}/{name} cannot be read ({error.strerror})") from error
        if found != sha256:
            raise DamagedStep(f"{ARRAYS}/{name} is not the file that was written")


def _well_formed(content: Any) -> bool:
    """Returns True for the content of a manifest: the seal has no key, so that anybody can write one."""
    if not isinstance(content, dict) or content.keys() != {"step", "extra", "leaves", "files"}:
        return False
    leaves, files = content["leaves"], content["files"]
    is_step = type(content["step"]) is int and isinstance(content["extra"], dict)
    are_files = isinstance(files, dict) and all(isinstance(sha256, str) for sha256 in files.values())
    return is_step and are_files and isinstance(leaves, list) and all(map(_is_leaf, leaves))


def _is_leaf(leaf: Any) -> bool:
    if not isinstance(leaf, dict) or leaf.keys() != {"path", "dtype", "shape", "sha256"}:
        return False
    texts = all(isinstance(leaf[name], str) for name in ("path", "dtype", "sha256"))
    shape = leaf["shape"]
    return texts and isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)


def _record(path: str, array: np.ndarray) -> Record:
    array = np.asarray(array)
    sha256 = hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()
    return {"path": path, "dtype": str(array.dtype), "shape": list(array.shape), "sha256": sha256}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]
