"""The first lines of a run, before anything is compiled, and the warnings among them."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from experiments import evaluate
from experiments.config import (
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    ScheduleConfig,
)
from experiments.experience.prompts import held_out_examples
from experiments.invariant.options import InvarianceConfig
from experiments.loop import memory
from experiments.loop.evaluation import AnswerEvaluation, ExactMatch
from experiments.loop.find_model import find_model
from experiments.loop.start_report import check_answer_lengths, print_start_report
from experiments.loop.supervised import find_sizes, find_task
from experiments.models.dtype_choice import DtypeChoice
from experiments.models.parameters import abstract_decoder
from experiments.models.tokenizer import tokenizer_for
from experiments.sampling.options import SamplingOptions
from experiments.tasks import make_task
from experiments.tasks.arithmetic import Addition
from experiments.tasks.protocol import exact_answers
from experiments.tasks.rewards import rewards_of
from tests.experiments.lines import write
from tests.experiments.tiny_directory import write_tiny_directory


def lines(tmp_path, capsys, rewards=None, **changes):
    """What is printed of a run, and its model."""
    config = replace(Config(), **changes).resolved()
    task = find_task(config) if config.supervised else make_task(config.task)
    model = find_model(config, task, None, restored=False)
    sizes, dtype = find_sizes(config, task, model.tokenizer), DtypeChoice("float32", "a reason")
    print_start_report(config, task, model, sizes, tmp_path / "run", dtype, rewards)
    return model, capsys.readouterr().out.splitlines()


def test_what_is_about_to_run(tmp_path, capsys):
    model, printed = lines(tmp_path, capsys, task="addition:3", rollout=RolloutConfig(rows=64))
    facts = dict(line.split(":", 1) for line in printed)
    facts = {name: value.strip() for name, value in facts.items()}
    assert list(facts) == ["task", "model", "devices", "steps", "optimizer", "rollout", "run folder"]
    different = len({example.prompt for example in held_out_examples(make_task("addition:3"), 512)})
    assert facts["task"] == f"addition:3, endless training examples, {different} distinct held-out prompts"
    size = sum(leaf.size for leaf in jax.tree.leaves(abstract_decoder(model.decoder)[1]))
    assert facts["model"] == f"decoder, {size:,} parameters, float32 (a reason)"
    assert facts["devices"] == "1 of 8 cpu, mesh data=1,fsdp=1,sequence=1,tensor=1"
    assert facts["steps"] == "1000 of 512 documents each, loss grpo, warm start of at most 400 steps"
    assert facts["optimizer"] == "adamw, learning rate 0.0005"
    at_once = "64 at a time on each data rank"
    assert facts["rollout"] == f"64 prompts × 8 completions of at most 5 tokens, {at_once}, advantages group"
    assert facts["run folder"] == str(tmp_path / "run")


def test_the_longest_document_is_told_of_because_rows_are_as_long(tmp_path, capsys):
    records = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(60)]
    path = write(tmp_path / "sums.jsonl", *records, {"prompt": "x" * 300_000, "completion": "1"})
    _, (data, *_) = lines(tmp_path, capsys, task=f"sft:{path}")
    # The start token, a byte of the completion and an end token.
    assert data.endswith(" held out, the longest of 300,003 tokens")


@pytest.mark.parametrize("told, warned", [({"max_position_embeddings": 255}, True), ({}, False)])
def test_documents_beyond_what_the_model_is_made_for_are_warned_of(tmp_path, capsys, told, warned):
    path = str(write_tiny_directory(tmp_path / "model", **told))
    model = ModelConfig(path=path, chat_template=False)
    rollout = RolloutConfig(max_prompt_tokens=200, max_new_tokens=56)
    made_for, printed = lines(tmp_path, capsys, task="addition:2", model=model, rollout=rollout)
    assert made_for.decoder.context_length == 256 - warned
    words = "documents of up to 256 tokens: the model's files say that it is made for at most 255"
    assert any(words in line for line in printed) == warned


def test_a_state_that_the_devices_of_the_mesh_cannot_hold_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "device_limit", lambda devices: 2**21)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    # State and gradients are split over fsdp, and there twice with data=2; the cache is 2.1 MiB on any mesh.
    few = EvaluationConfig(num_prompts=64)
    lines(tmp_path, capsys, mesh="fsdp=2", evaluation=few)
    lines(tmp_path, capsys, rollout=RolloutConfig(mesh="data=2"), evaluation=few)
    for mesh, evaluation, here in (("", few, "2.0 MiB"), ("data=2", few, "4.0 MiB"), ("fsdp=2", None, "4.0 MiB")):
        changes = {} if evaluation is None else {"evaluation": evaluation}
        words = rf"^memory: parameters, .* need at least .*, available: {here}; try a smaller model or more memory$"
        with pytest.raises(ValueError, match=words):
            lines(tmp_path, capsys, mesh=mesh, **changes)


@pytest.mark.parametrize("task, prompts", [("addition:1", 10), ("comparison:1", 9)])
def test_a_held_out_set_of_few_prompts_is_warned_of(tmp_path, capsys, task, prompts):
    words = f"WARNING: task {task}: distinct held-out prompts: {prompts}; a score on so few is noisy"
    assert lines(tmp_path, capsys, task=task, quiet=True)[1] == [words]


@pytest.mark.parametrize(
    ("mesh", "rollouts", "docs_per_step", "warned"),
    [
        ("data=4,fsdp=2", None, 0, ["512 completions are 4 leaves"]),
        ("data=4,fsdp=2", "data=4", 300, ["300 documents of a step are 3 leaves"]),
        ("data=8", None, 300, ["512 completions are 4 leaves", "300 documents of a step are 3 leaves"]),
        ("data=4,tensor=2", None, 400, []),
        ("data=8", "data=4", 0, []),
    ],
)
def test_ranks_without_a_leaf_are_warned_of(tmp_path, capsys, mesh, rollouts, docs_per_step, warned):
    options = {"invariance": InvarianceConfig(leaf_rows=128), "rollout": RolloutConfig(mesh=rollouts)}
    options |= {
        "mesh": mesh,
        "task": "addition:2",
        "quiet": True,
        "schedule": ScheduleConfig(docs_per_step=docs_per_step),
    }
    said = [f"WARNING: --invariance.leaf-rows 128: {words}, for 8 data ranks" for words in warned]
    assert lines(tmp_path, capsys, invariant=True, **options)[1] == said


@pytest.mark.parametrize("room", [2, 4, 5, None])
def test_answers_that_completions_have_no_room_for_are_warned_of(tmp_path, capsys, room):
    """Of two to four digits: not refused where one may be right without its end token."""
    options = {"task": "addition:3", "quiet": True, "evaluation": EvaluationConfig(num_prompts=64)}
    _, printed = lines(tmp_path, capsys, rollout=RolloutConfig(max_new_tokens=room), **options)
    lengths = [len(each.answer) for each in held_out_examples(make_task("addition:3"), 64)]
    long = sum(length + 1 > (room or 5) for length in lengths)
    words = f"too few for {long} of 64 answers; the longest needs 5, end token included"
    assert printed == [f"WARNING: --rollout.max-new-tokens {room}: {words}"] * (long > 0)
    assert (long > 0) == (room in (2, 4))


def test_answers_are_no_reason_to_refuse_where_something_else_is_rewarded_or_right(tmp_path):
    """Refusals are in test_wrong_inputs.py."""
    path = tmp_path / "numbers.jsonl"
    write(path, *({"prompt": f"{n}+1=", "answer": f"{n + 1:.3f}"} for n in range(100, 200)))
    short = RolloutConfig(max_new_tokens=3)
    options = replace(Config(), rollout=short, task="addition:12")
    numeric = replace(options, task=f"jsonl:{path}", data=DataConfig(verifier="numeric"))
    for config, rewards in [
        (options, rewards_of(lambda example, completion: 1.0)),
        (replace(options, reward=RewardConfig(functions=("correct", "ended"))), None),
        (numeric, None),
    ]:
        task = config.data.task(config.task, config.seed)
        held_out = held_out_examples(task, 16)
        said = check_answer_lengths(config, task, held_out, tokenizer_for(task.alphabet), rewards)
        number = len(held_out) + (task.num_examples("train") or 0)
        assert said is not None and f"too few for {number} of {number} answers" in said
    without = [replace(each, answer="") for each in held_out]
    assert not exact_answers(make_task("word_problems:2")), "a number is right without the work"
    own = SimpleNamespace(num_examples=lambda split: None)
    assert check_answer_lengths(config, own, without, tokenizer_for(task.alphabet), None) is None


class Nine(Addition):
    """With nine examples of each split."""

    def num_examples(self, split):
        return 9


def test_an_evaluation_says_how_many_prompts_there_are(monkeypatch, capsys):
    scores, task = ExactMatch(0.5, 0.25), Nine(size=1)
    for count, words in ((500, "9 held-out prompts (requested: 500; the task has no more)"), (5, "5 held-out prompts")):
        evaluation = AnswerEvaluation(task, rewards_of(task.verify), count, 5, SamplingOptions(3))
        monkeypatch.setattr(evaluation, "of", lambda policy: SimpleNamespace(scores=scores))
        inference = SimpleNamespace(evaluation=evaluation, policy_of=lambda params: None)
        monkeypatch.setattr(evaluate, "load", lambda options, task, inference=inference: (inference, None, 3))
        assert evaluate.run_cli(["runs/a", "--num-prompts", "500"]) == scores
        said = capsys.readouterr().out.splitlines()
        assert said[0] == f"step 3, {words}"
        assert said[1:] == ["held-out exact match (temperature 1): 0.500", "held-out exact match (greedy): 0.250"]


def test_a_broken_reward_is_found_before_anything_is_compiled(tmp_path, capsys):
    seen = []

    def broken(example, completion):
        seen.append((completion == example.answer, completion.ended))
        return [1.0][len(seen) - 1]

    options = {"task": "addition:1", "evaluation": EvaluationConfig(num_prompts=64)}
    with pytest.raises(ValueError, match="^reward 'broken': expected a finite number for document 1 .* got IndexError"):
        lines(tmp_path, capsys, rewards_of(broken), **options)
    assert seen == [(True, True), (False, False)] and capsys.readouterr().out == ""
    _, printed = lines(tmp_path, capsys, rewards_of(lambda example, completion: float("nan")), **options)
    assert any(line.startswith("WARNING: reward 'lambda': expected a finite number") for line in printed)
