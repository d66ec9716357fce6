"""x64: float64 is refused by head, embedding and log_probs_from_logits, kept by losses and metrics; fp32 is unchanged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlogp
from jaxlogp import log_probs_from_logits
from jaxlogp._reduce import masked_max, masked_mean


@pytest.mark.bad_input
def test_float64_operands_are_refused():
    """Sums are fp32, so neither a float64 log-prob nor the gradient of a float64 table could be had."""
    hidden, weight, bias = np.ones((2, 4)), np.ones((6, 4)), np.ones(6)
    targets, narrow = np.zeros(2, np.int32), functools.partial(np.asarray, dtype=np.float32)
    calls = {
        "hidden": lambda: jaxlogp.linear_log_probs(hidden, narrow(weight), targets),
        "weight": lambda: jaxlogp.linear_log_probs(narrow(hidden), jnp.asarray(weight), targets),
        "bias": lambda: jaxlogp.head_logits(narrow(hidden), narrow(weight), bias=bias),
        "logits": lambda: log_probs_from_logits(jnp.asarray(weight), np.zeros(6, np.int32)),
        "table": lambda: jaxlogp.embedding_lookup(jnp.asarray(weight), targets),
    }
    for argument, call in calls.items():
        with jax.enable_x64(True):
            expected = f"^{argument}: expected dtype bfloat16, float16 or float32, got float64 array .*: cast it"
            with pytest.raises(ValueError, match=expected):
                call()
        call()  # without x64 they are float32 to JAX


def test_losses_reductions_and_metrics_keep_float64():
    with jax.enable_x64(True):
        new, old = np.log(np.array([[0.5, 0.3], [0.2, 0.9]])), np.log(np.array([[0.4, 0.3], [0.3, 0.8]]))
        expected = np.exp(new - old)
        metrics = jaxlogp.policy_metrics(new, old, np.ones(2), level="with_entropy", entropy=-new, lse=new)
        named = {"ratio_new_old": expected.mean(), "max_ratio_new_old": expected.max(), "entropy": -new.mean()}
        found = {name: (metrics[name], value) for name, value in named.items()}
        found["masked_mean"] = masked_mean(new), new.mean()
        found["masked_max"] = masked_max(new), new.max()
        found["entropy_threshold"] = jaxlogp.entropy_threshold(-new, share=0.5), np.quantile(-new, 0.5)
        found["reward_mean"] = jaxlogp.reward_terms(new[0]).finish()["reward_mean"], new[0].mean()
        found["loss"] = (
            jaxlogp.policy_loss(new, old, np.ones(2)).mean(),
            -np.minimum(expected, expected.clip(0.8, 1.2)).mean(),
        )
        for name, (actual, value) in found.items():
            assert actual.dtype == np.float64 and abs(float(actual) - value) < 1e-14, name


@pytest.mark.parametrize("engine", ["reference", "chunked", "fixed_order", "support"])
def test_engines_compute_the_same_in_fp32_with_x64_on(engine):
    """With it sums of int32 are int64, as are Python's integers and the indices of loops."""
    rng = np.random.default_rng(0)
    hidden, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 4), (26, 4)))
    targets = np.array([0, 25, 7], np.int32)
    support = jaxlogp.Support.from_lists([[0, 3], [25], [9, 7, 11]])

    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def total(hidden, weight, support):
        result = jaxlogp.linear_log_probs(
            hidden, weight, targets, support=support, with_entropy=True, with_lse=True, engine=engine
        )
        return jnp.sum(result.log_probs + result.entropy), result

    supports = {"fixed_order": (None, support), "support": (support,)}.get(engine, (None,))
    for given in supports:
        wanted = total(hidden, weight, given)
        with jax.enable_x64(True):
            seen = total(hidden, weight, given)
        for ours, theirs in zip(jax.tree.leaves(seen), jax.tree.leaves(wanted), strict=True):
            assert ours.dtype == np.float32
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
