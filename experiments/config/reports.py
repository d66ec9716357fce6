"""Options of what a run measures and keeps as it goes: evaluation, drift, checkpoints."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EvaluationConfig:
    """Exact match on held-out prompts, sampled at temperature 1 and decoded greedily."""

    every: int = 100
    """Optimizer steps between two evaluations. 0: only before and after training."""
    num_prompts: int = 512
    """Held-out prompts."""
    kl: bool = False
    """Also report the KL of the policy to the initial one, on the sampled completions.
    Keeps a copy of the initial parameters, as --loss.kl-coefficient does."""


@dataclass(frozen=True)
class DriftConfig:
    """The report on how far apart sampler and trainer are, on the tokens that were sampled with the trainer's parameters."""

    every: int = 50
    """Optimizer steps between two reports, the first at step 1 or the first step with such tokens. 0: none.
    A report costs a forward pass over the documents of a step, or nothing with --rollout.rescore."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved."""

    every: int = 200
    """Optimizer steps between two checkpoints. 0: only at the end, and by time."""
    every_minutes: float = 10.0
    """Minutes after which a step ends with a checkpoint, whatever its number. 0: by steps alone."""
    keep: int = 2
    """Number of checkpoints kept on disk."""
