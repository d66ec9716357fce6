"""A task, a reward, a model and a source of one's own by name: trained, resumed, evaluated and refused."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest
from flax import nnx

from experiments import SamplingOptions, evaluate, grpo
from experiments.config import DataConfig, ModelConfig
from experiments.experience.prompts import encode_answer, encode_prompt
from experiments.loop import resume
from experiments.loop.load import load_model
from experiments.loop.run_parts import UserParts
from experiments.models.tokenizer import CharTokenizer
from experiments.tasks import Example, make_task
from experiments.tasks.protocol import TaskFailed
from jaxlogp import Document
from jaxlogp.head import HeadSpec
from tests.experiments.copying_task import Copying
from tests.experiments.tiny import assert_same_state, refusal, set_up_without_programs, tiny, train_records

HERE = __name__


def copying():
    return Copying()


def even(example, completion):
    return float(completion[:1] in "02468")


class Table(nnx.Module):
    """One hidden state for each id, whatever came before it."""

    def __init__(self, vocab_size):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(vocab_size, 8, rngs=rngs)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (vocab_size, 8)))

    def hidden_states(self, tokens, positions, segment_ids):
        return self.embed(tokens)

    def head(self):
        return HeadSpec(), self.weight[...]


def seeded(seed=3):
    assert seed == 3, "an argument with a default is left alone"
    return Table(16)


def pair(vocab_size, features):
    return Table(vocab_size)


def number():
    return 3


instance = Table(16)


def digits(policy, step):
    """Two answers to each of four digits; the first of the two is the better one."""
    prompts = [policy.tokenizer.encode_prompt(str(number)) for number in range(4)]
    drawn = policy.generate(prompts, SamplingOptions(max_new_tokens=2), copies=2, seed=(step,))
    signs = {"advantages": 1.0, "versions": policy.version}, {"advantages": -1.0, "versions": policy.version}
    pairs = zip([prompt for prompt in prompts for _ in range(2)], drawn, signs * 4, strict=True)
    return [Document.of_completion(prompt, each.ids, each.log_probs, **sign) for prompt, each, sign in pairs]


SIZES = [
    *("--quiet", "--warm-start.max-steps", "2", "--warm-start.batch-size", "16", "--schedule.steps", "2"),
    *("--schedule.rows", "8", "--schedule.row-length", "8", "--evaluation.num-prompts", "8", "--drift.every", "0"),
    *("--checkpoint.every", "1"),
]
DECODER = ["--model.hidden-size", "16", "--model.intermediate-size", "16", "--model.num-layers", "1"]
DECODER += ["--model.num-heads", "1", "--model.num-kv-heads", "1"]
ROLLOUTS = ["--rollout.prompts-per-rollout", "8", "--rollout.num-generations", "4", "--schedule.docs-per-step", "32"]
RUNS = {
    "task, rewards and model": [
        *("--task", f"{HERE}:copying", "--reward.functions", "ended", f"{HERE}:even", "--reward.weights", "0.25", "1"),
        *("--model.own", f"{HERE}:Table", *ROLLOUTS),
    ],
    "task and source": ["--task", f"{HERE}:Copying", "--source", f"{HERE}:digits", *DECODER],
}


@pytest.mark.costly
@pytest.mark.parametrize("parts", RUNS)
def test_named_parts_resume_to_the_same_bits_and_are_evaluated(tmp_path, capsys, parts):
    whole = grpo.run_cli([*SIZES, *RUNS[parts], "--out", str(tmp_path), "--name", "run"])
    path, records = whole.run.path, train_records(whole)
    summary = json.loads(whole.run.summary.read_text())
    assert records[0]["grad_norm"] > 0.0 and all(record["update_applied"] == 1 for record in records)
    assert summary["task"] == RUNS[parts][1]
    if "--model.own" in RUNS[parts]:
        assert summary["attention"] == "own (Table computes hidden states by itself)"
        for record in records:
            # Means of 32 multiples of a quarter: sums are exact.
            assert record["reward_mean"] == 0.25 * record["reward/ended"] + record["reward/even"]
    resumed = grpo.run_cli(["--resume", f"{path}@1", "--quiet"])
    assert_same_state(resumed, whole)
    assert train_records(resumed)[1]["loss"] == records[1]["loss"]
    assert evaluate.run_cli([str(path)])._asdict() == summary["after"]
    assert "source code" not in capsys.readouterr().out
    # Chat and export find the task of a run as well, whose model has to be a decoder.
    if "--model.own" in RUNS[parts]:
        with pytest.raises(ValueError, match=f"^model: expected a run of the project's own decoder, got {HERE}:Table"):
            load_model(path)
    else:
        assert load_model(path).tokenizer.decode([3, 4]) == "01"


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Writes modules that can be imported until the test ends."""
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))

    yield write
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == tmp_path:
            del sys.modules[name]


