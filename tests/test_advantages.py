"""Group-relative advantages against float64, degenerate groups, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp.policy.advantages import group_advantages, leave_one_out_advantages
from tests import oracle

# A mean of 6 rewards is off by as many roundings of at most 2.1; its difference to a reward, and the square root of a mean
# of 6 squares, add 4 more. Divided by a deviation of at least 0.4.
ERROR = oracle.fp32_bound(2.1 / 0.4, 6 + 4)


def rewards_of(groups=5, generations=6):
    return np.random.default_rng(0).normal(0.3, 1.0, (groups, generations)).astype(np.float32)


def test_scaled_by_group_and_not():
    rewards = rewards_of()
    wide = np.float64(rewards)
    centred = wide - wide.mean(axis=1, keepdims=True)
    deviation = np.sqrt((centred**2).sum(axis=1, keepdims=True) / 5)  # the sample deviation of 6 generations
    for options, expected in (
        ({}, centred / (deviation + 1e-4)),
        ({"epsilon": 0.5}, centred / (deviation + 0.5)),
        ({"scale_rewards": "none"}, centred),
    ):
        result = jax.jit(functools.partial(group_advantages, **options))(rewards)
        np.testing.assert_allclose(result.advantages, expected, atol=ERROR)
        assert not np.asarray(result.degenerate).any() and result.advantages.dtype == jnp.float32


def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others():
    rewards = rewards_of()
    expected = np.array([[row[i] - np.mean(np.delete(row, i)) for i in range(6)] for row in np.float64(rewards)])
    result = leave_one_out_advantages(rewards)
    np.testing.assert_allclose(result.advantages, expected, atol=ERROR)


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_leave_one_out_rounds_no_more_than_its_own_size(offset):
    """Two subtractions, each of which rounds by at most half an ulp, 2^-24, of the largest advantage."""
    rewards = (offset + np.random.default_rng(0).normal(0.0, 10.0, (2000, 8))).astype(np.float32)
    wide = np.float64(rewards)
    expected = wide - (wide.sum(axis=1, keepdims=True) - wide) / 7
    error = np.abs(np.asarray(leave_one_out_advantages(rewards).advantages) - expected).max()
    assert error < 2 * 2.0**-24 * np.abs(expected).max(), error


@pytest.mark.parametrize("advantages", [group_advantages, leave_one_out_advantages])
def test_equal_rewards_give_exactly_zero(advantages):
    # The fp32 mean of three times 0.1 is not 0.1, so the difference alone would not be zero.
    rewards = np.float32([[0.1, 0.1, 0.1], [1e30, 1e30, 1e30], [0.0, 0.0, 1.0]])
    result = advantages(rewards)
    np.testing.assert_array_equal(result.degenerate, [True, True, False])
    np.testing.assert_array_equal(result.advantages[:2], np.zeros((2, 3)))
    assert (np.asarray(result.advantages)[2] != 0).all()


def test_a_small_deviation_is_not_degenerate():
    rewards = np.float32([[1.0, 1.0, 1.0 + 2**-22], [0.0, 1e-12, 0.0]])
    result = group_advantages(rewards, epsilon=0.0)
    assert not np.asarray(result.degenerate).any()
    # (2, -1, -1) / 3 over its sample deviation 1 / sqrt(3), whatever the offset and the scale.
    expected = np.array([[-1, -1, 2], [-1, 2, -1]]) / np.sqrt(3)
    np.testing.assert_allclose(result.advantages, expected, atol=ERROR)


def test_zero_epsilon_and_equal_rewards_are_not_nan():
    result = group_advantages(np.ones((1, 4), np.float32), epsilon=0.0)
    np.testing.assert_array_equal(result.advantages, np.zeros((1, 4)))


def test_every_group_stands_for_itself():
    """The advantages of a group do not depend on which groups are beside it."""
    rewards = rewards_of()
    whole = np.asarray(group_advantages(rewards).advantages)
    for row in range(5):
        np.testing.assert_allclose(group_advantages(rewards[row : row + 1]).advantages[0], whole[row], atol=ERROR)


BAD = {
    "rank 1": (np.zeros(4, np.float32), {}, "rewards", "(4,)"),
    "no group": (np.zeros((0, 4), np.float32), {}, "rewards", "(0, 4)"),
    "ints": (np.zeros((2, 4), np.int32), {}, "rewards", "int32"),
    "a list": ([[1.0, 0.0]], {}, "rewards", "list"),
    "NaN": (np.float32([[0, 1], [2, np.nan]]), {}, "rewards", "nan at position (1, 1)"),
    "infinite": (np.float32([[0, 1], [-np.inf, 1]]), {}, "rewards", "-inf at position (1, 0)"),
    "scale": (rewards_of(), {"scale_rewards": "std"}, "scale_rewards", "'std'"),
    "epsilon": (rewards_of(), {"epsilon": -1.0}, "epsilon", "-1.0"),
    "an infinite epsilon": (rewards_of(), {"epsilon": np.inf}, "epsilon", "inf"),
    "an epsilon that is no number": (rewards_of(), {"epsilon": None}, "epsilon", "None"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.bad_input
def test_bad_input_names_the_argument(name):
    rewards, options, argument, seen = BAD[name]
    functions = [functools.partial(group_advantages, **options)] + ([] if options else [leave_one_out_advantages])
    for function in functions:
        with pytest.raises(ValueError) as raised:
            function(rewards)
        message = str(raised.value)
        assert message.startswith(f"{argument}: expected ") and seen in message.partition(", got ")[2], message


GROUPS = np.int32([7, -3, 7, 40, 7, -3, 11, 11, 11])  # sizes 3, 2, 1, 3; the last has equal rewards
GROUPED = np.float32([1.0, 0.25, -2.0, 5.0, 0.5, 3.0, 0.1, 0.1, 0.1])


@pytest.mark.parametrize("options", [{}, {"scale_rewards": "none"}, {"epsilon": 0.0}, None])
def test_groups_by_id_of_any_size_against_float64(options):
    """None: leave_one_out. Each entry by its group alone, in float64."""
    wide, expected = np.float64(GROUPED), np.zeros(len(GROUPED))
    for group in set(GROUPS):
        members = np.flatnonzero(group == GROUPS)
        values, n = wide[members], len(members)
        if np.ptp(values) == 0:
            continue
        if options is None:
            expected[members] = values - (values.sum() - values) / (n - 1)
            continue
        expected[members] = values - values.mean()
        if "scale_rewards" not in options:
            expected[members] /= values.std(ddof=1) + options.get("epsilon", 1e-4)
    function = leave_one_out_advantages if options is None else functools.partial(group_advantages, **options)
    for run in (function, jax.jit(function)):
        result = run(GROUPED, group_ids=GROUPS)
        # Rewards up to 5: a few roundings of half an ulp each.
        np.testing.assert_allclose(result.advantages, expected, atol=5 * 4 * 2.0**-24)
        np.testing.assert_array_equal(result.degenerate, np.isin(GROUPS, [40, 11]))
        assert (np.asarray(result.advantages)[np.isin(GROUPS, [40, 11])] == 0).all()


@pytest.mark.parametrize("advantages", [group_advantages, leave_one_out_advantages])
def test_groups_by_id_are_those_of_rows(advantages):
    rewards = rewards_of(groups=3, generations=4)
    rows = advantages(rewards)
    shuffled = np.random.default_rng(1).permutation(12)
    ids = np.repeat(np.int32([5, 9, 2]), 4)[shuffled]
    flat = advantages(rewards.ravel()[shuffled], group_ids=ids).advantages
    # Sums of 4 in two orders.
    np.testing.assert_allclose(flat, np.asarray(rows.advantages).ravel()[shuffled], atol=4 * 2.0**-22)


@pytest.mark.parametrize("advantages", [group_advantages, leave_one_out_advantages])
def test_a_group_of_one_has_advantage_zero(advantages):
    result = advantages(np.float32([[3.0], [-1.0]]))
    np.testing.assert_array_equal(result.advantages, [[0.0], [0.0]])
    assert result.degenerate.tolist() == [True, True]


@pytest.mark.bad_input
@pytest.mark.parametrize("advantages", [group_advantages, leave_one_out_advantages])
def test_bad_group_ids_are_named(advantages):
    for rewards, ids, argument in (
        (GROUPED, GROUPS[:3], "group_ids"),
        (GROUPED, GROUPED, "group_ids"),
        (GROUPED, [1] * 9, "group_ids"),
        (GROUPED, None, "rewards"),
        (GROUPED[None], GROUPS[None], "rewards"),
        (GROUPED[:0], GROUPS[:0], "rewards"),
        (np.where(GROUPED == 5.0, np.nan, GROUPED), GROUPS, "rewards"),
    ):
        with pytest.raises(ValueError, match=f"^{argument}: expected"):
            advantages(rewards, group_ids=ids)
