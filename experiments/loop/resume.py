"""Resumption of a run with its saved options and the changes that a resume may make."""

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from experiments.config import Config, apply_changes, validate
from experiments.experience.own_source import resolve_source
from experiments.loop.assemble import Setup
from experiments.loop.found import find_parts, resolve_task
from experiments.loop.loop import Progress
from experiments.loop.memory import say_memory
from experiments.loop.run import Result, Run
from experiments.loop.run_parts import NOTHING_OWN, RewardPairs, UserParts, require_own_task, require_same_parts
from experiments.models.dtype_choice import DtypeChoice
from experiments.processes import processes
from experiments.runs.checkpoint import complete_steps
from experiments.runs.config_file import load_config, read_object, save_config
from experiments.runs.console import RunConsole
from experiments.runs.ends import AlreadyFinished
from experiments.runs.folder import RunFolder, run_and_step
from experiments.runs.identity import RunParts, require_settings
from experiments.runs.lock import RunLock
from experiments.tasks import Reward, Rewards, Task
from experiments.tasks.registry import full_name
from jaxlogp.errors import describe, require


def resume(
    path: str,
    changes: Mapping[str, Any] | None = None,
    *,
    task: Task | None = None,
    reward: Reward | RewardPairs | Rewards | None = None,
    model: nnx.Module | None = None,
    source: Any = None,
) -> Result:
    """Resumes a run from its newest intact checkpoint, with the bits of an uninterrupted run.

    Args:
        path: run folder, or RUN@STEP to go back to the checkpoint of that step.
        changes: options by dotted name, as in ``{"schedule.steps": 2000}``. Those that may change (see
            `experiments.config`), all but quiet, are saved in the run folder and hold for later resumes.
        task: your own task, if the run began with one.
        reward: your own reward, if the run began with one.
        model: your own model, if the run began with one.
        source: your own source, if the run began with one from Python.

    Returns:
        The result, as of `experiments.loop.run.train`; scores before are those of the run's beginning.

    Raises:
        ValueError: if there is no run folder or a damaged one, the data differ from those that the run began with, an option
            may not change, or the run has passed the target.
        AlreadyFinished: if the run has finished.
        RunEnded: if a signal or a guard ended the run early, as in `train`.
    """
    changes = {} if changes is None else changes
    require(isinstance(changes, Mapping), "changes", "a dictionary of options by dotted name", describe(changes))
    return set_up_resume(path, changes, UserParts(task, reward, model, source)).finish()


def set_up_resume(path: str, changes: Mapping[str, Any], user: UserParts = NOTHING_OWN) -> Run:
    """Makes a run that exists; nothing is restored yet."""
    require_settings()
    place, step = run_and_step(path)
    folder = RunFolder.open(place)
    lock = RunLock(folder.lock) if processes().first else None
    with contextlib.ExitStack() as refused:
        if lock is not None:
            refused.callback(lock.release)
        run = _set_up(folder, lock, step, changes, user)
        refused.pop_all()
    return run


def _set_up(
    folder: RunFolder, lock: RunLock | None, step: int | None, changes: Mapping[str, Any], user: UserParts
) -> Run:
    stored = load_config(folder.config, Config)
    quiet = bool(changes.get("quiet", False))
    kept = apply_changes(stored, _as_stored(changes, stored))
    kept = dataclasses.replace(kept, quiet=stored.quiet)
    config = dataclasses.replace(with_saved_model(kept, folder), quiet=quiet)
    validate(config)
    began_with = load_config(folder.parts, RunParts)
    require_own_task(began_with, user.task)
    task = resolve_task(config, user.task)
    require(task.name == config.task, "--task", f"the task of the run, {config.task!r}", repr(task.name))
    # Without any checkpoint there are no parameters to restore: the first ones are drawn or read again.
    restored = has_checkpoint(folder)
    _, source = resolve_source(config.source, user.source)
    found = find_parts(config, user, task, source, restored=restored)
    for warning in require_same_parts(began_with, found.parts):
        RunConsole(quiet).warn(warning)
    dtype = DtypeChoice(config.model.dtype, "as the run began")
    found.report(folder.path, dtype)
    setup = found.assemble(restored=restored)
    return Run(setup, folder, lock, dtype, Resumption(folder, stored, kept), step)


@dataclass(frozen=True)
class Resumption:
    """What a resume asks of a run: its options so far, and those from now on."""

    folder: RunFolder
    stored: Config
    kept: Config

    def check(self, setup: Setup, progress: Progress) -> None:
        """Prints the memory that the rest needs; AlreadyFinished if the run has ended, ValueError if it cannot go on."""
        step, steps = progress.step, self.kept.schedule.steps
        require(steps >= step, "--schedule.steps", f"at least {step}, the step that the run has reached", steps)
        # Written last: a run that was killed before it is finished by a resume.
        summary = read_object(self.folder.summary) if self.folder.summary.is_file() else {}
        if summary.get("optimizer steps") == step and (step == steps or summary.get("data ended")):
            why = (
                f"ended with its training data at step {step}"
                if summary.get("data ended")
                else f"has reached step {step} of {steps}; raise --schedule.steps to continue"
            )
            raise AlreadyFinished(f"nothing to do: {self.folder.path} {why}")
        say_memory(setup, progress, RunConsole(setup.config.quiet), resumed=True)

    def keep(self) -> None:
        if self.kept != self.stored and processes().first:
            save_config(self.folder.config, self.kept)


def has_checkpoint(folder: RunFolder) -> bool:
    """Returns True if a checkpoint of the training, or of the warm start, is complete."""
    return bool(complete_steps(folder.checkpoints) or complete_steps(folder.warm_start))


def with_saved_model(config: Config, folder: RunFolder) -> Config:
    """The options with a model from disk replaced by the run's own copy, whatever became of the original: checkpoints hold
    all of its parameters. With adapters they hold these alone, and the base is read where it was; so is a model of which no
    checkpoint has been written."""
    if config.model.path is None or config.lora.rank or not has_checkpoint(folder):
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder.model)))


def _as_stored(changes: Mapping[str, Any], stored: Config) -> dict[str, Any]:
    """The changes, with a task's name as `full_name` has it: addition is addition:2."""
    written = dict(changes)
    task = written.get("task")
    # What is no text is refused with the other options.
    if isinstance(task, str) and task != stored.task:
        written["task"] = full_name(task)
    return written
