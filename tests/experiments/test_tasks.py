"""Tasks: splits that share no prompt, examples that repeat exactly, rewards, limits, and every refusal."""

import sys

import numpy as np
import pytest

from experiments.models.tokenizer import tokenizer_for
from experiments.tasks import TASK_FORMS, Example, make_task, split_of
from experiments.tasks.protocol import SizedTask
from tests.experiments.lines import records, write

OWN = ("addition", "comparison")
SIZED = tuple(f"{family}{size}" for family in OWN for size in ("", ":2", ":3", ":12"))
MANY = 400


def examples(task, split, count=MANY):
    return [task.example(index, split) for index in range(count)]


def solve(prompt):
    """Answers a prompt of our own tasks from its text alone."""
    body = prompt.removesuffix("=")
    if "+" in body:
        return str(sum(int(number) for number in body.split("+")))
    left, right = (int(number) for number in body.split("?"))
    return "=" if left == right else "<>"[left > right]


@pytest.mark.parametrize("spec", SIZED)
def test_own_examples(spec):
    task = make_task(spec)
    train, held_out = examples(task, "train"), examples(task, "held_out")
    assert not {example.prompt for example in train} & {example.prompt for example in held_out}
    tokenizer = tokenizer_for(task.alphabet)
    for example in train + held_out:
        assert example.answer == solve(example.prompt)
        assert set(example.prompt + example.answer) <= set(task.alphabet)
        assert tokenizer.decode(tokenizer.encode(example.prompt)) == example.prompt
        assert len(example.prompt) <= task.max_prompt_tokens
        assert len(example.answer) <= task.max_answer_tokens
    assert task.num_examples("train") is None and task.num_examples("held_out") is None
    if spec.endswith(":2"):
        assert max(len(example.prompt) for example in train + held_out) == task.max_prompt_tokens
        assert max(len(example.answer) for example in train + held_out) == task.max_answer_tokens


@pytest.mark.parametrize("family", OWN)
def test_examples_are_random_access(family):
    task, again, other = make_task(family), make_task(family), make_task(family, seed=1)
    forward = examples(task, "train", 30)
    assert [again.example(np.int64(index), "train") for index in reversed(range(30))] == forward[::-1]
    assert examples(other, "train", 30) != forward
    assert len(set(forward)) > 20
    # In any process: their hashes of texts differ.
    assert make_task("addition").example(7, "held_out").prompt == "9+84="


def test_seeds_and_sizes_agree_about_the_split():
    train = {example.prompt for seed in range(3) for example in examples(make_task("addition", seed=seed), "train")}
    smaller = {example.prompt for example in examples(make_task("addition:1"), "held_out")}
    assert not train & smaller


def test_one_prompt_in_ten_is_held_out():
    count = sum(split_of("addition", f"{left}+{right}=") == "held_out" for left in range(100) for right in range(100))
    assert 900 < count < 1100  # a binomial count of mean 1000 and deviation 30
    assert {split_of(family, "27+35=") for family in OWN} == {"train", "held_out"}


RIGHT, WRONG = ["85", " 85\n"], ["", "8", "86", "085", "8 5", "85=", "185", "85.0", "85 or 86", "\ufffd85"]


@pytest.mark.parametrize("completion", RIGHT + WRONG)
def test_rewards_are_whole_or_nothing(completion):
    reward = make_task("addition").verify(Example("37+48=", "85"), completion)
    assert isinstance(reward, float) and reward == (completion in RIGHT)


def test_refuses_indices_and_splits(tmp_path):
    for task in (make_task("addition"), make_task(f"jsonl:{write(tmp_path / 'a', *records(60))}")):
        for index in (-1, np.int64(-3), 1.0, "0", None, True):
            with pytest.raises(ValueError, match="index: expected an integer of at least 0, got"):
                task.example(index, "train")
        for ask in (task.num_examples, lambda split, task=task: task.example(0, split)):
            with pytest.raises(ValueError, match="split: expected one of train, held_out, got 'test'"):
                ask("test")


class Zero(SizedTask):
    """One prompt, of the training split, or none at all."""

    family, alphabet, max_prompt_tokens, max_answer_tokens = "zero", "0", 1, 1

    def candidate(self, generator):
        return Example("0", "0") if self.size == 1 else None


ZERO = Zero(1)


def test_gives_up_when_there_is_no_prompt_of_the_split():
    assert ZERO.example(3, "train").prompt == "0"
    with pytest.raises(ValueError, match="task 'zero:1': expected a held_out prompt among 1000 draws, got none"):
        make_task(f"{__name__}:ZERO")
    with pytest.raises(ValueError, match="task 'zero:2': expected a train prompt among 1000 draws, got none"):
        Zero(2).example(0, "train")


@pytest.mark.parametrize("spec", ["", "adition", "Addition", " addition", ":2", "reasoning_gym", "jsonl", "jsonl:"])
def test_refuses_unknown_tasks(spec):
    with pytest.raises(ValueError, match=rf"^--task: expected one of addition.*{spec!r}.*\Z") as caught:
        make_task(spec)
    assert all(form in str(caught.value) for form in TASK_FORMS)


