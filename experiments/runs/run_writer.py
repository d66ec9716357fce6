"""What a run keeps on disk, as one thing: checkpoints, and the logs and the identity that belong to each of them."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from experiments.processes import processes
from experiments.runs.checkpoint import Checkpoints, Restored, complete_steps, restore, step_folders
from experiments.runs.config_file import read_object, to_json
from experiments.runs.files import kind_of, write_json
from experiments.runs.folder import MetricsWriter, RunFolder
from experiments.runs.identity import Identity, compared
from experiments.runs.log_file import LogMarks
from experiments.runs.step_files import CheckpointRecord
from jaxlogp.errors import require


def read_checkpoint(folder: Path, identity: Identity, template: Any, step: int | None = None) -> Restored:
    """Restores only the arrays of the template, while a run may be writing; ValueError if another run saved them."""
    restored = restore(folder, template, step, whole=False)
    # Other versions and devices read the same numbers.
    compared(restored.record.identity, identity, restored.step)
    return restored._replace(warnings=(*map(restored.damage, restored.damaged), *restored.warnings))


class RunWriter:
    """A run folder open for writing, in all processes of the run, of which process 0 holds its lock and writes the logs.

    The identity is that of the run as it is now. `begin` or `restore` comes first: they read, and change nothing in the
    folder. `discard_newer` comes once nothing else can refuse the run, and before anything is written.
    """

    def __init__(self, folder: RunFolder, keep: int, identity: Identity) -> None:
        self._folder, self._keep, self._identity = folder, keep, identity
        self._checkpoints = Checkpoints(folder.checkpoints, keep)
        # That of the warm start, whose last save may be in progress.
        self._left: Checkpoints | None = None
        self._logs: MetricsWriter | None = None
        self._restored: Restored | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._close_left()
        finally:
            try:
                self._checkpoints.close()
            finally:
                if self._logs is not None:
                    self._logs.close()

    @property
    def begun(self) -> bool:
        """Whether there is a checkpoint, damaged or not."""
        return bool(step_folders(self._checkpoints.folder))

    def enter(self, checkpoints: Path) -> None:
        """From now on checkpoints are those of another folder, which is made if missing. A save in progress goes on."""
        self._close_left()
        self._checkpoints, self._left = Checkpoints(checkpoints, self._keep), self._checkpoints
        self._restored = None

    def begin(self) -> None:
        self._open_logs()

    def beginning(self, feed: dict[str, Any]) -> dict[str, Any] | None:
        """Keeps the state that a source begins with, until there is a checkpoint; returns that of an earlier beginning."""
        require(to_json(feed, "source") == feed, "source", "a state that JSON returns unchanged", "another one")

        def earlier() -> dict[str, Any] | None:
            kept = read_object(self._folder.beginning).get("feed")
            if kept is None:
                write_json(self._folder.beginning, {"feed": feed})
            return kept

        return processes().from_first("beginning of the training", earlier)

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        if self._logs is not None:
            self._logs.write(step, kind, values)

    def write_samples(self, step: int, phase: str, samples: Iterable[Mapping[str, Any]]) -> None:
        if self._logs is not None:
            self._logs.write_samples(step, phase, samples)

    def save(self, step: int, arrays: Any, **of_loop: Any) -> None:
        """As `Checkpoints.save`, once the lines of the logs are durable; `of_loop` are the loop's parts of the record."""
        self.wait_until_finished()
        marks = LogMarks() if self._logs is None else self._logs.marks()
        self._checkpoints.save(step, arrays, CheckpointRecord(self._identity, marks, **of_loop))

    def wait_until_copied(self) -> None:
        if self._left is not None:
            self._left.wait_until_copied()
        self._checkpoints.wait_until_copied()

    def wait_until_finished(self) -> None:
        """As that of checkpoints; once the training has one, what a run would begin again with is removed."""
        self._close_left()
        self._checkpoints.wait_until_finished()
        if processes().first and complete_steps(self._folder.checkpoints):
            self._folder.beginning.unlink(missing_ok=True)
            if kind_of(self._folder.warm_start) == "folder":
                shutil.rmtree(self._folder.warm_start)

    def restore(self, template: Any, step: int | None = None) -> Restored:
        """As `restore` of checkpoints, and opens the logs; ValueError also if the run, or a log, is not what it was."""
        self._restored = restored = restore(self._checkpoints.folder, template, step)
        different = compared(restored.record.identity, self._identity, restored.step)
        self._open_logs(restored.record.logs)
        return restored._replace(warnings=(*restored.warnings, *different))

    def discard_newer(self) -> list[str]:
        """Leaves of checkpoints and logs what the run resumes from; returns a sentence for all that goes."""
        # Process 0 waits for the others, which may still read.
        processes().gather("run resumed", None)
        if self._logs is None:
            return []
        # Killed between the two, a resume finds lines after its checkpoint; the other way round it would miss some.
        moved = [] if self._restored is None else self._checkpoints.quarantine_newer(self._restored)
        return [*moved, *self._logs.cut()]

    def record_resume(self, step: int) -> None:
        if processes().first:
            self._folder.record_resume(step)

    def _close_left(self) -> None:
        left, self._left = self._left, None
        if left is not None:
            left.close()

    def _open_logs(self, marks: LogMarks | None = None) -> None:
        if processes().first:
            self._logs = MetricsWriter(self._folder, marks)
