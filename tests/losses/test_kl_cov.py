"""KL-Cov: the choice of labels against NumPy, and the loss with its penalty in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import high_covariance_labels, linear_policy_loss
from jaxlogp.losses import Correction, grpo_paper, kl_cov, policy_loss
from jaxlogp.policy.metrics import policy_metrics
from tests.losses.correction_case import sampler
from tests.losses.policy_case import DOCUMENTS, case, scaled_error


def expected_terms(given, penalized, new, coefficient, document_mean=False):
    """-r A + coefficient p |log r| of each label, and its gradient, in float64; the gradient is 0 where log r is."""
    log_r = np.float64(new[given.mask]) - np.float64(given.old[given.mask])
    a, p = np.float64(given.advantages[given.mask]), penalized[given.mask]
    weights = np.ones(len(a))
    if document_mean:
        ids = given.ids[given.mask]
        weights = np.array([1.0 / (ids == document).sum() for document in ids])
    terms = weights * (-np.exp(log_r) * a + coefficient * p * np.abs(log_r))
    return terms, weights * (-np.exp(log_r) * a + coefficient * p * np.sign(log_r))


@pytest.mark.parametrize("share", [1e-6, 0.15, 1.0])
def test_the_labels_are_those_of_the_largest_covariance(share):
    given = case(seed=1)
    a, lp = (np.float64(x[given.mask]) for x in (given.advantages, given.old))
    covariances = (a - a.mean()) * (lp - lp.mean())
    number = max(int(share * len(a)), 1)
    expected = np.zeros(given.mask.shape, bool)
    expected[tuple(np.argwhere(given.mask)[np.argsort(-covariances)[:number]].T)] = True
    for run in (high_covariance_labels, jax.jit(high_covariance_labels, static_argnames="share")):
        np.testing.assert_array_equal(run(given.old, given.advantages, given.mask, share=share), expected)


@pytest.mark.parametrize("document_mean", [False, True])
def test_the_value_and_gradient_are_those_of_float64(document_mean):
    given = case(seed=1, dtype=np.float64)
    new = given.new.copy()
    new[0, 1] = given.old[0, 1]  # a label without drift
    penalized = np.random.default_rng(0).random(given.mask.shape) < 0.5
    penalized[0, 1] = True
    loss = kl_cov(drift_coefficient=0.3)
    loss = dataclasses.replace(loss, reduction="document_mean") if document_mean else loss

    def total(x):
        options = {"penalized": penalized, "document_ids": given.ids, "num_documents": DOCUMENTS}
        return policy_loss(x, given.old, given.advantages, given.mask, loss=loss, **options).sum

    with jax.enable_x64(True):
        value, gradient = jax.value_and_grad(total)(jnp.asarray(new))
    terms, slopes = expected_terms(given, penalized, new, 0.3, document_mean)
    assert abs(float(value) - terms.sum()) < 1e-14 * np.abs(terms).max() * 30
    assert scaled_error(np.asarray(gradient)[given.mask], slopes) < 1e-14
    np.testing.assert_array_equal(np.asarray(gradient)[~given.mask], 0.0)


def test_the_penalty_is_a_part_of_its_own_that_no_correction_weighs():
    given = case(seed=2)
    penalized, values = np.ones(given.mask.shape, bool), sampler(given)
    drift = np.abs(np.float64(given.new[given.mask]) - given.old[given.mask]).mean()
    for loss in (kl_cov(), kl_cov(correction=Correction(high=1.1)), dataclasses.replace(kl_cov(), ratio="sequence")):
        options = {"loss": loss, "document_ids": given.ids, "num_documents": DOCUMENTS, "sampler_log_probs": values}
        arguments = given.new, given.old, given.advantages, given.mask
        metrics = policy_metrics(*arguments, penalized=penalized, **options)
        np.testing.assert_allclose(metrics["loss_drift"], drift, rtol=1e-5)  # a mean of fp32 differences
        mean = policy_loss(*arguments, penalized=penalized, **options).mean()
        np.testing.assert_allclose(metrics["loss_objective"] + metrics["loss_drift"], mean, rtol=1e-5, atol=1e-6)
        assert "loss_drift" not in policy_metrics(*arguments, **options), "a part without its input is left out"


@pytest.mark.bad_input
def test_missing_or_wrong_labels_are_named():
    old, ones = np.full((2, 3), -1.0, np.float32), np.ones((2, 3), np.float32)
    for wrong in (None, ones, np.ones(6, bool)):
        with pytest.raises(
            ValueError, match="^penalized: expected labels to penalize, a bool array of shape .2, 3., .*, got "
        ):
            policy_loss(old, old, ones, loss=kl_cov(), penalized=wrong)
    with pytest.raises(ValueError, match="^penalized: expected"):
        linear_policy_loss(
            np.ones((2, 4), np.float32),
            np.ones((5, 4), np.float32),
            np.int32([0, 1]),
            old[0, :2],
            ones[0, :2],
            loss=kl_cov(),
        )
    with pytest.raises(ValueError, match="^drift_coefficient: expected a finite number of at least 0, got -1"):
        kl_cov(drift_coefficient=-1.0)
    result = policy_loss(old, old, ones, loss=grpo_paper(), penalized=np.ones((2, 3), bool))
    assert float(result.sum) == -2.0, "a loss without the penalty does not read it"
