"""Scores the newest checkpoint of a run on held-out prompts.

python -m experiments.evaluate runs/NAME
python -m experiments.evaluate runs/NAME --num-prompts 1000 --mesh data=2
"""

import dataclasses
from dataclasses import dataclass

import tyro

from experiments.command_line import errors_in_one_line
from experiments.config import Config
from experiments.runs.checkpoint import Checkpoints
from experiments.runs.config_file import load_config
from experiments.runs.console import RunConsole
from experiments.runs.folder import RunFolder
from experiments.training.trainer import Scores, Trainer


@dataclass(frozen=True)
class EvaluateConfig:
    """Options of an evaluation."""

    run: tyro.conf.Positional[str]
    """Run folder."""
    num_prompts: int | None = None
    """Held-out prompts; None takes the run's own number."""
    mesh: str | None = None
    """Device mesh; None takes the run's own."""


def load(config: EvaluateConfig) -> Trainer:
    """The trainer of a run with its newest checkpoint.

    Raises:
      ValueError: no run folder, no intact checkpoint, or an option out of range.
    """
    folder = RunFolder.open(config.run)
    stored = load_config(folder.config, Config)
    if config.num_prompts is not None:
        evaluation = dataclasses.replace(stored.evaluation, num_prompts=config.num_prompts)
        stored = dataclasses.replace(stored, evaluation=evaluation)
    if config.mesh is not None:
        stored = dataclasses.replace(stored, mesh=config.mesh)
    trainer = Trainer(stored)
    with Checkpoints(folder.checkpoints, stored.checkpoint.keep) as checkpoints:
        trainer.restore(checkpoints, RunConsole())
    return trainer


def main(config: EvaluateConfig) -> Scores:
    """Loads and scores a run. Raises ValueError where :func:`load` does."""
    return _report(load(config))


def _report(trainer: Trainer) -> Scores:
    scores = trainer.evaluate()
    print(f"step {trainer.progress.step}, {trainer.config.evaluation.num_prompts} held-out prompts")
    print(f"held-out exact match (temperature 1): {scores.sampled:.3f}")
    print(f"held-out exact match (greedy): {scores.greedy:.3f}")
    return scores


def run_cli(arguments: list[str] | None = None) -> Scores:
    """The command line: bad options and files give one line on stderr and exit code 2."""
    config = tyro.cli(EvaluateConfig, args=arguments, prog="python -m experiments.evaluate", description=__doc__)
    with errors_in_one_line():
        trainer = load(config)
    return _report(trainer)


if __name__ == "__main__":
    run_cli()
