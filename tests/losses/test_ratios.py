"""Log-ratios, ratios and KL estimates of tokens: masked entries, bounds, accuracy near zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp.losses import MAX_LOG_RATIO, kl_k1, kl_k2, kl_k3, log_ratio, ratio
from tests import oracle

FUNCTIONS = (log_ratio, ratio, kl_k1, kl_k2, kl_k3)


def test_ratio_and_kl_of_masked_tokens_are_zero_with_zero_gradient():
    new = np.float32([0.5, np.nan, -1.0, 300.0, 300.0, -300.0, MAX_LOG_RATIO])
    old = np.float32([0.2, 1.0, np.inf, -300.0, -300.0, 300.0, 0.0])
    mask = np.array([True, False, False, False, True, True, True])
    bound = np.exp(MAX_LOG_RATIO)
    # The last log-ratio is the bound itself, which has a gradient.
    expected = {
        log_ratio: ([0.3, 0, 0, 0, 600.0, -600.0, 30.0], [1, 0, 0, 0, 1, 1, 1]),
        ratio: ([np.exp(0.3), 0, 0, 0, bound, 0, bound], [np.exp(0.3), 0, 0, 0, 0, 0, bound]),
        kl_k1: ([0.3, 0, 0, 0, 600.0, -600.0, 30.0], [1, 0, 0, 0, 1, 1, 1]),
        kl_k2: ([0.045, 0, 0, 0, 180000.0, 180000.0, 450.0], [0.3, 0, 0, 0, 600.0, -600.0, 30.0]),
        kl_k3: (
            [np.exp(-0.3) + 0.3 - 1, 0, 0, 0, 599.0, bound - MAX_LOG_RATIO - 1, 29.0],
            [1 - np.exp(-0.3), 0, 0, 0, 1, 0, 1],
        ),
    }
    assert set(expected) == set(FUNCTIONS)
    for function, (values, slopes) in expected.items():
        result, pullback = jax.vjp(lambda x, f=function: f(x, old, mask), jnp.asarray(new))
        (gradient,) = pullback(jnp.ones_like(result))
        # The input 0.5 - 0.2 is rounded by 1.5e-8 and k3 of it is 0.04: 1e-6 relative.
        np.testing.assert_allclose(result, values, rtol=2e-6)
        np.testing.assert_allclose(gradient, slopes, rtol=2e-6)


def test_k3_keeps_its_digits_near_zero():
    """The naive exp(x) - x - 1 gives 0 or 1e-7 here, where the truth is 5e-9."""
    small = np.float32([1e-4, -1e-4, 1e-6])
    result = kl_k3(np.zeros(3, np.float32), small, np.ones(3, bool))
    wide = np.float64(small)
    # expm1 rounds to 2^-24 of x, relative to x² / 2: 1.2e-7 / x.
    np.testing.assert_allclose(result[:2], (wide**2 / 2 + wide**3 / 6)[:2], rtol=2e-3)
    assert (np.asarray(result) >= 0).all()


def test_on_policy_the_mean_gradient_of_k2_is_that_of_the_kl_and_that_of_k1_is_zero():
    """What the docstrings say, over a whole vocabulary: Σ_v p_v ∇k(v) against ∇ Σ_v p_v (log p_v - log q_v)."""
    rng = np.random.default_rng(0)
    logits, ref = jnp.asarray(rng.normal(size=(2, 7)).astype(np.float32))
    ref, mask = jax.nn.log_softmax(ref), np.ones(7, bool)
    p = jax.nn.softmax(logits)

    def mean(estimator):
        return jax.grad(lambda z: jnp.sum(p * estimator(jax.nn.log_softmax(z), ref, mask)))(logits)

    exact = jax.grad(lambda z: jnp.sum(jax.nn.softmax(z) * (jax.nn.log_softmax(z) - ref)))(logits)
    # A log-softmax, and its transpose, of 7 entries with Σ|p k| < 4.
    rounding = oracle.fp32_bound(4.0, 2 * 7)
    np.testing.assert_allclose(mean(kl_k2), exact, atol=rounding)
    np.testing.assert_allclose(mean(kl_k1), 0.0, atol=rounding)
    assert np.max(np.abs(np.asarray(exact))) > 0.05 and np.max(np.abs(np.asarray(mean(kl_k3) - exact))) > 0.01


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.bad_input
def test_bad_input_is_named(function):
    zeros, mask = np.zeros(3, np.float32), np.ones(3, bool)
    first, second = ("new", "old") if function in (log_ratio, ratio) else ("ref", "new")
    for bad, argument in ((np.zeros(4, np.float32), "old"), ([0.0] * 3, "old"), (np.zeros(3, np.int32), "old")):
        with pytest.raises(ValueError, match=f"^({second}|{first}|{argument}): expected"):
            function(zeros, bad, mask)
    for bad in (np.ones(3, np.int32), [True] * 3):
        with pytest.raises(ValueError, match="^mask: expected an array of dtype bool"):
            function(zeros, zeros, bad)
    with pytest.raises(ValueError, match="^mask: expected at least one entry"):
        function(zeros[:0], zeros[:0], mask[:0])
