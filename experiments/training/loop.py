"""The loop of a run: warm start, steps, evaluations, checkpoints, and its end, whatever ends it."""

import shlex
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from experiments.config import Config
from experiments.config.changes import fixed_values
from experiments.experience.own_source import SourceFailed
from experiments.models.mesh import parse_mesh
from experiments.runs.checkpoint import complete_steps
from experiments.runs.config_file import load_config
from experiments.runs.console import RunConsole
from experiments.runs.folder import RunFolder, read_metrics
from experiments.runs.identity import Identity, RunParts, identity_of
from experiments.runs.processes import processes
from experiments.runs.signals import Signals, caught_signals
from experiments.runs.stops import GuardAbort, Interrupted
from experiments.runs.store import FollowedStore, RunStore, open_store
from experiments.tasks.rewards import RewardFailed, RewardNotFinite
from experiments.training.evaluation import ExactMatch
from experiments.training.trainer import StepRecord, Trainer
from jaxlogp.errors import require


def run_to_end(
    trainer: Trainer,
    folder: RunFolder,
    console: RunConsole,
    *,
    resumed: bool,
    step: int | None = None,
    on_resume: Callable[[Trainer], None] = lambda trainer: None,
) -> tuple[ExactMatch, ExactMatch]:
    """Warm start or restore, then steps, evaluations and checkpoints up to the last one; the held-out scores before the
    first step and after the last.

    SIGTERM and SIGINT are answered between two steps: a checkpoint is written, then `Interrupted` raised. In the warm
    start nothing is kept: a resume begins it again, and arrives at the same bits. `on_resume` gets the restored trainer
    before anything is written; what it raises ends the resume.

    Raises:
        Interrupted: a signal; the message says what is kept, and the command that goes on.
        GuardAbort: numbers that cannot be trained on, or a broken reward function; likewise.
        ValueError: a run folder that cannot be continued.
    """
    try:
        with (
            caught_signals() as signals,
            open_store(folder, trainer.config.checkpoint.keep, identity_of_run(folder, trainer.config)) as store,
        ):
            before = None
            if resumed and store.begun:
                before = trainer.restore(store, console, step)
                found, at = trainer.learner.fault(), f"checkpoint step {trainer.progress.step}"
                require(found is None, at, "a state that can be trained on (an older one: --resume RUN@STEP)", found)
            else:
                _require_unbegun(folder)
                store.begin()
            if resumed:
                on_resume(trainer)
            for line in store.take_up():
                console.warn(line)
            if resumed:
                _say_resumed(trainer, store, console, before, folder)
            return Loop(trainer, folder, console, store, signals).run(before)
    except KeyboardInterrupt:
        sentence = f"SIGINT twice: stopped at once; {kept(folder)}"
        # No other process knows of it: they would wait for this one.
        processes().end(128 + signal.SIGINT, sentence, caused_here=True)
        raise Interrupted(signal.SIGINT, sentence) from None


def kept(folder: RunFolder, *, finished: bool = False) -> str:
    """Returns the last saved step of a run, and the command that resumes it."""
    steps = complete_steps(folder.checkpoints)
    saved = f"step {steps[-1]} is saved" if steps else "nothing is saved before the warm start has ended"
    command = f"python -m experiments.grpo --resume {shlex.quote(str(folder.path))}"
    if finished:
        return f"{saved}; to train up to step N: {command} --schedule.steps N"
    return f"{saved}; to {'continue' if steps else 'repeat it'}: {command}"


