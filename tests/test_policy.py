"""GRPO and GSPO: values, gradients at and beyond the clip bounds, masked garbage, padding, documents cut over ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp.losses.policy import MAX_LOG_RATIO, kl_k3, log_ratio, policy_loss, ratio
from tests.policy_case import DOCUMENTS, ERROR, KINDS, SHAPE, case, expected_gradient, expected_sum, scaled_error


@functools.partial(jax.jit, static_argnames=("kind", "weighting", "low", "high"))
def loss_and_gradient(new, old, advantages, mask, ids, documents, *, kind, weighting="length", low=0.2, high=0.2):
    def total(x):
        result = policy_loss(
            x,
            old,
            advantages,
            mask,
            kind=kind,
            epsilon=low,
            epsilon_high=high,
            document_ids=ids,
            num_documents=documents,
            document_weighting=weighting,
        )
        return result.sum, result.count

    (value, count), gradient = jax.value_and_grad(total, has_aux=True)(new)
    return value, count, gradient


@pytest.mark.parametrize(("kind", "weighting"), KINDS)
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.1, 0.4)])
def test_value_count_and_gradient_are_those_of_float64(kind, weighting, low, high):
    new, old, advantages, mask, ids = case()
    value, count, gradient = loss_and_gradient(
        new, old, advantages, mask, ids, np.int32(DOCUMENTS), kind=kind, weighting=weighting, low=low, high=high
    )
    arguments = (kind, weighting, new, old, advantages, mask, ids, low, high)
    gradient_64 = expected_gradient(*arguments)
    assert scaled_error(value, expected_sum(*arguments)) < ERROR
    assert scaled_error(gradient, gradient_64) < ERROR
    assert 0 < (gradient_64 != 0).sum() < mask.sum(), "the case must clip some labels and not others"
    assert value.dtype == gradient.dtype == jnp.float32 and count.dtype == jnp.int32
    assert int(count) == (mask.sum() if kind == "grpo" else DOCUMENTS)


@pytest.mark.parametrize(("kind", "weighting"), KINDS)
def test_gradient_is_the_slope_of_the_float64_loss(kind, weighting):
    """Central differences of the float64 formula: what the gradient means, without any pass condition."""
    new, old, advantages, mask, ids = case(seed=1)
    *_, gradient = loss_and_gradient(
        new, old, advantages, mask, ids, np.int32(DOCUMENTS), kind=kind, weighting=weighting
    )
    step, slopes = 1e-5, np.zeros(SHAPE)
    for i in map(tuple, np.argwhere(mask)):
        shifted = [np.float64(new), np.float64(new)]
        shifted[0][i] += step
        shifted[1][i] -= step
        up, down = (expected_sum(kind, weighting, x, old, advantages, mask, ids) for x in shifted)
        slopes[i] = (up - down) / (2 * step)
    # The truncation error of the differences is about step² and their rounding error 1e-16 / step: both below 1e-9.
    assert scaled_error(gradient, slopes) < ERROR


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_gradient_passes_at_the_bound_itself_and_not_beyond(kind, sign):
    # Two equal labels of one document: R_d is then the ratio of each. The bound is put exactly on the fp32 ratio.
    size = np.float32(sign * 0.3)
    on_bound = float(jax.jit(jnp.exp)(size))
    beyond = float(np.nextafter(np.float32(on_bound), np.float32(1.0)))  # a bound that the ratio is just beyond
    new, old = np.full((1, 2), size), np.zeros((1, 2), np.float32)
    advantages, mask, ids = np.full((1, 2), sign, np.float32), np.ones((1, 2), bool), np.zeros((1, 2), np.int32)
    for bound, passes in ((on_bound, True), (beyond, False)):
        low, high = (0.9, bound - 1) if sign > 0 else (1 - bound, 0.9)
        assert np.float32(1 + high if sign > 0 else 1 - low) == np.float32(bound)
        value, _, gradient = loss_and_gradient(
            new, old, advantages, mask, ids, np.int32(1), kind=kind, low=low, high=high
        )
        np.testing.assert_allclose(value, -2 * sign * bound, rtol=1e-6)  # a few fp32 roundings
        expected = np.full((1, 2), -sign * on_bound if passes else 0.0)
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.parametrize(("kind", "weighting"), KINDS)
def test_huge_log_ratios_of_either_sign_stay_finite(kind, weighting):
    new = np.repeat(np.float32([200.0, 200.0, -200.0, -200.0]), 6).reshape(SHAPE)
    old, ids = np.zeros(SHAPE, np.float32), np.repeat(np.arange(4, dtype=np.int32), 6).reshape(SHAPE)
    advantages = np.repeat(np.float32([1.0, -1.0, 1.0, -1.0]), 6).reshape(SHAPE)
    value, _, gradient = loss_and_gradient(
        new, old, advantages, np.ones(SHAPE, bool), ids, np.int32(4), kind=kind, weighting=weighting
    )
    # Clipped above at 1.2; bounded at exp(MAX_LOG_RATIO); ratio 0; clipped below at 0.8 with a negative advantage.
    objective = 1.2 - np.exp(MAX_LOG_RATIO) + 0.0 - 0.8
    np.testing.assert_allclose(value, -objective * (1 if weighting == "document" else 6), rtol=1e-6)
    np.testing.assert_array_equal(gradient, np.zeros(SHAPE))
    squares = np.float32(np.exp(np.float32(MAX_LOG_RATIO))) ** 2 * np.float32(1e9)
    assert np.isfinite(squares), "ratio² must leave room for a sum over a step"


@pytest.mark.parametrize(("kind", "weighting"), KINDS)
def test_garbage_at_masked_places_changes_no_bit_and_gets_no_gradient(kind, weighting):
    new, old, advantages, mask, ids = case()
    clean = [np.where(mask, values, np.float32(0.0)) for values in (new, old, advantages)]
    options = {"kind": kind, "weighting": weighting}
    dirty_result = loss_and_gradient(new, old, advantages, mask, ids, np.int32(DOCUMENTS), **options)
    clean_result = loss_and_gradient(*clean, mask, ids, np.int32(DOCUMENTS), **options)
    for dirty, expected in zip(dirty_result, clean_result, strict=True):
        np.testing.assert_array_equal(dirty, expected)
    np.testing.assert_array_equal(dirty_result[2][~mask], 0.0)
    assert np.isfinite(dirty_result[0])


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_without_any_label_the_loss_and_its_gradient_are_zero(kind):
    new, old, advantages, mask, ids = case()
    nothing = np.zeros_like(mask)
    value, count, gradient = loss_and_gradient(new, old, advantages, nothing, ids, np.int32(DOCUMENTS), kind=kind)
    assert float(value) == 0.0 and int(count) == (0 if kind == "grpo" else DOCUMENTS)
    np.testing.assert_array_equal(gradient, np.zeros(SHAPE))
    # A rank of nothing but padding: no document either.
    value, count, gradient = loss_and_gradient(new, old, advantages, nothing, ids * 0 - 1, np.int32(0), kind=kind)
    assert float(value) == 0.0 and int(count) == 0
    np.testing.assert_array_equal(gradient, np.zeros(SHAPE))
    assert float(policy_loss(new, old, advantages, nothing, kind=kind, **documents(ids, DOCUMENTS)).mean()) == 0.0


def documents(ids, count):
    return {"document_ids": ids, "num_documents": count}


@pytest.mark.parametrize("weighting", ["length", "document"])
def test_padding_ids_may_be_anything_and_the_loss_is_that_of_the_unpadded_pack(weighting):
    new, old, advantages, mask, ids = case()
    value, count, gradient = loss_and_gradient(
        new, old, advantages, mask, ids, np.int32(DOCUMENTS), kind="gspo", weighting=weighting
    )
    garbage = np.full((2, 6), np.nan, np.float32)
    for padding_id in (DOCUMENTS - 1, DOCUMENTS, -1, 2**31 - 1, -(2**31)):
        padded_ids = np.concatenate([ids, np.full((2, 6), padding_id, np.int32)])
        padded = [np.concatenate([x, garbage]) for x in (new, old, advantages)]
        padded_mask = np.concatenate([mask, np.zeros((2, 6), bool)])
        padded_value, padded_count, padded_gradient = loss_and_gradient(
            *padded, padded_mask, padded_ids, np.int32(DOCUMENTS), kind="gspo", weighting=weighting
        )
        np.testing.assert_allclose(padded_value, value, rtol=1e-6)  # another order of the same fp32 additions
        np.testing.assert_allclose(padded_gradient[:4], gradient, rtol=1e-6)
        np.testing.assert_array_equal(padded_gradient[4:], 0.0)
        assert int(padded_count) == int(count) == DOCUMENTS


def test_the_number_of_documents_may_be_a_static_int_or_an_array():
    new, old, advantages, mask, ids = case()
    static = policy_loss(new, old, advantages, mask, kind="gspo", document_ids=ids, num_documents=DOCUMENTS)
    array = policy_loss(new, old, advantages, mask, kind="gspo", document_ids=ids, num_documents=jnp.int32(DOCUMENTS))
    more = policy_loss(new, old, advantages, mask, kind="gspo", document_ids=ids, num_documents=DOCUMENTS + 40)
    assert float(static.sum) == float(array.sum) == float(more.sum)
    assert (int(static.count), int(array.count), int(more.count)) == (DOCUMENTS, DOCUMENTS, DOCUMENTS + 40)


@pytest.mark.parametrize(("bad_id", "count"), [(-1, DOCUMENTS), (DOCUMENTS, DOCUMENTS), (2, 0), (30, 40)])
def test_a_traced_label_outside_all_documents_is_not_silently_dropped(bad_id, count):
    """Values of traced ids cannot be checked, so the loss says it: NaN (40 documents do not fit 24 tokens either)."""
    new, old, advantages, mask, ids = case()
    ids = ids.copy()
    ids[0, 0] = bad_id
    value, *_ = loss_and_gradient(new, old, advantages, mask, ids, np.int32(count), kind="gspo")
    assert np.isnan(value)


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_traced_nan_at_a_label_reaches_the_loss(kind, position):
    new, old, advantages, mask, ids = case()
    values = [new.copy(), old.copy(), advantages.copy()]
    values[position][0, 1] = np.nan
    value, *_ = loss_and_gradient(*values, mask, ids, np.int32(DOCUMENTS), kind=kind)
    assert np.isnan(value)


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_old_log_probs_and_advantages_are_constants(kind):
    new, old, advantages, mask, ids = case()
    gradients = jax.grad(
        lambda o, a: policy_loss(new, o, a, mask, kind=kind, **documents(ids, DOCUMENTS)).sum, argnums=(0, 1)
    )(jnp.asarray(old), jnp.asarray(advantages))
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, np.zeros(SHAPE))


def test_bf16_log_probs_are_summed_in_fp32_and_get_a_bf16_gradient():
    new, old, advantages, mask, ids = case()
    rounded = jnp.asarray(new).astype(jnp.bfloat16)
    value, _, gradient = loss_and_gradient(rounded, old, advantages, mask, ids, np.int32(DOCUMENTS), kind="grpo")
    arguments = ("grpo", "length", np.asarray(rounded, np.float64), old, advantages, mask, ids)
    assert value.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16
    assert scaled_error(value, expected_sum(*arguments)) < ERROR
    assert scaled_error(gradient, expected_gradient(*arguments)) < 2**-8  # one rounding to bf16


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_grad_divisor_divides_the_gradient_alone(kind):
    new, old, advantages, mask, ids = case()

    def mean(x, divisor):
        return policy_loss(
            x, old, advantages, mask, kind=kind, grad_divisor=divisor, **documents(ids, DOCUMENTS)
        ).mean()

    count = mask.sum() if kind == "grpo" else DOCUMENTS
    value, gradient = jax.value_and_grad(mean)(jnp.asarray(new), None)
    other_value, other_gradient = jax.value_and_grad(mean)(jnp.asarray(new), 7.0)
    assert float(value) == float(other_value)
    np.testing.assert_allclose(value, expected_sum(kind, "length", *case()) / count, rtol=1e-5)
    np.testing.assert_allclose(other_gradient, np.asarray(gradient) * count / 7.0, rtol=1e-6)  # two fp32 divisions


def test_the_temperature_is_part_of_the_gradient():
    rng = np.random.default_rng(5)
    logits, target, scale = rng.normal(size=(3, 5)).astype(np.float32), np.array([0, 4, 2]), 1 / 0.7
    advantages, mask = np.float32([1.0, -1.0, 0.5]), np.array([True, True, False])
    old = np.zeros(3, np.float32)
    wide = np.float64(logits) * scale
    p = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    log_p = np.log(p[np.arange(3), target])
    old[:] = log_p - 0.1  # ratio about 1.1: nothing is clipped
    expected = -(advantages * np.exp(log_p - old) * mask)[:, None] * scale * (np.eye(5)[target] - p)

    def total(z):
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(z * scale), target[:, None], axis=1)[:, 0]
        return policy_loss(log_probs, old, advantages, mask).sum

    assert scaled_error(jax.grad(total)(jnp.asarray(logits)), expected) < ERROR


def test_ratio_and_kl_of_masked_tokens_are_zero_with_zero_gradient():
    new = np.float32([0.5, np.nan, -1.0, 300.0, 300.0, -300.0])
    old = np.float32([0.2, 1.0, np.inf, -300.0, -300.0, 300.0])
    mask = np.array([True, False, False, False, True, True])
    bound = np.exp(MAX_LOG_RATIO)
    expected = {
        log_ratio: ([0.3, 0, 0, 0, 600.0, -600.0], [1, 0, 0, 0, 1, 1]),
        ratio: ([np.exp(0.3), 0, 0, 0, bound, 0], [np.exp(0.3), 0, 0, 0, 0, 0]),
        kl_k3: (
            [np.exp(-0.3) + 0.3 - 1, 0, 0, 0, 599.0, bound - MAX_LOG_RATIO - 1],
            [1 - np.exp(-0.3), 0, 0, 0, 1, 0],
        ),
    }
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


GOOD = {
    "log_probs": np.zeros(SHAPE, np.float32),
    "old_log_probs": np.zeros(SHAPE, np.float32),
    "advantages": np.ones(SHAPE, np.float32),
    "mask": np.ones(SHAPE, bool),
    "kind": "gspo",
    "document_ids": case()[4],
    "num_documents": DOCUMENTS,
}


def with_value(name, value):
    changed = GOOD[name].copy()
    changed[1, 2] = value
    return {name: changed}


EMPTY = {name: np.zeros((0, 6), GOOD[name].dtype) for name in ("log_probs", "old_log_probs", "advantages", "mask")}
BAD = {
    "log_probs of another shape": ({"log_probs": np.zeros((4, 5), np.float32)}, "log_probs", "(4, 5)"),
    "old_log_probs of another shape": ({"old_log_probs": np.zeros(6, np.float32)}, "old_log_probs", "(6,)"),
    "advantages of another shape": ({"advantages": np.zeros((6, 4), np.float32)}, "advantages", "(6, 4)"),
    "document_ids of another shape": ({"document_ids": np.zeros(6, np.int32)}, "document_ids", "(6,)"),
    "mask of ints": ({"mask": np.ones(SHAPE, np.int32)}, "mask", "int32"),
    "log_probs of ints": ({"log_probs": np.zeros(SHAPE, np.int32)}, "log_probs", "int32"),
    "document_ids of floats": ({"document_ids": np.zeros(SHAPE, np.float32)}, "document_ids", "float32"),
    "no token": (EMPTY, "mask", "(0, 6)"),
    "unknown kind": ({"kind": "ppo"}, "kind", "'ppo'"),
    "unknown weighting": ({"document_weighting": "equal"}, "document_weighting", "'equal'"),
    "epsilon 0": ({"epsilon": 0.0}, "epsilon", "0.0"),
    "epsilon 1": ({"epsilon": 1.0}, "epsilon", "1.0"),
    "epsilon NaN": ({"epsilon": float("nan")}, "epsilon", "nan"),
    "epsilon_high negative": ({"epsilon_high": -0.1}, "epsilon_high", "-0.1"),
    "NaN log_probs": (with_value("log_probs", np.nan), "log_probs", "nan at position (1, 2)"),
    "infinite old_log_probs": (with_value("old_log_probs", -np.inf), "old_log_probs", "-inf at position (1, 2)"),
    "infinite advantages": (with_value("advantages", np.inf), "advantages", "inf at position (1, 2)"),
    "grad_divisor 0": ({"grad_divisor": 0.0}, "grad_divisor", "0.0"),
    "grad_divisor NaN": ({"grad_divisor": jnp.float32(np.nan)}, "grad_divisor", "nan"),
    "num_documents negative": ({"num_documents": -1}, "num_documents", "-1"),
    "num_documents 0 with labels": ({"num_documents": 0}, "num_documents", "0"),
    "num_documents above the tokens": ({"num_documents": np.array(25)}, "num_documents", "25"),
    "num_documents a vector": ({"num_documents": np.array([5])}, "num_documents", "(1,)"),
    "num_documents a float": ({"num_documents": 5.0}, "num_documents", "float"),
    "num_documents missing": ({"num_documents": None}, "num_documents", "None"),
    "document_ids missing": ({"document_ids": None}, "document_ids", "None"),
    "both missing": ({"document_ids": None, "num_documents": None}, "document_ids", "None"),
    "label with id -1": (with_value("document_ids", -1), "document_ids", "-1 at position (1, 2)"),
    "label with id M": (with_value("document_ids", DOCUMENTS), "document_ids", "5 at position (1, 2)"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.bad_input
def test_bad_input_names_the_argument_and_what_was_seen(name):
    changes, argument, seen = BAD[name]
    with pytest.raises(ValueError) as raised:
        policy_loss(**{**GOOD, **changes})
    message = str(raised.value)
    assert message.startswith(f"{argument}: expected ") and seen in message.partition(", got ")[2], message
    assert int(policy_loss(**GOOD).count) == DOCUMENTS, "the control: nothing else is wrong with the arguments"


@pytest.mark.bad_input
def test_shapes_are_checked_under_jit_and_in_the_small_functions():
    with pytest.raises(ValueError, match="^advantages: expected shape"):
        jax.jit(lambda a: policy_loss(**{**GOOD, "advantages": a}).sum)(np.zeros(6, np.float32))
    for function, argument in ((log_ratio, "old"), (ratio, "old"), (kl_k3, "new")):
        with pytest.raises(ValueError, match=f"^{argument}: expected shape"):
            arrays = [np.zeros(3, np.float32), np.zeros(4, np.float32)]
            function(*(reversed(arrays) if argument == "new" else arrays), np.ones(4 if argument == "new" else 3, bool))
