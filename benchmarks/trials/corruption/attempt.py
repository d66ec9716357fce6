"""One resume of a damaged run folder, up to its first step, and the verdict on it."""

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.command_line import exit_code
from experiments.config import Config
from experiments.experience.scoring import Sample
from experiments.loop.session import identity_of_run
from experiments.runs.checkpoint import Restored
from experiments.runs.config_file import load_config
from experiments.runs.files import replace_file, write_json
from experiments.runs.folder import RunFolder
from experiments.runs.identity import Identity
from experiments.runs.lock import RunLock
from experiments.runs.run_writer import RunWriter

SENTENCE = "goes on, with a sentence"
UNTOUCHED = "goes on, of no importance"
REFUSED = "refused"
SILENT = "SILENT"
TRACEBACK = "TRACEBACK"
SAMPLE = Sample("1+1=", "2", "2", 1.0, {"correct": 1.0}, 2, True)._asdict()
COUNTERS: dict[str, Any] = {"progress": {}, "learner": {}, "feed": {}, "before": None}
"""What a loop saves with the arrays."""
VERDICTS = (SENTENCE, REFUSED, UNTOUCHED, SILENT, TRACEBACK)


@dataclass(frozen=True)
class Saved:
    """What must come back.

    Attributes:
        states: arrays by path, of every step.
        logs: content of the two logs by name, as they were at every step.
        newest: the newest step.
    """

    states: dict[int, dict[str, np.ndarray]]
    logs: dict[int, dict[str, bytes]]
    newest: int


@dataclass(frozen=True)
class Outcome:
    """A verdict, and the sentence or exception that came with it."""

    verdict: str
    words: str


def identity_here(folder: RunFolder) -> Identity:
    """As the loop of a run has it."""
    return identity_of_run(folder, load_config(folder.config, Config))


def attempt(path: Path, template: Any, saved: Saved) -> Outcome:
    """Resumes a folder, compares every array and every line, and judges.

    Args:
        path: the run folder.
        template: of the arrays.
        saved: what was there before the damage.
    """
    with _standard_error() as errors:
        try:
            folder = RunFolder.open(path)
            with RunLock(folder.lock), RunWriter(folder, 2, identity_here(folder)) as writer:
                restored = writer.restore(template)
                restored = restored._replace(warnings=(*restored.warnings, *writer.discard_newer()))
                outcome = _judged(path, restored, saved)
                _go_on(folder, writer, restored)
        except Exception as error:
            in_order = exit_code(error) in (2, 3) and "\n" not in str(error)
            outcome = Outcome(REFUSED if in_order else TRACEBACK, f"{type(error).__name__}: {error}")
    return Outcome(TRACEBACK, errors[0][:300]) if errors[0].strip() else outcome


def _go_on(folder: RunFolder, writer: RunWriter, restored: Restored) -> None:
    """Writes everything that a run writes."""
    step = restored.step + 1
    folder.record_resume(restored.step)
    writer.write(step, "train", {"loss": 0.5})
    writer.write_samples(step, "train", [SAMPLE])
    writer.save(step, restored.arrays, **COUNTERS)
    write_json(folder.summary, {"step": step})
    replace_file(folder.curves, b"PNG")


def _judged(path: Path, restored: Restored, saved: Saved) -> Outcome:
    named = {jax.tree_util.keystr(key, simple=True): leaf for key, leaf in _leaves(restored.arrays)}
    words = "; ".join(restored.warnings)
    step = restored.step
    same = step in saved.states and all(
        np.asarray(named[name]).tobytes() == array.tobytes() for name, array in saved.states[step].items()
    )
    logs = step in saved.logs and all((path / name).read_bytes() == text for name, text in saved.logs[step].items())
    if not same or not logs or "\n" in words:
        return Outcome(SILENT, f"step {step}, arrays {same}, logs {logs}: {words}")
    if words:
        return Outcome(SENTENCE, words)
    return Outcome(UNTOUCHED if step == saved.newest else SILENT, words)


def arrays_of(tree: Any) -> dict[str, np.ndarray]:
    """Arrays by path."""
    return {jax.tree_util.keystr(key, simple=True): np.asarray(leaf) for key, leaf in _leaves(tree)}


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


@contextlib.contextmanager
def _standard_error() -> Iterator[list[str]]:
    """Collects what is written to standard error, by threads outside of Python too; one text, there after the block."""
    texts: list[str] = []
    with tempfile.TemporaryFile() as file, contextlib.redirect_stderr(io.StringIO()) as python:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield texts
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            texts.append(python.getvalue() + os.pread(file.fileno(), 10_000, 0).decode(errors="replace"))
