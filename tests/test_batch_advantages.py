"""Advantages over a whole batch, with lengths, greedy baselines or active groups: against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxlogp import (
    active_group_advantages,
    batch_advantages,
    decoupled_advantages,
    greedy_baseline_advantages,
    group_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
)
from tests import oracle

IDS = np.int32([7, -3, 7, 40, 7, -3, 11, 11, 11])  # sizes 3, 2, 1, 3; the last has equal rewards
REWARDS = np.float32([1.0, 0.25, -2.0, 5.0, 0.5, 3.0, 0.1, 0.1, 0.1])
LENGTHS = np.int32([3, 10, 0, 4, 25, 1, 7, 0, 8])
# Rewards of up to 5, sums of up to 9 of them with weights that add up to 1, and a deviation of at least 1.
ERROR = oracle.fp32_bound(5.0, 9 + 10)


def both(function, *arrays, **options):
    """The result on known values, and that under jit; of rows too if the groups allow."""
    yield function(*arrays, **options)
    names = [name for name in ("group_ids", "lengths") if options.get(name) is not None]
    static = {name: value for name, value in options.items() if name not in names}
    traced = {name: options[name] for name in names}
    yield jax.jit(functools.partial(function, **static))(*arrays, **traced)


def group_mean(values, ids, weights=None):
    result = np.zeros(len(values))
    for group in set(ids):
        of = ids == group
        w = np.ones(of.sum()) if weights is None else weights[of]
        result[of] = (values[of] * w).sum() / max(w.sum(), 1)
    return result


@pytest.mark.parametrize("epsilon", [1e-4, 0.5])
def test_scaled_by_the_batch(epsilon):
    """The group's mean, and the sample deviation of all rewards (TRL's `scale_rewards="batch"`, Lite PPO)."""
    wide = np.float64(REWARDS)
    expected = (wide - group_mean(wide, IDS)) / (wide.std(ddof=1) + epsilon)
    options = {"scale_rewards": "batch", "epsilon": epsilon}
    for result in both(group_advantages, REWARDS, group_ids=IDS, **options):
        np.testing.assert_allclose(result.advantages, expected, atol=ERROR)
        np.testing.assert_array_equal(result.degenerate, np.isin(IDS, [40, 11]))
        assert (np.asarray(result.advantages)[np.isin(IDS, [40, 11])] == 0).all()
    rows = np.random.default_rng(0).normal(0, 1, (4, 5)).astype(np.float32)
    wide = np.float64(rows)
    expected = (wide - wide.mean(axis=1, keepdims=True)) / (wide.std(ddof=1) + epsilon)
    for result in both(group_advantages, rows, **options):
        np.testing.assert_allclose(result.advantages, expected, atol=ERROR)


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("epsilon", [1e-8, 0.5])
def test_reinforce_plus_plus_normalizes_over_the_batch(baseline, lengths, epsilon):
    """Verl's masked whitening: every label of the batch counts, written out label by label."""
    wide = np.float64(REWARDS)
    values = wide - group_mean(wide, IDS) if baseline else wide
    labels = values if lengths is None else np.repeat(values, lengths)
    expected = (values - labels.mean()) / (labels.std(ddof=1) + epsilon)
    options = {"baseline": baseline, "lengths": lengths, "epsilon": epsilon}
    for result in both(batch_advantages, REWARDS, group_ids=IDS, **options):
        np.testing.assert_allclose(result.advantages, expected, atol=2 * ERROR)  # two means
        np.testing.assert_array_equal(result.degenerate, np.isin(IDS, [40, 11]))
    order = np.argsort(IDS[:6], kind="stable")  # groups of one size are rows
    rows = REWARDS[:6][order].reshape(3, 2)
    ids = np.repeat(np.arange(3), 2)
    in_rows = batch_advantages(rows, baseline=baseline).advantages
    np.testing.assert_allclose(
        np.ravel(in_rows), batch_advantages(rows.ravel(), group_ids=ids, baseline=baseline)[0], atol=ERROR
    )


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("baseline", [False, True])
def test_equal_values_give_exactly_zero(baseline, offset):
    # 0.1 + 100 has an fp32 mean of three that is off.
    rewards = np.full((2, 3), 0.1 + offset, np.float32)
    for lengths in (None, np.int32([[1, 2, 3], [4, 0, 6]])):
        result = batch_advantages(rewards, lengths=lengths, baseline=baseline, epsilon=0.0)
        np.testing.assert_array_equal(result.advantages, np.zeros((2, 3)))
    np.testing.assert_array_equal(group_advantages(rewards, scale_rewards="batch", epsilon=0.0)[0], np.zeros((2, 3)))
    np.testing.assert_array_equal(batch_advantages(rewards[:1, :1], baseline=baseline).advantages, [[0.0]])


