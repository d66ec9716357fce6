"""A run small enough for tests: which of two digits is larger, with a decoder of a few thousand parameters, in seconds."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from experiments.config import (
    CheckpointConfig,
    Config,
    DriftConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    ScheduleConfig,
    WarmStartConfig,
)
from experiments.loop import found, plan, run
from experiments.loop.run_parts import UserParts

TINY = Config(
    task="comparison:1",
    quiet=True,
    model=ModelConfig(
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        tie_embeddings=False,
    ),
    warm_start=WarmStartConfig(max_steps=12, batch_size=32, learning_rate=1e-2, check_every=12, target=1.0),
    rollout=RolloutConfig(prompts_per_rollout=16, num_generations=4),
    schedule=ScheduleConfig(steps=3, docs_per_step=64, rows=16, row_length=32),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2),
    evaluation=EvaluationConfig(every=0, num_prompts=16),
    drift=DriftConfig(every=0),
    checkpoint=CheckpointConfig(every=0),
)


def tiny(out: Path, name: str, **changes) -> Config:
    """TINY with changes; a nested section is given as a dictionary of its fields."""
    # With --invariant a micro-batch is a leaf.
    rows = None if changes.get("invariant") else TINY.schedule.rows
    base = dataclasses.replace(TINY, schedule=dataclasses.replace(TINY.schedule, rows=rows))
    nested = {
        key: dataclasses.replace(getattr(base, key), **value) if isinstance(value, dict) else value
        for key, value in changes.items()
    }
    return dataclasses.replace(base, out=str(out), name=name, **nested)


def train_records(result) -> list[dict]:
    """The records of the optimizer steps."""
    return [record for record in result.metrics if record["kind"] == "train"]


def assert_same_state(result, other) -> None:
    """The learners of both runs have the same bits."""
    jax.tree.map(np.testing.assert_array_equal, result.setup.learner.state, other.setup.learner.state)


def contents(folder) -> dict[str, bytes | None]:
    """All that is in a run folder, but for the lock, which says who has it: bytes of files, None of folders."""
    found = {str(path.relative_to(folder.path)): path for path in folder.path.rglob("*") if path != folder.lock}
    return {name: path.read_bytes() if path.is_file() else None for name, path in found.items()}


def set_up_without_programs(monkeypatch):
    """Returns what sets up runs for real, up to what a run consists of, which a stand-in replaces."""
    monkeypatch.setattr(found, "assemble", lambda *given, **options: None)
    monkeypatch.setattr(plan, "say_memory", lambda *given, **options: None)

    def begin(config, **own):
        begun = run.set_up(config, UserParts(**own))
        begun.lock.release()
        return begun

    return begin
