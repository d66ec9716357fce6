"""The loop of a run: warm start, steps, evaluations, checkpoints, and its end, whatever ends it."""

import shlex
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from experiments.runs.checkpoint import Checkpoints, complete_steps
from experiments.runs.console import RunConsole
from experiments.runs.folder import MetricsWriter, RunFolder, read_metrics
from experiments.runs.signals import Signals, caught_signals
from experiments.runs.stops import GuardAbort, Interrupted
from experiments.tasks.rewards import RewardFailed, RewardNotFinite
from experiments.training.trainer import Scores, Trainer
from jaxlogp.errors import require

PHASES = ("warm_start", "train", "eval", "drift", "held_out")
"""Kinds of records in metrics.jsonl and phases of samples.jsonl."""


def run_to_end(trainer: Trainer, folder: RunFolder, console: RunConsole, *, resumed: bool) -> tuple[Scores, Scores]:
    """Warm start or restore, then steps, evaluations and checkpoints up to the last one.

    SIGTERM and SIGINT are answered between two steps: a checkpoint is written, then `Interrupted` raised. In the warm
    start nothing is kept: a resume begins it again, and arrives at the same bits.

    Returns:
      Scores on held-out prompts before the first step and after the last.

    Raises:
      Interrupted: a signal; the message says what is kept, and the command that goes on.
      GuardAbort: numbers that cannot be trained on, or a broken reward function; likewise.
      ValueError: a run folder that cannot be continued.
    """
    try:
        with (
            caught_signals() as signals,
            Checkpoints(folder.checkpoints, trainer.config.checkpoint.keep) as checkpoints,
        ):
            before = _restore(trainer, folder, console, checkpoints) if resumed else None
            with _writer(trainer, folder, console, resumed=resumed, begun=before is not None) as metrics:
                return Loop(trainer, folder, console, metrics, checkpoints, signals).run(before)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, f"SIGINT twice: stopped at once; {kept(folder)}") from None


def kept(folder: RunFolder) -> str:
    """What of a run is on disk, and the command that goes on."""
    steps = complete_steps(folder.checkpoints)
    saved = f"step {steps[-1]} is saved" if steps else "nothing is saved before the warm start has ended"
    goes_on = "goes on from there" if steps else "begins it again"
    return f"{saved}; python -m experiments.grpo --resume {shlex.quote(str(folder.path))} {goes_on}"