EXPECTED = {
    "--task": "one of addition[:SIZE], ",
    "--reward.functions": "some of correct, tags, pattern, ended, short, overlong, or module:name of a function",
    "--model.own": "module:name of a function or class that makes a Flax model, of no argument or of the vocabulary size",
    "--source": "module:name of a function (policy, step) -> documents, or of a class with next, state and restore",
}


NOTHING = [(option, "missing_module:name", "there is no module missing_module") for option in EXPECTED]
NOTHING += [
    ("--task", "parts_script.inner:name", "there is no module parts_script.inner"),
    ("--source", "parts_needs:name", "module parts_needs raised ModuleNotFoundError: No module named 'missing_package'"),
    ("--model.own", "parts_broken:name", "module parts_broken raised SyntaxError: "),
    ("--reward.functions", "parts_script:name", "module parts_script raised SystemExit: 0"),
    ("--task", f"{HERE}:no_such", f"module {HERE} has no no_such"),
]  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize("option, name, reason", NOTHING)
def test_a_name_of_nothing_is_refused(modules, capsys, option, name, reason):
    modules("parts_needs", "import missing_package")
    modules("parts_broken", "def name(:")
    modules("parts_script", "raise SystemExit(0)" if name == "parts_script:name" else "")
    error = refusal(capsys, grpo, [*SIZES, option, name])
    assert error.startswith(f"{option}: expected {EXPECTED[option]}") and f", got {name!r}, but " in error
    # A module that is no package has nothing inside.
    assert reason in error


OF_THE_WRONG_KIND = [
    ("--task", "RUNS", "which is no task but dict "),
    ("--task", "number", "which is no task but int 3"),
    ("--task", "even", "which raised TypeError: even() missing 2 required positional arguments"),
    ("--reward.functions", "SIZES", "which is list "),
    ("--reward.functions", "Copying", "which is "),
    ("--model.own", "instance", "which is a Table"),
    ("--model.own", "SIZES", "which is a list"),
    ("--model.own", "pair", "which raised TypeError: pair() missing 2 required positional arguments"),
    ("--model.own", "number", "--model.own: expected an nnx.Module with hidden_states"),
    ("--source", "SIZES", "got list "),
    ("--source", "Table", "which raised TypeError: "),
]


@pytest.mark.bad_input
@pytest.mark.parametrize("option, name, reason", OF_THE_WRONG_KIND)
def test_an_object_of_the_wrong_kind_is_refused(capsys, option, name, reason):
    error = refusal(capsys, grpo, [*SIZES, option, f"{HERE}:{name}"])
    assert error.startswith(f"{option}: expected ") and reason in error


