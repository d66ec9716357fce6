"""What a run keeps on disk, as one thing: checkpoints, and the logs and the identity that belong to each of them."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from experiments.models.placement import whole_on_host
from experiments.processes import processes
from experiments.runs.checkpoint import Checkpoints, Restored, SavedSteps, leaves_to_save, numbered
from experiments.runs.files import kind_of
from experiments.runs.folder import MetricsWriter, RunFolder
from experiments.runs.identity import Identity, compared
from experiments.runs.log_file import LogMark
from jaxlogp.errors import require

OWN = "run"
"""The key of a checkpoint's record under which the store keeps its own."""


class SavedRun:
    """A folder of checkpoints of a run, to read; the identity is that of the run as its folder describes it."""

    def __init__(self, checkpoints: Path, identity: Identity) -> None:
        self._steps, self._identity = SavedSteps(checkpoints), identity

    def restore(self, template: Any, step: int | None = None) -> Restored:
        """As `SavedSteps.restore`, of those arrays alone that the template has; without the store's own record.

        Raises:
            ValueError: also if the checkpoint was saved by another run.
        """
        restored = self._steps.restore(template, step, whole=False)
        # Other versions and devices read the same numbers.
        compared(own_record(restored)["identity"], self._identity, restored.step)
        return _without_own(restored)


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
        self.close()

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._folder.path

    @property
    def metrics(self) -> MetricsWriter:
        """The logs."""
        assert self._metrics is not None, "begin or restore comes first"
        return self._metrics

    def enter(self, checkpoints: Path) -> None:
        """Waits for the save in progress; from now on checkpoints are those of another folder, which is made if missing."""
        self._checkpoints.close()
        self._checkpoints, self._restored = Checkpoints(checkpoints, self._keep), None

    def forget_warm_start(self) -> None:
        """Removes the checkpoints of the warm start, once one of the training is durable."""
        if kind_of(self._folder.warm_start) == "folder":
            shutil.rmtree(self._folder.warm_start)

    def latest_step(self) -> int | None:
        """The newest checkpoint that is complete on disk, or None."""
        return self._checkpoints.latest_step()

    @property
    def begun(self) -> bool:
        """Whether there is a checkpoint, damaged or not."""
        return bool(numbered(self._checkpoints.folder))

    def begin(self) -> None:
        """Opens the logs from the start."""
        self._metrics = MetricsWriter(self._folder)

    def save(self, step: int, arrays: Any, extra: dict[str, Any]) -> None:
        """As `Checkpoints.save`, with the identity and what the logs are now; their lines become durable first."""
        marks = {name: list(mark) for name, mark in self.metrics.marks().items()}
        own = {"identity": self._identity.as_record(), "logs": marks}
        self._checkpoints.save(step, arrays, {**extra, OWN: own})

    def wait_until_finished(self) -> None:
        """As `Checkpoints.wait_until_finished`."""
        self._checkpoints.wait_until_finished()

    def restore(self, template: Any, step: int | None = None) -> Restored:
        """As `Checkpoints.restore`, and opens the logs as they were then.

        Raises:
            ValueError: also where the run would become another one, or where a log is not what it was.
        """
        self._restored = restored = self._checkpoints.restore(template, step)
        own = own_record(restored)
        different = compared(own["identity"], self._identity, restored.step)
        self._metrics = MetricsWriter(self._folder, {name: LogMark(*mark) for name, mark in own["logs"].items()})
        processes().gather("restored", restored.step)
        return _without_own(restored)._replace(warnings=(*restored.warnings, *different))

    def take_up(self) -> list[str]:
        """Leaves of checkpoints and logs what the run goes on from; returns a sentence for all that goes."""
        processes().gather("run taken up", None)
        # Killed between the two, a resume finds lines after its checkpoint; the other way round it would miss some.
        moved = [] if self._restored is None else self._checkpoints.continue_from(self._restored)
        return [*moved, *self.metrics.cut()]

    def record_resume(self, step: int) -> None:
        """As `RunFolder.record_resume`."""
        self._folder.record_resume(step)

    def close(self) -> None:
        """Waits for the save in progress, and closes everything; raises OSError where it could not be written."""
        try:
            self._checkpoints.close()
        finally:
            if self._metrics is not None:
                self._metrics.close()


class FollowedStore:
    """The store as the other processes have it: they read the run folder, which process 0 writes."""

    def __init__(self, folder: RunFolder, identity: Identity) -> None:
        self._folder, self._checkpoints, self._identity = folder, folder.checkpoints, identity
        self._restored: int | None = None
        self.metrics = NoMetrics()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def enter(self, checkpoints: Path) -> None:
        """See `RunStore`."""
        self._checkpoints, self._restored = checkpoints, None

    def forget_warm_start(self) -> None:
        """Nothing is removed."""

    @property
    def begun(self) -> bool:
        """See `RunStore`."""
        return bool(numbered(self._checkpoints))

    def latest_step(self) -> int | None:
        """See `RunStore`."""
        return self._restored

    def begin(self) -> None:
        """Nothing is opened."""

    def save(self, step: int, arrays: Any, extra: dict[str, Any]) -> None:
        """Gives process 0 what it saves."""
        for leaf in leaves_to_save(arrays).values():
            whole_on_host(leaf)

    def wait_until_finished(self) -> None:
        """Nothing is written."""

    def restore(self, template: Any, step: int | None = None) -> Restored:
        """The step that process 0 has restored."""
        del step
        self._restored = processes().gather("restored", None)[0]
        return SavedRun(self._checkpoints, self._identity).restore(template, self._restored)

    def take_up(self) -> list[str]:
        """Process 0 waits for the others, and changes the folder."""
        processes().gather("run taken up", None)
        return []

    def record_resume(self, step: int) -> None:
        """Nothing is written."""


class NoMetrics:
    """Takes records, as `experiments.runs.folder.MetricsWriter` does, and writes nothing."""

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def write_samples(self, step: int, phase: str, samples: Iterable[Mapping[str, Any]]) -> None:
        """Nothing."""


def open_store(folder: RunFolder, keep: int, identity: Identity) -> RunStore | FollowedStore:
    """The store of a run, in every process; arguments are those of `RunStore`."""
    return RunStore(folder, keep, identity) if processes().first else FollowedStore(folder, identity)


def own_record(restored: Restored) -> dict[str, Any]:
    """Returns what the store has kept in a checkpoint: identity and logs; ValueError if it is not there."""
    own = restored.extra.get(OWN)
    require(_is_own(own), f"checkpoint step {restored.step}", "the record of a run", "another")
    return own


def _without_own(restored: Restored) -> Restored:
    extra = {name: value for name, value in restored.extra.items() if name != OWN}
    return restored._replace(extra=extra)


def _is_own(own: Any) -> bool:
    """The seal of a checkpoint has no key, so that anybody can write one."""
    if not isinstance(own, dict) or own.keys() != {"identity", "logs"}:
        return False
    return (
        isinstance(own["identity"], dict) and isinstance(own["logs"], dict) and all(map(_is_mark, own["logs"].values()))
    )


def _is_mark(mark: Any) -> bool:
    return isinstance(mark, list) and [type(part) for part in mark] == [int, str] and mark[0] >= 0
