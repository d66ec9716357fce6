"""A run from its open folder to its end: signals caught, checkpoints restored, and a loop for each phase."""

import signal
from dataclasses import dataclass
from typing import Protocol

from experiments.config import Config, identity_options
from experiments.loop.assemble import Setup
from experiments.loop.loop import Loop, Outcome, Progress, resume_hint
from experiments.loop.phase import Phase, training_phase, warm_start_phase
from experiments.models.mesh import parse_mesh
from experiments.processes import processes
from experiments.runs.config_file import load_config
from experiments.runs.console import RunConsole
from experiments.runs.ends import Interrupted
from experiments.runs.files import kind_of
from experiments.runs.folder import RunFolder, read_metrics
from experiments.runs.identity import Identity, RunParts, identity_of
from experiments.runs.run_writer import RunWriter
from experiments.runs.signals import Signals, caught_signals
from jaxlogp.errors import require


class Resumption(Protocol):
    """What a resume does once it knows where the run is."""

    def check(self, setup: Setup, progress: Progress) -> None:
        """Refuses a training that cannot continue from this progress; changes nothing."""

    def keep(self) -> None:
        """Records the options of the resume, once nothing else can refuse it."""


def run_to_end(
    setup: Setup, folder: RunFolder, console: RunConsole, resumption: Resumption | None = None, step: int | None = None
) -> Outcome:
    """Runs the phases of a run, from the newest checkpoint of either or from a `step` of the training, up to the last step.

    SIGTERM and SIGINT are answered between two steps: a checkpoint is written, then `Interrupted` raised. GuardAbort ends a
    run whose numbers cannot be trained on, or whose reward function is broken.
    """
    try:
        identity = identity_of_run(folder, setup.config)
        with (
            caught_signals() as signals,
            RunWriter(folder, setup.config.checkpoint.keep, identity) as writer,
        ):
            run = _Session(setup, folder, console, writer, signals, resumption)
            outcome = run.resume_training(step) if resumption is not None and writer.begun else run.begin(step)
            with console.waiting("the last checkpoint"):
                writer.wait_until_finished()
            return outcome
    except KeyboardInterrupt:
        sentence = f"SIGINT twice: stopped at once; {resume_hint(folder, setup.config)}"
        # No other process knows of it: they would wait for this one.
        processes().end(128 + signal.SIGINT, sentence, is_origin=True)
        raise Interrupted(signal.SIGINT, sentence) from None


@dataclass(frozen=True)
class _Session:
    setup: Setup
    folder: RunFolder
    console: RunConsole
    writer: RunWriter
    signals: Signals
    resumption: Resumption | None

    def resume_training(self, step: int | None) -> Outcome:
        assert self.resumption is not None, "only a run that exists is resumed"
        training = self._loop(training_phase(self.setup))
        training.restore(step)
        self.resumption.check(self.setup, training.progress)
        self._discard_newer(f"at step {training.progress.step}", training.progress.step)
        return training.run()

    def begin(self, step: int | None) -> Outcome:
        """Runs from the warm start on; of a run that was stopped in it, from its newest checkpoint."""
        _require_never_saved(self.folder)
        require(step is None, "--resume", f"{self.folder.path}, which has no step of its training yet", f"@{step}")
        if self.resumption is not None:
            self.resumption.check(self.setup, Progress())
        if self.setup.warms_up:
            self._warm_start()
            self.writer.enter(self.folder.checkpoints)
        else:
            self.writer.begin()
            self._discard_newer("from the beginning")
            self.setup.learner.keep_reference()
        training = self._loop(training_phase(self.setup))
        training.begin()
        return training.run()

    def _warm_start(self) -> None:
        self.writer.enter(self.folder.warm_start)
        phase = warm_start_phase(self.setup)
        loop = self._loop(phase)
        if self.resumption is not None and self.writer.begun:
            loop.restore()
        else:
            self.writer.begin()
        steps = loop.progress.step
        self._discard_newer(f"at step {steps} of the warm start" if steps else "from the beginning of the warm start")
        self.console.say(f"warm start: at most {phase.steps} steps")
        loop.run()
        self.console.say(f"warm start: ended after step {loop.progress.step}")
        self.setup.learner.begin(phase.setup.learner.release())

    def _loop(self, phase: Phase) -> Loop:
        return Loop(phase, self.folder, self.console, self.writer, self.signals)

    def _discard_newer(self, where: str, step: int = 0) -> None:
        """Changes the folder for the first time: what comes after the checkpoint goes."""
        if self.resumption is not None:
            self.resumption.keep()
        for line in self.writer.discard_newer():
            self.console.warn(line)
        if self.resumption is not None:
            self.writer.record_resume(step)
            self.console.say(f"resumed {self.folder.path} {where}")


def identity_of_run(folder: RunFolder, config: Config) -> Identity:
    """What a run is, where it lies being no part of it."""
    options = identity_options(load_config(folder.config, Config))
    options = {field: value for field, value in options.items() if field not in ("name", "out")}
    # The bits of an invariant run are the same on every mesh.
    mesh = "any" if config.invariant else str(parse_mesh(config.mesh))
    return identity_of(options, mesh, load_config(folder.parts, RunParts))


def _require_never_saved(folder: RunFolder) -> None:
    """Refuses a run that has lost its checkpoints: to begin again would cut off all of its log."""
    made = sum(record["kind"] == "train" for record in read_metrics(folder.metrics).records)
    was_never = made == 0 or kind_of(folder.beginning) == "file"
    require(was_never, "checkpoints", f"at least one complete step in {folder.checkpoints}", f"none after {made} steps")
