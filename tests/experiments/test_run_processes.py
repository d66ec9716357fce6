"""What the processes of a run tell each other, with threads in their place and a dictionary as their store."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from experiments import processes as module
from experiments.experience.scoring import score
from experiments.models.tokenizer import EOS_ID, CharTokenizer
from experiments.processes import FAILURE, Processes, processes, start
from experiments.sampling.options import SamplingOptions
from experiments.sampling.policy import Generation, SamplerPolicy, Samplers
from experiments.sampling.sampler import Samples
from experiments.tasks import Completion, Example, Rewards
from experiments.tasks.rewards import RewardFailed, RewardNotFinite, RewardTerm


class Left(BaseException):
    """In the place of os._exit."""


class Store:
    """The calls of JAX's key-value store that are used, with its errors."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            if key in self.values:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_delete(self, key):
        with self.changed:
            self.values.pop(key, None)


@pytest.fixture
def said(monkeypatch):
    """What the processes print."""
    said = []
    monkeypatch.setattr(module, "_say", said.append)
    return said


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def here(monkeypatch, store, said):
    """Three processes, which raise what they end with."""
    for name, value in (("_POLL_MS", 20), ("GRACE_SECONDS", 0.0), ("LEAVE_SECONDS", 0.1)):
        monkeypatch.setattr(module, name, value)

    def leave(code):
        raise Left(code)

    monkeypatch.setattr(module.os, "_exit", leave)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    return [Processes(index, 3, store) for index in range(3)]


def in_each(here, function):
    """What the function returns, or raises, in every process at the same time."""

    def run(each):
        try:
            return function(each)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(here)) as pool:
        return list(pool.map(run, here))


def test_one_process_has_nobody_to_ask():
    here = processes()
    assert (here.index, here.count, here.first) == (0, 1, True)
    assert Processes().gather("x", [1]) == [[1]]
    Processes().end(1, "a fault", is_origin=True)
    Processes().watch()


def test_every_process_gathers_all_values_and_the_store_stays_small(here, store):
    for number in range(4):
        found = in_each(here, lambda each, number=number: each.gather("numbers", [each.index, number, float("-inf")]))
        assert found == [[[index, number, float("-inf")] for index in range(3)]] * 3
    assert len(store.values) == 3
    assert in_each(here, lambda each: each.from_first("name", lambda: f"of {each.index}")) == ["of 0"] * 3


def test_a_fault_of_one_process_is_that_of_all(here):

    def write(each):
        if each.index == 1:
            raise OSError(28, "No space left on device", "/x")
        return each.index

    assert in_each(here, lambda each: each.attempt("numbers", lambda: each.index)) == [[0, 1, 2]] * 3
    errors = in_each(here, lambda each: each.attempt("files", lambda: write(each)))
    assert [error.errno for error in errors] == [28] * 3
    words = "No space left on device"
    assert [error.strerror for error in errors] == [f"process 1: {words}", words, f"process 1: {words}"]
    with pytest.raises(OSError, match="/x"):
        Processes().attempt("files", lambda: write(here[1]))


def test_processes_that_gather_different_things_are_told_so(here):
    errors = in_each(here, lambda each: each.gather("signals" if each.index else "rewards", None))
    assert str(errors[0]) == "process 1 is at 'signals' where process 0 is at 'rewards'"
    assert all(isinstance(error, RuntimeError) for error in errors)


