"""A run cannot become another one in silence: own tasks, rewards and models, and the files of a model from disk."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from experiments import evaluate
from experiments.config import Config, ModelConfig, RolloutConfig
from experiments.loop import resume, run, run_parts
from experiments.loop.load import load_model
from experiments.loop.run_parts import UserParts
from experiments.runs.config_file import load_config, save_config
from experiments.runs.folder import RunFolder
from experiments.tasks.arithmetic import Addition
from tests.experiments.tiny import set_up_without_programs, tiny
from tests.experiments.tiny_directory import write_tiny_directory


class OwnTask(Addition):
    """Goes by the name of a built-in task, and has another verdict."""

    def verify(self, example, completion):
        return float(completion != example.answer)


def mine(example, completion):
    return 1.0


def other(example, completion):
    return 0.0


@pytest.fixture
def set_up(monkeypatch):
    begin = set_up_without_programs(monkeypatch)
    return lambda config, **own: begin(config, **own).folder


def resumed(folder, **own):
    begun = resume.set_up_resume(str(folder.path), {}, UserParts(**own))
    begun.lock.release()
    return begun


ONE = [(mine, 1.0)]


MINE = "reward: expected your own reward mine (weight 1), as the run began (from Python: reward=), got"
DEFAULT = "expected the options' {0}, as the run began, got your own {0}"


@pytest.mark.parametrize(
    "began, goes_on, sentence",
    [
        ({"reward": mine}, {}, f"{MINE} none"),
        ({}, {"reward": mine}, f"reward: {DEFAULT.format('reward')} mine (weight 1)"),
        ({"reward": ONE}, {"reward": other}, f"{MINE} your own reward other"),
        ({"reward": ONE}, {"reward": [(mine, 1.0 + 1e-9)]}, f"{MINE} your own reward mine (weight 1.000000001)"),
        (
            {"task": OwnTask(size=1)},
            {},
            "task: expected your own task OwnTask, as the run began (from Python: task=), got none",
        ),
        ({}, {"task": OwnTask(size=1)}, f"task: {DEFAULT.format('task')} OwnTask"),
    ],
)
def test_a_resume_without_the_same_own_parts_is_refused(set_up, tmp_path, began, goes_on, sentence):
    folder = set_up(tiny(tmp_path, "run", task="addition:1"), **began)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        resumed(folder, **goes_on)
    resumed(folder, **began)


def test_changed_source_code_is_named(set_up, tmp_path, monkeypatch, capsys):
    folder = set_up(tiny(tmp_path, "run", task="addition:1"), reward=mine, task=OwnTask(size=1))
    resumed(folder, reward=mine, task=OwnTask(size=1))
    assert "source code" not in capsys.readouterr().out
    of_other = run_parts.inspect.getsource(other)
    monkeypatch.setattr(run_parts.inspect, "getsource", lambda value: of_other)
    resumed(folder, reward=mine, task=OwnTask(size=1))
    said = capsys.readouterr().out
    for name in ("reward mine", "task OwnTask"):
        assert f"WARNING: the source code of {name} has changed since the run began" in said


CHANGES = {
    "rope_theta": ("config.json", '"rope_theta"', '"rope_theta_": 1, "rope_theta"'),
    "template": ("tokenizer_config.json", "{", '{"x": 1, '),
    "ids": ("tokenizer.json", "{", "{ "),
}


@pytest.mark.parametrize("lora", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_files_of_a_model_are_refused(set_up, tmp_path, monkeypatch, change, lora):
    """Of the run's own copy once there is a checkpoint; of the base's directory with adapters."""
    base = write_tiny_directory(tmp_path / "base", "smollm2", num_hidden_layers=1)
    config = tiny(tmp_path, "run", task="addition:1", schedule={"row_length": 64}, rollout={"max_new_tokens": 3})
    model = ModelConfig(path=str(base))
    folder = set_up(dataclasses.replace(config, model=model, lora=dataclasses.replace(config.lora, rank=lora)))
    monkeypatch.setattr(resume, "complete_steps", lambda path: [1])
    resumed(folder)
    name, old, new = CHANGES[change]
    file = (base if lora else folder.model) / name
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=f"^model: expected the {name} that the run began with"):
        resumed(folder)


def test_ones_own_task_of_another_name_is_refused_before_its_examples_are_read(set_up, tmp_path, monkeypatch):
    folder = set_up(tiny(tmp_path, "run", task="addition:1"), task=OwnTask(size=1))
    monkeypatch.setattr(resume, "find_parts", None)
    with pytest.raises(ValueError, match="^--task: expected the task of the run, 'addition:1', got 'addition:2'"):
        resumed(folder, task=OwnTask(size=2))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of the caller's own task, without a step."""
    sizes = {"schedule": {"steps": 0}, "warm_start": {"max_steps": 0}}
    config = tiny(tmp_path_factory.mktemp("runs"), "own", task="addition:1", **sizes)
    return run.train(config, task=OwnTask(size=1)).run


@pytest.fixture
def copied(trained, tmp_path):
    return RunFolder(Path(shutil.copytree(trained.path, tmp_path / "run")))


def read(folder, *task):
    return evaluate.load(evaluate.EvaluateConfig(str(folder.path)), *task)


@pytest.mark.costly
def test_readers_take_no_built_in_task_for_ones_own(trained):
    for reader in (lambda: load_model(trained.path), lambda: read(trained)):
        with pytest.raises(ValueError, match="^task: expected your own task OwnTask, as the run began .* got none"):
            reader()
    scores = evaluate.main(evaluate.EvaluateConfig(str(trained.path)), OwnTask(size=1))
    recorded = json.loads(trained.summary.read_text())["after"]
    # An untrained model is hardly ever right.
    assert scores._asdict() == recorded and scores.greedy > 0.5


def of_the_built_in_task(folder, parent):
    shutil.copy(RunFolder.create(parent, "plain").path / "parts.json", folder.path)


def test_options_that_cannot_be_used_are_refused_by_readers_of_a_model_too(copied, tmp_path):
    of_the_built_in_task(copied, tmp_path)
    rollout = RolloutConfig(num_generations=1)
    save_config(copied.config, dataclasses.replace(load_config(copied.config, Config), rollout=rollout))
    with pytest.raises(ValueError, match="^--rollout.num-generations: expected at least 2, got 1$"):
        load_model(copied.path)


def test_readers_refuse_what_is_of_another_run(copied, tmp_path):
    """Another seed's options in the folder of this run, or the parts of a run of the built-in task."""
    config = load_config(copied.config, Config)
    save_config(copied.config, dataclasses.replace(config, seed=7))
    with pytest.raises(ValueError, match="^checkpoint step 0: expected the options"):
        read(copied, OwnTask(size=1))
    save_config(copied.config, config)
    of_the_built_in_task(copied, tmp_path)
    with pytest.raises(ValueError, match="^checkpoint step 0: expected the parts"):
        read(copied)
