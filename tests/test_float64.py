"""x64: float64 is refused by head, embedding and log_probs_from_logits, kept by losses and metrics; fp32 is unchanged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlogp
from jaxlogp import log_probs_from_logits
from jaxlogp._reduce import masked_max, masked_mean
from jaxlogp.losses import Clipped, Correction, PolicyLoss, Rejection, StopGradientWeight, log_ratio


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
        # float64 of either policy.
        found["log_ratio"] = log_ratio(np.float32(new), old)[0, 0], float(np.float32(new[0, 0])) - old[0, 0]
        for name, (actual, value) in found.items():
            assert actual.dtype == np.float64 and abs(float(actual) - value) < 1e-14, name


OPTIONS = {
    "clipped": lambda x: {"objective": Clipped(x(0.2), x(0.3), x(3.0))},
    "stop_gradient_weight": lambda x: {"objective": StopGradientWeight(x(2.0), x(0.5))},
    "log_clip": lambda x: {"ratio": "sequence", "log_clip": (x(0.1), x(0.2)), "grad_divisor": x(4.0)},
    "correction": lambda x: {"correction": Correction(kind="mask", low=x(0.5), high=x(2.0))},
    "rejection": lambda x: {"rejection": Rejection(token=(x(0.5), x(2.0)), veto=x(0.1), k3=x(0.5), negative_kl=x(0.1))},
    "coefficients": lambda x: {f"{part}_coefficient": x(0.1) for part in ("kl", "entropy", "z_loss", "drift")},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("scalar", [np.float64, np.float32])
def test_a_loss_of_fp32_stays_fp32_whatever_scalars_its_options_are(name, scalar):
    """As those of `np.linspace` are: with x64 a NumPy scalar of float64 makes float64 of an fp32 array."""
    new, old = np.log(np.float32([[0.5, 0.3], [0.2, 0.9]])), np.log(np.float32([[0.4, 0.3], [0.3, 0.8]]))
    further = {"entropy": -new, "lse": new, "ref_log_probs": old, "penalized": new > old, "sampler_log_probs": old}

    def value(number):
        loss = PolicyLoss(name, **OPTIONS[name](number))
        return jaxlogp.policy_loss(new, old, np.float32([1, -1]), loss=loss, **further).mean()

    with jax.enable_x64(True):
        seen = value(scalar)
        assert seen.dtype == np.float32 and seen == value(lambda x: float(scalar(x)))


@pytest.mark.parametrize("scalar", [np.float64, np.float32])
def test_advantages_and_punishments_of_fp32_stay_fp32_whatever_scalars_their_options_are(scalar):
    rewards, lengths = np.float32([[1, 0, 0.5]]), np.array([[3, 5, 9]])
    calls = {
        "group": lambda x: jaxlogp.group_advantages(rewards, epsilon=x(1e-3)).advantages,
        "batch": lambda x: jaxlogp.batch_advantages(rewards, lengths=lengths, epsilon=x(1e-3)).advantages,
        "overlong": lambda x: jaxlogp.soft_overlong_punishment(lengths, max_length=8, buffer=4, factor=x(0.3)),
        "clip_cov": lambda x: jaxlogp.clip_cov_advantages(
            -rewards, rewards, key=jax.random.key(0), share=x(0.5), low=x(-9.0), high=x(9.0)
        ),
    }
    with jax.enable_x64(True):
        for name, call in calls.items():
            seen = call(scalar)
            assert seen.dtype == np.float32, name
            np.testing.assert_array_equal(seen, call(lambda x: float(scalar(x))), err_msg=name)


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
