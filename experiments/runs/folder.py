"""The folder of one run: its configuration, its environment, and one line per step; docs/run_folder.md lists the files.

Nothing in it names the folder itself, which can be moved. It may also come from somebody else: what is read or written
here are files and folders, never links to others.
"""

import contextlib
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from experiments.runs.config_file import NON_FINITE, load_config, parse_json, read_config, read_object, save_config
from experiments.runs.environment import describe_environment
from experiments.runs.event_file import EventFile
from experiments.runs.files import (
    UNFINISHED,
    create_file,
    kind_of,
    require_kind,
    require_readable_path,
    sync_folder,
    unfinished,
    write_json,
)
from experiments.runs.identity import RunParts
from experiments.runs.lock import RunLock
from experiments.runs.log_file import LogFile, LogMarks
from jaxlogp.errors import describe, require

LONGEST_NAME_BYTES = 200
"""File systems take 255, and files inside add to theirs."""
LARGEST_LOG_BYTES = 1 << 32
"""Read at a time; a step takes some 2000."""
NO_PARTS = RunParts()
STEP_OF_RUN = re.compile(r"(.+)@(0|[1-9][0-9]{0,17})", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run; constructed by `create` or `open`."""

    path: Path

    config = property(lambda self: self.path / "config.json")
    env = property(lambda self: self.path / "env.json")
    metrics = property(lambda self: self.path / "metrics.jsonl")
    samples = property(lambda self: self.path / "samples.jsonl")
    summary = property(lambda self: self.path / "summary.json")
    parts = property(lambda self: self.path / "parts.json")
    curves = property(lambda self: self.path / "curves.png")
    checkpoints = property(lambda self: self.path / "checkpoints")
    warm_start = property(lambda self: self.path / "warm_start")
    tensorboard = property(lambda self: self.path / "tb")
    model = property(lambda self: self.path / "model")
    lock = property(lambda self: self.path / "lock")
    beginning = property(lambda self: self.path / "beginning.json")

    @classmethod
    def create(
        cls,
        parent: str | Path,
        name: str,
        fill: Callable[[Self], None] = lambda folder: None,
        parts: RunParts = NO_PARTS,
    ) -> Self:
        """Creates `parent/name`, a name as of `is_folder_name`; it is complete once `save_config` has written config.json.

        It is made under another name and renamed, so that a process that is killed leaves nothing under this one. What
        such a process left is removed. `fill` writes what else is in the folder before it has its name. ValueError if the
        path exists already, or Orbax could not read from it.
        """
        folder = cls(Path(parent).resolve() / name)
        require_readable_path(folder.path)
        _require_free(folder.path)
        fresh = cls(unfinished(folder.path))
        fresh.path.mkdir(parents=True)
        try:
            with RunLock(fresh.lock):
                _remove_unfinished(folder.path)
                fresh._make_entries(parts)
                fill(fresh)
                _require_free(folder.path)
                # What takes the name between the two is left alone, unless it is an empty folder.
                fresh.path.rename(folder.path)
                sync_folder(folder.path.parent)
        except BaseException:
            shutil.rmtree(fresh.path, ignore_errors=True)
            raise
        return folder

    def _make_entries(self, parts: RunParts) -> None:
        self.checkpoints.mkdir()
        self.tensorboard.mkdir()
        for log in (self.metrics, self.samples):
            create_file(log).close()
        write_json(self.beginning, {})
        write_json(self.env, {**describe_environment(), "resumes": []})
        save_config(self.parts, parts)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Opens a run folder that `create` and `save_config` completed; ValueError if it is none, or damaged."""
        folder = cls(Path(path).resolve())
        require(folder.path.is_dir(), "run folder", "an existing folder", folder.path)
        require_readable_path(folder.path)
        present = folder.env.is_file() or folder.config.is_file()
        require(present, "run folder", "one with config.json and env.json", f"neither in {folder.path}")
        for part in (folder.env, folder.config, folder.parts, folder.metrics, folder.samples):
            require_kind(part, "file")
        there = [folder.warm_start] if kind_of(folder.warm_start) != "nothing" else []
        for part in (folder.checkpoints, folder.tensorboard, *there):
            require_kind(part, "folder")
        resumes = read_object(folder.env).get("resumes")
        is_list = isinstance(resumes, list) and all(isinstance(each, dict) for each in resumes)
        require(is_list, str(folder.env), "a list of objects as resumes", repr(resumes)[:80])
        read_config(folder.config)
        load_config(folder.parts, RunParts)
        return folder

    def record_resume(self, step: int) -> None:
        """Adds the environment of this process to env.json, as a resume from `step`."""
        env = read_object(self.env)
        resumes = [*env["resumes"], {"step": step, **describe_environment()}]
        write_json(self.env, {**env, "resumes": resumes})


def _require_free(path: Path) -> None:
    require(kind_of(path) == "nothing", "run folder", "a path that does not exist yet", path)


def _remove_unfinished(path: Path) -> None:
    for entry in list(path.parent.iterdir()):
        is_ours = entry.name.startswith(path.name) and UNFINISHED.fullmatch(entry.name[len(path.name) :])
        if is_ours and kind_of(entry) == "folder":
            # One that is locked is being made; one that is not ours to lock takes nothing but room.
            with contextlib.suppress(ValueError, OSError), RunLock(entry / "lock"):
                shutil.rmtree(entry)


def is_folder_name(name: str) -> bool:
    """Whether a name is one component of a path, and can be read where it is printed."""
    is_component = bool(name.strip()) and name not in (".", "..") and not set(name) & set("/\\")
    return is_component and name.isprintable()


def run_and_step(run: str | Path) -> tuple[Path, int | None]:
    """A run folder as it is written on a command line: RUN, or RUN@STEP for an older checkpoint than the newest.

    Example:
        >>> run_and_step("runs/a@200")
        (PosixPath('runs/a'), 200)
    """
    require(isinstance(run, str | Path), "run folder", "a path", describe(run))
    named = None if Path(run).exists() else STEP_OF_RUN.fullmatch(str(run))
    return (Path(run), None) if named is None else (Path(named[1]), int(named[2]))


class MetricsLog(NamedTuple):
    """The records of metrics.jsonl; `torn` describes a last line that a crash cut short, or is None."""

    records: list[dict[str, Any]]
    torn: str | None


class MetricsWriter:
    """Appends to metrics.jsonl, samples.jsonl and tb/ of a run that this process has locked, each line at once.

    The marks are those of the checkpoint that the run resumes from; ValueError if a log was changed before its mark.
    """

    def __init__(self, folder: RunFolder, marks: LogMarks | None = None) -> None:
        self._folder, self._resumed = folder, marks is not None
        self._has_earlier_boards = self._resumed
        self._boards: dict[str, EventFile] = {}
        marks = marks or LogMarks()
        self._metrics = LogFile(folder.metrics, marks.metrics)
        try:
            self._samples = LogFile(folder.samples, marks.samples)
            records = (_parse_line(line, str(folder.metrics)) for line in self._metrics.kept.splitlines())
            self._last_steps = {record["kind"]: record["step"] for record in records}
        except BaseException:
            self._metrics.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut(self) -> list[str]:
        """Cuts off the lines after the marks, before others are added; returns a sentence for each log that had any."""
        after = "after the checkpoint" if self._resumed else "before there was a checkpoint"
        numbers = {log.path.name: log.cut() for log in (self._metrics, self._samples)}
        self._has_earlier_boards = self._resumed or any(numbers.values())
        return [f"{name}: {number} lines written {after} dropped" for name, number in numbers.items() if number]

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Adds the scalars of one step; numbers also go to tb/<kind>/.

        ValueError for a step of this kind that is not newer than the last, and for a value that is not a scalar.
        """
        last = self._last_steps.get(kind, -1)
        require(step > last, f"step of kind {kind!r}", f"a step after {last}", step)
        clash = sorted(values.keys() & {"step", "kind"})
        require(not clash, "values", "names other than step and kind", clash)
        scalars = {name: _scalar(name, value) for name, value in values.items()}
        board = self._board(kind)
        self._metrics.append({"step": int(step), "kind": kind, **scalars})
        self._last_steps[kind] = step
        numbers = (int, float)
        board.add(step, {name: value for name, value in scalars.items() if type(value) in numbers})

    def write_samples(self, step: int, phase: str, samples: Iterable[Mapping[str, Any]]) -> None:
        for sample in samples:
            self._samples.append({"step": int(step), "phase": phase, **sample})

    def marks(self) -> LogMarks:
        """What a checkpoint remembers of the logs, whose lines are durable from here on."""
        return LogMarks(self._metrics.mark(), self._samples.mark())

    def close(self) -> None:
        for stream in (self._metrics, self._samples, *self._boards.values()):
            stream.close()

    def _board(self, kind: str) -> EventFile:
        if kind not in self._boards:
            purge = self._last_steps.get(kind, -1) + 1 if self._has_earlier_boards else None
            self._boards[kind] = EventFile(self._folder.tensorboard / kind, purge)
        return self._boards[kind]


def read_metrics(path: Path) -> MetricsLog:
    """Reads metrics.jsonl; ValueError for a damaged line other than an unfinished last one, with its number."""
    try:
        size = path.stat().st_size
        require(size <= LARGEST_LOG_BYTES, str(path), f"at most {LARGEST_LOG_BYTES} bytes", size)
        *whole, last = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: expected a readable file, got {type(error).__name__}: {error}") from error
    records = [_parse_line(line, f"{path} line {number}") for number, line in enumerate(whole, start=1)]
    torn = None
    if last:
        try:
            records.append(_parse_line(last, "last line"))
        except ValueError:
            torn = f"{path} line {len(whole) + 1}: cut short after {len(last)} bytes, left out"
    for record in records:
        texts = {name: value for name, value in record.items() if isinstance(value, str)}
        record.update({name: NON_FINITE[value] for name, value in texts.items() if value in NON_FINITE})
    return MetricsLog(records, torn)


def metric_of(values: Mapping[str, Any], name: str) -> Any:
    """A metric of a step, or that of its computed documents where it is known of these alone; None if there is neither."""
    return values.get(name, values.get(f"computed/{name}"))


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        require(np.ndim(value) == 0, f"value {name!r}", "a scalar", f"shape {np.shape(value)}")
        value = np.asarray(value).item()
    is_scalar = value is None or isinstance(value, bool | int | float | str)
    require(is_scalar, f"value {name!r}", "a scalar", type(value).__name__)
    require(value not in NON_FINITE, f"value {name!r}", "text that does not name a non-finite number", repr(value))
    return value


def _parse_line(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{place}: expected a JSON object, got {error}") from error
    is_record = isinstance(record, dict) and type(record.get("step")) is int and isinstance(record.get("kind"), str)
    require(is_record, place, "an object with step and kind", repr(line[:80]))
    return record
