"""Labels chosen by entropy and by covariance: against NumPy in float64, masked garbage, the loss of the labels left."""

import dataclasses
import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import (
    clip_cov_advantages,
    entropy_threshold,
    high_covariance_labels,
    high_entropy_advantages,
    label_covariances,
)
from jaxlogp.losses import PRESETS, grpo, policy_loss
from jaxlogp.policy import selection
from tests import oracle

SHAPE = (6, 11)


def case(seed=0):
    """Entropies, log-probs, advantages of tokens and a mask, with garbage where masked."""
    rng = np.random.default_rng(seed)
    mask = rng.random(SHAPE) < 0.7
    values = rng.uniform(0, 4, SHAPE), rng.normal(-3.0, 2.0, SHAPE), rng.normal(0.0, 2.0, SHAPE)
    arrays = [x.astype(np.float32) for x in values]
    for x in arrays:
        x[~mask] = rng.choice(np.float32([np.nan, np.inf, -np.inf, 3e38]), int((~mask).sum()))
    return *arrays, mask


def covariance(log_probs, advantages, mask):
    a, lp = (np.float64(x[mask]) for x in (advantages, log_probs))
    result = np.zeros(mask.shape)
    result[mask] = (a - a.mean()) * (lp - lp.mean())
    return result


@pytest.mark.parametrize("share", [0.0, 0.2, 0.37, 1.0])
def test_the_threshold_is_numpys_quantile_of_the_labels(share):
    entropy, _, _, mask = case()
    expected = np.quantile(np.float64(entropy[mask]), 1.0 - share)
    for run in (entropy_threshold, jax.jit(entropy_threshold, static_argnames="share")):
        # A position of up to 45 among gaps of at most 1: rounded by 2^-18, and a few roundings of at most 4.
        np.testing.assert_allclose(run(entropy, mask, share=share), expected, atol=2.0**-17)
    assert np.isinf(entropy_threshold(entropy, np.zeros_like(mask)))


def test_trls_example_of_the_top_fifth():
    """Ten labels, of which two, and padding with the largest entropies."""
    entropy = np.arange(1, 13, dtype=np.float32).reshape(2, 6) / 10
    mask = entropy <= 1.0
    threshold = entropy_threshold(entropy, mask, share=0.2)
    kept = high_entropy_advantages(np.full((2, 6), -2.0, np.float32), entropy, mask, threshold=threshold)
    np.testing.assert_array_equal(kept, [[0] * 6, [0, 0, -2, -2, 0, 0]])


@pytest.mark.costly
def test_labels_below_the_threshold_add_nothing_to_any_loss_of_labels_but_to_its_count():
    """TRL's form: the loss of each label times the mask, and denominators of all labels; here in two micro-batches."""
    entropy, log_probs, advantages, mask = case(1)
    threshold = np.float32(entropy_threshold(entropy, mask))
    kept = mask & (np.where(mask, entropy, 0.0) >= threshold)
    assert 0 < kept.sum() < mask.sum()
    old = np.minimum(log_probs + np.float32(0.1), np.float32(-0.01))
    for name, preset in PRESETS.items():
        # A penalty is that of all labels.
        loss = preset(**{"dr_grpo": {"length": 9}, "kl_cov": {"drift_coefficient": 0.0}}.get(name, {}))
        if loss.ratio != "token":
            continue
        parts = []
        for rows in (slice(0, 2), slice(2, 6)):
            learning = high_entropy_advantages(advantages[rows], entropy[rows], mask[rows], threshold=threshold)
            parts.append(policy_loss(log_probs[rows], old[rows], learning, mask[rows], loss=loss))
        whole = policy_loss(log_probs, old, advantages, mask, loss=loss)
        assert int(sum(parts).count) == int(whole.count)
        # The sum over the labels kept, each with its weight in the whole.
        counts = mask.sum(axis=1, keepdims=True)
        weights = np.where(kept, 1.0 / counts if loss.reduction == "document_mean" else 1.0, 0.0)
        each = [
            policy_loss(
                log_probs[kept][i : i + 1], old[kept][i : i + 1], advantages[kept][i : i + 1], loss=unweighted
            ).sum
            for unweighted in [grpo_like(loss)]
            for i in range(kept.sum())
        ]
        scale = 1.0 / loss.length if loss.length else 1.0
        terms = np.float64(each) * weights[kept] * scale
        # 45 terms, and a few roundings of each.
        np.testing.assert_allclose(sum(parts).sum, terms.sum(), atol=oracle.fp32_bound(np.abs(terms).sum(), 60))


