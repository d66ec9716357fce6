"""Algorithms by name: the loss and the advantages of each, against formulas in float64."""

import inspect
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import losses
from jaxlogp.policy.algorithms import ADVANTAGES, ALGORITHMS, OVER_BATCH, CompletionRewards, find_algorithm
from tests import oracle

RNG = np.random.default_rng(0)
REWARDS, LENGTHS = RNG.normal(0.3, 1.0, (5, 4)).astype(np.float32), RNG.integers(0, 9, (5, 4))
BASELINES = RNG.normal(size=5).astype(np.float32)
PARTS, WEIGHTS = np.stack([REWARDS, REWARDS**2], axis=-1), np.float32([1.0, 0.5])
WIDE = np.float64(REWARDS)
CENTRED = WIDE - WIDE.mean(axis=1, keepdims=True)


def over_labels(values):
    """Values less their mean over labels, divided by the labels' sample deviation."""
    repeated = np.repeat(values.ravel(), LENGTHS.ravel())
    return (values - repeated.mean()) / (repeated.std(ddof=1) + 1e-8)


def scaled(values):
    """Values less the mean of their group, divided by its deviation."""
    return (values - values.mean(axis=1, keepdims=True)) / (values.std(axis=1, ddof=1, keepdims=True) + 1e-4)


DECOUPLED = scaled(WIDE) + 0.5 * scaled(np.float64(PARTS[..., 1]))
EXPECTED = {
    "group": CENTRED / (WIDE.std(axis=1, ddof=1, keepdims=True) + 1e-4),
    "centred": CENTRED,
    "leave_one_out": CENTRED * 4 / 3,
    "length_weighted": WIDE - (WIDE * LENGTHS).sum(axis=1, keepdims=True) / LENGTHS.sum(axis=1, keepdims=True),
    "greedy_baseline": WIDE - np.float64(BASELINES)[:, None],
    "batch_scaled": CENTRED / (WIDE.std(ddof=1) + 1e-4),
    "batch": over_labels(WIDE),
    "batch_baseline": over_labels(CENTRED),
    "active_group": CENTRED,
    "decoupled": DECOUPLED / (DECOUPLED.std(ddof=1) + 1e-4),
    "none": 0.0 * WIDE,
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_by_name_are_those_of_their_formula(name):
    # Sums of at most 20 rewards below 2.2 times lengths below 9, a root and a division by a deviation above 0.4.
    error = oracle.fp32_bound(2.2 / 0.4, 20 + 8)
    given = CompletionRewards(REWARDS, LENGTHS, BASELINES, PARTS, WEIGHTS)
    np.testing.assert_allclose(ADVANTAGES[name](given).advantages, EXPECTED[name], atol=error)
    mine = ADVANTAGES[name](given._replace(lengths=np.ones((5, 4), int))).advantages
    more = [np.concatenate([x[:1], 2 * x[1:], x[:1] * 0]) for x in (REWARDS, PARTS)]
    baselines = np.append(BASELINES, np.float32(0.0))
    other = CompletionRewards(more[0], np.ones((6, 4), int), baselines, more[1], WEIGHTS)
    same = np.allclose(mine[0], ADVANTAGES[name](other).advantages[0], rtol=0.0, atol=error)
    assert same == (name not in OVER_BATCH)


def test_every_algorithm_pairs_a_loss_of_the_library_with_advantages():
    for name, each in ALGORITHMS.items():
        options = {"length": 8} if "length" in inspect.signature(each.loss).parameters else {}
        assert each.advantages in ADVANTAGES and each.loss(**options).name in losses.PRESETS, name
        assert each.loss(**options).name == name or each.loss in (losses.grpo, losses.reinforce), name
    assert {each.loss for each in ALGORITHMS.values()} == set(losses.PRESETS.values())
    parts = [(each.loss, each.advantages, each.selection) for each in ALGORITHMS.values()]
    assert len(parts) == len(set(parts)), "no algorithm has two names"


def test_every_algorithm_has_the_parts_that_its_page_lists():
    page = (Path(__file__).parents[1] / "docs/losses.md").read_text()
    table = page.split("| `--loss.name` | loss | `--loss.advantages` |\n|---|---|---|\n")[1].split("\n\n")[0]
    listed = {}
    for row in table.splitlines():
        names, loss, advantages = row.strip("|").split("|")
        for name in re.findall(r"`(\w+)`", names):
            other = re.search(r"`(\w+)`", loss)
            selection = name if "labels chosen" in loss else None
            listed[name] = (losses.PRESETS[other[1] if other else name], advantages.strip(" `"), selection)
    assert {name: (x.loss, x.advantages, x.selection) for name, x in ALGORITHMS.items()} == listed
    assert all(find_algorithm(name) is each for name, each in ALGORITHMS.items())


def test_a_registered_loss_has_group_advantages(monkeypatch):
    monkeypatch.setitem(losses.PRESETS, "mine", losses.gspo)
    assert (find_algorithm("mine").loss, find_algorithm("mine").advantages) == (losses.gspo, "group")
    assert find_algorithm("yours") is None and find_algorithm("rloo").loss is losses.reinforce


def test_a_masked_completion_counts_in_no_mean_over_labels():
    rewards, lengths = jnp.array([[1.0, 0.0], [5.0, 0.0]]), jnp.array([[3, 3], [0, 3]])
    expected = over = np.array([1.0] * 3 + [0.0] * 6)
    expected = (1.0 - over.mean()) / (over.std(ddof=1) + 1e-8)
    advantages = ADVANTAGES["batch"](CompletionRewards(rewards, lengths)).advantages
    np.testing.assert_allclose(advantages[0, 0], expected, rtol=1e-6)
