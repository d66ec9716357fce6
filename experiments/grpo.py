"""GRPO and GSPO on a verifiable task, from scratch, on any machine.

    python -m experiments.grpo                                  # two-digit addition, a few minutes on two CPU cores
    python -m experiments.grpo --preset smollm2                 # a small language model, word problems, on a GPU
    python -m experiments.grpo --loss.name gspo --seed 1
    python -m experiments.grpo --task sorting --schedule.steps 300
    python -m experiments.grpo --resume runs/NAME --schedule.steps 1200
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m experiments.grpo --mesh data=2,tensor=4

A small decoder learns the task's format from examples until some of its sampled answers are right (the warm start),
then improves from its own samples: groups of completions per prompt, rewards from a verifier, group advantages, a
clipped policy loss with denominators over the whole step. Not supported: several processes, and large models.
"""

import tyro

from experiments.command_line import errors_in_one_line
from experiments.config import Config
from experiments.presets import defaults_for
from experiments.training.run import Result, set_up


def run_cli(arguments: list[str] | None = None) -> Result:
    """The command line: bad options and files give one line on stderr and exit code 2."""
    with errors_in_one_line():
        defaults = defaults_for(arguments)
    config = tyro.cli(Config, default=defaults, args=arguments, prog="python -m experiments.grpo", description=__doc__)
    with errors_in_one_line():
        return set_up(config).finish()


if __name__ == "__main__":
    run_cli()
