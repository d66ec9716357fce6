"""Configurations on disk: each is read back unchanged, and an edit, a wrong type or a missing key is named."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from experiments.runs.config_file import load_config, save_config
from experiments.runs.files import digest_of_json
from experiments.runs.folder import RunFolder


@dataclass(frozen=True)
class Copying:
    length: int = 4


@dataclass(frozen=True)
class Adding:
    digits: int = 2


@dataclass(frozen=True)
class Optimizer:
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float | None = None


@dataclass(frozen=True)
class Config:
    optimizer: Optimizer = field(default_factory=Optimizer)
    task: Copying | Adding = field(default_factory=Adding)
    kind: Literal["grpo", "gspo"] = "grpo"
    steps: int = 10
    quiet: bool = False
    name: str = "nan"
    lengths: tuple[int, ...] = (8, 16)
    parent: Path = Path("runs")


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(tmp_path / "runs", "first")
    save_config(folder.config, Config())
    return folder


def rewrite(path, change):
    """Edits a JSON file, and seals config.json again, so that only the edit itself can be refused."""
    stored = json.loads(path.read_text())
    change(stored["config"])
    stored["sha256"] = digest_of_json(stored["config"])
    path.write_text(json.dumps(stored))


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(optimizer=Optimizer(clip=1.0), task=Copying(length=9), kind="gspo", quiet=True, lengths=()),
        Config(optimizer=Optimizer(learning_rate=math.inf, clip=-math.inf)),
    ],
)
def test_config_comes_back(run, config):
    save_config(run.config, config)
    loaded = load_config(run.config, Config)
    assert loaded == config
    assert type(loaded.task) is type(config.task)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda config: config.update(step=3), "unknown step$"),
        (lambda config: config["optimizer"].update(momentum=1), "config.optimizer: .*Optimizer, got unknown momentum"),
        (lambda config: config.pop("steps"), "config: .*none named steps"),
        (lambda config: config["optimizer"].pop("clip"), "none named clip"),
        (lambda config: config.update(steps=1.0), "config.steps: expected int, got 1.0"),
        (lambda config: config.update(steps=True), "config.steps: expected int, got True"),
        (lambda config: config.update(steps="7"), "config.steps: expected int, got '7'"),
        (lambda config: config.update(quiet=0), "config.quiet: expected bool, got 0"),
        (lambda config: config.update(name=None), "config.name: expected str, got None"),
        (lambda config: config.update(kind="ppo"), "config.kind: expected .*Literal.*, got 'ppo'"),
        (lambda config: config.update(lengths=[1, "2"]), "config.lengths: expected int, got '2'"),
        (lambda config: config.update(optimizer=[]), "config.optimizer: expected the fields of Optimizer"),
        (lambda config: config["optimizer"].update(betas=[0.9]), r"config.optimizer.betas: expected tuple"),
        (lambda config: config["optimizer"].update(learning_rate="fast"), "learning_rate: expected float, got 'fast'"),
        (
            lambda config: config["optimizer"].update(learning_rate=10**400),
            "expected a number that float64 holds, got 1000",
        ),
        (lambda config: config.update(task={"size": 1}), "config.task: .*Copying, got unknown size.*Adding"),
    ],
)
def test_config_that_does_not_fit_names_the_place(run, change, words):
    rewrite(run.config, change)
    with pytest.raises(ValueError, match=rf"^.*{words}.*\Z"):
        load_config(run.config, Config)


@dataclass(frozen=True)
class Listed:
    values: tuple[int, ...] = (1,)
    other: dict | None = None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Listed(values=[1, 2]), "returns unchanged"),
        (Listed(values=(np.int64(1),)), "got int64"),
        (Listed(values=("1",)), "expected int, got '1'"),
        (Listed(other={}), "config.other"),
    ],
)
def test_config_that_could_not_come_back_is_refused_at_the_start(tmp_path, config, words):
    with pytest.raises(ValueError, match=words):
        save_config(tmp_path / "config.json", config)
    assert not (tmp_path / "config.json").exists()
