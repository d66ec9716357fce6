"""GRPO and GSPO on a verifiable task, from scratch, on any machine.

    python -m experiments.grpo                    # two-digit addition, on a CPU
    python -m experiments.grpo --preset smollm2   # word problems, on a GPU
    python -m experiments.grpo --loss.name gspo --seed 1
    python -m experiments.grpo --task sorting --schedule.steps 300
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
from experiments.loop.resume import set_up_resume
from experiments.loop.run import Result, set_up
from experiments.options import typed_options, value_of
from experiments.presets import defaults_for
from experiments.processes import processes, start
from jaxlogp.errors import require


@dataclass(frozen=True)
class GrpoConfig(Config):
    """Options of a run or of a run to resume, and its processes."""

    resume: str | None = None
    """Run folder to resume, with its saved options.
    These may change, and are saved: --schedule.steps, --optimizer.learning-rate, --mesh, --rollout.mesh, --log-every.
    So may the sections checkpoint, drift, evaluation (all but --evaluation.kl) and guards. --quiet is not saved."""
    distributed: bool = False
    """Join the other processes of the run, all started with the same options (docs/scaling.md).
    SLURM and Open MPI start one per GPU and number them; elsewhere start one per host and set the three options below."""
    coordinator: str | None = None
    """host:port of process 0, with a free port."""
    num_processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Number of this process, from 0."""


def run_cli(arguments: Sequence[str] | None = None) -> Result:
    """Runs the command line; see `experiments.command_line` for its exit codes."""
    given = arguments_of(arguments)

    def run(config: GrpoConfig) -> Result:
        _join(config)
        typed = {field: value_of(config, field) for field in typed_options(given, Config)}
        if config.resume is not None:
            return set_up_resume(config.resume, typed).finish()
        return set_up(Config(**{field.name: getattr(config, field.name) for field in fields(Config)})).finish()

    return run_command(
        GrpoConfig,
        run,
        program="experiments.grpo",
        description=__doc__,
        arguments=given,
        default=lambda typed: GrpoConfig(**vars(defaults_for(typed))),
    )


def _join(config: GrpoConfig) -> None:
    """Joins the other processes, where there are any."""
    place = {"coordinator": config.coordinator, "num_processes": config.num_processes, "process_id": config.process_id}
    if config.distributed:
        start(**place)
        processes().require_same("command line", {"--resume": config.resume})
    for name, value in place.items():
        expected = "no value without --distributed"
        require(config.distributed or value is None, f"--{name.replace('_', '-')}", expected, value)
