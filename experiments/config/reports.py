"""Options of what a run measures and keeps as it goes: evaluation, drift, checkpoints."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EvaluationConfig:
    """Exact match on held-out prompts, sampled at temperature 1 and decoded greedily."""

    every: int = 100
    """Optimizer steps between two evaluations; 0 evaluates only before and after."""
    num_prompts: int = 512
    """Held-out prompts."""
    kl: bool = False
    """Also the KL of the policy to the one that training began with, on the sampled completions: keeps a copy of the first
    parameters, as loss.kl-coefficient does."""


@dataclass(frozen=True)
class DriftConfig:
    """The report on how far apart sampler and trainer are, on the tokens that were sampled with the trainer's parameters."""

    every: int = 50
    """Optimizer steps between two reports, the first at step 1; 0 makes none. One costs a forward pass over the documents of
    a step, or nothing where rollout.rescore has made it. It waits for a step with such tokens."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved."""

    every: int = 200
    """Optimizer steps between two checkpoints; 0 saves only at the end, and by time."""
    every_minutes: float = 10.0
    """Minutes after which a step ends with a checkpoint, whatever its number; 0 saves by steps alone."""
    keep: int = 2
    """Number of checkpoints kept on disk."""
