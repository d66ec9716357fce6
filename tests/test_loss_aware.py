"""linear_policy_gradients against the two-step path and against float64, portable and through the Hopper kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import linear_log_probs, policy_loss
from jaxlogp.head import loss_aware
from jaxlogp.head.hopper import HopperEngine
from jaxlogp.head.hopper import loss_aware as hopper_loss_aware
from jaxlogp.head.hopper._pallas_compat import interpreter, why_not_available
from jaxlogp.head.loss_aware import linear_policy_gradients
from tests import hopper_case, oracle

GRADIENT_ERROR = 5e-3
needs_interpreter = pytest.mark.skipif(why_not_available() is not None, reason=str(why_not_available()))
ALL_OPTIONS = {"temperature": 0.7, "logit_scale": 1.3}


def problem(tokens=70, hidden_size=64, vocab=600, bias=False, dtype=jnp.bfloat16, seed=0):
    data = hopper_case.case(tokens, hidden_size, vocab, bias=bias, seed=seed)
    rng = np.random.default_rng(seed + 100)
    mask = jnp.asarray(rng.random(tokens) < 0.6).at[:2].set(True)
    hidden = data["hidden"].astype(dtype)
    # Masked rows may hold anything.
    hidden = jnp.where(mask[:, None], hidden, jnp.nan)
    weight = data["weight"].astype(dtype)
    head = {"bias": data["bias"], **(ALL_OPTIONS if bias else {})}
    clean = jnp.where(mask[:, None], hidden, 0)
    log_probs = linear_log_probs(clean, weight, data["targets"], mask=mask, engine="reference", **head).log_probs
    old = jnp.where(mask, log_probs + jnp.asarray(rng.normal(0.0, 0.3, tokens), jnp.float32), jnp.nan)
    advantages = jnp.where(mask, jnp.asarray(rng.normal(size=tokens), jnp.float32), jnp.nan)
    return (hidden, weight, data["targets"], old, advantages, mask), head


def two_steps(arguments, head, coefficient, denominator, engine):
    hidden, weight, targets, old, advantages, mask = arguments

    def objective(hidden, weight, bias):
        options = {**head, "bias": bias, "mask": mask, "with_entropy": True, "engine": engine}
        values = linear_log_probs(hidden, weight, targets, **options)
        loss = policy_loss(values.log_probs, old, advantages, mask)
        total = loss.sum - coefficient * jnp.sum(values.entropy)
        return total / denominator, (total, values)

    argnums = (0, 1) if head["bias"] is None else (0, 1, 2)
    return jax.jit(jax.grad(objective, argnums, has_aux=True))(hidden, weight, head["bias"])


def compare(out, wanted, value_error, gradient_error):
    gradients, (total, values) = wanted
    np.testing.assert_allclose(out.loss.sum, total, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out.values.log_probs, values.log_probs, atol=value_error)
    if out.values.entropy is not None:
        np.testing.assert_allclose(out.values.entropy, values.entropy, atol=value_error)
    for actual, gradient in zip((out.hidden, out.weight, out.bias), gradients, strict=False):
        assert actual.dtype == gradient.dtype and actual.shape == gradient.shape
        assert oracle.relative_error(actual, np.asarray(gradient, np.float64)) < gradient_error


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "temperature, scale, bias"])
@pytest.mark.parametrize("coefficient", [0.0, 0.1], ids=["policy", "policy and entropy"])
def test_portable_equals_the_two_step_path(monkeypatch, bias, coefficient):
    monkeypatch.setattr(loss_aware, "CHUNK_ELEMENTS", 600 * 16)
    arguments, head = problem(bias=bias, dtype=jnp.float32)
    options = {"denominator": 37.0, "entropy_coefficient": coefficient, "engine": "chunked", **head}
    out = jax.jit(lambda *x: linear_policy_gradients(*x, **options))(*arguments)
    compare(out, two_steps(arguments, head, coefficient, 37.0, "reference"), 1e-5, 1e-5)
    masked = ~np.asarray(arguments[-1])
    assert not np.asarray(out.hidden)[masked].any() and not np.asarray(out.values.log_probs)[masked].any()


def test_portable_with_a_soft_cap_and_bf16():
    arguments, head = problem()
    head = {**head, "softcap": 5.0}
    out = linear_policy_gradients(*arguments, engine="chunked", **head)
    compare(out, two_steps(arguments, head, 0.0, 1.0, "reference"), 1e-5, GRADIENT_ERROR)


def test_no_label_at_all():
    (*operands, mask), head = problem(tokens=6)
    out = linear_policy_gradients(*operands, jnp.zeros_like(mask), engine="chunked", with_entropy=True)
    assert float(out.loss.sum) == 0.0 and int(out.loss.count) == 0
    for x in (out.hidden, out.weight, out.values.log_probs, out.values.entropy):
        assert not np.asarray(x, np.float32).any()


@pytest.mark.bad_input
def test_document_ratios_are_refused():
    arguments, _ = problem(tokens=6)
    with pytest.raises(ValueError, match="kind: expected 'grpo'"):
        linear_policy_gradients(*arguments, kind="gspo")


@needs_interpreter
@pytest.mark.parametrize("chunk_rows", [64, 1024], ids=["several chunks", "one chunk"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "temperature, scale, bias"])
def test_hopper_kernels_equal_the_two_step_path(monkeypatch, chunk_rows, bias):
    fp32_weight = 4 * 768 * 64
    several = chunk_rows * 2 * 768 - (fp32_weight if chunk_rows > 300 else 0)
    monkeypatch.setattr(hopper_loss_aware, "EXP_BYTES", several)
    arguments, head = problem(tokens=300, bias=bias, seed=1)
    engine = HopperEngine(interpret=interpreter(), num_sms=2)
    options = {"denominator": 37.0, "entropy_coefficient": 0.1, "engine": engine, **head}
    out = jax.jit(lambda *x: linear_policy_gradients(*x, **options))(*arguments)
    compare(out, two_steps(arguments, head, 0.1, 37.0, "reference"), 1e-5, GRADIENT_ERROR)
    assert not np.asarray(out.hidden)[~np.asarray(arguments[-1])].any()
    values = linear_log_probs(*arguments[:3], mask=arguments[-1], with_entropy=True, engine=engine, **head)
    np.testing.assert_array_equal(np.asarray(out.values.log_probs), np.asarray(values.log_probs))
    np.testing.assert_array_equal(np.asarray(out.values.entropy), np.asarray(values.entropy))
