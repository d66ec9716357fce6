"""The preset losses: values by hand, slopes in float64, pairs that must coincide, and a custom loss."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import losses
from jaxlogp.losses import PRESETS, Clipped, LogLikelihood, PolicyLoss, policy_loss, register_loss
from jaxlogp.policy.metrics import policy_metrics
from tests import oracle
from tests.losses.policy_case import DOCUMENTS, ERROR, SHAPE, case, expected_gradient, scaled_error, sum_error

# Document 0 has two labels with A = 1 and the ratios 1.5 and 0.5, document 1 one label with A = -2 and the ratio 0.5;
# document 2 has none. The logarithms of 0.6, 0.1 and 0.2 are -0.510826, -2.302585 and -1.609438.
PROBABILITIES = np.log(np.float32([[0.6, 0.1, 0.9, 0.2]]))
BY_HAND = {
    "log_probs": PROBABILITIES,
    "old_log_probs": PROBABILITIES - np.log(np.float32([[1.5, 0.5, 7.0, 0.5]])),
    "advantages": np.float32([[1.0, 1.0, 9.0, -2.0]]),
    "mask": np.array([[True, True, False, True]]),
    "document_ids": np.array([[0, 0, 2, 1]]),
    "num_documents": 2,
    "penalized": np.array([[True, False, True, True]]),
}
# Constants of six digits, and three terms with Σ|x| < 6 of ratios of two or three roundings.
BY_HAND_ERROR = 1e-6 + oracle.fp32_bound(6.0, 3 + 3)
# What the step's mean is: three labels, two documents.
HAND_COMPUTED = {
    # min(1.5, 1.2) + min(0.5, 0.8) - 2 max(0.5, 0.8) = 1.2 + 0.5 - 1.6 = 0.1
    "grpo": (losses.grpo(), -0.1 / 3),
    "grpo_paper": (losses.grpo_paper(), -((1.2 + 0.5) / 2 - 1.6) / 2),
    "dapo": (losses.dapo(), -(1.28 + 0.5 - 1.6) / 3),
    "dr_grpo": (losses.dr_grpo(length=4), -0.1 / 4 / 2),
    # R_0 = sqrt(1.5 * 0.5) = 0.866025, unclipped; R_1 = 0.5, clipped from below: 2 * 0.9997, or 2 * 0.8
    "gspo": (losses.gspo(), -(0.866025 - 1.9994) / 2),
    # log 1.5 = 0.405465 and log 0.5 = -0.693147: the first limited to 0.4: exp(-0.293147 / 2) = 0.863662; the label of
    # document 1, whose A is negative, to -0.4: exp(-0.4) = 0.670320
    "gmpo": (losses.gmpo(), -(0.863662 - 2 * 0.670320) / 2),
    "gmpo, upper bound alone": (losses.gmpo(epsilon=1.0, epsilon_high=0.1), -(0.743361 - 2 * 0.5) / 2),
    # W_0 = 0.75 with φ = 0.75² exp(3 / 4) = 1.190813, W_1 = 0.5 with φ = 0.5³ exp(2 / 2) = 0.339785
    # 1.190813 (log 0.6 + log 0.1) - 2 * 0.339785 log 0.2 = -3.350246 + 1.093726
    "vespo": (losses.vespo(), 2.256520 / 3),
    # The same ratios: every label of document 0 has its own A, which here is the document's.
    "gspo_token": (losses.gspo_token(), -(0.866025 - 1.9994) / 2),
    "gspo by length": (losses.gspo(weighting="length"), -(2 * 0.866025 - 1.6) / 2),
    # 1.5 log 0.6 + 0.5 log 0.1 - 2 * 0.5 log 0.2 = -0.766238 - 1.151293 + 1.609438 = -0.308093
    "cispo": (losses.cispo(), 0.308093 / 3),
    # the first weight limited to 1: -0.510826 - 1.151293 + 1.609438 = -0.052681
    "cispo limited": (losses.cispo(max_weight=1.0), 0.052681 / 3),
    # the second weight raised to 0.8, the third too: -0.766238 - 1.842068 + 2.575100 = -0.033206
    "cispo from below": (losses.cispo(min_weight=0.8), 0.033206 / 3),
    # Probabilities 0.6 of 0.4, 0.1 of 0.2 and, with A < 0, 0.2 of 0.4: the first rises and the third falls by 0.2, which
    # stops both, and what is left is 0.5 log 0.1; with wider bounds one of them stays.
    "dppo_tv": (losses.dppo_tv(), 1.151293 / 3),
    "dppo_tv, wide below": (losses.dppo_tv(epsilon=0.21, epsilon_high=0.15), (1.151293 - 1.609438) / 3),
    # 0.4 log(0.4 / 0.6) + 0.6 log(0.6 / 0.4) = 0.081093 and 0.4 log(0.4 / 0.2) + 0.6 log(0.6 / 0.8) = 0.104650
    "dppo_kl": (losses.dppo_kl(), 1.151293 / 3),
    "dppo_kl, wide above": (losses.dppo_kl(epsilon=0.1, epsilon_high=0.082), (0.766238 + 1.151293) / 3),
    "dppo_kl, wide, limited": (losses.dppo_kl(epsilon=0.11, max_weight=1.0), 0.052681 / 3),
    # 4 σ(0.5) = 2.489837, 4 σ(-0.5) = 1.510163, their mean 2; -2 * 4 / 1.05 σ(-0.525) = -2.831877
    "sapo": (losses.sapo(), -(2.0 - 2.831877) / 2),
    # log 0.6 + log 0.1 - 2 log 0.2 = 0.405465
    "reinforce": (losses.reinforce(), -0.405465 / 2),
    "gpg": (losses.gpg(), -0.405465 / 3),
    # 1.5 + 0.5 - 2 * 0.5 = 1, and the drifts |log 1.5| = 0.405465 and |log 0.5| = 0.693147 of the labels penalized
    "kl_cov": (losses.kl_cov(drift_coefficient=0.5), -(1.0 - 0.5 * 1.098612) / 3),
    # With A_1 = -2 a delta changes nothing here; with the ratios turned round it does, see below.
    "grpo with delta": (losses.grpo(delta=1.3), -0.1 / 3),
}


@pytest.mark.parametrize("name", HAND_COMPUTED)
def test_the_value_is_the_one_computed_by_hand(name):
    loss, expected = HAND_COMPUTED[name]
    np.testing.assert_allclose(policy_loss(**BY_HAND, loss=loss).mean(), expected, atol=BY_HAND_ERROR)


def test_every_preset_is_computed_by_hand_and_has_its_name():
    assert {loss.name for loss, _ in HAND_COMPUTED.values()} == set(PRESETS)
    for name, function in PRESETS.items():
        needed = {"length": 8} if "length" in inspect.signature(function).parameters else {}
        loss = function(**needed, kl_coefficient=0.1, kl_estimator="k2", entropy_coefficient=0.2, grad_divisor=3.0)
        assert loss.name == name
        assert (loss.kl_coefficient, loss.kl_estimator, loss.entropy_coefficient) == (0.1, "k2", 0.2)
        assert loss.grad_divisor == 3.0


def test_delta_limits_a_ratio_with_a_negative_advantage_by_hand():
    # r = 3 with A = -2: without delta -6, with delta 1.5 -3 and no gradient; r = 1.4 keeps its own.
    new = jnp.log(jnp.float32([3.0, 1.4]))
    zeros, advantages, mask = np.zeros(2, np.float32), np.float32([-2.0, -2.0]), np.ones(2, bool)
    for delta, value, gradient in ((None, 8.8, [6.0, 2.8]), (1.5, 5.8, [0.0, 2.8])):
        loss = losses.grpo(delta=delta)
        result = jax.value_and_grad(lambda x, loss=loss: policy_loss(x, zeros, advantages, mask, loss=loss).sum)(new)
        # A log, an exp, a product and one addition: at most eight roundings.
        np.testing.assert_allclose(result[0], value, rtol=1e-6)
        np.testing.assert_allclose(result[1], gradient, rtol=1e-6)


@pytest.mark.parametrize("delta", [1.1, 3.0])
@pytest.mark.parametrize("name", ["grpo", "grpo_paper", "dapo", "dr_grpo"])
def test_the_dual_clip_is_verls(name, delta):
    """Written as there, by maxima and minima of losses, also where `delta` is below the upper bound."""
    ratios, signs = np.meshgrid([0.3, 0.79, 1.0, 1.05, 1.15, 1.21, 1.29, 2.9, 3.1, 50.0], [-2.0, -1e-3, 0.0, 1e-3, 2.0])
    old, ids = np.full(ratios.size, -1.0), np.arange(ratios.size)
    loss = PRESETS[name](**{"length": 1} if name == "dr_grpo" else {}, delta=delta)
    low, high = loss.objective.low, loss.objective.high

    def expected(r, a):
        clipped = np.maximum(-a * r, -a * np.clip(r, low, high))
        return np.where(a < 0, np.minimum(clipped, -a * delta), clipped)

    with jax.enable_x64(True):
        log_ratios, advantages = jnp.log(jnp.asarray(ratios.ravel())), jnp.asarray(signs.ravel())

        def total(x):
            return policy_loss(x + old, old, advantages, loss=loss, document_ids=ids, num_documents=ids.size).sum

        value, slope = jax.value_and_grad(total)(log_ratios)
        r, a, step = ratios.ravel(), signs.ravel(), 1e-6
        np.testing.assert_allclose(value, expected(r, a).sum(), rtol=1e-13)  # 50 terms and some roundings each
        numerical = (expected(r * np.exp(step), a) - expected(r * np.exp(-step), a)) / (2 * step)
        np.testing.assert_allclose(slope, numerical, rtol=1e-8, atol=1e-8)  # step² and 1e-16 · 100 / step


def test_the_kl_and_the_entropy_bonus_by_hand():
    # ref - new = -log 2 at each label: k1 = 0.693147, k2 = 0.240227, k3 = 0.5 + 0.693147 - 1 = 0.193147. Entropies 1, 2, 3.
    given = {**BY_HAND, "ref_log_probs": PROBABILITIES - np.float32(np.log(2.0)), "entropy": np.float32([[1, 2, 9, 3]])}
    for estimator, kl in (("k1", 0.693147), ("k2", 0.240227), ("k3", 0.193147)):
        parts = {"kl_coefficient": 0.5, "kl_estimator": estimator, "entropy_coefficient": 0.1}
        by_labels = policy_loss(**given, loss=losses.grpo(**parts)).mean()
        np.testing.assert_allclose(by_labels, -0.1 / 3 + 0.5 * kl - 0.1 * (1 + 2 + 3) / 3, atol=BY_HAND_ERROR)
        # Documents alike: the entropy of document 0 is (1 + 2) / 2.
        by_documents = policy_loss(**given, loss=losses.grpo_paper(**parts)).mean()
        np.testing.assert_allclose(by_documents, 0.375 + 0.5 * kl - 0.1 * (1.5 + 3) / 2, atol=BY_HAND_ERROR)


def sum_and_gradient(loss, given, document_ids=None):
    """The mean, the sum, and the gradient of the mean."""

    def total(new):
        ids = given.ids if document_ids is None else document_ids
        number = int(ids.max()) + 1
        options = {"ref_log_probs": given.ref, "entropy": given.entropy, "document_ids": ids, "num_documents": number}
        options["penalized"] = given.penalized
        result = policy_loss(new, given.old, given.advantages, given.mask, loss=loss, **options)
        return result.mean(), result.sum

    (mean, total), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(jnp.asarray(given.new))
    return float(mean), total, np.asarray(gradient)


@pytest.mark.parametrize("name", PRESETS)
def test_in_float64_the_value_and_the_slope_are_those_of_the_formula(name):
    options = {"length": 8} if name == "dr_grpo" else {}
    # A wider GSPO has documents inside of its bounds.
    options |= {"epsilon": 0.2, "epsilon_high": 0.2} if name in ("gspo", "gspo_token") else {}
    # Its documents have small probabilities.
    options |= {"dppo_tv": {"epsilon": 2e-3, "epsilon_high": 3e-3}, "dppo_kl": {"epsilon": 1e-3}}.get(name, {})
    loss = PRESETS[name](**options, kl_coefficient=0.05, entropy_coefficient=0.02, grad_divisor=1.0)
    given = case(seed=1, dtype=np.float64)
    with jax.enable_x64(True):
        _, total, gradient = sum_and_gradient(loss, given)
        assert total.dtype == np.float64
        assert sum_error(total, loss, given) < 1e-14  # some 30 roundings of 1e-16
    # Central differences with step 1e-5: truncation step² and rounding 1e-16 / step.
    assert scaled_error(gradient, expected_gradient(loss, given)) < 1e-9


def assert_same(one, other, given, **options):
    (left, _, left_gradient), (right, _, right_gradient) = (
        sum_and_gradient(loss, given, **options) for loss in (one, other)
    )
    np.testing.assert_allclose(left, right, rtol=ERROR, atol=ERROR)
    np.testing.assert_allclose(left_gradient, right_gradient, rtol=ERROR, atol=ERROR)


def test_pairs_that_are_one_loss():
    given = case(seed=2)
    assert inspect.signature(policy_loss).parameters["loss"].default == losses.grpo()
    assert_same(losses.dapo(epsilon=0.15, epsilon_high=0.15), losses.grpo(epsilon=0.15), given)
    assert_same(losses.grpo(delta=1e9), losses.grpo(), given)
    with pytest.raises(AssertionError):
        assert_same(losses.dapo(), losses.grpo(), given)


def test_documents_of_one_length_or_one_label_make_reductions_and_ratios_coincide():
    given = case(seed=3)._replace(mask=np.ones(SHAPE, bool))
    finite = {
        name: np.nan_to_num(getattr(given, name), posinf=-1.0, neginf=-1.0) for name in ("new", "old", "advantages")
    }
    bounds = {"new": (-8, -2), "old": (-8, -2), "advantages": (-3, 3)}
    clipped = {name: np.clip(values, *bounds[name]) for name, values in finite.items()}
    given = given._replace(**clipped, ref=None, entropy=None)
    rows = np.repeat(np.arange(4), 6).reshape(SHAPE)
    assert_same(losses.grpo_paper(), losses.grpo(), given, document_ids=rows)
    assert_same(losses.dr_grpo(length=6), losses.grpo(), given, document_ids=rows)
    tokens = np.arange(24).reshape(SHAPE)
    assert_same(losses.gspo(), losses.grpo_paper(epsilon=3e-4, epsilon_high=4e-4), given, document_ids=tokens)
    assert_same(losses.gspo(weighting="length"), losses.grpo(), given, document_ids=tokens)
    with pytest.raises(AssertionError):
        assert_same(losses.grpo_paper(), losses.grpo(), given, document_ids=given.ids)
    with pytest.raises(AssertionError):
        assert_same(losses.gspo(weighting="length"), losses.gspo(epsilon=0.2), given, document_ids=given.ids)


@pytest.mark.parametrize("reduction", ["labels", "documents", "document_mean"])
def test_on_policy_every_objective_has_the_gradient_of_reinforce(reduction):
    given = case(seed=4)
    given = given._replace(old=given.new)
    expected = sum_and_gradient(dataclasses.replace(losses.reinforce(), reduction=reduction), given)[2]
    for loss in (losses.grpo(), losses.grpo(delta=3.0), losses.cispo(), losses.sapo()):
        gradient = sum_and_gradient(dataclasses.replace(loss, reduction=reduction), given)[2]
        np.testing.assert_allclose(gradient, expected, rtol=ERROR, atol=ERROR)


def test_on_policy_gspo_by_length_has_the_gradient_of_reinforce_where_a_document_has_one_advantage():
    given = case(seed=4)
    given = given._replace(old=given.new, advantages=np.float32([1.0, -0.5, 2.0, 0.3, -1.0])[given.ids])
    expected = sum_and_gradient(losses.reinforce(), given)[2]
    gradient = sum_and_gradient(losses.gspo(weighting="length"), given)[2]
    np.testing.assert_allclose(gradient, expected, rtol=ERROR, atol=ERROR)


def test_gspo_token_is_gspo_where_a_document_has_one_advantage():
    given = case(seed=5)
    options = {"epsilon": 0.2, "epsilon_high": 0.2}
    with pytest.raises(AssertionError):
        assert_same(losses.gspo_token(**options), losses.gspo(**options), given)
    given = given._replace(advantages=np.float32([1.0, -0.5, 2.0, 0.3, -1.0])[given.ids])
    assert_same(losses.gspo_token(**options), losses.gspo(**options), given)


def test_the_defaults_of_gspo_follow_its_weighting():
    assert losses.gspo().objective == Clipped(3e-4, 4e-4) and losses.gspo().reduction == "document_mean"
    by_length = losses.gspo(weighting="length")
    assert by_length.objective == Clipped(0.2, 0.2) and by_length.reduction == "documents"
    assert losses.gspo(epsilon=0.1).objective == Clipped(0.1)
    assert losses.gspo(epsilon_high=0.1).objective == Clipped(3e-4, 0.1)
    assert losses.gspo(weighting="length", epsilon_high=0.3).objective == Clipped(0.2, 0.3)


def test_without_a_bound_gmpo_is_gspo_without_a_clip_and_on_policy_it_is_gspo():
    given = case(seed=5)
    unclipped = dataclasses.replace(losses.gspo(), objective=losses.Unclipped())
    assert_same(losses.gmpo(epsilon=1e3), unclipped, given)
    with pytest.raises(AssertionError):
        assert_same(losses.gmpo(), unclipped, given)
    given = given._replace(old=given.new)
    np.testing.assert_allclose(
        *(sum_and_gradient(loss, given)[2] for loss in (losses.gmpo(), losses.gspo())), rtol=ERROR, atol=ERROR
    )


@pytest.mark.costly
def test_the_bounds_of_gmpo_stop_the_labels_that_an_advantage_drives_and_metrics_count_them():
    """Verl's form, sg max-min by the sign of A, for log-ratios on both sides of and on the bounds."""
    logs = np.float32([[-0.5, -0.25, 0.0, 0.5, 0.75], [-0.5, -0.25, 0.0, 0.5, 0.75]])
    old, advantages = np.full((2, 5), -1.0, np.float32), np.float32([[2.0], [-2.0]])
    loss = losses.gmpo(epsilon=0.25, epsilon_high=0.5)

    def total(x):
        return policy_loss(x + old, old, advantages, loss=loss).sum

    value, gradient = jax.value_and_grad(total)(jnp.asarray(logs))
    means = np.float64([[-0.5 - 0.25 + 0.0 + 0.5 + 0.5], [-0.25 - 0.25 + 0.0 + 0.5 + 0.75]]) / 5
    np.testing.assert_allclose(value, -(advantages * np.exp(means)).sum(), rtol=1e-6)  # ten fp32 roundings
    passes = np.array([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]])
    np.testing.assert_allclose(gradient, -passes * advantages * np.exp(means) / 5, rtol=1e-6)
    metrics = policy_metrics(logs + old, old, advantages, loss=loss)
    seen = {name: float(metrics[name]) for name in ("clipped_ratio_fraction", "stopped_low_fraction")}
    assert seen == {"clipped_ratio_fraction": pytest.approx(0.4), "stopped_low_fraction": pytest.approx(0.1)}
    assert float(metrics["stopped_high_fraction"]) == pytest.approx(0.1)
    # A label without advantage is driven nowhere: beyond a bound, it stays in the mean of its document.
    logs, advantages = np.float32([[0.0, 0.75, -0.5]]), np.float32([[3.0, 0.0, 0.0]])
    result = policy_loss(logs - 1, old[:1, :3], advantages, loss=loss)
    np.testing.assert_allclose(result.sum, -np.exp(0.25 / 3), rtol=1e-6)


