"""log_probs_from_logits on one device against the float64 oracle."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import TokenLogProbs, log_probs_from_logits
from tests import oracle

# fp32 state: the rounding of max, exp, log and their sum is a few 2^-24 of the largest term (contract A: 2e-6).
STATE_ERROR = 2e-6
# Gradients of fp32 logits: one exp and one product per entry, 2e-5 in norm is the contract's bound.
GRADIENT_ERROR = 2e-5
# Gradients returned in bf16/fp16: the final rounding is 2^-9 or 2^-12 of each entry; contract: 5e-3 in norm.
LOW_PRECISION_GRADIENT_ERROR = 5e-3
TOKENS, VOCAB = (3, 5), 257


def case(dtype=jnp.float32, seed=0, scale=3.0):
    rng = np.random.default_rng(seed)
    return {
        "logits": jnp.asarray(rng.normal(0.0, scale, (*TOKENS, VOCAB)), dtype),
        "targets": jnp.asarray(rng.integers(0, VOCAB, TOKENS), jnp.int32).at[0, 0].set(0).at[0, 1].set(VOCAB - 1),
        "g_lp": jnp.asarray(rng.normal(size=TOKENS), jnp.float32),
        "g_entropy": jnp.asarray(rng.normal(size=TOKENS), jnp.float32),
    }


@functools.partial(jax.jit, static_argnames=("temperature", "with_entropy"))
def value_and_gradient(logits, targets, g_lp, g_entropy, mask, temperature=1.0, with_entropy=True):
    def objective(z):
        result = log_probs_from_logits(z, targets, mask=mask, temperature=temperature, with_entropy=with_entropy)
        total = jnp.sum(result.log_probs * g_lp)
        if with_entropy:
            total = total + jnp.sum(result.entropy * g_entropy)
        return total, result

    gradient, result = jax.grad(objective, has_aux=True)(logits)
    return result, gradient


def expected(data, mask=None, temperature=1.0, with_entropy=True):
    values = oracle.scaled_logits_log_probs(data["logits"], data["targets"], mask, temperature)
    gradient = oracle.scaled_logits_gradient(
        data["logits"],
        data["targets"],
        data["g_lp"],
        data["g_entropy"] if with_entropy else None,
        mask,
        temperature,
    )
    return (*values, gradient)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_values_and_gradient_match_the_oracle(dtype, temperature):
    data = case(dtype)
    mask = jnp.ones(TOKENS, bool)
    result, gradient = value_and_gradient(**data, mask=mask, temperature=temperature)
    log_probs, entropy, logits_gradient = expected(data, temperature=temperature)
    assert isinstance(result, TokenLogProbs)
    assert result.log_probs.dtype == result.entropy.dtype == jnp.float32
    assert oracle.scaled_error(result.log_probs, log_probs) < STATE_ERROR
    assert oracle.scaled_error(result.entropy, entropy) < STATE_ERROR
    assert gradient.dtype == dtype
    bound = GRADIENT_ERROR if dtype == jnp.float32 else LOW_PRECISION_GRADIENT_ERROR
    assert oracle.relative_error(gradient, logits_gradient) < bound


def test_without_entropy():
    data = case()
    result, gradient = value_and_gradient(**data, mask=jnp.ones(TOKENS, bool), with_entropy=False)
    log_probs, _, logits_gradient = expected(data, with_entropy=False)
    assert result.entropy is None
    assert oracle.scaled_error(result.log_probs, log_probs) < STATE_ERROR
    assert oracle.relative_error(gradient, logits_gradient) < GRADIENT_ERROR


@pytest.mark.parametrize("invalid", [np.nan, np.inf, -np.inf])
def test_masked_tokens_are_exactly_zero_and_touch_nothing_else(invalid):
    data = case()
    mask = np.ones(TOKENS, bool)
    mask[0, 2] = mask[2, 0] = mask[2, 4] = False
    clean, clean_gradient = value_and_gradient(**data, mask=jnp.asarray(mask))
    targets = data["targets"].at[0, 2].set(-100).at[2, 0].set(99_999).at[2, 4].set(99)
    logits = jnp.where(jnp.asarray(mask)[..., None], data["logits"], invalid)
    hostile = {**data, "targets": targets, "logits": logits}
    result, gradient = value_and_gradient(**hostile, mask=jnp.asarray(mask))
    for values in (result.log_probs, result.entropy, gradient):
        assert not np.asarray(values)[~mask].any()
    np.testing.assert_array_equal(result.log_probs, clean.log_probs)
    np.testing.assert_array_equal(result.entropy, clean.entropy)
    np.testing.assert_array_equal(gradient, clean_gradient)
    log_probs, entropy, logits_gradient = expected(hostile, mask)
    assert oracle.scaled_error(result.log_probs, log_probs) < STATE_ERROR
    assert oracle.scaled_error(result.entropy, entropy) < STATE_ERROR
    assert oracle.relative_error(gradient, logits_gradient) < GRADIENT_ERROR


def test_a_nan_in_an_active_row_stays_in_that_row():
    data = case()
    mask = jnp.ones(TOKENS, bool)
    clean, clean_gradient = value_and_gradient(**data, mask=mask)
    hostile = {**data, "logits": data["logits"].at[1, 1, 7].set(jnp.nan)}
    result, gradient = value_and_gradient(**hostile, mask=mask)
    others = np.ones(TOKENS, bool)
    others[1, 1] = False
    assert np.isnan(result.log_probs[1, 1])
    np.testing.assert_array_equal(np.asarray(result.log_probs)[others], np.asarray(clean.log_probs)[others])
    np.testing.assert_array_equal(np.asarray(gradient)[others], np.asarray(clean_gradient)[others])


@pytest.mark.parametrize("shift", [-50.0, -1e4, 1e4])
def test_shifted_logits_do_not_underflow(shift):
    data = case()
    # The shifted fp32 logits are the input; the oracle sees the same rounded numbers.
    data["logits"] = data["logits"] + jnp.float32(shift)
    result, gradient = value_and_gradient(**data, mask=jnp.ones(TOKENS, bool))
    log_probs, entropy, logits_gradient = expected(data)
    # The differences to the maximum are exact, so the size of the shift must not show at all.
    assert oracle.scaled_error(result.log_probs, log_probs) < STATE_ERROR
    assert oracle.scaled_error(result.entropy, entropy) < STATE_ERROR
    assert oracle.relative_error(gradient, logits_gradient) < GRADIENT_ERROR


def test_a_confident_target_keeps_its_small_gradient():
    data = case(jnp.bfloat16, scale=0.0)
    targets = data["targets"]
    confident = np.zeros((*TOKENS, VOCAB), np.float32)
    np.put_along_axis(confident, np.asarray(targets)[..., None], 14.0, axis=-1)
    data["logits"] = jnp.asarray(confident, jnp.bfloat16)
    _, gradient = value_and_gradient(**data, mask=jnp.ones(TOKENS, bool), with_entropy=False)
    at_target = np.take_along_axis(oracle.f64(gradient), np.asarray(targets)[..., None], -1)
    wanted = np.take_along_axis(expected(data, with_entropy=False)[2], np.asarray(targets)[..., None], -1)
    assert np.abs(wanted).max() < 1e-3
    # 1 - p = 2e-4: subtracting after rounding p to bf16 would give 0; fp32 keeps it to 2^-24 / 2e-4 = 3e-4.
    assert oracle.relative_error(at_target, wanted) < LOW_PRECISION_GRADIENT_ERROR


class Variants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_one_dimensional_tokens_and_the_known_example(self):
        logits = jnp.asarray([[0.1, -0.2, 1.7, 0.3, 1.2, -0.5]], jnp.float32)
        run = self.variant(lambda z, t: log_probs_from_logits(z, t, with_entropy=True))
        result = run(logits, jnp.asarray([4], jnp.int32))
        chex.assert_shape([result.log_probs, result.entropy], (1,))
        # Contract A's number, to the 2e-6 of fp32 state.
        chex.assert_trees_all_close(result.log_probs, jnp.asarray([-1.3395806963], jnp.float32), atol=STATE_ERROR)


def test_uniform_and_one_hot_rows():
    flat = jnp.zeros((2, 64), jnp.float32)
    result = log_probs_from_logits(flat, jnp.asarray([0, 63], jnp.int32), with_entropy=True)
    np.testing.assert_allclose(result.log_probs, -np.log(64), rtol=1e-6)  # one fp32 log
    np.testing.assert_allclose(result.entropy, np.log(64), rtol=1e-6)  # 64 equal powers of two add up exactly
    peaked = flat.at[:, 5].set(200.0)
    result = log_probs_from_logits(peaked, jnp.asarray([5, 5], jnp.int32), with_entropy=True)
    assert (np.asarray(result.log_probs) <= 0).all() and (np.asarray(result.entropy) >= 0).all()
    np.testing.assert_allclose(result.log_probs, 0.0, atol=STATE_ERROR)
    np.testing.assert_allclose(result.entropy, 0.0, atol=STATE_ERROR)


@pytest.mark.bad_input
def test_an_active_target_out_of_range_is_named_with_its_position():
    data = case()
    for bad in (-1, VOCAB, -100):
        with pytest.raises(ValueError) as raised:
            log_probs_from_logits(data["logits"], data["targets"].at[1, 3].set(bad))
        for fragment in ("targets", str(bad), "(1, 3)", str(VOCAB)):
            assert fragment in str(raised.value), raised.value


def test_under_jit_an_active_target_out_of_range_gives_nan_for_that_token_only():
    data = case()
    mask = jnp.ones(TOKENS, bool)
    clean, slopes = value_and_gradient(**data, mask=mask)
    result, gradient = value_and_gradient(**{**data, "targets": data["targets"].at[1, 3].set(VOCAB)}, mask=mask)
    bad = np.zeros(TOKENS, bool)
    bad[1, 3] = True
    np.testing.assert_array_equal(np.isnan(result.log_probs), bad)
    np.testing.assert_array_equal(np.asarray(result.log_probs)[~bad], np.asarray(clean.log_probs)[~bad])
    np.testing.assert_array_equal(result.entropy, clean.entropy)
    np.testing.assert_array_equal(gradient, np.where(bad[..., None], np.float32(np.nan), slopes))
