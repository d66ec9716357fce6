"""Policy losses: combinations of parts against float64, masked garbage, padding, huge ratios, propagated NaN."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp.losses import (
    MAX_LOG_RATIO,
    Clipped,
    GammaWeight,
    LogLikelihood,
    PolicyLoss,
    SoftGate,
    StopGradientWeight,
    Unclipped,
    gmpo,
    grpo,
    gspo,
    gspo_token,
    loss_tokens,
    policy_loss,
    vespo,
    weighted_losses,
)
from jaxlogp.losses.loss import RATIOS
from tests import oracle
from tests.losses.policy_case import (
    DOCUMENTS,
    ERROR,
    SHAPE,
    case,
    expected_count,
    expected_gradient,
    expected_losses,
    expected_sum,
    scaled_error,
    sum_error,
    with_labels,
)

OBJECTIVES = {
    "clipped": Clipped(0.2),
    "clip-higher": Clipped(0.1, 0.4),
    "dual clip": Clipped(0.2, 0.3, 1.6),
    "stop-gradient weight": StopGradientWeight(1.3),
    "stop-gradient weight, both bounds": StopGradientWeight(1.3, 0.7),
    "soft gate": SoftGate(1.0, 1.05),
    "gamma weight": GammaWeight(),
    "unclipped": Unclipped(),
    "log-likelihood": LogLikelihood(),
}
REDUCTIONS = {"labels": None, "documents": None, "document_mean": None, "constant_length": 9}
LOSSES = {"token": grpo(), "sequence": gspo(weighting="length"), "sequence, alike": gspo(epsilon=0.2)}
LOSSES["sequence, labels"] = gspo_token(epsilon=0.2, epsilon_high=0.2)
CLIPPED = tuple(LOSSES)
LOSSES |= {"product": vespo(), "geometric mean": gmpo()}


def given_to(loss, given):
    """The keyword arguments of `policy_loss` that `given` holds for `loss`."""
    return {
        "loss": loss,
        "entropy": given.entropy if loss.entropy_coefficient else None,
        "ref_log_probs": given.ref if loss.kl_coefficient else None,
        "document_ids": given.ids,
        "num_documents": DOCUMENTS,
    }


def sum_and_gradients(loss, given):
    """The sum, the count, and the gradients with respect to log-probs and entropies."""

    def total(new, entropy):
        options = given_to(loss, given) | {"entropy": entropy}
        result = policy_loss(new, given.old, given.advantages, given.mask, **options)
        return result.sum, result.count

    operands = jnp.asarray(given.new), jnp.asarray(given.entropy)
    (value, count), gradients = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(*operands)
    return value, count, *gradients


@functools.partial(jax.jit, static_argnames="loss")
def traced(given, num_documents, *, loss):
    """The same where no value is known; without entropies."""

    def total(new):
        options = given_to(loss, given) | {"num_documents": num_documents, "entropy": None}
        result = policy_loss(new, given.old, given.advantages, given.mask, **options)
        return result.sum, result.count

    (value, count), gradient = jax.value_and_grad(total, has_aux=True)(given.new)
    return value, count, gradient


PENALTIES = [(0.0, "k3", False, 0.0), *((0.3, estimator, False, 0.1) for estimator in ("k1", "k2", "k3"))]
PENALTIES += [(0.3, "k1", True, 0.1), (0.3, "k3", True, 0.1)]


def losses_of(ratio, objective):
    """Without a penalty and with each estimator of the KL; of all these, every three of the four parts meet."""
    first = [*RATIOS].index(ratio) + [*OBJECTIVES].index(objective)
    for number, penalty in enumerate(PENALTIES, first):
        reduction, length = [*REDUCTIONS.items()][number % len(REDUCTIONS)]
        yield PolicyLoss("any", ratio, OBJECTIVES[objective], reduction, length, *penalty)


def test_every_three_parts_of_a_loss_meet():
    parts = [RATIOS, OBJECTIVES.values(), REDUCTIONS, PENALTIES]
    names = ("kl_coefficient", "kl_estimator", "kl_unbiased", "entropy_coefficient")
    made = [loss for pair in itertools.product(RATIOS, OBJECTIVES) for loss in losses_of(*pair)]
    seen = [(x.ratio, x.objective, x.reduction, tuple(getattr(x, name) for name in names)) for x in made]
    for three in itertools.combinations(range(4), 3):
        wanted = set(itertools.product(*(parts[i] for i in three)))
        assert {tuple(each[i] for i in three) for each in seen} == wanted


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_combination_has_the_value_count_and_gradients_of_float64(ratio, objective):
    given = case()
    for loss in losses_of(ratio, objective):
        value, count, gradient, entropy_gradient = sum_and_gradients(loss, given)
        assert value.dtype == gradient.dtype == jnp.float32 and count.dtype == jnp.int32
        assert sum_error(value, loss, given) < ERROR, loss
        assert int(count) == expected_count(loss, given)
        assert scaled_error(gradient, expected_gradient(loss, given)) < ERROR, loss
        if loss.entropy_coefficient:
            assert scaled_error(entropy_gradient, expected_gradient(loss, given, "entropy")) < ERROR, loss
        else:
            np.testing.assert_array_equal(entropy_gradient, 0.0)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_clipped_logarithms_in_a_mean_have_the_value_and_gradient_of_float64(objective):
    given = case()
    for bounds in ((0.1, 0.3), (0.5, 0.2)):
        loss = PolicyLoss("any", "sequence", OBJECTIVES[objective], "document_mean", log_clip=bounds)
        value, _, gradient, _ = sum_and_gradients(loss, given)
        assert sum_error(value, loss, given) < ERROR, loss
        expected = expected_gradient(loss, given)
        if not objective.startswith(("stop", "gamma", "log")):
            assert 0 < (expected[given.mask] == 0).sum() < given.mask.sum(), "some labels are limited"
        assert scaled_error(gradient, expected) < ERROR, loss


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_z_loss_and_a_token_mean_of_the_entropy_in_float64(reduction):
    given, more = case(), {"reduction": reduction, "length": REDUCTIONS[reduction]}
    loss = PolicyLoss("any", entropy_coefficient=0.1, entropy_weights="labels", z_loss_coefficient=0.2, **more)
    options = given_to(loss, given) | {"labels_per_document": given.mask.sum() / DOCUMENTS}

    def total(entropy, lse):
        options.update(entropy=entropy, lse=lse)
        return policy_loss(given.new, given.old, given.advantages, given.mask, **options).sum

    operands = jnp.asarray(given.entropy), jnp.asarray(given.lse)
    value, gradients = jax.value_and_grad(total, (0, 1))(*operands)
    assert sum_error(value, loss, given) < ERROR
    for name, gradient in zip(("entropy", "lse"), gradients, strict=True):
        assert scaled_error(gradient, expected_gradient(loss, given, name)) < ERROR, name


def test_the_token_mean_of_the_entropy_is_that_of_the_step_however_it_is_cut():
    given, loss = (
        case(),
        PolicyLoss("any", reduction="document_mean", entropy_coefficient=1.0, entropy_weights="labels"),
    )
    options = {"loss": loss, "labels_per_document": given.mask.sum() / DOCUMENTS, "num_documents": 1}
    sums = []
    for d in range(DOCUMENTS):
        mask = given.mask & (given.ids == d)
        options |= {"entropy": given.entropy, "document_ids": np.zeros(SHAPE, np.int32)}
        sums.append(policy_loss(given.new, given.old, np.zeros(SHAPE, np.float32), mask, **options))
    expected = np.mean(np.float64(given.entropy[given.mask]))
    np.testing.assert_allclose(-sum(sums).mean(), expected, rtol=oracle.fp32_bound(1.0, 24))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("entropy_weights", ["reduction", "labels"])
def test_a_scaled_entropy_bonus_is_that_of_the_product(reduction, entropy_weights):
    given, more = case(), {"reduction": reduction, "length": REDUCTIONS[reduction]}
    loss = PolicyLoss("any", entropy_coefficient=0.5, entropy_weights=entropy_weights, **more)
    options = given_to(loss, given) | {"labels_per_document": given.mask.sum() / DOCUMENTS}
    traces = []

    @jax.jit
    def run(entropy, scale):
        traces.append(scale)

        def total(entropy):
            terms = options | {"entropy": entropy, "entropy_scale": scale}
            return policy_loss(given.new, given.old, given.advantages, given.mask, **terms).sum

        return jax.value_and_grad(total)(entropy)

    for scale in (0.0, 0.3, 2.0):
        value, gradient = run(jnp.asarray(given.entropy), np.float32(scale))
        product = dataclasses.replace(loss, entropy_coefficient=0.5 * scale)
        assert sum_error(value, product, given) < ERROR, scale
        if scale:
            assert scaled_error(gradient, expected_gradient(product, given, "entropy")) < ERROR, scale
        else:
            assert not np.any(gradient)
    assert len(traces) == 1, "another factor is no other program"


@pytest.mark.bad_input
def test_a_scale_of_the_entropy_bonus_is_one_number():
    given, loss = case(), PolicyLoss("any", entropy_coefficient=0.5)
    with pytest.raises(ValueError, match="^entropy_scale: expected one number"):
        policy_loss(
            given.new, given.old, given.advantages, given.mask, **given_to(loss, given), entropy_scale=np.ones(2)
        )


def test_the_case_meets_every_bound():
    """What makes the test above see a bound: labels and documents on both sides of each of them."""
    given = case()
    for objective in (OBJECTIVES["clipped"], OBJECTIVES["clip-higher"], OBJECTIVES["dual clip"]):
        for ratio in RATIOS:
            loss = PolicyLoss("any", ratio=ratio, objective=objective)
            passes = expected_gradient(loss, given)[given.mask] != 0
            assert 0 < passes.sum() < passes.size, "the case must clip some labels and not others"
    without = dataclasses.replace(OBJECTIVES["dual clip"], delta=None)
    for ratio in RATIOS:
        sums = [
            expected_sum(PolicyLoss("any", ratio=ratio, objective=o), given) for o in (without, OBJECTIVES["dual clip"])
        ]
        assert sums[0] != sums[1], "delta must limit a ratio"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_losses_of_a_token_ratio_are_elementwise_and_sum_to_the_loss(objective):
    given = case()
    parts = {"kl_coefficient": 0.3, "entropy_coefficient": 0.1, "reduction": "document_mean"}
    loss = PolicyLoss("any", objective=OBJECTIVES[objective], **parts)
    options = given_to(loss, given)
    whole = policy_loss(given.new, given.old, given.advantages, given.mask, **options)
    del options["loss"], options["entropy"]
    tokens, count = loss_tokens(loss, given.old, given.advantages, given.mask, **options)
    assert tokens.layout is None and all(x.shape == (given.mask.size,) for x in jax.tree.leaves(tokens))
    pieces = []
    for part in (slice(0, 7), slice(7, 8), slice(8, 24)):
        piece = jax.tree.map(lambda x, part=part: x[part], tokens)
        new, entropy = (jnp.asarray(x).reshape(-1)[part] for x in (given.new, given.entropy))
        pieces.append(weighted_losses(loss, new, piece, entropy=entropy))
    losses = np.concatenate(pieces)
    np.testing.assert_array_equal(losses[~given.mask.reshape(-1)], 0.0)
    np.testing.assert_allclose(losses.sum(), whole.sum, rtol=0, atol=oracle.fp32_bound(np.abs(losses).sum(), 24))
    assert int(count) == int(whole.count)


@pytest.mark.parametrize("kind", CLIPPED)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_gradient_passes_at_the_bound_itself_and_not_beyond(kind, sign):
    # Two equal labels of one document: R_d is then the ratio of each. The bound is put exactly on the fp32 ratio.
    size = np.float32(sign * 0.3)
    on_bound = float(jax.jit(jnp.exp)(size))
    beyond = float(np.nextafter(np.float32(on_bound), np.float32(1.0)))  # a bound that the ratio is just beyond
    row = np.full((1, 2), size), np.zeros((1, 2), np.float32), np.full((1, 2), sign, np.float32), np.ones((1, 2), bool)
    ids, weight = np.zeros((1, 2), np.int32), 0.5 if kind in ("sequence, alike", "sequence, labels") else 1.0
    for bound, passes in ((on_bound, True), (beyond, False)):
        low, high = (0.9, bound - 1) if sign > 0 else (1 - bound, 0.9)
        assert np.float32(1 + high if sign > 0 else 1 - low) == np.float32(bound)
        loss = dataclasses.replace(LOSSES[kind], objective=Clipped(low, high))
        value, gradient = jax.value_and_grad(
            lambda x, loss=loss: policy_loss(x, *row[1:], loss=loss, document_ids=ids, num_documents=1).sum
        )(jnp.asarray(row[0]))
        np.testing.assert_allclose(value, -2 * weight * sign * bound, rtol=1e-6)  # a few fp32 roundings
        expected = np.full((1, 2), -sign * weight * on_bound if passes else 0.0)
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)  # one exp, and powers of two


@pytest.mark.parametrize("objective", [Clipped(0.2), Clipped(0.2, 0.2, 4.0), StopGradientWeight(), SoftGate()])
@pytest.mark.parametrize("ratio", RATIOS)
def test_huge_log_ratios_of_either_sign_stay_finite(objective, ratio):
    new = np.repeat(np.float32([200.0, 200.0, -200.0, -200.0]), 6).reshape(SHAPE)
    old, ids = np.zeros(SHAPE, np.float32), np.repeat(np.arange(4, dtype=np.int32), 6).reshape(SHAPE)
    advantages = np.repeat(np.float32([1.0, -1.0, 1.0, -1.0]), 6).reshape(SHAPE)
    loss = PolicyLoss("any", ratio=ratio, objective=objective, kl_coefficient=0.1)
    value, gradient = jax.value_and_grad(
        lambda x: (
            policy_loss(
                x,
                old,
                advantages,
                np.ones(SHAPE, bool),
                loss=loss,
                ref_log_probs=old,
                document_ids=ids,
                num_documents=4,
            ).sum
        )
    )(jnp.asarray(new))
    assert np.isfinite(value) and np.isfinite(gradient).all()
    if objective == Clipped(0.2):
        # Clipped above at 1.2; bounded at exp(MAX_LOG_RATIO); ratio 0; clipped below at 0.8 with a negative advantage.
        kl = 2 * 199.0 + 2 * (np.exp(MAX_LOG_RATIO) - MAX_LOG_RATIO - 1)
        wanted = 6 * (-(1.2 - np.exp(MAX_LOG_RATIO) + 0.0 - 0.8) + 0.1 * kl)
        np.testing.assert_allclose(value, wanted, rtol=oracle.fp32_bound(1.0, 24))  # no term is far below 0
        # Only k3 below its bound has a slope: d/dx (exp(-x) + x - 1) = 1 at x = 200.
        np.testing.assert_allclose(gradient, np.where(new > 0, 0.1, 0.0), rtol=1e-6)  # one product
    squares = np.float32(np.exp(np.float32(MAX_LOG_RATIO))) ** 2 * np.float32(1e9)
    assert np.isfinite(squares), "ratio² must leave room for a sum over a step"


@pytest.mark.parametrize("kind", LOSSES)
def test_garbage_at_masked_places_changes_no_bit_and_gets_no_gradient(kind):
    loss = dataclasses.replace(LOSSES[kind], kl_coefficient=0.3, kl_estimator="k3", entropy_coefficient=0.1)
    given = case()
    floats = {name: getattr(given, name) for name in ("new", "old", "advantages", "ref", "entropy")}
    clean = given._replace(**{name: np.where(given.mask, x, np.float32(0.0)) for name, x in floats.items()})
    dirty_result, clean_result = (sum_and_gradients(loss, x) for x in (given, clean))
    for dirty, expected in zip(dirty_result, clean_result, strict=True):
        np.testing.assert_array_equal(dirty, expected)
    for gradient in dirty_result[2:]:
        np.testing.assert_array_equal(gradient[~given.mask], 0.0)
    assert np.isfinite(dirty_result[0])


@pytest.mark.parametrize("kind", LOSSES)
def test_without_any_label_the_loss_and_its_gradient_are_zero(kind):
    given = case()
    nothing = given._replace(mask=np.zeros_like(given.mask))
    value, count, gradient = traced(nothing, np.int32(DOCUMENTS), loss=LOSSES[kind])
    assert float(value) == 0.0 and int(count) == (0 if LOSSES[kind].reduction == "labels" else DOCUMENTS)
    np.testing.assert_array_equal(gradient, np.zeros(SHAPE))
    # A rank of nothing but padding: no document either.
    value, count, gradient = traced(nothing._replace(ids=given.ids * 0 - 1), np.int32(0), loss=LOSSES[kind])
    assert float(value) == 0.0 and int(count) == 0
    np.testing.assert_array_equal(gradient, np.zeros(SHAPE))
    eager = policy_loss(given.new, given.old, given.advantages, nothing.mask, **given_to(LOSSES[kind], given))
    assert float(eager.mean()) == 0.0


@pytest.mark.parametrize("kind", ["sequence", "sequence, alike"])
def test_padding_ids_may_be_anything_and_the_loss_is_that_of_the_unpadded_pack(kind):
    given = case()
    value, count, gradient = traced(given, np.int32(DOCUMENTS), loss=LOSSES[kind])
    garbage = np.full((2, 6), np.nan, np.float32)
    floats = {name: np.concatenate([getattr(given, name), garbage]) for name in ("new", "old", "advantages", "ref")}
    mask = np.concatenate([given.mask, np.zeros((2, 6), bool)])
    for padding_id in (DOCUMENTS - 1, DOCUMENTS, -1, 2**31 - 1, -(2**31)):
        ids = np.concatenate([given.ids, np.full((2, 6), padding_id, np.int32)])
        padded = given._replace(**floats, mask=mask, ids=ids)
        padded_value, padded_count, padded_gradient = traced(padded, np.int32(DOCUMENTS), loss=LOSSES[kind])
        largest = np.abs(expected_losses(LOSSES[kind], given)).max()
        np.testing.assert_allclose(padded_value, value, rtol=0, atol=ERROR * largest)
        assert scaled_error(padded_gradient[:4], gradient) < ERROR
        np.testing.assert_array_equal(padded_gradient[4:], 0.0)
        assert int(padded_count) == int(count) == DOCUMENTS


def test_the_number_of_documents_may_be_a_static_int_or_an_array():
    given = case()
    sums = []
    for number in (DOCUMENTS, jnp.int32(DOCUMENTS), np.uint8(DOCUMENTS), DOCUMENTS + 40):
        options = given_to(LOSSES["sequence"], given) | {"num_documents": number}
        result = policy_loss(given.new, given.old, given.advantages, given.mask, **options)
        assert int(result.count) == int(number)
        sums.append(float(result.sum))
    assert len(set(sums)) == 1


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("name", ["new", "old", "advantages", "ref"])
def test_a_traced_nan_at_a_label_reaches_the_loss(kind, name):
    loss = dataclasses.replace(LOSSES[kind], kl_coefficient=0.1)
    value, *_ = traced(with_labels(case(), **{name: np.nan}), np.int32(DOCUMENTS), loss=loss)
    assert np.isnan(value)


@pytest.mark.parametrize("kind", LOSSES)
def test_all_inputs_but_log_probs_and_entropies_are_constants(kind):
    given = case()
    loss = dataclasses.replace(LOSSES[kind], kl_coefficient=0.1)

    def total(old, advantages, ref):
        options = given_to(loss, given) | {"ref_log_probs": ref}
        return policy_loss(given.new, old, advantages, given.mask, **options).sum

    constants = (jnp.asarray(x) for x in (given.old, given.advantages, given.ref))
    for gradient in jax.grad(total, argnums=(0, 1, 2))(*constants):
        np.testing.assert_array_equal(gradient, np.zeros(SHAPE))


def test_bf16_log_probs_are_summed_in_fp32_and_get_a_bf16_gradient():
    given = case()
    rounded = given._replace(new=jnp.asarray(given.new).astype(jnp.bfloat16))
    value, _, gradient = traced(rounded, np.int32(DOCUMENTS), loss=grpo())
    wide = given._replace(new=np.asarray(rounded.new, np.float64))
    assert value.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16
    assert sum_error(value, grpo(), wide) < ERROR
    assert scaled_error(gradient, expected_gradient(grpo(), wide)) < 2**-8  # one rounding to bf16


@pytest.mark.parametrize("kind", LOSSES)
def test_grad_divisor_divides_the_gradient_alone(kind):
    given = case()

    def mean(x, divisor):
        options = given_to(dataclasses.replace(LOSSES[kind], grad_divisor=divisor), given)
        return policy_loss(x, given.old, given.advantages, given.mask, **options).mean()

    count = expected_count(LOSSES[kind], given)
    value, gradient = jax.value_and_grad(mean)(jnp.asarray(given.new), None)
    other_value, other_gradient = jax.value_and_grad(mean)(jnp.asarray(given.new), 7.0)
    assert float(value) == float(other_value)
    np.testing.assert_allclose(value, expected_sum(LOSSES[kind], given) / count, rtol=1e-5)
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