def test_vespo_has_the_gradient_of_weighted_log_probs_and_falls_on_both_sides():
    """φ is 1 at 1, and the shares of the whole document, whose ratio is a product, are equal."""
    new, advantages = jnp.full((1, 3), -8.0), np.float32([[1.0]])
    slopes, loss = [], losses.vespo()
    for ratio in (1.0, 0.5, 2.0, 1e4, 1e-9):
        old = np.asarray(new) - np.float32(np.log(ratio) / 3)
        gradient = jax.grad(lambda x, old=old: policy_loss(x, old, advantages, loss=loss).sum)(new)
        slopes.append(-np.asarray(gradient)[0])
    # Three log-probs near 8, each rounded by 2^-21, and a slope of log φ of at most 4.
    np.testing.assert_allclose(slopes[0], 1.0, rtol=1e-5)
    np.testing.assert_allclose(slopes[1], 0.25 * np.exp(1.5), rtol=1e-5)
    np.testing.assert_allclose(slopes[2], 4.0 * np.exp(-3.0), rtol=1e-5)
    assert (slopes[3] == 0).all() and (slopes[4] < 1e-15).all()


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_a_divergence_stops_labels_by_probability_in_the_direction_of_their_advantage(divergence):
    """Ratios beyond any clip stay at small probabilities; at 0.99 a small one stops, and never against the advantage."""
    old = np.append(np.log(np.float32([1e-4, 0.99, 0.99, 0.8, 0.8, 1.0, 0.3])), np.float32(-1.2))
    new = np.append(np.log(np.float32([2e-3, 0.8, 0.8, 0.99, 0.99, 1.0, 0.3])), np.float32(-np.inf))
    advantages = np.float32([1, -1, 1, 1, -1, 1, -1, -1])
    loss = losses.DivergenceMask(divergence, 0.05, 0.05)

    def total(log_prob):
        return loss.value(jnp.asarray(new - old), log_prob, advantages).sum()

    slopes = np.asarray(jax.grad(total)(jnp.asarray(new)))
    # Exponents of up to 10 have an error of 2^-21; the label that has become impossible has a weight of 0.
    expected = [20.0, 0.0, 0.8 / 0.99, 0.0, -0.99 / 0.8, 1.0, -1.0, 0.0]
    np.testing.assert_allclose(slopes, expected, rtol=1e-5)
    shifted = {"log_probs": new[None, :5], "old_log_probs": old[None, :5], "advantages": advantages[None, :5]}
    metrics = policy_metrics(**shifted, loss=PolicyLoss("mine", objective=loss))
    assert float(metrics["stopped_low_fraction"]) == float(metrics["stopped_high_fraction"]) == pytest.approx(0.2)
    assert loss.clipped(jnp.float32([1e-3, 20.0, 20.1])).tolist() == [False, False, True]


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_a_divergence_stops_labels_whose_log_prob_is_a_rounding_above_0(divergence):
    """As of a sampler that is sure: the distance is 0.5 in probability, and at least 0.5 nats."""
    above = np.float32(3e-7)
    new, old = np.float32([above, np.log(0.5)]), np.float32([np.log(0.5), above])
    advantages = np.float32([1, -1])
    values = losses.DivergenceMask(divergence, 0.4).value(jnp.asarray(new - old), jnp.asarray(new), advantages)
    assert (np.asarray(values) == 0).all()
    wide = losses.DivergenceMask(divergence, 1.0 if divergence == "tv" else 20.0)
    kept = wide.value(jnp.asarray(new - old), jnp.asarray(new), advantages)
    # exp and log of numbers below 1, each with an error of 2^-23.
    np.testing.assert_allclose(kept, np.exp(np.float64(new - old)) * new * advantages, rtol=1e-6)


