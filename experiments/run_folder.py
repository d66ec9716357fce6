"""The folder of one run: its configuration, its environment, and one line per step.

    config.json    the configuration and its sha256
    env.json       versions, devices, git revision and command of the start, and of every later resume
    metrics.jsonl  one object a line: step, kind, scalars
    samples.jsonl  one object a line: step, phase, prompt, completion, answer, reward
    summary.json   the final numbers
    curves.png, checkpoints/, tb/<kind>/

Numbers are JSON numbers. JSON has no NaN and no infinity: they are written as the strings "nan", "inf" and "-inf",
which the readers here turn back into floats.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
import types
import typing
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from tensorboardX import SummaryWriter

from jaxlogp.errors import require

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
NON_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
GIT_TIMEOUT_SECONDS = 10
ConfigT = typing.TypeVar("ConfigT")


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run; made by `create` or `open`."""

    path: Path

    config = property(lambda self: self.path / "config.json")
    env = property(lambda self: self.path / "env.json")
    metrics = property(lambda self: self.path / "metrics.jsonl")
    samples = property(lambda self: self.path / "samples.jsonl")
    summary = property(lambda self: self.path / "summary.json")
    curves = property(lambda self: self.path / "curves.png")
    checkpoints = property(lambda self: self.path / "checkpoints")
    tensorboard = property(lambda self: self.path / "tb")

    @classmethod
    def create(cls, parent: str | Path, name: str) -> Self:
        """Makes `parent/name` with env.json; it is a whole run folder once `save_config` has written config.json.

        Raises:
            ValueError: a name that is not one path component, or a path that exists already.
        """
        is_component = bool(name) and name not in (".", "..") and not set(name) & set("/\\\0")
        require(is_component, "name", "one path component", repr(name))
        folder = cls(Path(parent).resolve() / name)
        require(not folder.path.exists(), "run folder", "a path that does not exist yet", folder.path)
        folder.checkpoints.mkdir(parents=True)
        folder.tensorboard.mkdir()
        folder.metrics.touch()
        folder.samples.touch()
        write_json(folder.env, {**describe_environment(), "resumes": []})
        return folder

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Opens a run folder that `create` and `save_config` made.

        Raises:
            ValueError: no folder there, not a run folder, or a damaged one.
        """
        folder = cls(Path(path).resolve())
        require(folder.path.is_dir(), "run folder", "an existing folder", folder.path)
        present = folder.env.is_file() or folder.config.is_file()
        require(present, "run folder", "one with config.json and env.json", f"neither in {folder.path}")
        _read_object(folder.env)
        _read_config(folder.config)
        for part in (folder.metrics, folder.samples, folder.checkpoints, folder.tensorboard):
            require(part.exists(), "run folder", f"one with {part.name}", f"none in {folder.path}")
        return folder

    def record_resume(self, step: int) -> None:
        """Adds the environment of this process to env.json, as that of a resume from `step`."""
        env = _read_object(self.env)
        resumes = [*env.get("resumes", []), {"step": step, **describe_environment()}]
        write_json(self.env, {**env, "resumes": resumes})


def describe_environment() -> dict[str, Any]:
    """What a reader needs to repeat the run; of the environment variables only XLA_FLAGS."""
    devices = jax.devices()
    kinds = Counter(device.device_kind for device in devices)
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(sys.orig_argv),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}},
        "platform": platform.platform(),
        "devices": {"platform": devices[0].platform, "count": len(devices), "kinds": dict(kinds)},
        "xla_flags": os.environ.get("XLA_FLAGS"),
        "git": describe_git(Path(__file__).resolve().parents[1]),
    }


def describe_git(root: Path) -> dict[str, Any]:
    """Revision of the code in `root` and whether files differ from it; None with a reason where git cannot say."""
    try:
        revision, changes = _git(root, "rev-parse", "--verify", "HEAD"), _git(root, "status", "--porcelain")
        return {"revision": revision, "dirty": bool(changes), "reason": None}
    except subprocess.CalledProcessError as error:
        reason = next(iter(error.stderr.strip().splitlines()), f"git exited with status {error.returncode}")
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"git could not run: {error}"
    return {"revision": None, "dirty": None, "reason": reason}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replaces a JSON file in one move: a reader, or a crash, sees the old content or the new one, never half."""
    _replace(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def config_hash(config: Any) -> str:
    """sha256 of the configuration's values, the one that `save_config` writes."""
    return _hash(_plain_values(config))


def save_config(path: Path, config: Any) -> None:
    """Writes nested dataclasses as config.json, with the sha256 that `load_config` checks.

    Fields may be bool, int, float, str, None, Path, Literal, tuples, unions and dataclasses of these.

    Raises:
        ValueError: a configuration that `load_config` could not give back unchanged.
    """
    values = _plain_values(config)
    write_json(path, {"config": values, "sha256": _hash(values)})


def load_config(path: Path, config_type: type[ConfigT]) -> ConfigT:
    """Rebuilds the configuration that `save_config` wrote.

    Args:
        path: config.json.
        config_type: the dataclass that was saved.

    Returns:
        The configuration; lists come back as tuples where the field says so.

    Raises:
        ValueError: a damaged file, a key that is unknown or missing, or a value of another type.
    """
    return _build(_read_config(path), config_type, "config")


class Sample(NamedTuple):
    """One completion: the text given, the text sampled, the expected answer and the reward."""

    prompt: str
    completion: str
    answer: str
    reward: float


class MetricsLog(NamedTuple):
    """The records of metrics.jsonl; `torn` describes a last line that a crash cut short, or is None."""

    records: list[dict[str, Any]]
    torn: str | None


class MetricsWriter:
    """Appends to metrics.jsonl, samples.jsonl and tb/, each line flushed when it is written.

    A resumed run drops what was written after the restored step, so that every kind has each step once.

    Args:
        folder: the run.
        restored: None for a fresh run. The restored step where all kinds count the same steps; otherwise the last step
            to keep of every kind (a sample's phase counts as its kind).

    Raises:
        ValueError: a fresh run whose files have lines, a kind that `restored` does not name, or a damaged file.
    """

    def __init__(self, folder: RunFolder, restored: int | Mapping[str, int] | None = None) -> None:
        self._folder, self._restored = folder, restored
        self._boards: dict[str, SummaryWriter] = {}
        self._last_steps: dict[str, int] = {}
        for record in _truncate(folder.metrics, "kind", restored):
            self._last_steps[record["kind"]] = record["step"]
        _truncate(folder.samples, "phase", restored)
        self._metrics = folder.metrics.open("ab")
        self._samples = folder.samples.open("ab")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Adds the scalars of one step; numbers also go to tb/<kind>/.

        Raises:
            ValueError: a step of this kind that is not newer than the last, or a value that is no scalar.
        """
        last = self._last_steps.get(kind, -1)
        require(step > last, f"step of kind {kind!r}", f"a step after {last}", step)
        clash = sorted(values.keys() & {"step", "kind"})
        require(not clash, "values", "names other than step and kind", clash)
        scalars = {name: _scalar(name, value) for name, value in values.items()}
        _append(self._metrics, {"step": int(step), "kind": kind, **scalars})
        self._last_steps[kind] = step
        for name, value in scalars.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._board(kind).add_scalar(name, value, step)

    def write_samples(self, step: int, phase: str, samples: Iterable[Sample]) -> None:
        """Adds completions of one step."""
        for sample in samples:
            reward = float(sample.reward)
            _append(self._samples, {"step": int(step), "phase": phase, **sample._asdict(), "reward": reward})

    def close(self) -> None:
        """Closes the files."""
        for stream in (self._metrics, self._samples, *self._boards.values()):
            stream.close()

    def _board(self, kind: str) -> SummaryWriter:
        if kind not in self._boards:
            keep = self._restored.get(kind) if isinstance(self._restored, Mapping) else self._restored
            purge = None if keep is None else keep + 1
            # Event files are named by the second: without a suffix a quick resume overwrites the earlier one.
            suffix, place = f".{time.time_ns()}", str(self._folder.tensorboard / kind)
            self._boards[kind] = SummaryWriter(place, purge_step=purge, filename_suffix=suffix)
        return self._boards[kind]


def read_metrics(path: Path) -> MetricsLog:
    """Reads metrics.jsonl.

    Raises:
        ValueError: an unreadable file, or a damaged line other than an unfinished last one, with its number.
    """
    records, torn = _read_lines(path, "kind")
    for record in records:
        texts = {name: value for name, value in record.items() if isinstance(value, str)}
        record.update({name: NON_FINITE[value] for name, value in texts.items() if value in NON_FINITE})
    return MetricsLog(records, torn)


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=GIT_TIMEOUT_SECONDS)
    return done.stdout.strip()


def _replace(path: Path, content: bytes) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(path)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected a JSON object, got {type(error).__name__}: {error}") from error
    require(isinstance(value, dict), str(path), "a JSON object", type(value).__name__)
    return value


def _read_config(path: Path) -> dict[str, Any]:
    stored = _read_object(path)
    require(stored.keys() == {"config", "sha256"}, str(path), "the keys config and sha256", sorted(stored))
    seen = _hash(stored["config"])
    require(seen == stored["sha256"], str(path), f"values with sha256 {stored['sha256']}", f"{seen}: edited or damaged")
    return stored["config"]


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _plain_values(config: Any) -> dict[str, Any]:
    values = _to_json(asdict(config))
    rebuilt = _build(values, type(config), "config")
    require(rebuilt == config, "config", "values that config.json gives back unchanged", repr(config))
    # The rebuilt one, because an int given to a float field comes back as a float and must hash the same.
    return _to_json(asdict(rebuilt))


def _to_json(value: Any, place: str = "config") -> Any:
    if isinstance(value, Mapping):
        return {name: _to_json(item, f"{place}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item, place) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not np.isfinite(value):
        return str(float(value))
    is_plain = value is None or type(value) in (bool, int, float, str)
    require(is_plain, place, "a JSON value, a path or a tuple of them", type(value).__name__)
    return value


def _build(value: Any, annotation: Any, place: str) -> Any:
    """Converts JSON back to one annotated type, or raises ValueError that names the place."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    wanted = getattr(annotation, "__name__", None) if origin is None else str(annotation)
    if is_dataclass(annotation):
        return _build_dataclass(value, annotation, place)
    if origin in (typing.Union, types.UnionType):
        return _build_first(value, arguments, place)
    if origin is typing.Literal and any(type(value) is type(choice) and value == choice for choice in arguments):
        return value
    if origin is tuple and isinstance(value, list):
        kinds = (arguments[0],) * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) == len(value):
            return tuple(_build(item, kind, place) for item, kind in zip(value, kinds, strict=True))
    if annotation is float and (type(value) is int or (isinstance(value, str) and value in NON_FINITE)):
        return float(value)
    if annotation is Path and isinstance(value, str):
        return Path(value)
    if annotation in (bool, int, float, str, type(None)) and type(value) is annotation:
        return value
    raise ValueError(f"{place}: expected {wanted}, got {value!r}")


