"""A run from its options to its result: the entry point from Python, also called by the command line."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flax import nnx

from experiments.config import Config, RewardConfig
from experiments.models.dtype_choice import DtypeChoice, dtype_here
from experiments.models.huggingface.export import write_files
from experiments.models.pretrained import small_files
from experiments.runs.checkpoint import complete_steps
from experiments.runs.config_file import load_config, save_config
from experiments.runs.console import HeldOut, RunConsole
from experiments.runs.files import write_json
from experiments.runs.folder import RunFolder, read_metrics, run_and_step
from experiments.runs.identity import require_settings
from experiments.runs.lock import RunLock
from experiments.runs.plots import plot_runs
from experiments.runs.stops import Stopped
from experiments.tasks import Reward, Rewards, Task
from experiments.tasks.configured import own_task, task_for
from experiments.tasks.rewards import rewards_of
from experiments.training.loop import run_to_end
from experiments.training.origin import with_own_model
from experiments.training.trainer import Scores, Trainer
from jaxlogp.errors import require

MAY_CHANGE_ON_RESUME = ("resume", "quiet", "schedule")


RewardPairs = Sequence[tuple[Reward, float]]
"""Functions with their weights."""


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
      before: held-out exact match after the warm start.
      after: held-out exact match at the end.
      run: the run folder.
      metrics: every record of metrics.jsonl.
      trainer: the trainer, with parameters and optimizer state.
    """

    before: Scores
    after: Scores
    run: RunFolder
    metrics: list[dict[str, Any]]
    trainer: Trainer

    @property
    def params(self) -> nnx.State:
        """The trained parameters."""
        return self.trainer.state.params


@dataclass(frozen=True)
class Run:
    """A run that is set up but has not begun; :meth:`finish` runs it. It holds the lock of its folder.

    Attributes:
      trainer: without parameters where the run goes on from a checkpoint.
      folder: of the run.
      lock: of the folder.
      resumed: whether the run goes on.
      dtype: of activations.
      step: of the checkpoint to go on from; None for the newest.
    """

    trainer: Trainer
    folder: RunFolder
    lock: RunLock
    resumed: bool
    dtype: DtypeChoice
    step: int | None = None

    def finish(self) -> Result:
        """Warm start (or resume), evaluation, reinforcement learning, evaluation; writes the run folder as it goes.

        Raises:
          Stopped: a signal, or a guard; what was done is saved, and the curves are drawn.
        """
        with self.lock:
            return self._finish()

    def _finish(self) -> Result:
        started, trainer = time.perf_counter(), self.trainer
        console = RunConsole(trainer.config.quiet)
        for warning in trainer.warnings:
            console.warn(warning)
        console.say(f"dtype of activations and head: {self.dtype}")
        try:
            before, after = run_to_end(trainer, self.folder, console, resumed=self.resumed, step=self.step)
        except Stopped:
            _draw_curves(self.folder)
            raise
        return _finish(self, console, before, after, time.perf_counter() - started)


def set_up(
    config: Config,
    *,
    task: Task | None = None,
    reward: Reward | RewardPairs | Rewards | None = None,
    model: nnx.Module | None = None,
) -> Run:
    """Creates trainer and run folder; nothing is trained yet. Arguments and errors are those of :func:`train`."""
    require_settings()
    rewards = None if reward is None else rewards_of(reward)
    alone = rewards is None or config.reward == RewardConfig()
    require(alone, "--reward", "no other options where train is given a reward", "other options")
    if config.resume is None:
        config = with_own_model(config, model)
        # What a run began with it keeps, whatever device it is resumed on.
        dtype = dtype_here(config.model.dtype, invariant=config.invariant)
        config = config.resolved()
        task = _task_of(config, task)
        config = _with_lasting_base(dataclasses.replace(config, task=task.name))
        trainer = Trainer(config, task, rewards, model)
        folder = RunFolder.create(config.out, config.name or _default_name(config))
        lock = RunLock(folder.lock)
        if trainer.origin.pretrained is not None:
            # All but the weights, so that the run can be resumed, scored and exported without the original.
            write_files(folder.model, small_files(trainer.origin.pretrained))
        save_config(folder.config, config)
        return Run(trainer, folder, lock, False, dtype)
    path, step = run_and_step(config.resume)
    folder = RunFolder.open(path)
    lock = RunLock(folder.lock)
    config = _resumed_config(config, stored_config(folder))
    task = _task_of(config, task)
    require(task.name == config.task, "task", f"the task of the run, {config.task!r}", repr(task.name))
    dtype = DtypeChoice(config.model.dtype, "as the run began")
    # A run that ended in its warm start has no parameters to restore, and draws or reads its first ones again.
    restored = bool(complete_steps(folder.checkpoints))
    return Run(Trainer(config, task, rewards, model, restored=restored), folder, lock, True, dtype, step)


