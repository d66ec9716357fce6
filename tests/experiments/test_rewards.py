"""Rewards: the functions that have names, weighted sums, and what a function may not return."""

import re
from fractions import Fraction

import numpy as np
import pytest

from experiments.config import Config, RewardConfig
from experiments.experience.scoring import Sample, score, to_samples
from experiments.loop.run import set_up
from experiments.loop.run_parts import UserParts
from experiments.sampling.policy import Generation
from experiments.tasks import Completion, Example, Rewards, RewardTerm, make_task
from experiments.tasks.rewards import RewardFailed, RewardNotFinite, rewards_of
from jaxlogp import soft_overlong_punishment

EXAMPLE = Example("37+48=", "85")


def said(text, num_tokens=3, ended=True):
    return Completion(text, num_tokens=num_tokens, ended=ended)


def named(task="addition", **options):
    return RewardConfig(**options).rewards(make_task(task))


def part(name, completion, **options):
    ((value,),) = named(functions=(name,), **options).score([EXAMPLE], [completion]).parts
    return value


TAGGED = "<think>30+40, 7+8</think>\n<answer>85</answer>"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (TAGGED, 1.0), (f"\n{TAGGED} ", 1.0), ("<think></think><answer></answer>", 1.0),
        ("<think>a < b</think><answer>1</answer>", 1.0), (f"Sure! {TAGGED}", 0.0), (f"{TAGGED} Done.", 0.0),
        (f"{TAGGED}{TAGGED}", 0.0), ("<answer>85</answer><think>late</think>", 0.0),
        ("<think>a<think>b</think><answer>85</answer>", 0.0), ("<think>a</think><answer>85", 0.0), ("85", 0.0),
    ],
)  # fmt: skip
def test_tags(text, value):
    assert part("tags", said(text)) == value


def test_pattern_matches_all_of_a_completion_and_ended_and_short_read_its_tokens():
    pattern = r"(.*)= (\d+)"
    assert part("pattern", said("30+40\n= 85"), pattern=pattern) == 1.0
    assert part("pattern", said("30+40= 85."), pattern=pattern) == 0.0
    assert part("ended", said("8", ended=True)) == 1.0 and part("ended", said("8", ended=False)) == 0.0
    lengths = [part("short", said("8", num_tokens=number), length=10) for number in (1, 10, 15, 30)]
    np.testing.assert_allclose(lengths, [0.0, 0.0, -0.5, -2.0])


def test_overlong_is_the_punishment_of_the_library():
    tokens = [1, 80, 81, 90, 100, 120]
    mine = [part("overlong", said("8", num_tokens=number), length=100, buffer=20) for number in tokens]
    wanted = soft_overlong_punishment(np.array(tokens), max_length=100, buffer=20)
    # Quotients of small integers by 20, rounded once to fp32.
    np.testing.assert_allclose(mine, wanted, rtol=0.0, atol=2.0**-23)


def test_rewards_are_weighted_sums():
    """Of the task's verdict alone by default."""
    scored = named().score([EXAMPLE] * 2, [said("85"), said("8")])
    assert named().names == ("correct",) and scored.rewards.tolist() == [1.0, 0.0]
    rewards = named(functions=("correct", "tags", "ended"), weights=(1.0, 0.25, -0.5))
    scored = rewards.score([EXAMPLE] * 3, [said("85"), said(TAGGED), said(TAGGED, ended=False)])
    assert scored.parts.tolist() == [[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 1.0, 0.0]]
    assert scored.rewards.tolist() == [0.5, -0.25, 0.25] and scored.rewards.dtype == np.float32


def near(example, completion):
    return completion[-1:] == example.answer[-1]


def test_functions_of_ones_own():
    assert rewards_of(near) == Rewards((RewardTerm("near", near, 1.0),))
    rewards = rewards_of([(near, 0.5), (lambda example, completion: np.float32(completion.num_tokens), 2)])
    assert rewards.names == ("near", "lambda") and rewards_of(rewards) is rewards
    assert rewards.score([EXAMPLE], [said("75", num_tokens=4)]).rewards.tolist() == [8.5]
    assert rewards_of(lambda *_: Fraction(1, 2)).score([EXAMPLE], [said("75")]).rewards.tolist() == [0.5]