def grpo_like(loss):
    """The same objective, each label with weight 1."""
    return dataclasses.replace(loss, reduction="labels", length=None)


def test_rows_share_their_advantage():
    entropy, _, _, mask = case()
    rows = np.linspace(-1, 1, SHAPE[0], dtype=np.float32)
    kept = high_entropy_advantages(rows, entropy, mask, threshold=1.0)
    np.testing.assert_array_equal(kept, np.where(mask & (np.where(mask, entropy, 0) >= 1.0), rows[:, None], 0.0))


def test_covariances_against_float64():
    _, log_probs, advantages, mask = case(2)
    expected = covariance(log_probs, advantages, mask)
    # Two means of 45 numbers of at most 8, a difference each, and a product with up to 8.
    bound = 2 * 8 * oracle.fp32_bound(8.0, 45 + 3)
    np.testing.assert_allclose(label_covariances(log_probs, advantages, mask), expected, atol=bound)
    np.testing.assert_array_equal(np.asarray(label_covariances(log_probs, advantages, mask))[~mask], 0.0)
    np.testing.assert_array_equal(label_covariances(log_probs, advantages, np.zeros_like(mask)), 0.0)


@pytest.mark.parametrize("share, number", [(1e-6, 1), (0.1, 4), (1.0, None)])
def test_clip_cov_stops_so_many_random_labels_between_the_bounds(share, number):
    _, log_probs, advantages, mask = case(3)
    low, high = 0.5, 4.0
    cov = covariance(log_probs, advantages, mask)
    candidates = mask & (cov > low) & (cov < high)
    assert np.abs(cov[mask][:, None] - [low, high]).min() > 1e-3, "no label on a bound"
    assert 4 < candidates.sum() < mask.sum() and 4 == int(0.1 * mask.sum())
    run = jax.jit(functools.partial(clip_cov_advantages, share=share, low=low, high=high))
    seen = np.zeros(SHAPE, int)
    for seed in range(40):
        result = np.asarray(run(advantages, log_probs, mask, key=jax.random.key(seed)))
        stopped = mask & (result == 0)
        assert stopped.sum() == (candidates.sum() if number is None else number)
        assert not (stopped & ~candidates).any(), "only labels between the bounds"
        np.testing.assert_array_equal(result, np.where(mask & ~stopped, advantages, 0.0))
        seen += stopped
    assert (seen[candidates] > 0).sum() > candidates.sum() / 2, "every candidate may be drawn"


@pytest.mark.parametrize("share, labels", [(0.53, 100), (0.29, 100), (1 / 3, 99), (0.009, 100)])
def test_the_number_of_labels_is_the_share_as_it_is_written(share, labels):
    """fp32 makes 52 labels of 0.53 of 100, and float64 28 of 0.29."""
    number = max(math.floor(labels * Fraction(share).limit_denominator(1000)), 1)
    log_probs = jnp.asarray(-np.linspace(0.0, 1.0, 100, dtype=np.float32))
    chosen = high_covariance_labels(log_probs, log_probs, jnp.arange(100) < labels, share=share)
    assert chosen.sum() == number


@pytest.mark.parametrize("share", [0.57, 0.84, 0.123457, 1 / 3, 1.0])
def test_shares_of_as_many_labels_as_int32_counts(share):
    product = jax.jit(functools.partial(selection._floor_of_product, share=share))
    for labels in (0, 75, 459_907, 2**24 + 1, 2**31 - 1):
        assert product(jnp.int32(labels)) == math.floor(labels * Fraction(share).limit_denominator(10**6))


