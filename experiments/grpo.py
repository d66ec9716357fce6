"""GRPO and GSPO on a verifiable task, from nothing, on any machine.

    python -m experiments.grpo                                  # two-digit addition, a few minutes on two CPU cores
    python -m experiments.grpo --loss.kind gspo --seed 1
    python -m experiments.grpo --task sorting --schedule.steps 300
    python -m experiments.grpo --resume runs/NAME --schedule.steps 1200
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m experiments.grpo --mesh data=2,tensor=4

A small decoder learns the task's format from examples until some of its sampled answers are right (the warm start), then
improves from its own samples: groups of completions per prompt, rewards by a verifier, group advantages, clipped policy
loss with denominators of the whole step. What it leaves out: a reference model, several processes, and large models.
"""

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import tyro
from flax import nnx

from experiments.command_line import errors_in_one_line
from experiments.config import Config
from experiments.runs.checkpoint import Checkpoints
from experiments.runs.config_file import load_config, save_config, write_json
from experiments.runs.console import HeldOut, RunConsole
from experiments.runs.folder import MetricsWriter, RunFolder, read_metrics
from experiments.runs.plots import plot_curves
from experiments.training.trainer import Scores, Trainer
from jaxlogp.errors import require

MAY_CHANGE_ON_RESUME = ("resume", "quiet", "schedule")


@dataclass(frozen=True)
class Result:
    """What a run came to.

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
    """A run that is set up and has not begun."""

    trainer: Trainer
    folder: RunFolder
    resumed: bool


def set_up(config: Config) -> Run:
    """Makes trainer and run folder; nothing is trained yet.

    Raises:
      ValueError: an option, a file, a mesh or a run folder that will not do; one line that names it.
    """
    if config.resume is None:
        # What a run began with it keeps, whatever device it is resumed on.
        config = dataclasses.replace(config, model=config.model.resolved(config.invariant))
        trainer = Trainer(config)
        folder = RunFolder.create(config.out, config.name or _default_name(config))
        save_config(folder.config, config)
        return Run(trainer, folder, False)
    folder = RunFolder.open(config.resume)
    config = _resumed_config(config, load_config(folder.config, Config))
    return Run(Trainer(config), folder, True)


def main(config: Config) -> Result:
    """Sets up and runs; see the module for what that does. Raises ValueError where :func:`set_up` does."""
    return train(set_up(config))


def train(run: Run) -> Result:
    """Warm start (or resume), evaluation, reinforcement learning, evaluation; writes the run folder as it goes."""
    started = time.perf_counter()
    config, trainer = run.trainer.config, run.trainer
    console = RunConsole(config.quiet)
    with Checkpoints(run.folder.checkpoints, config.checkpoint.keep) as checkpoints:
        if run.resumed:
            before = trainer.restore(checkpoints, console)
            restored = trainer.progress.step
            run.folder.record_resume(restored)
            steps = {"warm_start": config.warm_start.max_steps, "train": restored, "eval": restored}
            writer = MetricsWriter(run.folder, {**steps, "held_out": restored})
            console.say(f"resumed {run.folder.path} at step {restored}")
        else:
            writer = MetricsWriter(run.folder)
            before = None
        with writer as metrics:
            if before is None:
                trainer.warm_start(console, metrics)
                before = trainer.evaluate(metrics)
                trainer.save(checkpoints, before)
                console.say(f"after the warm start: sampled {before.sampled:.3f}, greedy {before.greedy:.3f}")
            after = _steps(trainer, console, metrics, checkpoints, before)
    return _finish(run, console, before, after, time.perf_counter() - started)


def _steps(
    trainer: Trainer, console: RunConsole, metrics: MetricsWriter, checkpoints: Checkpoints, before: Scores
) -> Scores:
    config, progress = trainer.config, trainer.progress
    first, scores, saved = progress.step, before, progress.step
    label = config.loss.kind.upper()
    with console.progress(label, config.schedule.steps, done=first, lines=False) as advance:
        exhausted = False
        while progress.step < config.schedule.steps and not exhausted:
            values, exhausted = trainer.train_step()
            if values is None:
                break
            step = progress.step
            metrics.write(step, "train", values)
            console.step(step, values)
            if not values["update_applied"]:
                console.warn(f"step {step}: loss or gradient is not finite, the update was not applied")
            advance()
            last = step == config.schedule.steps or exhausted
            if last or (config.evaluation.every and step % config.evaluation.every == 0):
                scores = trainer.evaluate(metrics)
                console.say(f"held-out: sampled {scores.sampled:.3f}, greedy {scores.greedy:.3f}")
            if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
                trainer.save(checkpoints, before)
                saved = step
    if exhausted:
        console.say(f"the training data ended after step {progress.step}")
    if progress.step == first or progress.step != saved:
        # The data ended exactly between two steps, or there was nothing left to do.
        scores = trainer.evaluate()
        if progress.step != saved:
            trainer.save(checkpoints, before)
    return scores


def _finish(run: Run, console: RunConsole, before: Scores, after: Scores, seconds: float) -> Result:
    log = read_metrics(run.folder.metrics)
    plot_curves(log.records, run.folder.curves)
    trainer = run.trainer
    head = trainer.step_fn.head_run
    facts = {
        "task": trainer.task.name,
        "loss": trainer.config.loss.kind,
        "mesh": trainer.config.mesh,
        "optimizer steps": trainer.progress.step,
        "documents seen": trainer.progress.documents_seen,
        "head": "not run" if head is None else f"{head.path}, engine {head.engine} ({head.reason})",
        "seconds": round(seconds, 1),
    }
    scores = {"before": before._asdict(), "after": after._asdict()}
    write_json(run.folder.summary, {**facts, **scores})
    held_out = {
        "temperature 1": HeldOut(before.sampled, after.sampled),
        "greedy": HeldOut(before.greedy, after.greedy),
    }
    console.summary(facts, run.folder.path, held_out)
    return Result(before, after, run.folder, log.records, trainer)


def _default_name(config: Config) -> str:
    task = "".join(c if c.isalnum() or c in "-_." else "-" for c in config.task).strip(".-")[-40:]
    return f"{task}-{config.loss.kind}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def _resumed_config(given: Config, stored: Config) -> Config:
    plain = Config()
    for field in dataclasses.fields(Config):
        if field.name not in MAY_CHANGE_ON_RESUME:
            same = getattr(given, field.name) == getattr(plain, field.name)
            expected = "to come from the run folder (only --schedule.steps and --quiet go with --resume)"
            require(same, f"--{field.name.replace('_', '-')}", expected, "another value")
    steps = given.schedule.steps
    rest = dataclasses.replace(given.schedule, steps=plain.schedule.steps) == plain.schedule
    require(rest, "--schedule", "nothing but --schedule.steps beside --resume", "other options")
    if steps != plain.schedule.steps:
        stored = dataclasses.replace(stored, schedule=dataclasses.replace(stored.schedule, steps=steps))
    return dataclasses.replace(stored, quiet=given.quiet)


def run_cli(arguments: list[str] | None = None) -> Result:
    """The command line: bad options and files end in one line on stderr and exit code 2."""
    config = tyro.cli(Config, args=arguments, prog="python -m experiments.grpo", description=__doc__)
    with errors_in_one_line():
        run = set_up(config)
    return train(run)


if __name__ == "__main__":
    run_cli()