@pytest.mark.bad_input
@pytest.mark.parametrize("value", [None, "1", [1.0], np.zeros(2), float("nan"), 1e300, 10**400, 1j], ids=repr)
def test_what_is_no_finite_number_is_refused_with_function_and_example(value):
    def odd(example, completion):
        return value if completion == "b" else 0

    words = f"reward 'odd': expected a finite number for document 1 (prompt '37+48=', completion 'b'), got {value!r}"
    # A number that is not finite refuses a step; what is no number is an error in the function.
    error = RewardNotFinite if isinstance(value, float | int) else RewardFailed
    with pytest.raises(error, match=f"^{re.escape(words)}$"):
        rewards_of(odd).score([EXAMPLE] * 2, [said("a"), said("b")])


@pytest.mark.bad_input
def test_a_function_that_raises_is_named_with_its_example():
    def odd(example, completion):
        return 1 / len(completion)

    place = r"document 1 \(prompt '37.*', completion ''\)"
    words = f"reward 'odd': expected a finite number for {place}, got ZeroDivisionError: division by zero"
    with pytest.raises(RewardFailed, match=f"^{words}$"):
        rewards_of(odd).score([EXAMPLE] * 2, [said("a"), said("")])
    with pytest.raises(RewardNotFinite, match="^reward: expected a finite sum for document 0 .*, got 6e"):
        rewards_of([(near, 3e38), (lambda *_: 1.0, 3e38)]).score([EXAMPLE], [said("5")])


@pytest.mark.bad_input
def test_completions_are_decoded_once_for_all_judges_and_only_no_text_is_empty():
    decoded = []

    class Letters:
        def decode(self, ids):
            decoded.append(ids)
            return "".join(map(chr, ids))

    texts = ["85", " ", "", "8"]
    ends = ["stop", "length", "stop", "length"]
    generations = [
        Generation(np.array([*map(ord, text)], np.int32), np.zeros(len(text), np.float32), end)
        for text, end in zip(texts, ends, strict=True)
    ]
    length = rewards_of(lambda example, completion: completion.num_tokens)
    tokenizer, judges = Letters(), (named(functions=("correct", "ended")), length)
    verdicts = score(tokenizer, [EXAMPLE] * 4, generations, *judges)
    assert verdicts.scored[0].parts.tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    assert verdicts.scored[1].rewards.tolist() == [2.0, 1.0, 0.0, 1.0]
    assert verdicts.empty.tolist() == [False, False, True, False] and len(decoded) == 4
    samples = to_samples(tokenizer, [EXAMPLE] * 2, generations, verdicts.scored[0], judges[0].names)
    assert samples == [
        Sample("37+48=", "85", "85", 2.0, {"correct": 1.0, "ended": 1.0}, 2, True),
        Sample("37+48=", " ", "85", 0.0, {"correct": 0.0, "ended": 0.0}, 1, False),
    ]
    # The error of a function itself is the cause, so that --debug shows its lines.
    with pytest.raises(RewardFailed, match="got ZeroDivisionError: division by zero$") as failed:
        score(tokenizer, [EXAMPLE], generations[:1], rewards_of(lambda example, completion: 1 / 0))
    assert isinstance(failed.value.__cause__, ZeroDivisionError)


def test_refuses_what_are_no_functions():
    for bad in ([near], [(near, 1.0, 2.0)], [("near", 1.0)], 3):
        with pytest.raises(ValueError, match="^reward: expected a function"):
            rewards_of(bad)
    with pytest.raises(ValueError, match="^--reward: expected no other options where train is given a reward, got "):
        set_up(Config(reward=RewardConfig(functions=("ended",))), UserParts(reward=near))
