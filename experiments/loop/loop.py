"""The loop of a phase: steps, evaluations, checkpoints, and its end, whatever ends it."""

import contextlib
import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from experiments.config import Config
from experiments.experience.own_source import SourceFailed
from experiments.learner.learner import StepResult
from experiments.loop.alerts import StepMonitor, over_median, with_norm
from experiments.loop.assemble import Setup
from experiments.loop.evaluation import Scores
from experiments.loop.feed import DocumentFeed, Taken
from experiments.loop.phase import Phase
from experiments.processes import processes
from experiments.refusal import NotFinite
from experiments.runs.checkpoint import complete_steps, restore_template
from experiments.runs.config_file import from_json
from experiments.runs.console import RunConsole
from experiments.runs.ends import GuardAbort, Interrupted
from experiments.runs.files import kind_of
from experiments.runs.folder import RunFolder
from experiments.runs.run_writer import RunWriter
from experiments.runs.signals import Signals
from experiments.tasks.protocol import TaskFailed
from experiments.tasks.rewards import RewardFailed, RewardNotFinite
from jaxlogp.errors import require


def resume_hint(folder: RunFolder, config: Config, *, finished: bool = False) -> str:
    """Returns the last saved step of a run, and the command that resumes it."""
    if kind_of(folder.config) != "file":
        return f"the run folder {folder.path} is gone"
    program = "sft" if config.supervised else "grpo"
    steps, warm = complete_steps(folder.checkpoints), complete_steps(folder.warm_start)
    saved = f"step {steps[-1]}" if steps else f"step {warm[-1]} of the warm start" if warm else "nothing"
    command = f"python -m experiments.{program} --resume {shlex.quote(str(folder.path))}"
    if finished:
        return f"{saved} is saved; to train up to step N: {command} --schedule.steps N"
    return f"{saved} is saved; to {'continue' if steps or warm else 'begin again'}: {command}"


@dataclass
class Progress:
    """The counters of a phase, saved with every checkpoint as JSON.

    `refused` counts the newest steps in a row whose update was refused. `drift_step` and `evaluated` are the steps of the
    newest drift report and evaluation in the log, `norms` the newest gradient norms; `reached` means that scores ended it.
    """

    step: int = 0
    refused: int = 0
    drift_step: int = 0
    evaluated: int = -1
    reached: bool = False
    norms: list[float] = field(default_factory=list)


class Outcome(NamedTuple):
    """What a phase came to: held-out scores before the first step and after the last, and whether the data has ended."""

    before: Scores | None
    after: Scores | None
    steps: int
    exhausted: bool


def take_step(
    setup: Setup, feed: DocumentFeed, *, report_drift: bool = False, when_drawn: Callable[[], None] = lambda: None
) -> tuple[StepResult, Taken] | None:
    """Draws documents and takes one optimizer step on them, or refuses it; None if the data has ended.

    `when_drawn` is called between the two, before the update takes over the memory of the parameters. RewardFailed,
    SourceFailed and TaskFailed pass through, as if the step had not begun.
    """
    policy = setup.policy()
    try:
        taken = feed.take(policy)
    finally:
        # The update takes over the memory of its parameters.
        policy.end()
    if taken.refusal is not None:
        return StepResult(refusal=taken.refusal.explained_by(setup.learner.fault())), taken
    if not taken.documents:
        return None
    when_drawn()
    return setup.learner.step(taken.documents, report_drift=report_drift), taken


