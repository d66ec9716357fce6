"""Invariance over the batch: a token's results do not depend on its position or on the other tokens."""

import jax
import numpy as np
import pytest

from tests.invariance.harness import CHUNKED, FIXED, NAIVE, TARGET_FIELDS, Setting, broken, case, run

pytestmark = pytest.mark.costly

TOKENS = 96
VOCAB = 1027
PER_TOKEN = ("log_probs", "entropy", "hidden")
EVERYTHING = (*PER_TOKEN, "weight", "bias")
# In NumPy, whose indexing compiles nothing.
BASE = jax.tree.map(np.asarray, case(VOCAB, TOKENS))
RNG = np.random.default_rng(9)
PERMUTATION = RNG.permutation(TOKENS)
ALL = np.arange(TOKENS)


def take(rows, source=BASE):
    """The tokens ``rows`` of the source, in that order."""
    rows = np.asarray(rows)
    return {name: value[rows] if name in ("hidden", *TARGET_FIELDS) else value for name, value in source.items()}


def among_others(change):
    """The first half as it is, among others that have been changed."""
    data = dict(BASE)
    others = np.arange(TOKENS) >= TOKENS // 2
    data.update(change(data, others))
    return data, np.arange(TOKENS // 2), np.arange(TOKENS // 2)


def padded(before, after):
    """Masked tokens, with NaN hidden states and ids of no use, before and after."""
    total = before + TOKENS + after
    data = case(VOCAB, total, seed=5)
    inside = slice(before, before + TOKENS)
    moved = {name: np.array(data[name]) for name in ("hidden", *TARGET_FIELDS)}
    moved["mask"][:], moved["hidden"][:], moved["targets"][:] = False, np.nan, -100
    for name, values in moved.items():
        values[inside] = BASE[name]
    return {**BASE, **moved}, np.arange(before, before + TOKENS), ALL


def selection(rows):
    return take(rows), np.arange(len(rows)), np.asarray(rows)


def changed_hidden(factor):
    return lambda data, others: {
        "hidden": np.where(others[:, None], data["hidden"] * np.float32(factor), data["hidden"])
    }


# name: (data, places in it, the places of the same tokens in BASE), and the results compared
TRANSFORMS = {
    "permutation": (selection(PERMUTATION), PER_TOKEN),
    "reversed": (selection(ALL[::-1]), PER_TOKEN),
    "rotated by one": (selection(np.roll(ALL, 1)), PER_TOKEN),
    "blocks of rows swapped": (selection(np.roll(ALL, 64)), PER_TOKEN),
    "every token twice, half of them": (selection(np.repeat(ALL[:48], 2)), PER_TOKEN),
    "one token everywhere": (selection(np.full(TOKENS, 7)), PER_TOKEN),
    "others ten thousand times larger": (among_others(changed_hidden(1e4)), PER_TOKEN),
    "others zero": (among_others(changed_hidden(0.0)), PER_TOKEN),
    "others masked": (among_others(lambda data, others: {"mask": data["mask"] & ~others}), PER_TOKEN),
    "others with other targets": (
        among_others(
            lambda data, others: {"targets": np.where(others, (data["targets"] + 1) % VOCAB, data["targets"])}
        ),
        PER_TOKEN,
    ),
    "the first half alone": (selection(ALL[:48]), PER_TOKEN),
    "seven tokens": (selection(ALL[40:47]), PER_TOKEN),
    "one token": (selection([50]), PER_TOKEN),
    "a chunk from the middle": (selection(ALL[24:72]), PER_TOKEN),
    "every token twice": (selection(np.tile(ALL, 2)), PER_TOKEN),
    "padding after": (padded(0, 96), EVERYTHING),
    "padding before": (padded(50, 46), PER_TOKEN),
    "padding of a whole block before": (padded(64, 32), PER_TOKEN),
}


def differences(setting, size, name):
    (data, places, sources), names = TRANSFORMS[name]
    wanted, seen = run(setting, size, BASE), run(setting, size, data)
    seen = {key: seen[key][places] if key in PER_TOKEN else seen[key] for key in names}
    wanted = {key: wanted[key][sources] if key in PER_TOKEN else wanted[key] for key in names}
    return broken(seen, wanted)


# Each size of a batch is a program to compile: half of the tokens, and twice as many, on four shards; seven tokens on one.
FOUR_ALONE = {name for name in TRANSFORMS if name.startswith(("padding", "the first half", "a chunk"))} | {
    "every token twice"
}
PROGRAMS = [(name, 4) for name in TRANSFORMS if name != "seven tokens"] + [
    pytest.param(name, 1, marks=pytest.mark.slow) for name in TRANSFORMS if name not in FOUR_ALONE
]


@pytest.mark.parametrize("name, size", PROGRAMS)
def test_the_same_tokens_get_the_same_bytes(name, size):
    assert differences(Setting(FIXED, VOCAB), size, name) == []


@pytest.mark.parametrize("engine", [CHUNKED, NAIVE], ids=["chunked", "naive"])
def test_the_fast_path_and_the_naive_design_break_in_this_harness(engine):
    """Negative controls: a single token takes another code path of the product."""
    assert differences(Setting(engine, VOCAB), 1, "one token")


@pytest.mark.slow
def test_the_shape_of_the_batch_is_no_matter():
    setting, shape = Setting(FIXED, VOCAB), (1, 8, 12)
    wanted = run(setting, 1, BASE)
    data = {name: BASE[name].reshape(*shape, *BASE[name].shape[1:]) for name in ("hidden", *TARGET_FIELDS)}
    seen = run(setting, 1, {**BASE, **data})
    seen = {name: seen[name].reshape(wanted[name].shape) for name in wanted}
    assert broken(seen, wanted) == []
