"""What a run keeps on disk, as one thing: checkpoints, and the logs and the identity that belong to each of them."""

import shutil
from pathlib import Path
from typing import Any, Self

import jax

from experiments.models.placement import whole_on_host
from experiments.processes import processes
from experiments.runs.checkpoint import Checkpoints, Restored, numbered, restore
from experiments.runs.files import kind_of
from experiments.runs.folder import MetricsWriter, RunFolder
from experiments.runs.identity import Identity, compared
from experiments.runs.step_files import CheckpointRecord


def read_checkpoint(folder: Path, identity: Identity, template: Any, step: int | None = None) -> Restored:
    """Restores only the arrays of the template, while a run may be writing; ValueError if another run saved them."""
    restored = restore(folder, template, step, whole=False)
    # Other versions and devices read the same numbers.
    compared(restored.record.identity, identity, restored.step)
    return restored._replace(warnings=(*map(restored.damage, restored.damaged), *restored.warnings))


class RunStore:
    """A run folder open for writing; the caller holds its lock. The identity is that of the run as it is now.

    `begin` or `restore` comes first: they read, and change nothing in the folder. `take_up` comes once nothing else can
    refuse the run, and before anything is written.
    """

    def __init__(self, folder: RunFolder, keep: int, identity: Identity) -> None:
        self._folder, self._keep, self._identity = folder, keep, identity
        self._checkpoints = Checkpoints(folder.checkpoints, keep)
        self._metrics: MetricsWriter | None = None
        self._restored: Restored | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._checkpoints.close()
        finally:
            if self._metrics is not None:
                self._metrics.close()

    @property
    def metrics(self) -> MetricsWriter:
        """The logs."""
        assert self._metrics is not None, "begin or restore comes first"
        return self._metrics

    @property
    def begun(self) -> bool:
        """Whether there is a checkpoint, damaged or not."""
        return bool(numbered(self._checkpoints.folder))

    def enter(self, checkpoints: Path) -> None:
        """Waits for the save in progress; from now on checkpoints are those of another folder, which is made if missing."""
        self._checkpoints.close()
        self._checkpoints, self._restored = Checkpoints(checkpoints, self._keep), None

    def forget_warm_start(self) -> None:
        """Removes the checkpoints of the warm start, once one of the training is durable."""
        if kind_of(self._folder.warm_start) == "folder":
            shutil.rmtree(self._folder.warm_start)

    def begin(self) -> None:
        """Opens the logs from the start."""
        self._metrics = MetricsWriter(self._folder)

    def save(self, step: int, arrays: Any, **of_loop: Any) -> None:
        """As `Checkpoints.save`, once the lines of the logs are durable; `of_loop` are the loop's parts of the record."""
        self._checkpoints.save(step, arrays, CheckpointRecord(self._identity, self.metrics.marks(), **of_loop))

    def wait_until_finished(self) -> None:
        """As `Checkpoints.wait_until_finished`."""
        self._checkpoints.wait_until_finished()

    def restore(self, template: Any, step: int | None = None) -> Restored:
        """As `restore` of checkpoints, and opens the logs; ValueError also if the run, or a log, is not what it was."""
        self._restored = restored = restore(self._checkpoints.folder, template, step)
        different = compared(restored.record.identity, self._identity, restored.step)
        self._metrics = MetricsWriter(self._folder, restored.record.logs)
        processes().gather("restored", restored.step)
        return restored._replace(warnings=(*restored.warnings, *different))

    def take_up(self) -> list[str]:
        """Leaves of checkpoints and logs what the run resumes from; returns a sentence for all that goes."""
        processes().gather("run taken up", None)
        # Killed between the two, a resume finds lines after its checkpoint; the other way round it would miss some.
        moved = [] if self._restored is None else self._checkpoints.continue_from(self._restored)
        return [*moved, *self.metrics.cut()]

    def record_resume(self, step: int) -> None:
        """As `RunFolder.record_resume`."""
        self._folder.record_resume(step)


class FollowedStore:
    """The store as the other processes have it, logs included: they read the run folder, which process 0 writes."""

    def __init__(self, folder: RunFolder, identity: Identity) -> None:
        self._checkpoints, self._identity = folder.checkpoints, identity
        self.metrics = self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def _write_nothing(self, *_: Any) -> None:
        """Leaves it to process 0."""

    begin = forget_warm_start = wait_until_finished = record_resume = write = write_samples = _write_nothing

    @property
    def begun(self) -> bool:
        return bool(numbered(self._checkpoints))

    def enter(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints

    def save(self, step: int, arrays: Any, **of_loop: Any) -> None:
        """Gives process 0 what it saves, one array after the other."""
        for leaf in jax.tree.leaves(arrays):
            whole_on_host(leaf)

    def restore(self, template: Any, step: int | None = None) -> Restored:
        """The step that process 0 has restored."""
        step = processes().gather("restored", None)[0]
        return read_checkpoint(self._checkpoints, self._identity, template, step)

    def take_up(self) -> list[str]:
        """Process 0 waits for the others before it changes the folder."""
        processes().gather("run taken up", None)
        return []


def open_store(folder: RunFolder, keep: int, identity: Identity) -> RunStore | FollowedStore:
    """The store of a run, in every process; arguments are those of `RunStore`."""
    return RunStore(folder, keep, identity) if processes().first else FollowedStore(folder, identity)
