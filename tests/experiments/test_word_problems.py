"""Word problems: worked answers that are right, numbers of a story that are in one split only, verdicts by the number."""

import re

import pytest

from experiments.models.tokenizer import tokenizer_for
from experiments.tasks import make_task
from experiments.tasks.word_problems import LARGEST, NUM_EXAMPLES

MANY = 200


def examples(task, count=MANY):
    return [task.example(index, split) for split in ("train", "held_out") for index in range(count)]


SENTENCES = (
    (r"\w+ has (\d+) \w+ with (\d+) \w+ each", lambda amount, count, each: count * each),
    (r"\w+ buys (\d+) more", lambda amount, number: amount + number),
    (r"Then \w+ gives \w+ (\d+) \w+", lambda amount, number: amount + number),
    (r"\w+ gives (\d+) of the \w+ to \w+", lambda amount, number: amount - number),
    (r"On the way home \w+ loses (\d+) of them", lambda amount, number: amount - number),
    (r"A week later \w+ has (\d+) as many \w+", lambda amount, number: amount * number),
    (r"\w+ shares the \w+ equally among (\d+) children", lambda amount, number: amount / number),
    (r"\w+ sells all of the \w+ for \$(\d+) each", lambda amount, number: amount * number),
    # The hero at the beginning, or a friend who is counted in all.
    (r"\w+ has (\d+) \w+", lambda amount, number: amount + number),
)


def solve(prompt):
    """The answer to a story by what its sentences say."""
    *told, question = prompt.removesuffix("?").split(". ")
    assert question.startswith("How many ")
    amount = 0
    for sentence in told:
        matches = [(re.fullmatch(words, sentence), change) for words, change in SENTENCES]
        ((match, change),) = [pair for pair in matches if pair[0]]
        amount = change(amount, *map(int, match.groups()))
    return amount


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_worked_answers_are_right(size):
    task = make_task(f"word_problems:{size}")
    seen = set()
    for example in examples(task):
        *work, verdict = example.answer.removesuffix(".").split(". ")
        seen.add(len(work))
        for line in work:
            left, sign, right, equal, result = line.split()
            operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
            value = operations[sign](int(left), int(right))
            assert (equal, value) == ("=", int(result)) and (sign != "/" or int(left) % int(right) == 0)
            assert 2 <= value <= 9 * LARGEST
        assert verdict == f"The answer is {work[-1].split()[-1]}"
        # Every line goes on with the result of the one before it.
        assert all(after.split()[0] == before.split()[-1] for before, after in zip(work, work[1:], strict=False))
        # What was calculated with is what was told.
        told = [int(number) for number in re.findall(r"\d+", " ".join(line.split(" =")[0] for line in work))]
        assert [told[0], *told[1::2]] == list(example.source)
        prompt = example.prompt.replace("twice", "2").replace("three times", "3").replace("four times", "4")
        assert [int(number) for number in re.findall(r"\d+", prompt)] == list(example.source)
        assert solve(prompt) == int(work[-1].split()[-1])
    assert seen == ({1} if size == 1 else set(range(2, size + 1)))


def test_no_story_of_one_split_has_the_numbers_of_another():
    for name in ("word_problems:2", "word_problems"):
        task = make_task(name)
        train, held_out = ({task.example(i, split).source for i in range(MANY)} for split in ("train", "held_out"))
        assert len(train) > MANY // 2 and len(held_out) > MANY // 2 and not train & held_out


def test_examples_repeat_and_seeds_differ():
    task, again, other = make_task("word_problems"), make_task("word_problems"), make_task("word_problems", seed=1)
    assert examples(task, 20) == examples(again, 20) != examples(other, 20)
    assert task.num_examples("train") == NUM_EXAMPLES["train"]
    with pytest.raises(ValueError, match="index: expected less than 1024 .held_out of word_problems:4., got 1024"):
        task.example(1024, "held_out")
    with pytest.raises(ValueError, match="expected a size from 1 to 4 after the colon, got '5'"):
        make_task("word_problems:5")


def test_verdicts_look_for_the_number():
    task = make_task("word_problems")
    for example in examples(task, 50):
        number = example.answer.split()[-1].removesuffix(".")
        right = [
            example.answer, number, f"So {number} of them.", f"The answer is ${number}.00!", rf"5, \boxed{{{number}}}",
        ]  # fmt: skip
        wrong = [
            "", "none", f"{number} or {number}1", f"-{number}", f"The answer is 1{number}. {number}", f"{number}.5",
        ]  # fmt: skip
        assert all(task.verify(example, text) == 1.0 for text in right)
        assert not any(task.verify(example, text) for text in wrong)


def test_a_model_from_nothing_has_all_the_letters():
    task = make_task("word_problems")
    tokenizer = tokenizer_for(task.alphabet)
    for example in examples(task, 15):
        text = example.prompt + example.answer
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(example.prompt) <= task.max_prompt_tokens and len(example.answer) <= task.max_answer_tokens
