"""Scores a run's newest checkpoint, or a model on disk, on held-out prompts.

python -m experiments.evaluate runs/NAME
python -m experiments.evaluate runs/NAME --num-prompts 1000 --samples 8 --mesh data=2
python -m experiments.evaluate --model DIRECTORY --task word_problems
"""

if __name__ == "__main__":
    # Before the imports, which Ctrl-C ends in one line too.
    from experiments.entry import run_module

    run_module("experiments.evaluate")

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from experiments.command_line import run_command
from experiments.config import Config, DataConfig, ModelConfig
from experiments.loop.evaluation import Scores
from experiments.loop.inference import make_inference
from experiments.loop.load import LoadedRun, load_run
from experiments.options import AtLeast, check_ranges, option_name
from experiments.tasks import Task
from jaxlogp.errors import describe, require


@dataclass(frozen=True)
class EvaluateConfig:
    """Options of an evaluation."""

    run: tyro.conf.Positional[str | None] = None
    """Run folder."""
    model: str | None = None
    """Hugging Face directory or GGUF file to score instead of a run."""
    chat_template: bool = True
    """With --model: apply its chat template to prompts."""
    task: str | None = None
    """With --model: the task."""
    data: DataConfig = field(default_factory=DataConfig)
    max_new_tokens: Annotated[int | None, AtLeast(1)] = None
    """Longest completion in tokens. None: that of the run, or 256 with --model."""
    num_prompts: Annotated[int | None, AtLeast(1)] = None
    """Number of held-out prompts. None: that of the run."""
    samples: Annotated[int | None, AtLeast(1)] = None
    """Completions of each prompt at temperature 1. None: those of the run, or 1 with --model."""
    mesh: str | None = None
    """Device mesh. None: that of the run."""


def load(config: EvaluateConfig, task: Task | None = None) -> LoadedRun:
    if config.run is None:
        require(config.model is not None, "run", "a run folder, or --model", "neither")
        require(task is None, "task", "none of your own with --model (--task module:name)", describe(task))
        given = {} if config.task is None else {"task": config.task}
        stored = Config(
            model=ModelConfig(path=config.model, chat_template=config.chat_template), data=config.data, **given
        )
        try:
            inference = make_inference(_changed(stored, config))
        except ValueError as error:
            # The same option has another name here.
            raise ValueError(str(error).replace("--model.no-chat-template", "--no-chat-template")) from error
        return LoadedRun(inference, inference.backend.take_params(), 0)
    expected = "no value together with a run, which has its own"
    for name in ("model", "task"):
        value = getattr(config, name)
        require(value is None, f"--{name}", expected, value)
    require(config.chat_template, "--no-chat-template", expected, "the option")
    require(config.data == DataConfig(), "--data", expected, "other options")
    return load_run(config.run, lambda stored: _changed(stored, config), task=task)


def _changed(stored: Config, config: EvaluateConfig) -> Config:
    # Refused by the names that this command has for them.
    check_ranges(config)
    expected = "no value in supervised learning, which samples nothing"
    for name in ("max_new_tokens", "samples"):
        value = getattr(config, name)
        require(not stored.supervised or value is None, option_name(name), expected, value)
    asked = {name: getattr(config, name) for name in ("num_prompts", "samples") if getattr(config, name) is not None}
    stored = dataclasses.replace(stored, evaluation=dataclasses.replace(stored.evaluation, **asked))
    if config.max_new_tokens is not None:
        rollout = dataclasses.replace(stored.rollout, max_new_tokens=config.max_new_tokens)
        stored = dataclasses.replace(stored, rollout=rollout)
    if config.mesh is None:
        return stored
    return dataclasses.replace(stored, mesh=config.mesh)


def main(config: EvaluateConfig, task: Task | None = None) -> Scores:
    """Loads and scores a run, or a model on disk; `task` is your own, if the run began with one."""
    inference, params, step = load(config, task)
    scores = inference.evaluation.of(inference.policy_of(params)).scores
    print(f"step {step}, {inference.evaluation.size}")
    for name, score in scores.named().items():
        print(f"{name}: {score:.3f}")
    return scores


def run_cli(arguments: list[str] | None = None) -> Scores:
    return run_command(EvaluateConfig, main, program="experiments.evaluate", description=__doc__, arguments=arguments)