def train(
    config: Config,
    *,
    task: Task | None = None,
    reward: Reward | RewardPairs | Rewards | None = None,
    model: nnx.Module | None = None,
) -> Result:
    """Trains a policy and writes a run folder.

    Args:
      config: the options, as on the command line.
      task: your own task (see `experiments.tasks.Task`); None takes the one that ``config.task`` names.
      reward: maps an example and its completion to a finite number; or pairs of such a function and its weight, whose
        weighted sum is the reward; None takes those that ``config.reward`` names. Held-out scores are the task's verdict
        whatever the reward.
      model: your own Flax model (see `experiments.models.protocol.Model`); None takes the decoder that ``config.model``
        describes. It stays as it is: ``nnx.update(model, result.params)`` puts the trained parameters into it.

    A run must be resumed with the task, reward and model that it began with.

    Returns:
      Scores before and after, the run folder, the log, and the trainer.

    Raises:
      ValueError: an option, a file, a mesh or a run folder that cannot be used; one line that names it.
      Stopped: the run ended early, by a signal or a guard; one line that says what was kept.
    """
    return set_up(config, task=task, reward=reward, model=model).finish()


def stored_config(folder: RunFolder) -> Config:
    """The options of a run. A model from disk is the run's own copy, whatever became of the original: checkpoints hold all
    of its parameters. With adapters they hold these alone, and the base is read where it was; so is a model of which no
    checkpoint has been written.

    Raises:
      ValueError: a damaged config.json.
    """
    config = load_config(folder.config, Config)
    if config.model.path is None or config.lora.rank or not complete_steps(folder.checkpoints):
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder.model)))


def _with_lasting_base(config: Config) -> Config:
    """The options with an absolute path: a resume before the first checkpoint needs the model on disk again, and with
    adapters every resume."""
    path = config.model.path
    if path is None or not Path(path).exists():
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(Path(path).resolve())))


def _task_of(config: Config, task: Task | None) -> Task:
    return task_for(config) if task is None else own_task(task, config.data)


def _finish(run: Run, console: RunConsole, before: Scores, after: Scores, seconds: float) -> Result:
    records, trainer = _draw_curves(run.folder), run.trainer
    head = trainer.sums.head_run
    assert head is not None, "traced at the start"
    facts = {
        "task": trainer.task.name,
        "loss": trainer.config.loss.name,
        "mesh": trainer.config.mesh,
        "optimizer steps": trainer.progress.step,
        "documents seen": trainer.progress.documents_seen,
        "head": "not run"
        if head is None
        else f"{head.path}, engine {head.engine} ({head.reason}), gradient {head.gradient}",
        "attention": f"{trainer.attention_run.implementation} ({trainer.attention_run.reason})",
        "sampler": trainer.sampler,
        "dtype": str(run.dtype),
        "seconds": round(seconds, 1),
    }
    scores = {"before": before._asdict(), "after": after._asdict()}
    write_json(run.folder.summary, {**facts, **scores})
    held_out = {
        "temperature 1": HeldOut(before.sampled, after.sampled),
        "greedy": HeldOut(before.greedy, after.greedy),
    }
    console.summary(facts, run.folder.path, held_out)
    return Result(before, after, run.folder, records, trainer)


def _draw_curves(folder: RunFolder) -> list[dict[str, Any]]:
    """Draws what has been logged, and returns it."""
    records = read_metrics(folder.metrics).records
    plot_runs([records], folder.curves)
    return records


def _default_name(config: Config) -> str:
    task = "".join(c if c.isalnum() or c in "-_." else "-" for c in config.task).strip(".-")[-40:]
    task = task if config.preset is None else f"{config.preset}-{task}"
    return f"{task}-{config.loss.name}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def _resumed_config(given: Config, stored: Config) -> Config:
    plain = Config()
    for field in dataclasses.fields(Config):
        if field.name not in MAY_CHANGE_ON_RESUME:
            same = getattr(given, field.name) == getattr(plain, field.name)
            expected = "to come from the run folder (only --schedule.steps and --quiet may be given with --resume)"
            require(same, f"--{field.name.replace('_', '-')}", expected, "another value")
    steps = given.schedule.steps
    rest = dataclasses.replace(given.schedule, steps=plain.schedule.steps) == plain.schedule
    require(rest, "--schedule", "no option but --schedule.steps with --resume", "other options")
    if steps != plain.schedule.steps:
        stored = dataclasses.replace(stored, schedule=dataclasses.replace(stored.schedule, steps=steps))
    return dataclasses.replace(stored, quiet=given.quiet)