def _build_first(value: Any, choices: tuple[Any, ...], place: str) -> Any:
    reasons = []
    for choice in choices:
        try:
            return _build(value, choice, place)
        except ValueError as reason:
            reasons.append(str(reason))
    raise ValueError("; or ".join(reasons))


def _build_dataclass(value: Any, config_type: Any, place: str) -> Any:
    require(isinstance(value, dict), place, f"the fields of {config_type.__name__}", repr(value))
    names = [field.name for field in fields(config_type) if field.init]
    unknown, missing = sorted(value.keys() - set(names)), [name for name in names if name not in value]
    require(not unknown, place, f"the keys of {config_type.__name__}", f"unknown {', '.join(unknown)}")
    require(not missing, place, f"every key of {config_type.__name__}", f"none named {', '.join(missing)}")
    hints = typing.get_type_hints(config_type)
    return config_type(**{name: _build(value[name], hints[name], f"{place}.{name}") for name in names})


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        require(np.ndim(value) == 0, f"value {name!r}", "a scalar", f"shape {np.shape(value)}")
        value = np.asarray(value).item()
    is_scalar = value is None or isinstance(value, bool | int | float | str)
    require(is_scalar, f"value {name!r}", "a scalar", type(value).__name__)
    require(value not in NON_FINITE, f"value {name!r}", "text that does not name a non-finite number", repr(value))
    return value