class Loop:
    """A phase of a run; `before` are held-out scores from before its first step, None until known and in a warm start."""

    def __init__(
        self,
        phase: Phase,
        folder: RunFolder,
        console: RunConsole,
        writer: RunWriter,
        signals: Signals,
    ) -> None:
        self._phase, self._setup, self._feed = phase, phase.setup, phase.feed
        setup = phase.setup
        self._config, self._learner = setup.config, setup.learner
        self._folder, self._console, self._writer, self._signals = folder, console, writer, signals
        rewarded = setup.config.loss.advantages != "none"
        self._monitor = StepMonitor(setup.config.guards, setup.sizes.completion, rewarded=rewarded)
        self.before: Scores | None = None
        self.progress, self._exhausted = Progress(), False
        self._stepped = False
        self._saved_step: int | None = None
        # Not the time of day, which jumps.
        self._saved_at = time.monotonic()

    def begin(self) -> None:
        """Takes the source back to where the run first began, if one was killed before it had a checkpoint."""
        earlier = self._writer.beginning(self._feed.state())
        if earlier is not None:
            self._feed.restore(earlier)

    def restore(self, step: int | None = None) -> None:
        """Restores the newest intact checkpoint, or that of a step, on this mesh; ValueError if there is none."""
        learner = self._learner
        restored = self._writer.restore(restore_template(learner.template(), self._setup.mesh), step)
        for warning in restored.warnings:
            self._console.warn(warning)
        record, self._saved_step = restored.record, restored.step
        learner.restore(restored.arrays, record.learner)
        self._feed.restore(record.feed)
        self.progress, before = from_json(record.progress, Progress, "progress of the checkpoint"), record.before
        self.before = None if before is None else self._setup.evaluation.scores(**before)
        fault, at = learner.fault(), f"checkpoint {self._phase.at(self.progress.step)}"
        require(fault is None, at, "a state that can be trained on (an older one: --resume RUN@STEP)", fault)

    def run(self) -> Outcome:
        """Runs to the end, from the first step on unless a checkpoint was restored."""
        phase, progress = self._phase, self.progress
        self._answer_signals()
        if phase.evaluates_ends and self.before is None:
            with self._console.waiting("evaluation of step 0"):
                self.before = self._evaluate()
            self._say_scores(self.before)
            self._answer_signals()
        # Of a run that was interrupted between a step and its evaluation.
        scores = self._evaluate_if_due()
        with self._console.progress(phase.label, phase.steps, progress.step, phase.rows, phase.columns):
            while not self._ended and self._step():
                self._answer_signals()
                scores = self._evaluate_if_due() or scores
                if self._save_is_due():
                    self._save()
                self._answer_signals()
        if self._exhausted:
            self._console.say(f"the training data ended after {phase.at(progress.step)}")
        if phase.evaluates_ends:
            scores = self._evaluate_if_due() or scores or self._evaluate(log=False)
        self._save()
        return Outcome(self.before, scores, progress.step, self._exhausted)

    @property
    def _ended(self) -> bool:
        return self._exhausted or self.progress.reached or self.progress.step >= self._phase.steps

    def _step(self) -> bool:
        """Takes a step; False if the data had ended before it."""
        started = time.perf_counter()
        options = {"report_drift": self._drift_is_due, "when_drawn": self._writer.wait_until_copied}
        # The first step of a phase compiles what it needs.
        first = self._console.waiting(self._phase.at(self.progress.step + 1))
        with contextlib.nullcontext() if self._stepped else first:
            done = self._with_rewards(lambda: take_step(self._setup, self._feed, **options))
        self._stepped = True
        if done is None:
            self._exhausted = True
            return False
        self._record(*done, started)
        return True

    @property
    def _drift_is_due(self) -> bool:
        every, last = self._phase.drift_every, self.progress.drift_step
        return every > 0 and (last == 0 or self.progress.step + 1 >= last + every)

    def _record(self, result: StepResult, taken: Taken, started: float) -> None:
        progress, tokenizer, drift = self.progress, self._setup.tokenizer, result.drift
        refusal = None if result.refusal is None else result.refusal.sentence(tokenizer)
        progress.step += 1
        progress.refused = 0 if refusal is None else progress.refused + 1
        values, step, writer = self._values(result, taken, started), progress.step, self._writer
        if refusal is not None:
            values["refused"] = refusal
        writer.write(step, self._phase.name, values)
        self._console.step(step, values)
        if drift is not None:
            progress.drift_step = step
            writer.write(step, "drift", drift.metrics(tokenizer))
            for line in drift.lines(tokenizer):
                self._console.say(f"step {step}: {line}")
        if refusal is not None:
            self._console.warn(f"{self._phase.at(step)} is refused: {refusal}")
        for warning in self._monitor.warnings(step, values, taken.counts):
            self._console.warn(warning)
        self._guard(step, refusal)

    def _values(self, result: StepResult, taken: Taken, started: float) -> dict[str, Any]:
        values, progress = dict(result.metrics), self.progress
        if values:
            norm = values["grad_norm"]
            values["grad_norm_over_median"] = over_median(progress.norms, norm)
            progress.norms = with_norm(progress.norms, norm)
            values |= {"attention": self._setup.attention.implementation, "data_wait_seconds": taken.wait_seconds}
        drift_seconds = 0.0 if result.drift is None else result.drift.seconds
        seconds = time.perf_counter() - started - drift_seconds
        return values | {
            "update_applied": int(result.refusal is None),
            "documents_seen": self._learner.version,
            "rollout_seconds": taken.rollout_seconds,
            "step_seconds": seconds,
            "tokens_per_second": values.get("tokens", 0) / seconds,
            **taken.counts.metrics(),
        }

    def _guard(self, step: int, refusal: str | None) -> None:
        """Ends the run after too many refused steps, or where devices hold different copies of the state."""
        progress, options = self.progress, self._config.guards
        refused = progress.refused
        if refused >= options.max_refused_steps:
            # A resume begins to count anew.
            progress.refused = 0
            self._abort(f"{self._phase.at(step)} is the last of {refused} refused in a row: {refusal}")
        if options.replica_every and step % options.replica_every == 0:
            self._require(step, "copies differ", self._learner.mismatch())

    def _evaluate(self, *, log: bool = True) -> Any:
        started, phase, step = time.perf_counter(), self._phase, self.progress.step
        scores, values, samples = self._with_rewards(lambda: phase.evaluate(step))
        if log:
            values = {**values, "seconds": time.perf_counter() - started}
            self._writer.write(step, phase.evaluation_name, values)
            self._writer.write_samples(step, "held_out", [each._asdict() for each in samples])
            self.progress.evaluated = step
            self.progress.reached = phase.is_reached(scores)
        return scores

    def _evaluate_if_due(self) -> Any:
        """Scores where this step has an evaluation that is not made yet, or None."""
        phase, progress = self._phase, self.progress
        due = (
            self._ended and phase.evaluates_ends or (phase.evaluate_every and progress.step % phase.evaluate_every == 0)
        )
        if not due or progress.step == max(progress.evaluated, 0):
            return None
        scores = self._evaluate()
        if phase.evaluates_ends:
            self._say_scores(scores)
        return scores

    def _say_scores(self, scores: Scores) -> None:
        self._console.say(f"step {self.progress.step}: {scores}")

    def _save_is_due(self) -> bool:
        options, step = self._config.checkpoint, self.progress.step
        return bool(self._ended or self._time_has_come() or (options.every and step % options.every == 0))

    def _time_has_come(self) -> bool:
        minutes = self._config.checkpoint.every_minutes
        passed = lambda: time.monotonic() - self._saved_at >= 60.0 * minutes  # noqa: E731
        return bool(minutes) and processes().from_first("time to save", passed)

    def _save(self) -> None:
        """A checkpoint of this step, unless there is one; never of a state that cannot be trained on."""
        step, learner = self.progress.step, self._learner
        if step == self._saved_step:
            return
        self._require(step, "not saved", learner.fault())
        if self._config.guards.replica_every:
            self._require(step, "not saved, copies differ", learner.mismatch())
        self._console.say(f"{self._phase.at(step)}: saving a checkpoint")
        before = None if self.before is None else self.before._asdict()
        saved = learner.saved()
        counters = {"progress": vars(self.progress), "learner": saved.counters, "feed": self._feed.state()}
        self._writer.save(step, saved.arrays, **counters, before=before)
        self._saved_step, self._saved_at = step, time.monotonic()

    def _save_now(self) -> None:
        """A durable checkpoint of this step, if there is anything to save yet."""
        if self.before is not None or self.progress.step > 0:
            self._save()
            self._wait_until_saved()

    def _wait_until_saved(self) -> None:
        with self._console.waiting("the checkpoint"):
            self._writer.wait_until_finished()

    def _with_rewards(self, function: Callable[[], Any]) -> Any:
        """The function's result; a broken reward, source or task ends the run, once what is done has been saved."""
        try:
            return function()
        except (RewardFailed, RewardNotFinite, SourceFailed, TaskFailed, NotFinite) as error:
            self._abort(str(error), error)

    def _abort(self, reason: str, error: Exception | None = None) -> NoReturn:
        """Ends the run with a durable checkpoint of the state, which no refused step has changed."""
        self._save_now()
        raise GuardAbort(f"{reason}; {resume_hint(self._folder, self._config)}") from error

    def _require(self, step: int, what: str, found: str | None) -> None:
        """Ends the run without a checkpoint of a damaged state."""
        if found is not None:
            self._wait_until_saved()
            raise GuardAbort(f"{self._phase.at(step)}: {what}: {found}; {resume_hint(self._folder, self._config)}")

    def _answer_signals(self) -> None:
        """Raises `Interrupted` after a signal to any process, once this step is durable if there is anything to save."""
        here = processes()
        told = here.gather("signals", self._signals.received)
        process = next((process for process, number in enumerate(told) if number is not None), None)
        if process is None:
            return
        received = signal.Signals(told[process])
        name = received.name if here.count == 1 else f"{received.name} to process {process}"
        self._save_now()
        raise Interrupted(received, f"{name}: {resume_hint(self._folder, self._config)}")
