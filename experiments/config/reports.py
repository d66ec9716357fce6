"""Options of measurements and saves during a run: evaluation, drift, checkpoints."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EvaluationConfig:
    """Exact match on held-out prompts, sampled at temperature 1 and decoded greedily."""

    every: int = 100
    """Optimizer steps between evaluations. 0: only before and after training."""
    num_prompts: int = 512
    """Number of held-out prompts."""
    kl: bool = False
    """Report the KL of the policy to the initial one as well, on the sampled completions.
    Keeps a copy of the initial parameters, as --loss.kl-coefficient does."""


@dataclass(frozen=True)
class DriftConfig:
    """Report on the distance between sampler and trainer, on tokens that were sampled with the trainer's parameters."""

    every: int = 50
    """Optimizer steps between reports, the first at step 1 or the first step with such tokens. 0: none.
    A report costs a forward pass over the documents of a step, or nothing with --rollout.rescore."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Times at which the run is saved."""

    every: int = 200
    """Optimizer steps between checkpoints. 0: only at the end, and by time."""
    every_minutes: float = 10.0
    """Minutes since the last checkpoint after which a step ends with one. 0: by steps alone."""
    keep: int = 2
    """Number of checkpoints kept on disk."""