def test_a_batch_without_labels_gives_zero():
    result = batch_advantages(REWARDS, group_ids=IDS, lengths=np.zeros(9, np.int32))
    np.testing.assert_array_equal(result.advantages, np.zeros(9))


def test_opo_weighs_the_mean_by_length():
    wide = np.float64(REWARDS)
    expected = wide - group_mean(wide, IDS, np.float64(LENGTHS))
    for result in both(length_weighted_advantages, REWARDS, LENGTHS, group_ids=IDS):
        np.testing.assert_allclose(result.advantages, expected, atol=ERROR)
        np.testing.assert_array_equal(result.degenerate, np.isin(IDS, [40, 11]))
    # Weighted by length, the advantages of a group add up to 0; with equal lengths they are those of the plain mean.
    weighted = np.asarray(result.advantages) * LENGTHS
    np.testing.assert_allclose(group_mean(weighted, IDS), 0.0, atol=25 * ERROR)
    rows = REWARDS[:6].reshape(2, 3)
    plain = group_advantages(rows, scale_rewards="none").advantages
    np.testing.assert_allclose(length_weighted_advantages(rows, np.full((2, 3), 9)).advantages, plain, atol=ERROR)
    nothing = length_weighted_advantages(rows, np.int32([[0, 0, 0], [1, 1, 1]])).advantages
    np.testing.assert_array_equal(nothing[0], np.zeros(3))


@pytest.mark.parametrize("marker", [-1e9, -1e25])
def test_the_reward_of_a_masked_completion_takes_no_bits_from_the_others(marker):
    """A completion of length 0 has no weight in any mean, so its reward, here a marker, must not be an offset either."""
    rewards, lengths = (
        np.float32([[1.0, 0.0, marker, 0.5], [3.0, marker, marker, 2.0]]),
        np.int32([[4, 2, 0, 6], [3, 0, 0, 5]]),
    )
    wide, counted = np.float64(rewards), lengths > 0
    mean = np.average(wide, weights=lengths)
    deviation = np.sqrt((lengths * (wide - mean) ** 2).sum() / (lengths.sum() - 1))
    for result in both(batch_advantages, rewards, lengths=lengths):
        np.testing.assert_allclose(result.advantages[counted], ((wide - mean) / deviation)[counted], atol=ERROR)
    mean = np.average(wide, weights=lengths, axis=1)[:, None]
    for result in both(length_weighted_advantages, rewards, lengths):
        np.testing.assert_allclose(result.advantages[counted], (wide - mean)[counted], atol=ERROR)


def test_remax_subtracts_the_greedy_reward():
    rewards, greedy = np.float32([[1.0, 0.0, 1.0], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]), np.float32([0.0, 0.25, 0.5])
    for result in both(greedy_baseline_advantages, rewards, greedy):
        np.testing.assert_array_equal(result.advantages, rewards - greedy[:, None])
        np.testing.assert_array_equal(result.degenerate, [False, False, True])
    flat = greedy_baseline_advantages(REWARDS, REWARDS[::-1].copy(), group_ids=IDS)
    np.testing.assert_array_equal(flat.advantages, REWARDS - REWARDS[::-1])
    one = greedy_baseline_advantages(np.float32([[1.0]]), np.float32([0.0]))
    assert one.advantages.tolist() == [[1.0]], "a group of one has an advantage"