def test_the_kl_of_a_divergence_keeps_its_digits_near_1():
    """0.9999 ln(0.9999 / 0.995) + 0.0001 ln(0.0001 / 0.005) = 0.0045208, with an error of 2^-24 in each complement."""
    old, new = np.log(np.float32([0.9999, 0.995]))
    for epsilon, stops in ((0.00450, True), (0.00454, False)):
        value = losses.DivergenceMask("kl", epsilon).value(jnp.float32(new - old), jnp.float32(new), jnp.float32(-1.0))
        assert (float(value) == 0.0) is stops


def test_a_loss_of_ones_own_is_a_small_class_and_one_registration():
    @dataclasses.dataclass(frozen=True)
    class Squared:
        """A - (r - 1 - A)² / 2: pulls the ratio to 1 + A."""

        def value(self, log_ratio, log_prob, advantages):
            return advantages - (jnp.expm1(log_ratio) - advantages) ** 2 / 2

        def clipped(self, ratio):
            return ratio > 1.4

    def squared(**parts):
        """Documents alike."""
        return PolicyLoss("squared", objective=Squared(), reduction="document_mean", **parts)

    register_loss("squared", squared)
    try:
        loss = PRESETS["squared"](kl_coefficient=0.0)
        # Document 0: 1 - (0.5 - 1)² / 2 and 1 - (-0.5 - 1)² / 2; document 1: -2 - (-0.5 + 2)² / 2.
        expected = -((0.875 - 0.125) / 2 - 3.125) / 2
        np.testing.assert_allclose(policy_loss(**BY_HAND, loss=loss).mean(), expected, atol=BY_HAND_ERROR)
        metrics = policy_metrics(**BY_HAND, loss=loss)
        np.testing.assert_allclose(metrics["clipped_ratio_fraction"], 0.25)  # one of two labels, one of two documents
        sequence = policy_metrics(**BY_HAND, loss=dataclasses.replace(loss, ratio="sequence"))
        assert float(sequence["clipped_ratio_fraction"]) == 0.0 and int(sequence["num_segments"]) == 2
    finally:
        del PRESETS["squared"]