def _append(stream: typing.BinaryIO, record: dict[str, Any]) -> None:
    plain = {name: _to_json(value, name) for name, value in record.items()}
    stream.write(json.dumps(plain, allow_nan=False).encode() + b"\n")
    stream.flush()


def _parse_line(line: bytes, kind: str, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: expected a JSON object, got {error}") from error
    is_record = isinstance(record, dict) and type(record.get("step")) is int and isinstance(record.get(kind), str)
    require(is_record, place, f"an object with step and {kind}", repr(line[:80]))
    return record


def _read_lines(path: Path, kind: str) -> tuple[list[dict[str, Any]], str | None]:
    try:
        *whole, last = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: expected a readable file, got {type(error).__name__}: {error}") from error
    records = [_parse_line(line, kind, f"{path} line {number}") for number, line in enumerate(whole, start=1)]
    if not last:
        return records, None
    try:
        return [*records, _parse_line(last, kind, "last line")], None
    except ValueError:
        return records, f"{path} line {len(whole) + 1}: cut short after {len(last)} bytes, left out"


def _truncate(path: Path, kind: str, restored: int | Mapping[str, int] | None) -> list[dict[str, Any]]:
    records, torn = _read_lines(path, kind)
    if restored is None:
        require(not records and torn is None, "restored", f"a step, {path} has lines already", None)
        return records
    kinds = {record[kind] for record in records}
    limits = restored if isinstance(restored, Mapping) else dict.fromkeys(kinds, restored)
    unnamed = sorted(kinds - limits.keys())
    require(not unnamed, "restored", f"a step for every kind in {path}", f"none for {', '.join(unnamed)}")
    kept = [record for record in records if record["step"] <= limits[record[kind]]]
    _replace(path, b"".join(json.dumps(record).encode() + b"\n" for record in kept))
    return kept