EXAMPLE = "example(0, 'train'): expected "
BROKEN_TASKS = [
    ({"name": 3}, ": expected a name that is a text, got int 3"),
    ({"max_prompt_tokens": "3"}, ": expected max_prompt_tokens to be an integer of at least 0, got str '3'"),
    ({"max_answer_tokens": 1.5}, ": expected max_answer_tokens to be an integer of at least 0, got float 1.5"),
    (
        {"num_examples": lambda self, split: 0},
        ": expected num_examples('train') to be an integer of at least 1, or None",
    ),
    ({"example": lambda *given: ("1", "1")}, f", {EXAMPLE}an experiments.tasks.Example, got tuple ('1', '1')"),
    ({"example": lambda *given: Example(["1"], "1")}, f", {EXAMPLE}a prompt of text, or a tuple of Message, got list"),
    ({"example": lambda *given: Example("1", 1)}, f", {EXAMPLE}an answer that is a text, got int 1"),
    ({"example": lambda *given: 1 / 0}, ": expected sizes and examples, got ZeroDivisionError: division by zero"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize("members, words", BROKEN_TASKS)
def test_a_task_with_a_broken_member_is_refused(monkeypatch, members, words):
    task = type("Broken", (Copying,), members)()
    monkeypatch.setitem(globals(), "broken", task)
    with pytest.raises(ValueError, match=re.escape(f"task '{HERE}:broken'{words}")):
        make_task(f"{HERE}:broken")
    with pytest.raises(ValueError, match=f"^{re.escape(f'task{words}')}"):
        DataConfig().user_task(task)


class Ending(Copying):
    """Breaks behind its first examples, which are looked at before a run."""

    def example(self, index, split):
        return super().example(index, split) if index < 3 else {3: ("1", "1")}[index]


@pytest.mark.bad_input
@pytest.mark.parametrize("words", [{}, {"instruction": "Write."}])
def test_a_task_that_breaks_later_is_named_with_the_example(words):
    data = DataConfig(**words)
    for name, task in ((f"{HERE}:Ending", data.task(f"{HERE}:Ending", 0)), ("copying", data.user_task(Ending()))):
        assert task.example(2, "train").answer == "4"
        for index, seen in (
            (3, "ValueError: example: expected an experiments.tasks.Example, got tuple"),
            (4, "KeyError: 4"),
        ):
            with pytest.raises(TaskFailed) as failed:
                task.example(index, "train")
            assert str(failed.value).startswith(f"task '{name}', example({index}, 'train'): {seen}")


@pytest.mark.bad_input
def test_an_example_that_the_model_cannot_read_is_the_tasks_fault():
    tokenizer = CharTokenizer("0123456789")
    with pytest.raises(TaskFailed, match=r"^prompt '1x': text: expected characters of '0123456789', got 'x' at 1$"):
        encode_prompt(tokenizer, Example("1x", "2"), 4)
    with pytest.raises(TaskFailed, match=r"^--rollout.max-prompt-tokens: expected prompts of at most 4 tokens, got 5$"):
        encode_prompt(tokenizer, Example("1234", "2"), 4)
    with pytest.raises(TaskFailed, match=r"^answer '-2': text: expected characters of '0123456789', got '-' at 0$"):
        encode_answer(tokenizer, Example("1", "-2"))
    assert encode_answer(tokenizer, Example("1", "2")) == [*tokenizer.encode("2"), *tokenizer.eos_ids]


@pytest.mark.bad_input
@pytest.mark.parametrize("count", [None, 4])
def test_a_prompt_that_the_model_cannot_read_is_quoted_before_the_run_begins(set_up, tmp_path, count):
    class Letters(Copying):
        def num_examples(self, split):
            return count

        def example(self, index, split):
            return Example("12" if count and index < 2 else "1x", "1")

    with pytest.raises(ValueError, match=r"^prompt '1x': text: expected characters of '0123456789', got 'x' at 1$"):
        set_up(named(tmp_path), task=Letters())


@pytest.mark.bad_input
@pytest.mark.parametrize("family", ["addition", "word_problems", "jsonl"])
def test_a_module_that_is_called_like_a_family_is_never_imported(modules, family):
    modules(family, "raise AssertionError('imported')")
    with pytest.raises(ValueError, match="^task |^file ") as refused:
        make_task(f"{family}:name")
    assert "imported" not in str(refused.value)


@pytest.mark.parametrize("name", ["Copying", "copying", "OBJECT"])
def test_a_task_is_an_object_or_what_makes_one(name):
    task = make_task(f"{HERE}:{name}")
    assert task.name == f"{HERE}:{name}" and task.example(3, "train") == Example("6", "6")
    assert (task.alphabet, task.num_examples("train"), task.max_prompt_tokens) == ("0123456789", None, 1)
    assert [task.verify(task.example(3, "train"), text) for text in ("6", "7")] == [1.0, 0.0]


OBJECT = Copying()


@pytest.fixture
def set_up(monkeypatch):
    return set_up_without_programs(monkeypatch)


def named(out, **changes):
    model = changes.pop("model", ModelConfig())
    return tiny(out, "run", model=model, warm_start={"max_steps": 0}, **changes)


@pytest.mark.bad_input
def test_a_part_by_name_and_from_python_is_refused(set_up, tmp_path):
    options = {
        "task": ({"task": f"{HERE}:Copying"}, Copying()),
        "reward": ({"reward": {"functions": (f"{HERE}:even",)}}, even),
        "model": ({"model": ModelConfig(own=f"{HERE}:Table"), "task": f"{HERE}:Copying"}, Table(16)),
    }
    words = {"task": "no task of your own where", "reward": "no other options where", "model": "no other options where"}
    for part, (changes, given) in options.items():
        with pytest.raises(ValueError, match=f"^--{part}: expected {words[part]} train is given "):
            set_up(named(tmp_path, **changes), **{part: given})
    with pytest.raises(ValueError, match="^--model: expected no other options with --model.own, got other options"):
        set_up(named(tmp_path, model=ModelConfig(own=f"{HERE}:Table", num_layers=2)))
    words = r"--model.own: expected your own model Gru, .*: model=\), or a module of another name than own, got none"
    with pytest.raises(ValueError, match=f"^{words}"):
        set_up(named(tmp_path, model=ModelConfig(own="own:Gru")))


@pytest.mark.bad_input
def test_a_resume_takes_named_parts_from_nowhere_else(set_up, tmp_path):
    changes = {"reward": {"functions": (f"{HERE}:even",)}, "model": ModelConfig(own=f"{HERE}:seeded")}
    folder = set_up(named(tmp_path, task=f"{HERE}:Copying", **changes)).folder.path
    for part, given, words in (
        ("task", Copying(), "^task: expected the options' task, as the run began, got your own task Copying"),
        ("reward", even, "^--reward: expected no other options where train is given a reward"),
        ("model", Table(16), f"^--model.own: expected None where a model is passed from Python, got {HERE}:seeded"),
    ):
        with pytest.raises(ValueError, match=words):
            resume.set_up_resume(str(folder), {}, UserParts(**{part: given}))
    resume.set_up_resume(str(folder), {}).lock.release()


PARTS = """
from flax import nnx
from tests.experiments import test_named_parts as parts

class Task(parts.Copying):
    limit = 1

def task():
    return Task()

def reward(example, completion):
    return 1

class Model(parts.Table):
    limit = 1

def model():
    return Model(16)

def source(policy, step):
    return 1
"""


def test_changed_source_code_of_a_named_part_is_a_warning(set_up, modules, tmp_path, capsys):
    """Of the function or class that is named, and of the class of what it makes."""
    modules("own_parts", PARTS)
    model = {"task": "own_parts:task", "model": ModelConfig(own="own_parts:model")}
    rewarded = set_up(named(tmp_path / "a", reward={"functions": ("ended", "own_parts:reward")}, **model)).folder.path
    rollout = {"prompts_per_rollout": 64, "num_generations": 8}
    sourced = set_up(named(tmp_path / "b", source="own_parts:source", rollout=rollout, **model)).folder.path
    sources = {name for name, _ in json.loads((rewarded / "parts.json").read_text())["config"]["sources"]}
    assert sources == {"task own_parts:task", "reward own_parts:reward", "model own_parts:model"}

    def warnings():
        for folder in (rewarded, sourced):
            resume.set_up_resume(str(folder), {}).lock.release()
        lines = [line for line in capsys.readouterr().out.splitlines() if "source code" in line]
        return sorted({line.removeprefix("WARNING: the source code of ").split(" has ")[0] for line in lines})

    assert warnings() == []
    modules("own_parts", PARTS.replace("return 1", "return 2"))
    assert warnings() == ["reward own_parts:reward", "source own_parts:source"]
    modules("own_parts", PARTS.replace("limit = 1", "limit = 2"))
    assert warnings() == ["model own_parts:model", "task own_parts:task"]
    modules("own_parts", PARTS.replace("return Task()", "return Task( )").replace("Model(16)", "Model(8 + 8)"))
    assert warnings() == ["model own_parts:model", "task own_parts:task"]


@pytest.mark.costly
@pytest.mark.bad_input
def test_the_current_directory_is_searched(tmp_path):
    (tmp_path / "here.py").write_text("task = 3\n")
    command = [sys.executable, "-m", "experiments.grpo", "--task", "here:task"]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert ended.returncode == 2 and "got 'here:task', which is no task but int 3" in ended.stderr