ALREADY, NOT_CALLABLE = lambda: register_loss("grpo", losses.grpo), lambda: register_loss("mine", losses.grpo())
BAD = {
    "epsilon 0": (lambda: losses.grpo(epsilon=0.0), "epsilon", "0.0"),
    "epsilon 1": (lambda: losses.dapo(epsilon=1.0), "epsilon", "1.0"),
    "epsilon NaN": (lambda: losses.gspo(epsilon=float("nan")), "epsilon", "nan"),
    "epsilon_high negative": (lambda: losses.grpo(epsilon_high=-0.1), "epsilon_high", "-0.1"),
    "epsilon_high infinite": (lambda: losses.grpo(epsilon_high=np.inf), "epsilon_high", "inf"),
    "delta 1": (lambda: losses.grpo(delta=1.0), "delta", "1.0"),
    "delta infinite": (lambda: losses.grpo(delta=np.inf), "delta", "inf"),
    "min_weight above max_weight": (lambda: losses.cispo(max_weight=1.0, min_weight=1.5), "min_weight", "1.5"),
    "max_weight 0": (lambda: losses.cispo(max_weight=0.0), "max_weight", "0.0"),
    "temperature 0": (lambda: losses.sapo(temperature_negative=0.0), "temperature_negative", "0.0"),
    "bounds on probabilities of documents": (
        lambda: dataclasses.replace(losses.dppo_kl(), ratio="sequence"),
        "ratio",
        "'sequence'",
    ),
    "an unknown divergence": (lambda: losses.DivergenceMask("js"), "divergence", "'js'"),
    "a bound 0 of a divergence": (lambda: losses.dppo_tv(epsilon=0.0), "epsilon", "0.0"),
    "an infinite bound of a divergence": (lambda: losses.dppo_kl(epsilon_high=np.inf), "epsilon_high", "inf"),
    "a bound beyond all probabilities": (lambda: losses.dppo_tv(epsilon_high=1.5), "epsilon_high", "1.5"),
    "max_weight of a divergence 0": (lambda: losses.dppo_kl(max_weight=0.0), "max_weight", "0.0"),
    "power 0": (lambda: losses.vespo(power_negative=0.0), "power_negative", "0.0"),
    "decay infinite": (lambda: losses.vespo(decay_positive=np.inf), "decay_positive", "inf"),
    "a bound 0 of logarithms": (lambda: losses.gmpo(epsilon=0.0), "epsilon", "0.0"),
    "a bound of logarithms that is none": (lambda: losses.gmpo(epsilon_high=np.nan), "epsilon_high", "nan"),
    "bounds 0 of logarithms": (lambda: PolicyLoss("x", "sequence", log_clip=(0.0, 0.1)), "log_clip", "(0.0, 0.1)"),
    "bounds of logarithms of tokens": (lambda: PolicyLoss("x", log_clip=(0.1, 0.1)), "log_clip", "(0.1, 0.1)"),
    "one bound of logarithms": (lambda: PolicyLoss("x", "sequence", log_clip=0.4), "log_clip", "0.4"),
    "length missing": (lambda: PolicyLoss("x", reduction="constant_length"), "length", "None"),
    "length 0": (lambda: losses.dr_grpo(length=0), "length", "0"),
    "length without its reduction": (lambda: PolicyLoss("x", length=4), "length", "4"),
    "unknown weighting": (lambda: losses.gspo(weighting="equal"), "weighting", "'equal'"),
    "unknown ratio": (lambda: PolicyLoss("x", ratio="gspo"), "ratio", "'gspo'"),
    "unknown reduction": (lambda: PolicyLoss("x", reduction="mean"), "reduction", "'mean'"),
    "unknown estimator": (lambda: losses.grpo(kl_estimator="k4"), "kl_estimator", "'k4'"),
    "an unbiased k2": (lambda: losses.grpo(kl_estimator="k2", kl_unbiased=True), "kl_unbiased", "True"),
    "kl_unbiased a number": (lambda: losses.grpo(kl_unbiased=1), "kl_unbiased", "1"),
    "KL negative": (lambda: losses.grpo(kl_coefficient=-0.1), "kl_coefficient", "-0.1"),
    "entropy NaN": (lambda: losses.grpo(entropy_coefficient=float("nan")), "entropy_coefficient", "nan"),
    "grad_divisor 0": (lambda: losses.grpo(grad_divisor=0.0), "grad_divisor", "0.0"),
    "grad_divisor negative": (lambda: losses.grpo(grad_divisor=-2), "grad_divisor", "-2"),
    "grad_divisor an array": (lambda: losses.grpo(grad_divisor=jnp.float32(2)), "grad_divisor", "Array(2."),
    "objective a name": (lambda: PolicyLoss("x", objective="clipped"), "objective", "'clipped'"),
    "no name": (lambda: PolicyLoss(""), "name", "''"),
    "a name that is taken": (ALREADY, "name", "'grpo'"),
    "a name with a space": (lambda: register_loss("my loss", losses.grpo), "name", "'my loss'"),
    "a loss in place of a function": (NOT_CALLABLE, "function", "PolicyLoss("),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.bad_input
def test_a_wrong_choice_is_named(name):
    call, argument, seen = BAD[name]
    with pytest.raises(ValueError) as raised:
        call()
    message = str(raised.value)
    assert message.startswith(f"{argument}: expected ") and seen in message.partition(", got ")[2], message


def test_a_loss_is_hashable_and_may_be_a_static_argument():
    assert len({losses.grpo(), losses.grpo(), losses.dapo()}) == 2
    given = case()

    def total(new, loss):
        return policy_loss(new, given.old, given.advantages, given.mask, loss=loss).sum

    first, second = (jax.jit(total, static_argnames="loss")(given.new, loss=x) for x in (losses.grpo(), losses.cispo()))
    assert float(first) != float(second)


@pytest.mark.parametrize("name", PRESETS)
def test_documents_without_advantages_add_to_the_count_alone(name):
    """Exactly 0 to the sum and to its gradient, however far the ratios are from 1."""
    given, loss = case(), PRESETS[name](**({"length": 9} if name == "dr_grpo" else {}))
    loss = dataclasses.replace(loss, drift_coefficient=0.0)
    assert loss.vanishes_without_advantage
    inputs = (given.old, np.zeros_like(given.advantages), given.mask)

    def total(log_probs):
        return policy_loss(log_probs, *inputs, loss=loss, document_ids=given.ids, num_documents=DOCUMENTS).sum

    value, slope = jax.value_and_grad(total)(given.new)
    assert value == 0.0 and not np.any(slope)
    parts = (
        {"kl_coefficient": 0.1},
        {"entropy_coefficient": 0.1},
        {"z_loss_coefficient": 0.1},
        {"drift_coefficient": 1.0},
        {"rejection": losses.Rejection(token=(0.5, 2.0))},
    )
    assert not any(dataclasses.replace(loss, **part).vanishes_without_advantage for part in parts)


def test_a_label_that_is_impossible_has_an_infinite_log_likelihood_unless_its_advantage_is_0():
    log_prob, advantages = np.full(3, -np.inf, np.float32), np.float32([1, -1, 0])
    assert LogLikelihood().value(log_prob, log_prob, advantages).tolist() == [-np.inf, np.inf, 0.0]


def test_the_gradient_passes_at_delta_and_not_beyond():
    at = float(jnp.exp(jnp.float32(1.0)))
    below = float(np.nextafter(np.float32(at), np.float32(0.0)))
    for delta, slope in ((at, -at), (below, 0.0)):
        value = functools.partial(Clipped(delta=delta).value, log_prob=jnp.float32(0.0), advantages=jnp.float32(-1.0))
        assert float(jax.grad(value)(jnp.float32(1.0))) == np.float32(slope)
