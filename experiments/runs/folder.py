"""The folder of one run: its configuration, its environment, and one line per step.

    config.json    the configuration and its sha256
    env.json       versions, devices, git revision and command of the first start and of every resume
    metrics.jsonl  one object per line: step, kind, scalars
    samples.jsonl  one object per line: step, phase, prompt, completion, answer, reward, rewards, num_tokens, ended
    summary.json   the final numbers
    data.json      of a run on a file of examples: its path and its sha256
    model/         of a run that began with a model from disk: its files, without the weights
    curves.png, checkpoints/, tb/<kind>/

Numbers are JSON numbers. JSON has no NaN and no infinity: they are written as the strings "nan", "inf" and "-inf",
which the readers here turn back into floats.
"""

import json
import os
import platform
import subprocess
import sys
import time
import typing
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from tensorboardX import SummaryWriter

from experiments.runs.config_file import (
    NON_FINITE,
    parse_json,
    read_config,
    read_object,
    replace_file,
    to_json,
    write_json,
)
from jaxlogp.errors import require

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
GIT_TIMEOUT_SECONDS = 10


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run; constructed by `create` or `open`."""

    path: Path

    config = property(lambda self: self.path / "config.json")
    env = property(lambda self: self.path / "env.json")
    metrics = property(lambda self: self.path / "metrics.jsonl")
    samples = property(lambda self: self.path / "samples.jsonl")
    summary = property(lambda self: self.path / "summary.json")
    data = property(lambda self: self.path / "data.json")
    curves = property(lambda self: self.path / "curves.png")
    checkpoints = property(lambda self: self.path / "checkpoints")
    tensorboard = property(lambda self: self.path / "tb")
    model = property(lambda self: self.path / "model")

    @classmethod
    def create(cls, parent: str | Path, name: str) -> Self:
        """Creates `parent/name` with env.json; it is a complete run folder once `save_config` has written config.json.

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
        """Opens a run folder that `create` and `save_config` completed.

        Raises:
            ValueError: no folder there, not a run folder, or a damaged one.
        """
        folder = cls(Path(path).resolve())
        require(folder.path.is_dir(), "run folder", "an existing folder", folder.path)
        present = folder.env.is_file() or folder.config.is_file()
        require(present, "run folder", "one with config.json and env.json", f"neither in {folder.path}")
        read_object(folder.env)
        read_config(folder.config)
        for part in (folder.metrics, folder.samples, folder.checkpoints, folder.tensorboard):
            require(part.exists(), "run folder", f"one with {part.name}", f"none in {folder.path}")
        return folder

    def record_resume(self, step: int) -> None:
        """Adds the environment of this process to env.json, as a resume from `step`."""
        env = read_object(self.env)
        resumes = [*env.get("resumes", []), {"step": step, **describe_environment()}]
        write_json(self.env, {**env, "resumes": resumes})


def describe_environment() -> dict[str, Any]:
    """What a reader needs to repeat the run; of the environment variables, only XLA_FLAGS."""
    devices = jax.devices()
    kinds = Counter(device.device_kind for device in devices)
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(sys.orig_argv),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}},
        "platform": platform.platform(),
        "devices": {"platform": devices[0].platform, "count": len(devices), "kinds": dict(kinds)},
        "xla_flags": os.environ.get("XLA_FLAGS"),
        "git": describe_git(Path(__file__).resolve().parents[2]),
    }


def describe_git(root: Path) -> dict[str, Any]:
    """Revision of the code in `root` and whether files differ from it; None with a reason where git cannot tell."""
    try:
        revision, changes = _git(root, "rev-parse", "--verify", "HEAD"), _git(root, "status", "--porcelain")
        return {"revision": revision, "dirty": bool(changes), "reason": None}
    except subprocess.CalledProcessError as error:
        reason = next(iter(error.stderr.strip().splitlines()), f"git exited with status {error.returncode}")
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"git could not run: {error}"
    return {"revision": None, "dirty": None, "reason": reason}


class Sample(NamedTuple):
    """One completion: the prompt, the sampled text, the expected answer, the reward (the sum and its parts by function),
    the number of sampled tokens, and whether an end token ended them."""

    prompt: str
    completion: str
    answer: str
    reward: float
    rewards: Mapping[str, float]
    num_tokens: int
    ended: bool


class MetricsLog(NamedTuple):
    """The records of metrics.jsonl; `torn` describes a last line that a crash cut short, or is None."""

    records: list[dict[str, Any]]
    torn: str | None


class MetricsWriter:
    """Appends to metrics.jsonl, samples.jsonl and tb/, each line flushed when it is written.

    A resumed run drops records written after the restored step, so that every kind has each step once.

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
            ValueError: a step of this kind that is not newer than the last, or a value that is not a scalar.
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
            # Event files are named by the second: without a suffix, a quick resume would overwrite the earlier one.
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


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Reads samples.jsonl, but for a last line that a crash cut short.

    Raises:
        ValueError: an unreadable file, or a damaged line, with its number.
    """
    return _read_lines(path, "phase")[0]


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=GIT_TIMEOUT_SECONDS)
    return done.stdout.strip()


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        require(np.ndim(value) == 0, f"value {name!r}", "a scalar", f"shape {np.shape(value)}")
        value = np.asarray(value).item()
    is_scalar = value is None or isinstance(value, bool | int | float | str)
    require(is_scalar, f"value {name!r}", "a scalar", type(value).__name__)
    require(value not in NON_FINITE, f"value {name!r}", "text that does not name a non-finite number", repr(value))
    return value


def _append(stream: typing.BinaryIO, record: dict[str, Any]) -> None:
    plain = {name: to_json(value, name) for name, value in record.items()}
    stream.write(json.dumps(plain, allow_nan=False).encode() + b"\n")
    stream.flush()


def _parse_line(line: bytes, kind: str, place: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
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
    replace_file(path, b"".join(json.dumps(record).encode() + b"\n" for record in kept))
    return kept
