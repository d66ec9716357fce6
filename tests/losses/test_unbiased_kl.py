"""The KL penalty weighted by the ratio to the sampler: its expected gradient is that of the exact KL, by enumeration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import linear_policy_loss
from jaxlogp.losses import MAX_LOG_RATIO, Correction, Rejection, grpo, gspo, policy_loss, weighted_losses
from jaxlogp.losses.loss import loss_tokens
from jaxlogp.policy.metrics import policy_metrics

VOCAB = 7


def distributions(seed=0):
    """Logits of the policy, and log-probs of old policy, sampler and reference, in float64: four that differ."""
    rng = np.random.default_rng(seed)
    logits, *others = rng.normal(0.0, 1.0, (4, VOCAB))
    return logits, *(x - np.log(np.exp(x).sum()) for x in others)


def kl_and_gradient(logits, ref):
    """KL(softmax(z) ‖ ref) and its gradient by z, p (log p - log ref - KL), in closed form."""
    log_p = logits - np.log(np.exp(logits).sum())
    p = np.exp(log_p)
    kl = (p * (log_p - ref)).sum()
    return kl, p * (log_p - ref - kl)


def expected_penalty(logits, old, sampler, ref, loss, given_sampler=True):
    """Σ_v μ_v KL_v: one document of every token of the vocabulary, each with the weight of its probability under μ."""
    ids, zeros = np.zeros(VOCAB, np.int32), np.zeros(VOCAB)
    log_probs = jax.nn.log_softmax(logits)
    options = {"ref_log_probs": ref, "document_ids": ids, "num_documents": 1}
    options["sampler_log_probs"] = sampler if given_sampler else None
    tokens, _ = loss_tokens(loss, old, zeros, np.ones(VOCAB, bool), **options)
    return jnp.sum(np.exp(sampler) * weighted_losses(loss, log_probs, tokens))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("preset", [grpo, gspo])
def test_the_expected_value_and_gradient_are_those_of_the_exact_kl(preset, estimator):
    """Under a sampler that is neither the policy nor the old one; without the weight neither holds."""
    logits, old, sampler, ref = distributions()
    kl, gradient = kl_and_gradient(logits, ref)
    # gspo divides by the labels of its document.
    scale = VOCAB if preset is gspo else 1
    with jax.enable_x64(True):
        results = [
            jax.value_and_grad(expected_penalty)(
                jnp.asarray(logits),
                old,
                sampler,
                ref,
                preset(kl_coefficient=0.3 * scale, kl_estimator=estimator, kl_unbiased=unbiased),
            )
            for unbiased in (True, False)
        ]
    (value, slope), (biased, biased_slope) = (map(np.asarray, result) for result in results)
    np.testing.assert_allclose(value, 0.3 * kl, rtol=1e-13)  # some 30 roundings of 1e-16
    np.testing.assert_allclose(slope, 0.3 * gradient, rtol=1e-12, atol=1e-15)
    assert abs(biased - 0.3 * kl) > 1e-3 and np.abs(biased_slope - 0.3 * gradient).max() > 1e-3


def test_on_policy_the_weight_is_1_and_still_has_its_gradient():
    """Without old log-probs: k3 alone would have the gradient of KL(ref ‖ π)."""
    logits, _, _, ref = distributions(1)
    log_p = logits - np.log(np.exp(logits).sum())
    kl, gradient = kl_and_gradient(logits, ref)
    with jax.enable_x64(True):
        for unbiased, expected in ((True, gradient), (False, np.exp(log_p) - np.exp(ref))):
            loss = grpo(kl_coefficient=1.0, kl_unbiased=unbiased)
            value, slope = jax.value_and_grad(expected_penalty)(
                jnp.asarray(logits), None, log_p, ref, loss, given_sampler=False
            )
            np.testing.assert_allclose(value, kl, rtol=1e-13)
            np.testing.assert_allclose(slope, expected, rtol=1e-12, atol=1e-15)


def test_the_weight_is_of_the_sampler_where_one_is_given():
    new, old, sampler, ref = (np.log(np.float32([x])) for x in (0.4, 0.2, 0.1, 0.8))
    loss, ones = grpo(kl_coefficient=1.0, kl_unbiased=True), np.zeros(1, np.float32)
    kl = 2.0 - np.log(2.0) - 1.0
    for given, weight in ((sampler, 4.0), (None, 2.0)):
        total = policy_loss(new, old, ones, sampler_log_probs=given, ref_log_probs=ref, loss=loss).sum
        np.testing.assert_allclose(total, weight * kl, rtol=1e-6)  # some ten fp32 roundings
        metrics = policy_metrics(new, old, ones, sampler_log_probs=given, ref_log_probs=ref, loss=loss)
        np.testing.assert_allclose(metrics["loss_kl"], weight * kl, rtol=1e-6)


def test_a_correction_does_not_weigh_it_again_and_a_rejected_label_has_none():
    new, old, sampler, ref = (np.log(np.float32(x)) for x in ([0.4, 0.4], [0.2, 0.4], [0.1, 0.01], [0.8, 0.8]))
    parts = {"correction": Correction(high=1.5), "rejection": Rejection(token=(0.0, 3.0))}
    loss = grpo(kl_coefficient=1.0, kl_unbiased=True, **parts)
    result = policy_loss(new, old, np.zeros(2, np.float32), sampler_log_probs=sampler, ref_log_probs=ref, loss=loss)
    np.testing.assert_allclose(result.sum, 4.0 * (1.0 - np.log(2.0)), rtol=1e-6)  # some ten fp32 roundings
    assert int(result.count) == 1


def test_huge_log_ratios_stay_finite():
    new, zeros = np.float32([200.0, -200.0, -20.0]), np.zeros(3, np.float32)
    for sampler in (zeros, new - np.float32(200.0)):
        loss = grpo(kl_coefficient=1.0, kl_unbiased=True)

        def total(x, sampler=sampler, loss=loss):
            tokens, _ = loss_tokens(loss, sampler, zeros, zeros == 0, ref_log_probs=zeros)
            return weighted_losses(loss, x, tokens).sum()

        value, gradient = jax.value_and_grad(total)(jnp.asarray(new))
        assert np.isfinite(value) and np.isfinite(gradient).all()
    assert np.isfinite(np.float32(np.exp(2 * MAX_LOG_RATIO)))


@pytest.mark.costly
def test_the_linear_head_takes_it_in_one_pass():
    rng = np.random.default_rng(3)
    hidden, weight = rng.normal(size=(5, 8)).astype(np.float32), rng.normal(size=(11, 8)).astype(np.float32)
    targets, ones = np.int32([0, 3, 10, 4, 4]), np.ones(5, np.float32)
    old, sampler, ref = (np.float32(rng.uniform(-3, -1, 5)) for _ in range(3))
    loss = grpo(kl_coefficient=0.5, kl_unbiased=True)

    def of_head(hidden, weight):
        options = {"sampler_log_probs": sampler, "ref_log_probs": ref, "loss": loss}
        return linear_policy_loss(hidden, weight, targets, old, ones, **options)[0].sum

    def of_log_probs(hidden, weight):
        log_probs = jax.nn.log_softmax(jnp.matmul(hidden, weight.T, precision="highest"))[jnp.arange(5), targets]
        return policy_loss(log_probs, old, ones, sampler_log_probs=sampler, ref_log_probs=ref, loss=loss).sum

    (value, gradients), (expected, slopes) = (
        jax.value_and_grad(f, (0, 1))(jnp.asarray(hidden), jnp.asarray(weight)) for f in (of_head, of_log_probs)
    )
    # Sums of 8 products with logits of about 8, and their exponentials: 100 fp32 roundings of the largest term.
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for gradient, slope in zip(gradients, slopes, strict=True):
        np.testing.assert_allclose(gradient, slope, atol=1e-5 * np.abs(slope).max())