def test_a_different_option_is_refused_by_name(here):
    errors = in_each(here, lambda each: each.require_same("options", {"--seed": each.index // 2, "--out": "runs"}))
    assert str(errors[0]) == "--seed: expected in process 2 that of process 0, 0, got 1"
    assert all(isinstance(error, ValueError) for error in errors)
    assert in_each(here, lambda each: each.require_same("options", {"--out": "runs"})) == [None] * 3


def test_a_slow_process_is_named_once(here, said, monkeypatch):
    monkeypatch.setattr(module, "SLOW_SECONDS", 0.1)
    released = threading.Event()
    threading.Timer(0.4, released.set).start()
    in_each(here, lambda each: (each.index != 1 or released.wait(), each.gather("rewards", None)))
    (line,) = said
    assert line.startswith("WARNING: process 1 keeps the others waiting at rewards")


def test_all_end_with_the_reason_and_the_code_of_the_first_that_failed(here, store, said):
    ends = in_each(here[1:2], lambda each: each.end(3, "/x: No space left on device", is_origin=True))
    assert [error.args for error in ends] == [(3,)] and json.loads(store.values[FAILURE])[0] == 1
    # Those that wait in a collective are ended by their threads.
    assert in_each(here[:1] + here[2:], lambda each: each._watch())[1].args == (3,)
    assert said == [f"error: process 1{word}: /x: No space left on device" for word in ("", " ended", " ended")]


def test_a_process_at_fault_stays_until_the_others_leave(here, monkeypatch):
    """JAX misses its heartbeats otherwise, and aborts the others before they have said anything."""
    monkeypatch.setattr(module, "LEAVE_SECONDS", 30.0)
    order, leave = [], module.os._exit
    monkeypatch.setattr(module.os, "_exit", lambda code: (order.append("left"), leave(code)))

    def fail(each):
        if each.index == 1:
            each.end(1, "a bug", is_origin=True)
        assert order == [] and not threading.Event().wait(0.2) and order == []
        each._watch()

    assert [error.args for error in in_each(here, fail)] == [(1,)] * 3


def test_a_broken_connection_is_no_reason_while_there_is_one(here, said):
    in_each(here[2:], lambda each: each.end(1, "a bug", is_origin=True))
    (end,) = in_each(here[:1], lambda each: each.end(1, "JaxRuntimeError: Connection reset", is_origin=False))
    assert end.args == (1,)
    assert said[0] == "error: process 2: a bug" and said[-1] == "error: process 2 ended: a bug" and len(said) == 3


def test_the_same_refusal_everywhere_is_printed_once(here, said):
    ends = in_each(here, lambda each: each.end(2, "--seed: expected …", is_origin=True))
    assert [error.args for error in ends] == [(2,)] * 3 and len(said) == 1


def test_a_process_that_ends_by_itself_is_not_ended_by_its_thread(here, said):
    here[0]._ending.set()
    here[0]._watch()
    in_each(here[1:2], lambda each: each.end(1, "a bug", is_origin=True))
    here[0]._watch()
    assert said == ["error: process 1: a bug"]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "place, words",
    [
        ((None, 2, 0), "--distributed: expected --coordinator, .* together, or none of them, got no --coordinator"),
        (("localhost:1", None, 0), "got no --num-processes"),
        (("localhost:1", 2, 2), r"--process-id: expected in \[0, 2\), got 2"),
        (("localhost:1", 0, 0), "--num-processes: expected at least 1, got 0"),
        (("localhost", 2, 0), "--coordinator: expected host:port, got 'localhost'"),
        ((None, None, None), "--distributed: expected .*, or a cluster, got an environment without them"),
    ],
)
def test_a_place_among_the_processes_that_cannot_be(place, words, monkeypatch):
    def initialize(*place, **timeouts):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(module.jax.distributed, "initialize", initialize)
    with pytest.raises(ValueError, match=words):
        start(*place)


EXAMPLES = [Example(f"{number}+1=", str(number + 1)) for number in range(7)]
TEXTS = [Completion(str(number % 3), num_tokens=1, ended=True) for number in range(7)]
IDS = [np.array(CharTokenizer("012").encode(text), np.int32) for text in TEXTS]
DRAWN = [Generation(ids, np.zeros(1, np.float32), "stop") for ids in IDS]


def scored(here, monkeypatch, function):
    """Results of `score` in each process."""
    own = threading.local()
    monkeypatch.setattr("experiments.experience.scoring.processes", lambda: own.here)
    rewards = Rewards((RewardTerm("own", function), RewardTerm("length", lambda e, c: c.num_tokens, 0.5)))

    def run(each):
        own.here = each
        return score(CharTokenizer("012"), EXAMPLES, DRAWN, rewards)

    return in_each(here, run)


def test_every_completion_is_scored_by_one_process(here, monkeypatch):
    calls = []

    def reward(example, completion):
        calls.append(example.prompt)
        return int(completion) / 7

    whole = Rewards((RewardTerm("own", reward), RewardTerm("length", lambda e, c: c.num_tokens, 0.5)))
    wanted = whole.score(EXAMPLES, TEXTS)
    calls.clear()
    for (found,), _ in scored(here, monkeypatch, reward):
        np.testing.assert_array_equal(found.rewards, wanted.rewards)
        np.testing.assert_array_equal(found.parts, wanted.parts)
    assert sorted(calls) == [example.prompt for example in EXAMPLES]


def test_every_completion_is_decoded_by_one_process(here, monkeypatch):
    """All of them know where a stop text ends it, its rewards and whether it is empty."""
    own, decoded = threading.local(), []
    for name in ("sampling.policy", "experience.scoring"):
        monkeypatch.setattr(f"experiments.{name}.processes", lambda: getattr(own, "here", Processes()))

    class Digits(CharTokenizer):
        def decode(self, ids):
            decoded.append((threading.get_ident(), list(ids)[0]))
            return super().decode(ids)

    tokenizer = Digits("0123456789+=")
    answers = [tokenizer.encode("7123"), *([*tokenizer.encode(text), EOS_ID] for text in ("812", "", "01"))]

    def draw(params, prompts, lengths, copies, key):
        del params, prompts, lengths, copies, key
        tokens = np.array([row + [0] * (4 - len(row)) for row in answers], np.int32)
        counts = np.array([row.index(EOS_ID) + 1 if EOS_ID in row else len(row) for row in answers], np.int32)
        return Samples(tokens, tokens * np.float32(-0.5), counts)

    reward = Rewards((RewardTerm("length", lambda example, completion: len(completion)),))

    def run(each=None):
        if each is not None:
            own.here = each
        policy = SamplerPolicy(Samplers(lambda *options: draw, tokenizer, 1.0, 9), {}, 0, None, None)
        drawn = policy.generate([[5]], SamplingOptions(4, stop=("12",)), copies=4)
        return drawn, *score(tokenizer, EXAMPLES[:1] * 4, drawn, reward)

    whole = run()
    decoded.clear()
    of_each = in_each(here, run)
    owners = {first: {thread for thread, other in decoded if other == first} for _, first in decoded}
    assert len(owners) == 4 and all(len(threads) == 1 for threads in owners.values())
    for drawn, (found,), empty in of_each:
        np.testing.assert_array_equal(found.rewards, whole[1][0].rewards)
        np.testing.assert_array_equal(empty, whole[2])
        assert [each.ids.tolist() for each in drawn] == [each.ids.tolist() for each in whole[0]]
        assert [each.finish_reason for each in drawn] == ["stop"] * 4
    assert whole[2].tolist() == [False, False, True, False] and [len(each.ids) for each in whole[0]] == [3, 3, 1, 3]


@pytest.mark.parametrize("raised", [RewardFailed, RewardNotFinite])
def test_a_reward_that_fails_in_one_process_fails_in_all(here, monkeypatch, raised):

    def reward(example, completion):
        if example is not EXAMPLES[4]:
            return 0.0
        return float("nan") if raised is RewardNotFinite else None

    errors = scored(here, monkeypatch, reward)
    assert [type(error) for error in errors] == [raised] * 3
    assert len(set(map(str, errors))) == 1 and "document 4" in str(errors[0])