def test_clip_cov_is_verls_where_the_policy_is_the_old_one():
    """Its loss of each label, times 0 at those drawn, over all labels."""
    _, log_probs, advantages, mask = case(3)
    old = np.minimum(log_probs, np.float32(-0.01))
    learning = clip_cov_advantages(advantages, old, mask, key=jax.random.key(0), share=0.1, low=0.5, high=4.0)

    def total(x, a):
        return policy_loss(x, old, a, mask, loss=grpo()).sum

    (value, gradient), (_, whole) = (jax.value_and_grad(total)(jnp.asarray(old), a) for a in (learning, advantages))
    keeps = np.asarray(learning) != 0
    np.testing.assert_array_equal(gradient, np.where(keeps, whole, 0.0))
    expected = -np.float64(advantages[keeps]).sum()
    np.testing.assert_allclose(value, expected, atol=oracle.fp32_bound(np.abs(advantages[keeps]).sum(), 45))


def test_the_advantages_have_no_gradient():
    entropy, log_probs, advantages, mask = case()
    clean = [jnp.asarray(np.where(mask, x, 0)) for x in (entropy, log_probs, advantages)]

    def total(entropy, log_probs, advantages):
        first = high_entropy_advantages(advantages, entropy, mask, threshold=entropy_threshold(entropy, mask))
        return (first + clip_cov_advantages(advantages, log_probs, mask, key=jax.random.key(0))).sum()

    for gradient in jax.grad(total, (0, 1, 2))(*clean):
        np.testing.assert_array_equal(gradient, 0.0)


ONES = np.ones(3, np.float32)
KEY = jax.random.key(0)
BAD = {
    "share": lambda: entropy_threshold(ONES, share=1.1),
    "share ": lambda: clip_cov_advantages(ONES, -ONES, key=KEY, share=0.0),
    "low": lambda: clip_cov_advantages(ONES, -ONES, key=KEY, low=2.0, high=2.0),
    "threshold": lambda: high_entropy_advantages(ONES, ONES, threshold=ONES),
    "entropy": lambda: entropy_threshold(np.float32([0.1, np.nan])),
    "entropy ": lambda: entropy_threshold([0.1]),
    "advantages": lambda: high_entropy_advantages(ONES[:2], ONES, threshold=0.1),
    "advantages ": lambda: label_covariances(-ONES, ONES * np.float32(np.inf)),
    "mask": lambda: label_covariances(-ONES, ONES, np.ones(3, np.int32)),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.bad_input
def test_bad_input_names_the_argument(name):
    with pytest.raises(ValueError, match=f"^{name.strip()}: expected .*, got "):
        BAD[name]()


def test_a_hidden_nan_reaches_the_advantages():
    """Under jit nothing is refused: a label without an entropy must not pass for one of low entropy."""
    entropy, mask = np.float32([1.0, np.nan, 2.0, 0.0]), np.array([True, True, True, False])
    assert np.isnan(jax.jit(entropy_threshold)(entropy, mask))
    kept = jax.jit(lambda x, t: high_entropy_advantages(np.ones(4, np.float32), x, mask, threshold=t))
    np.testing.assert_array_equal(kept(entropy, 1.5), [0.0, np.nan, 1.0, 0.0])
    np.testing.assert_array_equal(kept(np.ones(4, np.float32), np.nan), [np.nan] * 3 + [0.0])


@pytest.mark.bad_input
@pytest.mark.parametrize("threshold", [np.nan, "0.5", None, True, [0.5]])
def test_a_threshold_is_a_number(threshold):
    with pytest.raises(ValueError, match="^threshold: expected one number"):
        high_entropy_advantages(np.ones(3, np.float32), np.ones(3, np.float32), threshold=threshold)
