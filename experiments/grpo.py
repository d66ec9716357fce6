"""GRPO and GSPO on a verifiable task, from scratch, on any machine.

    python -m experiments.grpo                    # two-digit addition, on a CPU
    python -m experiments.grpo --preset smollm2   # word problems, on a GPU
    python -m experiments.grpo --loss.name gspo --seed 1
    python -m experiments.grpo --task addition:3 --schedule.steps 300
    python -m experiments.grpo --resume runs/NAME --schedule.steps 1200
    python -m experiments.grpo --mesh data=2,tensor=4
    srun python -m experiments.grpo --distributed --mesh data=-1,fsdp=8

A small decoder learns the task's format from examples until some of its sampled answers are right (the warm start),
then improves from its own samples: groups of completions per prompt, rewards from a verifier, group advantages, a
clipped policy loss with denominators over the whole step.
"""

if __name__ == "__main__":
    # Before the imports, which Ctrl-C ends in one line too.
    from experiments.entry import run_module

    run_module("experiments.grpo")

from collections.abc import Sequence
from dataclasses import dataclass, fields

from experiments.command_line import arguments_of, run_command
from experiments.config import Config
from experiments.distributed import ProcessOptions
from experiments.loop.resume import set_up_resume
from experiments.loop.run import Result, set_up
from experiments.options import typed_options, value_of
from experiments.presets import defaults_for


@dataclass(frozen=True)
class GrpoConfig(ProcessOptions, Config):
    """Options of a run or of a run to resume, and its processes."""

    resume: str | None = None
    """Run folder to resume, with its saved options.
    These may change, and are saved: --schedule.steps, --optimizer.learning-rate, --mesh, --rollout.mesh, --rollout.rows,
    --log-every. So may the sections checkpoint, drift, evaluation (all but --evaluation.kl) and guards.
    --quiet is not saved."""


def run_cli(arguments: Sequence[str] | None = None) -> Result:
    given = arguments_of(arguments)

    def run(config: GrpoConfig) -> Result:
        config.join(config.resume)
        typed = {name: value_of(config, name) for name in typed_options(given, Config)}
        if config.resume is not None:
            return set_up_resume(config.resume, typed).finish()
        return set_up(Config(**{each.name: getattr(config, each.name) for each in fields(Config)})).finish()

    return run_command(
        GrpoConfig,
        run,
        program="experiments.grpo",
        description=__doc__,
        arguments=given,
        default=lambda typed: GrpoConfig(**vars(defaults_for(typed))),
    )
