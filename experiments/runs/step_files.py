"""The files of one checkpoint: what every process wrote of the arrays, and one manifest that seals them.

    20/arrays-0.bin     the shards of process 0, one after another, little-endian as in memory
    20/manifest.json    {"content": {"step", "extra", "leaves"}, "sha256"}

A leaf is {"path", "dtype", "shape", "sha256", "shards"}: sha256 is over the bytes of the whole array in C order, so that
it does not depend on the mesh, and a shard is {"process", "offset", "index"}, index the range of every axis. NumPy
alone can read it. A folder under a number is complete: it was renamed to it after everything in it was durable.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes  # noqa: F401  (registers bfloat16 by name)
import numpy as np

from experiments.runs.files import create_file, kind_of, sync_folder, write_whole

MANIFEST = "manifest.json"
LARGEST_MANIFEST = 1 << 30
WAIT_FOR_PARTS_SECONDS = 600.0

Index = tuple[tuple[int, int], ...]
Record = dict[str, Any]


class DamagedStep(Exception):
    """A step on disk that cannot be read, or whose content is not what was saved."""


class Shard(NamedTuple):
    """A part of a leaf in the memory of this process; nothing on a device shares it."""

    path: str
    index: Index
    values: np.ndarray


def host_shards(leaves: Mapping[str, jax.Array]) -> list[Shard]:
    """What this process writes: its first replicas. Of one process alone every leaf is one shard."""
    for leaf in leaves.values():
        leaf.copy_to_host_async()
    if jax.process_count() == 1:
        return [Shard(path, _whole(leaf.shape), _copied(leaf)) for path, leaf in leaves.items()]
    shards = []
    for path, leaf in leaves.items():
        if leaf.is_fully_addressable:
            # Every process has one of its own, as of a counter that was never placed: they are the same.
            shards += [Shard(path, _whole(leaf.shape), _copied(leaf))] if jax.process_index() == 0 else []
            continue
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                ranges = [part.indices(size)[:2] for part, size in zip(shard.index, leaf.shape, strict=True)]
                shards.append(Shard(path, tuple(ranges), _copied(shard.data)))
    return shards


def described(leaves: Mapping[str, jax.Array]) -> list[Record]:
    """Path, dtype and shape of every leaf."""
    return [{"path": path, "dtype": str(leaf.dtype), "shape": list(leaf.shape)} for path, leaf in leaves.items()]


def write_step(folder: Path, content: Record, shards: Iterable[Shard], processes: tuple[int, int]) -> None:
    """Writes this process's part; process 0 also the manifest, once the parts of all are there.

    Args:
        folder: unfinished, the same of all processes.
        content: step, extra and the leaves as `described`.
        shards: of this process.
        processes: this one and their number.

    Raises:
        OSError: the disk is full, or a process has not written its part in time.
    """
    process, number = processes
    shards = list(shards)
    written = _write_part(folder / _part(process), shards, process)
    if process != 0:
        _write_json(folder / f"{_part(process)}.json", {"shards": written})
        return
    records = {record["path"]: {**record, "shards": []} for record in content["leaves"]}
    for shard in written:
        records[shard.pop("path")]["shards"].append(shard)
    for other in range(1, number):
        listed = folder / f"{_part(other)}.json"
        wait_for(listed)
        for shard in json.loads(listed.read_bytes())["shards"]:
            records[shard.pop("path")]["shards"].append(shard)
    own = {(shard.path, shard.index): shard.values for shard in shards}
    for path, record in records.items():
        array = own.get((path, _whole(record["shape"])))
        record["sha256"] = _sha256(assembled(folder, record) if array is None else array)
    sealed = {**content, "leaves": list(records.values())}
    _write_json(folder / MANIFEST, {"content": sealed, "sha256": digest(sealed)})
    sync_folder(folder)


def wait_for(path: Path, clock: Callable[[], float] = time.monotonic) -> None:
    """Returns once another process has made a file or folder; TimeoutError after `WAIT_FOR_PARTS_SECONDS`."""
    end = clock() + WAIT_FOR_PARTS_SECONDS
    while not path.exists():
        if clock() > end:
            raise TimeoutError(f"{path}: not written by its process in {WAIT_FOR_PARTS_SECONDS:.0f} seconds")
        time.sleep(0.02)


def read_manifest(folder: Path, step: int) -> Record:
    """The content of a step's manifest.

    Raises:
        DamagedStep: none that is whole and of this step.
    """
    if kind_of(folder) != "folder":
        raise DamagedStep(f"it is a {kind_of(folder)}, not a folder")
    path = folder / MANIFEST
    if kind_of(path) != "file" or path.stat().st_size > LARGEST_MANIFEST:
        raise DamagedStep(f"{MANIFEST} is {kind_of(path)}, not a file of at most {LARGEST_MANIFEST} bytes")
    try:
        manifest = json.loads(path.read_bytes())
        content = manifest["content"]
        sealed = manifest["sha256"] == digest(content)
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


def read_array(folder: Path, record: Record) -> np.ndarray:
    """One leaf, checked.

    Raises:
        DamagedStep: bytes that are missing or are not those that were saved.
    """
    array = assembled(folder, record)
    if _sha256(array) != record["sha256"]:
        raise DamagedStep(f"array {record['path']!r} does not match its digest")
    return array


def assembled(folder: Path, record: Record) -> np.ndarray:
    """One leaf from its shards, whatever their bytes."""
    array = np.empty(record["shape"], np.dtype(record["dtype"]))
    for shard in record["shards"]:
        index = tuple(slice(*ends) for ends in shard["index"])
        values = _read(folder / _part(shard["process"]), shard["offset"], array[index].shape, array.dtype)
        array[index] = values
    return array


def digest(content: Any) -> str:
    """sha256 of JSON values, whatever the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _well_formed(content: Any) -> bool:
    """The seal has no key, so that anybody can write a manifest."""
    if not isinstance(content, dict) or content.keys() != {"step", "extra", "leaves"}:
        return False
    leaves = content["leaves"]
    is_step = type(content["step"]) is int and isinstance(content["extra"], dict)
    return is_step and isinstance(leaves, list) and all(map(_is_leaf, leaves))