@pytest.mark.parametrize("size", ["", "0", "-1", "two", "2.0", "+2", " 2", "²", "٣", "2\n", "65", "9" * 5000])
def test_refuses_sizes(size):
    with pytest.raises(ValueError, match="expected a size from 1 to 64 after the colon"):
        make_task(f"addition:{size}")


def test_refuses_bad_constructor_arguments():
    for size in (0, 65, 2.0, True, "2"):
        with pytest.raises(ValueError, match="addition size: expected an integer from 1 to 64"):
            type(make_task("addition"))(size)
    with pytest.raises(ValueError, match="seed: expected an integer, got 'a'"):
        make_task("addition", seed="a")


@pytest.mark.parametrize("family", OWN)
def test_names_make_the_task_again(family):
    assert make_task(make_task(family).name) == make_task(family)
    assert make_task(f"{family}:05") == make_task(f"{family}:5")


def test_reasoning_gym_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    words = r"expected the extra tasks \(pip install -e \"\.\[experiments,tasks\]\"\), got no package reasoning_gym"
    with pytest.raises(ValueError, match=rf"^.*{words}.*\Z"):
        make_task("reasoning_gym:chain_sum")


@pytest.fixture
def gym():
    return pytest.importorskip("reasoning_gym", reason="needs the tasks extra")


def test_reasoning_gym_examples(gym):
    task, again = make_task("reasoning_gym:chain_sum"), make_task("reasoning_gym:chain_sum")
    train, held_out = examples(task, "train", 60), examples(task, "held_out", 40)
    assert not {example.prompt for example in train} & {example.prompt for example in held_out}
    assert [again.example(index, "train") for index in reversed(range(60))] == train[::-1]
    assert examples(make_task("reasoning_gym:chain_sum", seed=1), "train", 60) != train
    for example in train + held_out:
        assert 0 < len(example.prompt.encode()) <= task.max_prompt_tokens
        assert 0 < len(example.answer.encode()) <= task.max_answer_tokens
    assert task.alphabet is None and task.num_examples("train") is None
    assert task.name == "reasoning_gym:chain_sum"


def test_reasoning_gym_pays_only_full_scores(gym):
    task = make_task("reasoning_gym:chain_sum")
    example = task.example(0, "train")
    assert 0 < gym.create_dataset("chain_sum").score_answer(f"{example.answer} or so", example.source) < 1
    assert task.verify(example, f"{example.answer} or so") == 0.0
    assert task.verify(example, "") == 0.0
    assert task.verify(example, f" {example.answer}\n") == 1.0
    with pytest.raises(ValueError, match="got one without a source"):
        task.verify(Example(example.prompt, example.answer), example.answer)


def test_reasoning_gym_scorer_that_raises_pays_nothing(gym):
    task = make_task("reasoning_gym:prime_factorization")
    example = task.example(0, "train")
    with pytest.raises(ValueError, match="could not convert|invalid literal"):
        gym.create_dataset("prime_factorization").score_answer("a", example.source)
    assert task.verify(example, "a") == 0.0 and task.verify(example, example.answer) == 1.0


def test_reasoning_gym_passes_over_examples(gym, monkeypatch):
    class Uneven:
        """Blank answers at odd indices; long prompts and long answers behind the sample that sets the limits."""

        def __getitem__(self, index):
            question = f"{index:05d}" + "?" * (index > 32 and index % 4 == 0)
            answer = f"{index:05d}" + "!" * (index > 32 and index % 8 == 2)
            answer = (" ", None)[index % 4 // 2] if index % 2 else answer
            return {"question": question, "answer": answer}

        def score_answer(self, answer, entry):
            return float(answer == entry["answer"])

    monkeypatch.setattr(gym, "create_dataset", lambda name, **options: Uneven())
    task = make_task("reasoning_gym:chain_sum")
    assert (task.max_prompt_tokens, task.max_answer_tokens) == (5, 5)
    drawn = {int(example.answer) for example in examples(task, "train", 200)}
    assert len(drawn) > 100 and all(number % 8 == 6 or number <= 32 for number in drawn)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("chain_sun", "close: chain_sum"),
        ("qqqqqqqq", "none is close"),
        ("composite", "expected a data set that needs no options, got: Must specify at least one dataset"),
        ("countdown", "refused, scoring with it might run model text as a program"),
        ("n_queens", "refused, scoring with it might run model text as a program .eval."),
        ("word_ladder", "refused, its examples differ from process to process"),
        ("boxnet", "refused, it has no reference answers"),
        ("complex_arithmetic", "refused, 'nan' for an answer scores 1.0"),
    ],
)
def test_reasoning_gym_refuses(gym, dataset, words):
    with pytest.raises(ValueError, match=rf"^task 'reasoning_gym:{dataset}': .*{words}.*\Z"):
        make_task(f"reasoning_gym:{dataset}")
