"""Checkpoints that are durable when reported as saved, and that never return damaged numbers.

Orbax writes the arrays and keeps only complete steps. In addition, every step carries a manifest: one sha256 per array
over its logical bytes, the caller's record, and a digest that seals both. A restore recomputes the digests on the
host, before anything reaches a device, so the check sees exactly what the training step will see.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxlogp.errors import require

QUARANTINE = "quarantine"


class Restored(NamedTuple):
    """The result of a restore; `warnings` holds one line per damaged step that was skipped."""

    arrays: Any
    extra: dict[str, Any]
    step: int
    warnings: tuple[str, ...]


class DamagedStep(Exception):
    """A step on disk that cannot be read, or whose content is not what was saved."""


class Checkpoints:
    """The newest `keep` (at least 1) checkpoints of one run, in a folder that is created if missing."""

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        require(keep >= 1, "keep", "at least 1", keep)
        self.folder = Path(folder).resolve()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Steps that are complete on disk, in ascending order; a save in progress is not among them."""
        # Directory names, because the manager also remembers steps whose background save has failed.
        return complete_steps(self.folder)

    def latest_step(self) -> int | None:
        """The newest complete step on disk, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, arrays: Any, extra: dict[str, Any], wait: bool = True) -> None:
        """Saves one step.

        Args:
            step: training step, larger than every saved one.
            arrays: pytree of jax Arrays; random keys must be given as `jax.random.key_data`.
            extra: a record that JSON returns unchanged: string keys, lists, finite numbers.
            wait: return only once the step is durable. Without it, durable means after `wait_until_finished`.

        Raises:
            ValueError: a step that is not newer, a pytree leaf that is not an array, an extra that JSON would change.
        """
        self.wait_until_finished()
        latest = self.latest_step()
        require(latest is None or step > latest, "step", f"a step after {latest}, the newest saved one", step)
        require(_survives_json(extra), "extra", "a dict that JSON returns unchanged", repr(extra)[:200])
        leaves = _named_leaves(arrays, "arrays")
        for name, leaf in leaves.items():
            _require_array(name, leaf)
        content = {"step": step, "extra": extra, "leaves": [_record(name, leaf) for name, leaf in leaves.items()]}
        manifest = {"content": content, "sha256": _digest(content)}
        items = ocp.args.Composite(arrays=ocp.args.PyTreeSave(leaves), manifest=ocp.args.JsonSave(manifest))
        if not self._manager.save(step, args=items, force=True):
            raise RuntimeError(f"checkpoint step {step} in {self.folder}: Orbax declined to save it")
        if wait:
            self.wait_until_finished()

    def wait_until_finished(self) -> None:
        """Returns once every save is durable; raises the error of a background save that failed."""
        try:
            self._manager.wait_until_finished()
        except BaseException:
            self._manager.reload()
            raise

    def close(self) -> None:
        """Waits for saves in progress and frees the background threads."""
        try:
            self.wait_until_finished()
        finally:
            self._manager.close()

    def restore(self, template: Any, step: int | None = None) -> Restored:
        """Reads one step back, checked, into the template's structure, shapes, dtypes and shardings.

        Without `step`, the newest undamaged step is read: damaged newer ones are moved to the quarantine folder, with a
        file that holds the reason, and each adds a line to `warnings`. A step requested by number is never replaced.

        Args:
            template: pytree of jax Arrays or `jax.ShapeDtypeStruct` with shardings, see `restore_template`.
            step: the step to read; None for the newest undamaged one.

        Returns:
            Arrays committed to the template's shardings, the extra record, the step, and the warnings.

        Raises:
            ValueError: no such step, no undamaged step, or a pytree leaf whose path, shape or dtype is not the
                template's.
        """
        self.wait_until_finished()
        wanted = _named_leaves(template, "template")
        _check_placement(wanted)
        steps = self.steps()
        require(bool(steps), "checkpoints", f"at least one complete step in {self.folder}", "none")
        require(step is None or step in steps, "step", f"one of {steps} in {self.folder}", step)
        damaged: list[tuple[int, DamagedStep]] = []
        for candidate in reversed(steps) if step is None else [step]:
            try:
                content = self._read_manifest(candidate)
                _check_template(candidate, content["leaves"], wanted)
                host = self._read_arrays(candidate, content["leaves"])
            except DamagedStep as reason:
                damaged.append((candidate, reason))
                continue
            warnings = tuple(self._quarantine(*bad, restored=candidate) for bad in damaged)
            placed = [jax.device_put(host[name], leaf.sharding) for name, leaf in wanted.items()]
            arrays = jax.tree.unflatten(jax.tree.structure(template), placed)
            return Restored(arrays, content["extra"], candidate, warnings)
        reasons = "; ".join(f"step {bad}: {reason}" for bad, reason in damaged)
        raise ValueError(f"checkpoints: expected an undamaged step in {self.folder}, got {reasons}")

    def _read(self, step: int, item: str, args: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
        except Exception as error:
            # Damage can raise anything: a parse error, a decompression error, a missing key.
            if isinstance(error, MemoryError):
                raise
            first_line = next(iter(str(error).splitlines()), "")[:200]
            raise DamagedStep(f"{item} cannot be read ({type(error).__name__}: {first_line})") from error

    def _read_manifest(self, step: int) -> dict[str, Any]:
        manifest = self._read(step, "manifest", ocp.args.JsonRestore())
        content = manifest.get("content") if isinstance(manifest, dict) else None
        if content is None or manifest.get("sha256") != _digest(content):
            raise DamagedStep("the manifest does not match its own digest")
        if content["step"] != step:
            raise DamagedStep(f"the manifest is that of step {content['step']}")
        return content

    def _read_arrays(self, step: int, records: list[dict[str, Any]]) -> dict[str, np.ndarray]:
        names = [record["path"] for record in records]
        as_numpy = dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray))
        host = self._read(step, "arrays", ocp.args.PyTreeRestore(item=dict.fromkeys(names, 0), restore_args=as_numpy))
        for record in records:
            if _record(record["path"], host[record["path"]]) != record:
                raise DamagedStep(f"array {record['path']!r} does not match its digest")
        return host

    def _quarantine(self, step: int, reason: DamagedStep, *, restored: int) -> str:
        shelf = self.folder / QUARANTINE
        shelf.mkdir(exist_ok=True)
        place = shelf / f"{step}-{sum(1 for _ in shelf.glob(f'{step}-*.txt'))}"
        (self.folder / str(step)).rename(place)
        place.with_name(place.name + ".txt").write_text(f"{reason}\n", encoding="utf-8")
        self._manager.reload()
        return f"checkpoint step {step} is damaged: {reason}; moved to {place}; continuing from step {restored}"


def complete_steps(folder: Path) -> list[int]:
    """Steps that are complete in a folder of checkpoints, in ascending order."""
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal() and entry.is_dir())


def restore_template(arrays: Any, mesh: jax.sharding.Mesh) -> Any:
    """Shapes, dtypes and shardings for `Checkpoints.restore`, every pytree leaf placed on one mesh.

    A leaf with a named sharding keeps its partition; any other (the count of an optimiser, a random key) is
    replicated over the mesh, because a scalar committed to one device cannot be combined with arrays on a mesh.

    Args:
        arrays: pytree of jax Arrays or `jax.ShapeDtypeStruct`.
        mesh: where the restored arrays will be; need not be the mesh that they were saved from.

    Returns:
        The same structure of `jax.ShapeDtypeStruct`.
    """

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        # Only a named sharding has a spec that can be used on another mesh.
        spec = getattr(leaf.sharding, "spec", jax.sharding.PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

    return jax.tree.map(place, arrays)


def _named_leaves(tree: Any, argument: str) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        require(name not in named, argument, "leaves with distinct paths", f"{name!r} twice")
        named[name] = leaf
    require(bool(named), argument, "at least one array", "none")
    return named


def _require_array(name: str, leaf: Any) -> None:
    require(isinstance(leaf, jax.Array), f"arrays leaf {name!r}", "a jax Array", type(leaf).__name__)
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    require(not is_key, f"arrays leaf {name!r}", "uint32 data from jax.random.key_data", leaf.dtype)
    require(leaf.is_fully_addressable, f"arrays leaf {name!r}", "an array of this process", leaf.sharding)


def _record(name: str, leaf: Any) -> dict[str, Any]:
    host = np.ascontiguousarray(leaf).reshape(np.shape(leaf))
    sha256 = hashlib.sha256(host.reshape(-1).view(np.uint8).data).hexdigest()
    return {"path": name, "dtype": str(host.dtype), "shape": list(host.shape), "sha256": sha256}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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


def _check_template(step: int, records: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    saved = {record["path"]: record for record in records}
    missing, unknown = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    seen = f"missing {missing}, unknown {unknown}"
    require(not missing and not unknown, f"checkpoint step {step}", "the leaves of the template", seen)
    for name, leaf in wanted.items():
        expected, seen = f"{leaf.dtype}{list(leaf.shape)}", f"{saved[name]['dtype']}{saved[name]['shape']}"
        require(expected == seen, f"checkpoint step {step} leaf {name!r}", expected, seen)
