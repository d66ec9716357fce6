"""The first lines of a run, before anything is compiled, and the warnings among them."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import pytest

from experiments import evaluate
from experiments.config import Config, ModelConfig, RolloutConfig, ScheduleConfig
from experiments.models.dtype_choice import DtypeChoice
from experiments.models.parameters import abstract_decoder
from experiments.sampling.prompts import held_out_examples
from experiments.tasks import make_task
from experiments.training import introduction
from experiments.training.introduction import introduce
from experiments.training.origin import origin_of
from experiments.training.trainer import Scores


def lines(tmp_path, capsys, **changes):
    """What is printed of a run, and its model."""
    config = dataclasses.replace(Config(), **changes).resolved()
    task = make_task(config.task)
    origin = origin_of(config, task, None, restored=False)
    introduce(config, task, origin, tmp_path / "run", DtypeChoice("float32", "a reason"))
    return origin, capsys.readouterr().out.splitlines()


def test_what_is_about_to_run(tmp_path, capsys):
    origin, printed = lines(tmp_path, capsys, task="addition:3")
    facts = dict(line.split("  ", 1) for line in printed)
    facts = {name: value.strip() for name, value in facts.items()}
    assert list(facts) == ["task", "model", "devices", "memory", "steps", "run folder"]
    different = len({example.prompt for example in held_out_examples(make_task("addition:3"), 512)})
    assert facts["task"] == f"addition:3, endless training examples, {different} different held-out prompts"
    size = sum(leaf.size for leaf in jax.tree.leaves(abstract_decoder(origin.decoder)[1]))
    assert facts["model"] == f"decoder, {size:,} parameters, float32 (a reason)"
    assert facts["devices"] == "mesh data=1,fsdp=1,sequence=1,tensor=1 on 1 of 8 cpu"
    # Four bytes a parameter, AdamW's two moments (and its count), and the gradient.
    for name, number in (("parameters", 4 * size), ("optimizer", 8 * size), ("gradients", 4 * size)):
        said = re.search(rf"{name} ([0-9.]+) KiB", facts["memory"])
        assert said is not None and float(said[1]) == pytest.approx(number / 2**10, rel=1e-3)
    assert facts["steps"] == "1000, of 512 documents; loss grpo, after at most 400 steps of warm start"
    assert facts["run folder"] == str(tmp_path / "run")


def test_the_bound_on_memory_is_about_the_devices_of_the_mesh(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(introduction, "device_limit", lambda devices: 2**23)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    facts = {}
    for mesh in ("data=2,tensor=2", "tensor=2"):
        _, printed = lines(tmp_path, capsys, mesh=mesh)
        facts[mesh] = next(line for line in printed if line.startswith("memory"))
    # Of 8 devices, 4 and 2; parameters are there as often as data says, the cache is split over all.
    assert facts["data=2,tensor=2"].endswith("here are 32.0 MiB") and facts["tensor=2"].endswith("here are 16.0 MiB")
    held = {
        mesh: re.findall(r"(parameters|gradients) ([0-9.]+) KiB|(cache) ([0-9.]+) MiB", fact)
        for mesh, fact in facts.items()
    }
    ratios = [float(two[1] or two[3]) / float(one[1] or one[3]) for two, one in zip(*held.values(), strict=True)]
    assert ratios == pytest.approx([2.0, 2.0, 1.0], rel=1e-3)
    with pytest.raises(MemoryError, match=r"^memory: the run needs at least .*; here are 8.0 MiB$"):
        lines(tmp_path, capsys, model=ModelConfig(hidden_size=512))


@pytest.mark.parametrize("task", ["letter_counting:1", "sorting:1"])
def test_a_held_out_set_of_one_prompt_is_warned_of(tmp_path, capsys, task):
    words = f"WARNING: task {task}: different held-out prompts: 1; a score of so few says little"
    assert lines(tmp_path, capsys, task=task, quiet=True)[1] == [words]


@pytest.mark.parametrize(("docs", "warned"), [(10, True), (16, False), (8, False), (32, False), (24, True), (0, False)])
def test_steps_and_rollouts_that_do_not_divide_each_other_are_warned_of(tmp_path, capsys, docs, warned):
    rollout, schedule = RolloutConfig(prompts_per_rollout=4, num_generations=4), ScheduleConfig(docs_per_step=docs)
    _, printed = lines(tmp_path, capsys, rollout=rollout, schedule=schedule, quiet=True)
    assert [line.startswith(f"WARNING: --schedule.docs-per-step {docs} and the 16") for line in printed] == [
        True
    ] * warned


def test_an_evaluation_says_how_many_prompts_there_are(monkeypatch, capsys):
    config = SimpleNamespace(evaluation=SimpleNamespace(num_prompts=500))
    scores, progress = Scores(0.5, 0.25), SimpleNamespace(step=3)
    trainer = SimpleNamespace(evaluate=lambda: scores, num_held_out=21, config=config, progress=progress)
    monkeypatch.setattr(evaluate, "load", lambda options: trainer)
    assert evaluate.run_cli(["runs/a", "--num-prompts", "500"]) == scores
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "step 3, 21 held-out prompts (500 were asked for; the task has no more)"
    trainer.num_held_out = 500
    evaluate.run_cli(["runs/a"])
    assert capsys.readouterr().out.splitlines()[0] == "step 3, 500 held-out prompts"