class Loop:
    """A run between its first and its last step."""

    def __init__(
        self,
        trainer: Trainer,
        folder: RunFolder,
        console: RunConsole,
        store: RunStore | FollowedStore,
        signals: Signals,
    ) -> None:
        self._trainer, self._folder, self._console = trainer, folder, console
        self._metrics, self._store, self._signals = store.metrics, store, signals
        self._before: ExactMatch | None = None
        self._saved_step = store.latest_step()
        # Not the time of day, which jumps.
        self._saved_at = time.monotonic()
        self._exhausted = False

    def run(self, before: ExactMatch | None) -> tuple[ExactMatch, ExactMatch]:
        """To the end; without scores from before the first step, from the warm start on."""
        self._before = self._warm_start() if before is None else before
        return self._before, self._train()

    def _warm_start(self) -> ExactMatch:
        self._answer_signals()
        self._with_rewards(lambda: self._trainer.warm_start(self._console, self._metrics, self._answer_signals))
        before = self._before = self._with_rewards(lambda: self._trainer.evaluate(self._metrics))
        self._save()
        # Nothing may be logged of a step that no checkpoint is behind: a resume could not begin the warm start again.
        self._store.wait_until_finished()
        self._say_scores(before)
        return before

    def _train(self) -> ExactMatch:
        progress, config = self._trainer.progress, self._trainer.config
        self._answer_signals()
        # Of a run that was interrupted between a step and its evaluation.
        scores = self._evaluate_if_due()
        label = config.loss.name.upper()
        with self._console.progress(label, config.schedule.steps, done=progress.step):
            while not self._ended and self._step():
                self._answer_signals()
                scores = self._evaluate_if_due() or scores
                if self._save_is_due():
                    self._save()
                self._answer_signals()
        if self._exhausted:
            self._console.say(f"the training data ended after step {progress.step}")
        scores = self._evaluate_if_due() or scores or self._trainer.evaluate()
        self._save()
        return scores

    @property
    def _ended(self) -> bool:
        return self._exhausted or self._trainer.progress.step >= self._trainer.config.schedule.steps

    def _step(self) -> bool:
        """One step with its records; False if the data had ended before it."""
        trainer = self._trainer
        result: StepRecord | None = self._with_rewards(trainer.train_step)
        if result is None:
            self._exhausted = True
            return False
        step = trainer.progress.step
        self._metrics.write(step, "train", result.metrics)
        self._console.step(step, result.metrics)
        if result.drift is not None:
            self._metrics.write(step, "drift", result.drift.metrics(trainer.tokenizer))
            for line in result.drift.lines(trainer.tokenizer):
                self._console.say(f"step {step}: {line}")
        if result.refusal is not None:
            self._console.warn(f"step {step} is refused: {result.refusal}")
        for warning in result.warnings:
            self._console.warn(warning)
        self._guard(step, result.refusal)
        return True

    def _guard(self, step: int, refusal: str | None) -> None:
        """Ends the run after too many refused steps, or where devices hold different copies of the state."""
        trainer, options = self._trainer, self._trainer.config.guards
        refused = trainer.progress.refused
        if refused >= options.max_refused_steps:
            # A resume begins to count anew.
            trainer.progress.refused = 0
            self._abort(f"step {step} is the last of {refused} refused in a row: {refusal}")
        if options.replica_every and step % options.replica_every == 0:
            self._require(step, "copies differ", trainer.learner.mismatch())

    def _evaluate_if_due(self) -> ExactMatch | None:
        """An evaluation where this step has one that is not made yet."""
        progress, every = self._trainer.progress, self._trainer.config.evaluation.every
        due = self._ended or (every and progress.step % every == 0)
        if not due or progress.evaluated == progress.step:
            return None
        scores = self._with_rewards(lambda: self._trainer.evaluate(self._metrics))
        self._say_scores(scores)
        return scores

    def _say_scores(self, scores: ExactMatch) -> None:
        values = f"sampled {scores.sampled:.3f}, greedy {scores.greedy:.3f}"
        self._console.say(f"step {self._trainer.progress.step}: held-out exact match {values}")

    def _save_is_due(self) -> bool:
        options, step = self._trainer.config.checkpoint, self._trainer.progress.step
        return bool(self._ended or self._time_has_come() or (options.every and step % options.every == 0))

    def _time_has_come(self) -> bool:
        minutes = self._trainer.config.checkpoint.every_minutes
        passed = lambda: time.monotonic() - self._saved_at >= 60.0 * minutes  # noqa: E731
        return bool(minutes) and processes().of_first("time to save", passed)

    def _save(self) -> None:
        """A checkpoint of this step, unless there is one; never of a state that cannot be trained on."""
        step, trainer = self._trainer.progress.step, self._trainer
        if step != self._saved_step:
            self._require(step, "not saved", trainer.learner.fault())
            if trainer.config.guards.replica_every:
                self._require(step, "not saved, copies differ", trainer.learner.mismatch())
            self._console.say(f"step {step}: saving a checkpoint")
            trainer.save(self._store, self._before)
            self._saved_step, self._saved_at = step, time.monotonic()

    def _with_rewards(self, function: Callable[[], Any]) -> Any:
        """The function's result; a broken reward or source ends the run, once what is done has been saved."""
        try:
            return function()
        except (RewardFailed, RewardNotFinite, SourceFailed) as error:
            self._abort(str(error), error)

    def _abort(self, reason: str, error: Exception | None = None) -> NoReturn:
        """Ends the run with a durable checkpoint of the state, which no refused step has changed."""
        if self._before is not None:
            self._save()
            self._store.wait_until_finished()
        raise GuardAbort(f"{reason}; {kept(self._folder)}") from error

    def _require(self, step: int, what: str, found: str | None) -> None:
        """Ends the run without a checkpoint of a damaged state."""
        if found is not None:
            self._store.wait_until_finished()
            raise GuardAbort(f"step {step}: {what}: {found}; {kept(self._folder)}")

    def _answer_signals(self) -> None:
        """Raises `Interrupted` after a signal to any of the processes, with a durable checkpoint of this step if there is
        anything to save yet."""
        here = processes()
        told = here.gather("signals", self._signals.received)
        process = next((process for process, number in enumerate(told) if number is not None), None)
        if process is None:
            return
        received = signal.Signals(told[process])
        name = received.name if here.count == 1 else f"{received.name} to process {process}"
        if self._before is not None:
            self._save()
            self._store.wait_until_finished()
        raise Interrupted(received, f"{name}: {kept(self._folder)}")


def identity_of_run(folder: RunFolder, config: Config) -> Identity:
    """What a run is, where it lies being no part of it."""
    options = fixed_values(load_config(folder.config, Config))
    options = {field: value for field, value in options.items() if field not in ("name", "out")}
    # The bits of an invariant run are the same on every mesh.
    mesh = "any" if config.invariant else str(parse_mesh(config.mesh))
    return identity_of(options, mesh, load_config(folder.parts, RunParts))


def _require_unbegun(folder: RunFolder) -> None:
    made = sum(record["kind"] == "train" for record in read_metrics(folder.metrics).records)
    require(made == 0, "checkpoints", f"at least one complete step in {folder.checkpoints}", f"none after {made} steps")


def _say_resumed(
    trainer: Trainer,
    store: RunStore | FollowedStore,
    console: RunConsole,
    before: ExactMatch | None,
    folder: RunFolder,
) -> None:
    store.record_resume(trainer.progress.step)
    at = f" at step {trainer.progress.step}"
    begins_again = ", which has no checkpoint yet: the warm start begins again"
    console.say(f"resumed {folder.path}{begins_again if before is None else at}")
