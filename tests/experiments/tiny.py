"""A run small enough for tests: which of two digits is larger, with a decoder of a few thousand parameters, in seconds."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.config import Config, ModelConfig
from experiments.loop import found, plan, run
from experiments.loop.run_parts import UserParts
from experiments.options import replaced

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
TINY = replaced(
    Config(task="comparison:1", quiet=True, model=ModelConfig(**SIZES, tie_embeddings=False)),
    {
        "warm_start.max_steps": 12, "warm_start.batch_size": 32, "warm_start.learning_rate": 1e-2,
        "warm_start.check_every": 12, "warm_start.target": 1.0, "rollout.prompts_per_rollout": 16,
        "rollout.num_generations": 4, "schedule.steps": 3, "schedule.docs_per_step": 64, "schedule.rows": 16,
        "schedule.row_length": 32, "optimizer.learning_rate": 1e-3, "optimizer.warmup_steps": 2, "evaluation.every": 0,
        "evaluation.num_prompts": 16, "drift.every": 0, "checkpoint.every": 0,
    },
)  # fmt: skip


def tiny(out: Path, name: str, **changes) -> Config:
    """TINY with changes; a nested section is given as a dictionary of its fields."""
    # With --invariant a micro-batch is a leaf.
    rows = None if changes.get("invariant") else TINY.schedule.rows
    base = dataclasses.replace(TINY, schedule=dataclasses.replace(TINY.schedule, rows=rows))
    sections = {key: value for key, value in changes.items() if isinstance(value, dict)}
    changes |= {key: dataclasses.replace(getattr(base, key), **value) for key, value in sections.items()}
    return dataclasses.replace(base, out=str(out), name=name, **changes)


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


def parity(example, text):
    """A reward that an untrained model earns about half of the time."""
    return float(ord(text[0]) % 2) if text else 0.0


def refusal(capsys, command, arguments) -> str:
    """The line with which a command refuses its arguments, without the word "error"."""
    with pytest.raises(SystemExit) as stopped:
        command.run_cli(arguments)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    return error.removeprefix("error: ").strip()