class Loop:
    """A run between its first and its last step."""

    def __init__(
        self,
        trainer: Trainer,
        folder: RunFolder,
        console: RunConsole,
        metrics: MetricsWriter,
        checkpoints: Checkpoints,
        signals: Signals,
    ) -> None:
        self._trainer, self._folder, self._console = trainer, folder, console
        self._metrics, self._checkpoints, self._signals = metrics, checkpoints, signals
        self._before: Scores | None = None
        self._saved_step = checkpoints.latest_step()
        # Not the time of day, which jumps.
        self._saved_at = time.monotonic()
        self._exhausted = False

    def run(self, before: Scores | None) -> tuple[Scores, Scores]:
        """To the end; without scores from before the first step, from the warm start on."""
        self._before = self._warm_start() if before is None else before
        return self._before, self._train()

    def _warm_start(self) -> Scores:
        self._answer_signals()
        self._with_rewards(lambda: self._trainer.warm_start(self._console, self._metrics, self._answer_signals))
        before = self._before = self._with_rewards(lambda: self._trainer.evaluate(self._metrics))
        self._save()
        # Nothing may be logged of a step that no checkpoint is behind: a resume could not begin the warm start again.
        self._checkpoints.wait_until_finished()
        self._console.say(f"before training: sampled {before.sampled:.3f}, greedy {before.greedy:.3f}")
        return before

    def _train(self) -> Scores:
        progress, config = self._trainer.progress, self._trainer.config
        self._answer_signals()
        # Of a run that was interrupted between a step and its evaluation.
        scores = self._evaluate_if_due()
        label = config.loss.name.upper()
        with self._console.progress(label, config.schedule.steps, done=progress.step, lines=False) as advance:
            while not self._ended and self._step():
                advance()
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
        values, self._exhausted = self._with_rewards(trainer.train_step)
        if values is None:
            return False
        step = trainer.progress.step
        self._metrics.write(step, "train", values)
        self._console.step(step, values)
        if trainer.drift is not None:
            self._metrics.write(step, "drift", trainer.drift.metrics())
            self._console.say(str(trainer.drift))
        for alert in trainer.alerts:
            self._console.warn(alert)
        self._guard(step)
        return True

    def _guard(self, step: int) -> None:
        """Ends the run after too many refused steps, or where devices hold different copies of the state."""
        trainer, options = self._trainer, self._trainer.config.guards
        refused = trainer.progress.refused
        if refused >= options.max_refused_steps:
            # A resume begins to count anew.
            trainer.progress.refused = 0
            self._abort(
                f"step {step} is the last of {refused} refused in a row: {trainer.alerts[0].partition(': ')[2]}"
            )
        if options.replica_every and step % options.replica_every == 0:
            self._require(step, "copies differ", trainer.differing_copies())

    def _evaluate_if_due(self) -> Scores | None:
        """An evaluation where this step has one that is not made yet."""
        progress, every = self._trainer.progress, self._trainer.config.evaluation.every
        due = self._ended or (every and progress.step % every == 0)
        if not due or progress.evaluated == progress.step:
            return None
        scores = self._with_rewards(lambda: self._trainer.evaluate(self._metrics))
        self._console.say(f"held-out: sampled {scores.sampled:.3f}, greedy {scores.greedy:.3f}")
        return scores

    def _save_is_due(self) -> bool:
        options, step = self._trainer.config.checkpoint, self._trainer.progress.step
        by_time = options.every_minutes and time.monotonic() - self._saved_at >= 60.0 * options.every_minutes
        return bool(self._ended or by_time or (options.every and step % options.every == 0))

    def _save(self) -> None:
        """A checkpoint of this step, unless there is one; never of a state that cannot be trained on."""
        step, trainer = self._trainer.progress.step, self._trainer
        if step != self._saved_step:
            self._require(step, "not saved", trainer.unsound())
            if trainer.config.guards.replica_every:
                self._require(step, "not saved, copies differ", trainer.differing_copies())
            trainer.save(self._checkpoints, self._before)
            self._saved_step, self._saved_at = step, time.monotonic()

    def _with_rewards(self, function: Callable[[], Any]) -> Any:
        """The function's result; a reward function that is broken ends the run, once what is done has been saved."""
        try:
            return function()
        except (RewardFailed, RewardNotFinite) as error:
            self._abort(str(error), error)

    def _abort(self, reason: str, error: Exception | None = None) -> NoReturn:
        """Ends the run with a durable checkpoint of the state, which no refused step has changed."""
        if self._before is not None:
            self._save()
            self._checkpoints.wait_until_finished()
        raise GuardAbort(f"{reason}; {kept(self._folder)}") from error

    def _require(self, step: int, what: str, found: str | None) -> None:
        """Ends the run without a checkpoint of a damaged state."""
        if found is not None:
            self._checkpoints.wait_until_finished()
            raise GuardAbort(f"step {step}: {what}: {found}; {kept(self._folder)}")

    def _answer_signals(self) -> None:
        """Raises `Interrupted` after a signal, with a durable checkpoint of this step if there is anything to save yet."""
        received = self._signals.received
        if received is None:
            return
        if self._before is not None:
            self._save()
            self._checkpoints.wait_until_finished()
        raise Interrupted(received, f"{received.name}: {kept(self._folder)}")


def _restore(trainer: Trainer, folder: RunFolder, console: RunConsole, checkpoints: Checkpoints) -> Scores | None:
    """Scores from before the first step; None where the run never got that far."""
    if checkpoints.steps():
        before = trainer.restore(checkpoints, console)
        found = trainer.unsound()
        require(found is None, f"checkpoint step {trainer.progress.step}", "a state that can be trained on", found)
        folder.record_resume(trainer.progress.step)
        console.say(f"resumed {folder.path} at step {trainer.progress.step}")
        return before
    made = sum(record["kind"] == "train" for record in read_metrics(folder.metrics).records)
    require(made == 0, "checkpoints", f"at least one complete step in {folder.checkpoints}", f"none after {made} steps")
    folder.record_resume(0)
    console.say(f"resumed {folder.path}, which has no checkpoint yet: the warm start begins again")
    return None


def _writer(trainer: Trainer, folder: RunFolder, console: RunConsole, *, resumed: bool, begun: bool) -> MetricsWriter:
    """The log of a new run, or that of an old one up to where it goes on."""
    if not resumed:
        return MetricsWriter(folder)
    last = dict.fromkeys(PHASES, -1)
    if begun:
        step, evaluated = trainer.progress.step, trainer.progress.evaluated
        warm_start = trainer.config.warm_start.max_steps
        last = {"warm_start": warm_start, "train": step, "drift": step, "eval": evaluated, "held_out": evaluated}
    lines = len(read_metrics(folder.metrics).records)
    writer = MetricsWriter(folder, last)
    dropped = lines - len(read_metrics(folder.metrics).records)
    if dropped:
        console.say(f"dropped {dropped} lines of {folder.metrics.name}, of what is computed again")
    return writer