def test_gpg_scales_by_the_share_of_active_groups():
    wide = np.float64(REWARDS)
    expected = (wide - group_mean(wide, IDS)) * 9 / 5
    expected[np.isin(IDS, [40, 11])] = 0.0
    for result in both(active_group_advantages, REWARDS, group_ids=IDS):
        np.testing.assert_allclose(result.advantages, expected, atol=2 * ERROR)
    rows = np.float32([[1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 1, 1]])
    expected = 2 * (np.float64(rows) - np.float64(rows).mean(axis=1, keepdims=True))
    for result in both(active_group_advantages, rows):
        np.testing.assert_allclose(result.advantages, expected, atol=ERROR)
    np.testing.assert_array_equal(active_group_advantages(rows[1:3]).advantages, np.zeros((2, 3)))


# Three functions: REWARDS, one that differs in the other groups too, and one of a hundredth of its size.
FUNCTIONS = np.stack([REWARDS, REWARDS[::-1], 0.01 * (IDS + np.arange(9))], axis=-1).astype(np.float32)


@pytest.mark.parametrize("weights", [None, [1.0, -0.5, 2.0], np.float32([0.0, 1.0, 0.0])])
def test_gdpo_normalizes_each_function_before_their_sum_and_then_the_batch(weights):
    wide, total = np.float64(FUNCTIONS), np.zeros(9)
    for k, weight in enumerate(np.ones(3) if weights is None else weights):
        for group in set(IDS.tolist()):
            own = IDS == group
            centred = wide[own, k] - wide[own, k].mean()
            total[own] += weight * centred / (centred.std(ddof=min(1, own.sum() - 1)) * (own.sum() > 1) + 1e-4)
    expected = total / (total.std(ddof=1) + 1e-4)
    # Parts of up to 2 with weights of up to 3.5, from differences of rewards near 0.4 with deviations above 0.01, and a
    # deviation of the sum above 0.5.
    error = oracle.fp32_bound(0.4 / 0.01, 9) * 3.5 / 0.5
    for result in both(decoupled_advantages, FUNCTIONS, weights=weights, group_ids=IDS):
        np.testing.assert_allclose(result.advantages, expected, atol=error)
        np.testing.assert_array_equal(result.degenerate, IDS == 40)
        assert np.asarray(result.advantages)[IDS == 40] == 0.0, "exactly, so that it need not be computed"


def test_gdpo_of_rows_that_differ_in_one_function_or_none():
    rows = np.float32([[[1, 0], [0, 0]], [[1, 10], [1, 0]], [[3, 3], [3, 3]]])
    for result in both(decoupled_advantages, rows, epsilon=0.0):
        # Four parts of ±√½ among six: the deviation is √(4 · ½ / 5).
        np.testing.assert_allclose(result.advantages[:2], [[1.25**0.5, -(1.25**0.5)]] * 2, atol=ERROR)
        assert not np.any(result.advantages[2]) and result.degenerate.tolist() == [False, False, True]
    one_sum = group_advantages(rows.sum(axis=-1)).advantages
    assert abs(one_sum[0, 0] - one_sum[1, 0]) < 1e-3, "in a group of two the size of a reward has no effect"
    # Functions that cancel leave nothing, and no division by 0; fp16 would hold neither weight.
    cancelled = decoupled_advantages(rows[:1, :, [0, 0]], weights=(1e5, -1e5), epsilon=0.0).advantages
    np.testing.assert_array_equal(cancelled, np.zeros((1, 2)))