def _is_leaf(leaf: Any) -> bool:
    if not isinstance(leaf, dict) or leaf.keys() != {"path", "dtype", "shape", "sha256", "shards"}:
        return False
    texts = all(isinstance(leaf[name], str) for name in ("path", "dtype", "sha256"))
    shape, shards = leaf["shape"], leaf["shards"]
    return texts and _are_sizes(shape) and isinstance(shards, list) and all(_is_shard(each, shape) for each in shards)


def _is_shard(shard: Any, shape: list[int]) -> bool:
    if not isinstance(shard, dict) or shard.keys() != {"process", "offset", "index"}:
        return False
    index = shard["index"]
    is_index = isinstance(index, list) and len(index) == len(shape)
    ranges = is_index and all(_are_sizes(ends) and len(ends) == 2 for ends in index)
    return ranges and _are_sizes([shard["process"], shard["offset"]])


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _read(path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    # A pipe in the place of the file would block, and a device never end.
    if kind_of(path) != "file":
        raise DamagedStep(f"{path.name} is {kind_of(path)}, not a file")
    size = math.prod(shape) * dtype.itemsize
    with path.open("rb") as stream:
        stream.seek(offset)
        content = stream.read(size)
    if len(content) != size:
        raise DamagedStep(f"{path.name} ends before byte {offset + size}")
    return np.frombuffer(content, dtype).reshape(shape)


def _write_part(path: Path, shards: list[Shard], process: int) -> list[Record]:
    written, offset = [], 0
    with create_file(path) as stream:
        for shard in shards:
            content = shard.values.reshape(-1).view(np.uint8).data
            write_whole(stream, content)
            index = [list(ends) for ends in shard.index]
            written.append({"path": shard.path, "process": process, "offset": offset, "index": index})
            offset += content.nbytes
        os.fsync(stream.fileno())
    return written


def _write_json(path: Path, value: Record) -> None:
    # Under another name first: the other processes wait for this one.
    fresh = path.with_name(path.name + ".part")
    with create_file(fresh) as stream:
        write_whole(stream, json.dumps(value, allow_nan=False).encode())
        os.fsync(stream.fileno())
    fresh.rename(path)


def _copied(leaf: jax.Array) -> np.ndarray:
    # On a CPU the host's view is the device's memory; held, the next step could not take it over.
    return np.array(leaf, order="C", copy=True).reshape(leaf.shape)


def _whole(shape: Iterable[int]) -> Index:
    return tuple((0, size) for size in shape)


def _part(process: int) -> str:
    return f"arrays-{process}.bin"


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()
