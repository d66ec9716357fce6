"""Supervised fine-tuning on the documents of a file, in the same loop as reinforcement learning.

    python -m experiments.sft --data.path F.jsonl --model.path DIRECTORY
    python -m experiments.sft --data.path F.jsonl --model.path DIRECTORY --lora.rank 16 --schedule.epochs 3
    python -m experiments.sft --resume runs/NAME
    srun python -m experiments.sft --distributed --mesh data=-1,fsdp=8 --data.path F.jsonl --model.path DIRECTORY

A line of the file is {"prompt": ..., "completion": ...}, or {"messages": [...]}, whose assistant turns are trained on. The
loss is the cross-entropy of all labels of a step, divided once by their number. About one document in ten is held out.
"""

if __name__ == "__main__":
    # Before the imports, which Ctrl-C ends in one line too.
    from experiments.entry import run_module

    run_module("experiments.sft")

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from experiments.command_line import arguments_of, run_command
from experiments.config import (
    SUPERVISED,
    CheckpointConfig,
    Config,
    GuardsConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from experiments.distributed import ProcessOptions
from experiments.loop.resume import set_up_resume
from experiments.loop.run import Result, set_up
from experiments.models.lora import LoraConfig
from experiments.options import typed_options, value_of
from jaxlogp.errors import require


@dataclass(frozen=True)
class SftDataConfig:
    """Documents to learn from."""

    path: str | None = None
    """File with one JSON object a line: prompt and completion, or messages (docs/sft.md)."""


@dataclass(frozen=True)
class SftEvaluationConfig:
    """Loss and perplexity of held-out documents."""

    every: int = 100
    """Optimizer steps between evaluations. 0: only before and after training."""
    num_prompts: int = 512
    """Largest number of held-out documents."""


@dataclass(frozen=True)
class SftOptions:
    """Options of a supervised run."""

    data: SftDataConfig = field(default_factory=SftDataConfig)
    resume: str | None = None
    """Run folder to resume, with its saved options. These may change, and are saved: --schedule.steps,
    --optimizer.learning-rate, --mesh, --log-every, and the sections checkpoint, evaluation and guards."""
    seed: int = 0
    """Seed of parameters and of the order of documents, which are shuffled anew in every pass."""
    out: str = "runs"
    """Folder in which run folders are made."""
    name: str | None = None
    """Name of the run folder. None: composed from file, seed and time."""
    mesh: str = "data=1,fsdp=1,sequence=1,tensor=1"
    """Device mesh: data and fsdp split the documents, sequence the tokens of a row, tensor vocabulary and features."""
    invariant: bool = False
    """Bitwise equal on every mesh; several times slower."""
    quiet: bool = False
    """Print only warnings and the final scores."""
    log_every: int | None = None
    """Steps between printed rows, in a pipe or a file. None: about 40 rows per run."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(epochs=1))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: SftEvaluationConfig = field(default_factory=SftEvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)


@dataclass(frozen=True)
class SftConfig(ProcessOptions, SftOptions):
    """Options of a supervised run, and its processes."""


def config_of(options: SftOptions) -> Config:
    """Returns the options as those of a run."""
    require(options.data.path is not None, "--data.path", "a file, or --resume", "none")
    given = {each.name: getattr(options, each.name) for each in dataclasses.fields(SftOptions)}
    del given["data"], given["resume"]
    evaluation = dataclasses.replace(Config().evaluation, **vars(options.evaluation))
    return Config(**{**given, "task": f"{SUPERVISED}{options.data.path}", "evaluation": evaluation})


def run_cli(arguments: Sequence[str] | None = None) -> Result:
    given = arguments_of(arguments)

    def run(options: SftConfig) -> Result:
        options.join(options.resume)
        if options.resume is None:
            return set_up(config_of(options)).finish()
        require(
            options.data.path is None, "--data.path", "no value with --resume, whose run has its own", options.data.path
        )
        typed = {name: value_of(options, name) for name in typed_options(given, SftOptions) if name != "resume"}
        return set_up_resume(options.resume, typed).finish()

    return run_command(SftConfig, run, program="experiments.sft", description=__doc__, arguments=given)