def test_leaving_one_out_is_the_centred_reward_stretched():
    """RLOO against REINFORCE with the group's mean: the factor n / (n - 1), and nothing else."""
    rewards = np.random.default_rng(0).normal(0, 1, (4, 5)).astype(np.float32)
    centred = np.asarray(group_advantages(rewards, scale_rewards="none").advantages)
    np.testing.assert_allclose(leave_one_out_advantages(rewards).advantages, centred * 5 / 4, atol=ERROR)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_rewards_with_group_ids_may_be_split_over_a_mesh(kind):
    mesh = jax.make_mesh((3,), ("data",), axis_types=(kind,), devices=jax.devices()[:3])
    arrays = REWARDS, REWARDS[::-1].copy(), LENGTHS, IDS
    functions = {
        "group": lambda r, b, n, i: group_advantages(r, group_ids=i, scale_rewards="batch"),
        "leave one out": lambda r, b, n, i: leave_one_out_advantages(r, group_ids=i),
        "batch": lambda r, b, n, i: batch_advantages(r, group_ids=i, lengths=n, baseline=True),
        "length weighted": lambda r, b, n, i: length_weighted_advantages(r, n, group_ids=i),
        "greedy baseline": lambda r, b, n, i: greedy_baseline_advantages(r, b, group_ids=i),
        "active": lambda r, b, n, i: active_group_advantages(r, group_ids=i),
        "decoupled": lambda r, b, n, i: decoupled_advantages(jnp.stack([r, b], axis=-1), group_ids=i),
    }

    def all_of(*arrays):
        return {name: function(*arrays) for name, function in functions.items()}

    wanted = all_of(*arrays)
    split = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for x in arrays]
    for run in (all_of, jax.jit(all_of)):
        seen = jax.tree.map(np.asarray, run(*split))
        for name, result in wanted.items():
            np.testing.assert_allclose(seen[name].advantages, result.advantages, atol=ERROR, err_msg=name)
            np.testing.assert_array_equal(seen[name].degenerate, result.degenerate, err_msg=name)


def test_float64_is_kept():
    with jax.enable_x64(True):
        rewards, lengths = np.float64(REWARDS), LENGTHS
        for result in (
            group_advantages(rewards, group_ids=IDS, scale_rewards="batch"),
            batch_advantages(rewards, group_ids=IDS, lengths=lengths),
            length_weighted_advantages(rewards, lengths, group_ids=IDS),
            greedy_baseline_advantages(rewards, rewards, group_ids=IDS),
            active_group_advantages(rewards, group_ids=IDS),
            decoupled_advantages(np.float64(FUNCTIONS), weights=[1.0, 2.0, 0.5], group_ids=IDS),
        ):
            assert result.advantages.dtype == jnp.float64
        narrow = decoupled_advantages(FUNCTIONS, weights=[1.0, 2.0, 0.5], group_ids=IDS)
        assert narrow.advantages.dtype == jnp.float32


ROWS = np.ones((2, 3), np.float32)
COUNTS = np.ones((2, 3), np.int32)
BAD = {
    "lengths": lambda: batch_advantages(ROWS, lengths=COUNTS[:1]),
    "lengths ": lambda: length_weighted_advantages(ROWS, -COUNTS),
    "lengths  ": lambda: length_weighted_advantages(ROWS, ROWS),
    "lengths   ": lambda: length_weighted_advantages(ROWS, COUNTS.tolist()),
    "epsilon": lambda: batch_advantages(ROWS, epsilon=-1.0),
    "baselines": lambda: greedy_baseline_advantages(ROWS, ROWS[0]),
    "baselines ": lambda: greedy_baseline_advantages(ROWS, np.float32([0.0, np.nan])),
    "baselines  ": lambda: greedy_baseline_advantages(ROWS, COUNTS[0, :2]),
    "rewards": lambda: active_group_advantages(ROWS[0]),
    "rewards ": lambda: batch_advantages(ROWS * np.float32(np.inf)),
    "rewards  ": lambda: decoupled_advantages(ROWS),
    "rewards   ": lambda: decoupled_advantages(ROWS[..., None][..., :0]),
    "rewards    ": lambda: decoupled_advantages(None),
    "weights": lambda: decoupled_advantages(ROWS[..., None], weights=[1.0, 2.0]),
    "weights ": lambda: decoupled_advantages(ROWS[..., None], weights=[np.nan]),
    "weights      ": lambda: decoupled_advantages(ROWS[..., None], weights=[1e300]),
    "weights  ": lambda: decoupled_advantages(ROWS[..., None], weights=1.0),
    "weights   ": lambda: decoupled_advantages(ROWS[..., None], weights=COUNTS[0, :1]),
    "weights    ": lambda: decoupled_advantages(ROWS[..., None], weights=["1.0"]),
    "epsilon ": lambda: decoupled_advantages(ROWS[..., None], epsilon=-1.0),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.bad_input
def test_bad_input_names_the_argument(name):
    with pytest.raises(ValueError, match=f"^{name.strip()}: expected .*, got "):
        BAD[name]()
