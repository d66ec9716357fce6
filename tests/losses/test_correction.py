"""Importance weights for a sampler other than the old policy: against float64, over shards, cuts and the linear head."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxlogp import head as jaxlogp_head
from jaxlogp import losses, sharded_linear_policy_loss
from jaxlogp.losses import (
    MAX_LOG_WEIGHT,
    PRESETS,
    Correction,
    PolicyLoss,
    correction_weight_sum,
    grpo,
    gspo,
    policy_loss,
)
from jaxlogp.policy.accumulate import StepSums
from tests.head import policy_problem
from tests.losses.correction_case import Oracle, loss_of, ratios_at, sampler, spread, weights_of
from tests.losses.policy_case import DOCUMENTS, ERROR, SHAPE, case, expected_count, scaled_error

CORRECTIONS = [
    Correction("token", "truncate", high=1.2),
    Correction("token", "mask", low=0.7, high=1.4),
    Correction("sequence", "truncate", high=1.1),
    Correction("sequence", "mask", low=0.6, high=2.0),
    Correction("geometric", "truncate", high=1.05),
    Correction("geometric", "mask", low=0.8, high=1.3),
]
EXTRAS = {"kl_coefficient": 0.05, "entropy_coefficient": 0.02}


def given_to(loss, given):
    return {
        "loss": loss,
        "entropy": given.entropy if loss.entropy_coefficient else None,
        "ref_log_probs": given.ref if loss.kl_coefficient else None,
        "penalized": given.penalized if loss.drift_coefficient else None,
        "document_ids": given.ids,
        "num_documents": DOCUMENTS,
    }


def test_every_level_and_kind_limits_some_weights_and_not_others():
    """The control: the oracle's tests below see every bound."""
    given = case(seed=1)
    values = sampler(given)
    for correction in CORRECTIONS:
        ratios = ratios_at(correction.level, given, values)
        outside = (ratios < correction.low) | (ratios > correction.high)
        assert 0 < outside.sum() < outside.size, correction
        gap = np.minimum(np.abs(ratios - correction.high), np.abs(ratios - correction.low))
        assert gap.min() > 1e-4, "no weight on a bound"
    assert {(each.level, each.kind) for each in CORRECTIONS} == {
        (level, kind) for level in ("token", "sequence", "geometric") for kind in ("truncate", "mask")
    }


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_level_and_kind_in_float64(name):
    given = case(seed=1, dtype=np.float64)
    values = sampler(given)
    expected = Oracle(loss_of(name, **EXTRAS), given)

    @jax.jit
    def run(new):
        results = []
        for correction in CORRECTIONS:
            options = given_to(loss_of(name, correction=correction, **EXTRAS), given)

            def total(x, options=options):
                result = policy_loss(x, given.old, given.advantages, given.mask, sampler_log_probs=values, **options)
                return result.sum, result.count

            results.append(jax.value_and_grad(total, has_aux=True)(new))
        return results

    with jax.enable_x64(True):
        results = run(jnp.asarray(given.new))
    for correction, ((value, count), gradient) in zip(CORRECTIONS, results, strict=True):
        weights = weights_of(correction, given, values)
        terms = expected.losses(weights)
        assert value.dtype == np.float64 and int(count) == expected_count(loss_of(name), given)
        assert abs(float(value) - terms.sum()) < 1e-13 * np.abs(terms).max(), correction
        assert scaled_error(gradient, expected.gradient(weights)) < 1e-9, correction


def test_without_a_sampler_every_weight_is_1_and_no_bit_changes():
    given = case(seed=2)
    for plain in (grpo(**EXTRAS), gspo(epsilon=0.2)):
        for correction in CORRECTIONS:
            results = []
            for loss in (plain, dataclasses.replace(plain, correction=correction)):

                def total(x, loss=loss):
                    return policy_loss(x, given.old, given.advantages, given.mask, **given_to(loss, given)).sum

                results.append(jax.value_and_grad(total)(jnp.asarray(given.new)))
            np.testing.assert_array_equal(*[value for value, _ in results])
            np.testing.assert_array_equal(*[gradient for _, gradient in results])


def test_by_hand():
    # Ratios 2 and 1/2 in document 0, 3 in document 1: sequence weights 1 and 3, objectives (ratio 1) 1, 1 and -2.
    old = np.log(np.float32([[0.4, 0.1, 0.6]]))
    values = np.log(np.float32([[0.2, 0.2, 0.2]]))
    given = old, old, np.float32([[1.0, 1.0, -2.0]]), np.ones((1, 3), bool)
    options = {"sampler_log_probs": values, "document_ids": np.int32([[0, 0, 1]]), "num_documents": 2}
    expected = {
        Correction(): 2.0 + 0.5 - 2 * 2.0,
        Correction(high=math.inf): 2.0 + 0.5 - 2 * 3.0,
        Correction(kind="mask", low=0.6, high=2.5): 2.0,
        Correction("sequence"): 1.0 + 1.0 - 2 * 2.0,
        Correction("sequence", "mask"): 1.0 + 1.0,
        Correction("geometric", high=math.inf): 1.0 + 1.0 - 2 * 3.0,
    }
    for correction, total in expected.items():
        result = policy_loss(*given, loss=grpo(correction=correction), **options)
        np.testing.assert_allclose(result.sum, -total, rtol=1e-6)  # some ten fp32 roundings
        assert int(result.count) == 3, "weights change no denominator"


def test_bounds_are_kept_and_included():
    old, values = np.zeros(3, np.float32), np.log(np.float32([0.5, 0.25, 1.0]))
    loss = grpo(correction=Correction(kind="mask", low=1.0, high=2.0))
    result = policy_loss(old, old, np.ones(3, np.float32), sampler_log_probs=values, loss=loss)
    assert float(jnp.exp(-values[0])) == 2.0, "the bound itself"
    assert float(result.sum) == -3.0


def total_and_gradients(loss, given, values):
    """The sum, and the gradients with respect to new, old and the sampler's log-probs."""

    def total(new, old, sampled):
        options = given_to(loss, given) | {"sampler_log_probs": sampled}
        return policy_loss(new, old, given.advantages, given.mask, **options).sum

    return jax.value_and_grad(total, argnums=(0, 1, 2))(*map(jnp.asarray, (given.new, given.old, values)))


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda x: f"{x.level} {x.kind}")
def test_weights_are_constants_and_masked_garbage_changes_no_bit(correction):
    loss, given = gspo(epsilon=0.2, correction=correction), case(seed=1)
    values = sampler(given)
    value, gradients = total_and_gradients(loss, given, values)
    clean = np.where(given.mask, values, np.float32(-1.0))
    clean_value, clean_gradients = total_and_gradients(loss, given, clean)
    np.testing.assert_array_equal(value, clean_value)
    np.testing.assert_array_equal(gradients[0], clean_gradients[0])
    for constant in gradients[1:]:
        np.testing.assert_array_equal(constant, 0.0)
    options = {"document_ids": given.ids, "num_documents": DOCUMENTS, "sampler_log_probs": values}
    tokens, _ = losses.loss_tokens(loss, given.old, given.advantages, given.mask, **options)
    weights = spread(weights_of(correction, given, values), given).reshape(-1)
    np.testing.assert_allclose(tokens.corrections, weights, rtol=ERROR, atol=ERROR)
    np.testing.assert_array_equal(tokens.corrections[~given.mask.reshape(-1)], 0.0)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda x: f"{x.level} {x.kind}")
def test_log_ratios_of_200_of_either_sign_stay_finite(correction):
    old = np.repeat(np.float32([0.0, -200.0, 0.0, -200.0]), 6).reshape(SHAPE)
    values = -200.0 - old
    advantages = np.repeat(np.float32([1.0, -1.0]), 12).reshape(SHAPE)
    for correct in (correction, dataclasses.replace(correction, high=math.inf)):
        loss = grpo(correction=correct)

        def total(new, loss=loss):
            return policy_loss(new, old, advantages, np.ones(SHAPE, bool), sampler_log_probs=values, loss=loss).sum

        value, gradient = jax.value_and_grad(total)(jnp.asarray(old))
        assert np.isfinite(value) and np.isfinite(gradient).all()
        largest = min(correct.high, math.exp(MAX_LOG_WEIGHT))
        largest = 0.0 if correct.kind == "mask" and correct.high < math.inf else largest
        # Six labels with A = 1 and six with A = -1 cancel; the weights of the others are 2e-9 or 0.
        np.testing.assert_allclose(gradient[0], -largest, rtol=1e-5)  # exp of 20 with three roundings


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("correction", [CORRECTIONS[0], CORRECTIONS[3]], ids=["token", "sequence"])
def test_a_traced_value_at_a_label_that_is_not_finite_reaches_the_loss(bad, correction):
    loss, given = grpo(correction=correction), case(seed=1)
    values = sampler(given)
    values[0, 1] = bad
    assert np.isnan(jax.jit(lambda sampled: total_and_gradients(loss, given, sampled)[0])(values))


@functools.lru_cache
def over_sequence_ranks(correction, inside):
    """Loss sum and gradient of documents that are cut over eight devices."""
    mesh, specs = Mesh(np.array(jax.devices()[:8]), ("sequence",)), (P("sequence"),) * 6
    loss = losses.grpo_paper(correction=correction)

    def local(new, old, advantages, mask, ids, values):
        options = {"document_ids": ids, "num_documents": jnp.int32(DOCUMENTS), "document_axis_name": "sequence"}
        return policy_loss(new, old, advantages, mask, sampler_log_probs=values, loss=loss, **options)

    def gradient_inside(new, *rest):
        value, gradient = jax.value_and_grad(lambda x: local(x, *rest).sum)(new)
        return jax.lax.psum(value, "sequence"), gradient

    def gradient_outside(*arrays):
        whole = jax.shard_map(lambda *x: local(*x).psum("sequence").sum, mesh=mesh, in_specs=specs, out_specs=P())
        return jax.value_and_grad(whole)(*arrays)

    if inside:
        out_specs = P(), P("sequence")
        return jax.jit(jax.shard_map(gradient_inside, mesh=mesh, in_specs=specs, out_specs=out_specs))
    return jax.jit(gradient_outside)


@pytest.mark.parametrize(
    "correction, inside",
    [(CORRECTIONS[0], True), (CORRECTIONS[2], True), (CORRECTIONS[3], False), (CORRECTIONS[5], True)],
)
def test_documents_cut_over_sequence_ranks_have_the_weights_of_whole_documents(correction, inside):
    given = case(seed=1)
    values = sampler(given)
    weights = weights_of(correction, given, values)
    expected = Oracle(losses.grpo_paper(), given)
    value, gradient = over_sequence_ranks(correction, inside)(*(x.reshape(-1) for x in (*given[:5], values)))
    terms = expected.losses(weights)
    assert abs(float(value) - terms.sum()) < ERROR * np.abs(terms).max()
    assert scaled_error(gradient, expected.gradient(weights).reshape(-1)) < ERROR


@pytest.mark.parametrize("correction", [CORRECTIONS[1], CORRECTIONS[2]], ids=["token", "sequence"])
def test_any_cut_into_micro_batches_gives_the_step(correction):
    given = case(seed=1)
    values = sampler(given)
    loss = losses.grpo_paper(correction=correction, grad_divisor=None)

    def sums(mask, documents):
        def total(new):
            options = {"document_ids": given.ids, "num_documents": DOCUMENTS, "sampler_log_probs": values}
            result = policy_loss(new, given.old, given.advantages, mask, loss=loss, **options)
            # Each part counts its own documents.
            return result.sum, dataclasses.replace(result, count=jnp.int32(documents))

        gradient, result = jax.grad(total, has_aux=True)(jnp.asarray(given.new))
        return StepSums.of(gradient, result)

    whole = sums(given.mask, DOCUMENTS).finish()
    for cut in ((range(2), range(2, 5)), tuple((d,) for d in range(DOCUMENTS))):
        parts = [sums(given.mask & np.isin(given.ids, documents), len(documents)) for documents in cut]
        step = sum(parts).finish()
        np.testing.assert_allclose(step.loss, whole.loss, rtol=ERROR, atol=ERROR)
        np.testing.assert_allclose(step.gradients, whole.gradients, rtol=ERROR, atol=ERROR)


def head_problem():
    data = policy_problem.problem()
    rng = np.random.default_rng(9)
    old = np.where(data["mask"], data["old"], 0.0)
    values = np.minimum(old - rng.normal(0.0, 0.5, old.shape), 0.0).astype(np.float32)
    garbage = np.where(data["mask"], values, np.float32(np.nan))
    # `problem` adds noise to log-probs: some of an old policy may exceed 0.
    return data | {
        "old": jnp.where(data["mask"], jnp.minimum(data["old"], 0.0), np.nan),
        "sampler": jnp.asarray(garbage),
    }


def in_one_call(data, loss, **options):
    options = policy_problem.OPTIONS | {"sampler_log_probs": data["sampler"]} | options
    return policy_problem.one_call(data, loss, **options)


def in_two_calls(data, loss):
    """Log-probs first, then the loss."""
    operands = data["hidden"], data["weight"], data["targets"]
    options = policy_problem.OPTIONS | {"engine": "reference", "with_entropy": loss.entropy_coefficient != 0.0}
    values = policy_problem.linear_log_probs(*operands, mask=data["mask"], bias=data["bias"], **options)
    given = policy_problem.of_the_loss(data, loss) | {"sampler_log_probs": data["sampler"], "entropy": values.entropy}
    return policy_loss(values.log_probs, data["old"], data["advantages"], data["mask"], loss=loss, **given), values


@pytest.mark.costly
@pytest.mark.parametrize(
    "loss, way",
    [
        (grpo(correction=CORRECTIONS[0], entropy_coefficient=0.1), "in one pass"),
        (losses.grpo_paper(correction=CORRECTIONS[3]), "in one pass"),
        (gspo(epsilon=0.2, correction=CORRECTIONS[4]), "in two steps: the ratio of a document"),
    ],
    ids=["token", "sequence", "gspo"],
)
def test_a_linear_head_gives_the_loss_of_its_log_probs(loss, way):
    data = head_problem()
    with jaxlogp_head.record_head_runs() as runs:
        actual = policy_problem.run(in_one_call, data, loss)
    assert runs[-1].gradient.startswith(way)
    policy_problem.compare(actual, policy_problem.run(in_two_calls, data, loss))
    plain = policy_problem.run(in_two_calls, data, dataclasses.replace(loss, correction=None))
    with pytest.raises(AssertionError):
        policy_problem.compare(actual, plain)


@pytest.mark.costly
@pytest.mark.parametrize("correction", [CORRECTIONS[0], CORRECTIONS[2]], ids=["token", "sequence"])
def test_shards_of_vocabulary_and_tokens_give_the_unsharded_loss(correction):
    data, loss = head_problem(), losses.grpo_paper(correction=correction)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))

    def sharded(data, loss):
        operands = (data[name] for name in ("hidden", "weight", "targets", "old", "advantages", "mask"))
        options = policy_problem.OPTIONS | policy_problem.of_the_loss(data, loss) | {"bias": data["bias"]}
        options |= {"sampler_log_probs": data["sampler"], "loss": loss, "engine": "chunked", "mesh": mesh}
        return sharded_linear_policy_loss(*operands, **options)

    policy_problem.compare(
        policy_problem.differentiated(data, lambda given: sharded(given, loss)),
        policy_problem.run(in_two_calls, data, loss),
    )


NORMALIZED = [dataclasses.replace(correction, normalize=True) for correction in CORRECTIONS]


@pytest.mark.parametrize("name", ["grpo", "gspo", "dr_grpo", "kl_cov"])
def test_normalized_weights_have_mean_1_over_the_step_in_float64(name):
    given = case(seed=1, dtype=np.float64)
    values = sampler(given)
    expected = Oracle(loss_of(name, **EXTRAS), given)

    @jax.jit
    def run(new, means):
        results = []
        for correction, mean in zip(NORMALIZED, means, strict=True):
            options = given_to(loss_of(name, correction=correction, **EXTRAS), given)
            options |= {"sampler_log_probs": values, "mean_weight": mean}

            def total(x, options=options):
                result = policy_loss(x, given.old, given.advantages, given.mask, **options)
                return result.sum, result.count

            results.append(jax.value_and_grad(total, has_aux=True)(new))
        return results

    with jax.enable_x64(True):
        options = {"document_ids": given.ids, "num_documents": DOCUMENTS}
        means = [
            correction_weight_sum(correction, given.old, values, given.mask, **options).mean()
            for correction in NORMALIZED
        ]
        results = run(jnp.asarray(given.new), means)
    for correction, mean, ((value, count), gradient) in zip(NORMALIZED, means, results, strict=True):
        weights = weights_of(correction, given, values)
        assert abs(float(mean) / weights.mean() - 1.0) < 1e-13 and abs(weights.mean() - 1.0) > 1e-3, correction
        terms = expected.losses(weights / weights.mean())
        assert int(count) == expected_count(loss_of(name), given), "weights change no denominator"
        assert abs(float(value) - terms.sum()) < 1e-13 * np.abs(terms).max(), correction
        assert scaled_error(gradient, expected.gradient(weights / weights.mean())) < 1e-9, correction


@pytest.mark.parametrize("correction", [NORMALIZED[1], NORMALIZED[2]], ids=["token", "sequence"])
def test_any_cut_into_micro_batches_gives_the_normalized_step(correction):
    given = case(seed=1)
    values = sampler(given)
    documents = {"document_ids": given.ids, "num_documents": DOCUMENTS}
    weights = weights_of(correction, given, values)
    terms = Oracle(losses.grpo(), given).losses(weights / weights.mean())

    def masks(cut):
        return [given.mask & np.isin(given.ids, part) for part in cut]

    def step(cut):
        total = sum(correction_weight_sum(correction, given.old, values, mask, **documents) for mask in masks(cut))
        assert int(total.count) == given.mask.sum()
        options = documents | {"sampler_log_probs": values, "mean_weight": total.mean()}
        options["loss"] = grpo(correction=correction)
        return float(sum(policy_loss(*given[:3], mask, **options) for mask in masks(cut)).mean())

    cuts = [[range(DOCUMENTS)], [range(2), range(2, 5)], [[document] for document in range(DOCUMENTS)]]
    for cut in cuts:
        assert abs(step(cut) - terms.mean()) < ERROR
    # The control: a mean of one's own for each micro-batch is another loss.
    own = sum(
        policy_loss(
            *given[:3],
            mask,
            loss=grpo(correction=correction),
            sampler_log_probs=values,
            mean_weight=correction_weight_sum(correction, given.old, values, mask, **documents).mean(),
            **documents,
        )
        for mask in masks(cuts[1])
    )
    assert abs(float(own.mean()) - terms.mean()) > 1e-3


@pytest.mark.parametrize("correction", [NORMALIZED[0], NORMALIZED[3]], ids=["token", "sequence"])
def test_ranks_that_split_documents_have_the_normalized_weights_of_the_whole(correction):
    given = case(seed=1)
    values = sampler(given)
    mesh, specs = Mesh(np.array(jax.devices()[:8]), ("sequence",)), (P("sequence"),) * 6

    def local(new, old, advantages, mask, ids, values):
        documents = {"document_ids": ids, "num_documents": jnp.int32(DOCUMENTS), "document_axis_name": "sequence"}
        mean = correction_weight_sum(correction, old, values, mask, **documents).psum("sequence").mean()
        options = documents | {"loss": grpo(correction=correction), "sampler_log_probs": values, "mean_weight": mean}
        return policy_loss(new, old, advantages, mask, **options).psum("sequence").mean(), mean

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()))
    value, mean = run(*(x.reshape(-1) for x in (*given[:5], values)))
    weights = weights_of(correction, given, values)
    assert abs(float(mean) / weights.mean() - 1.0) < ERROR
    assert abs(float(value) - Oracle(grpo(), given).losses(weights / weights.mean()).mean()) < ERROR


def test_weights_that_are_all_0_stay_0():
    given = case(seed=1)
    values = np.where(given.mask, given.old - 3.0, np.nan).astype(np.float32)
    correction = Correction(kind="mask", normalize=True)
    options = given_to(grpo(correction=correction), given) | {"sampler_log_probs": values}
    mean = correction_weight_sum(correction, given.old, values, given.mask).mean()

    def total(new):
        return policy_loss(new, given.old, given.advantages, given.mask, mean_weight=mean, **options).sum

    value, gradient = jax.value_and_grad(total)(jnp.asarray(given.new))
    assert float(mean) == 0.0 == float(value) and not np.any(gradient)
    assert np.isnan(jax.jit(lambda x: policy_loss(*given[:4], mean_weight=x, **options).sum)(np.float32(np.nan)))


@pytest.mark.costly
def test_normalized_weights_of_a_linear_head():
    """In one pass, sharded, and as the loss of log-probs."""
    data, correction = head_problem(), NORMALIZED[2]
    documents = policy_problem.of_the_loss(data, losses.grpo_paper())
    documents = {name: documents[name] for name in ("document_ids", "num_documents")}
    total = correction_weight_sum(correction, data["old"], data["sampler"], data["mask"], **documents)
    mean, loss = float(total.mean()), losses.grpo_paper(correction=correction)
    assert abs(mean - 1.0) > 1e-3
    plain = losses.grpo_paper(correction=dataclasses.replace(correction, normalize=False))

    def scaled(data, loss):
        """The loss has no part but the objective."""
        value, values = in_two_calls(data, loss)
        return dataclasses.replace(value, sum=value.sum / mean), values

    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))

    def sharded(data, loss):
        operands = (data[name] for name in ("hidden", "weight", "targets", "old", "advantages", "mask"))
        options = policy_problem.OPTIONS | policy_problem.of_the_loss(data, loss) | {"bias": data["bias"]}
        options |= {"sampler_log_probs": data["sampler"], "loss": loss, "engine": "chunked", "mesh": mesh}
        return sharded_linear_policy_loss(*operands, mean_weight=mean, **options)

    expected = policy_problem.run(scaled, data, plain)
    policy_problem.compare(policy_problem.run(in_one_call, data, loss, mean_weight=mean), expected)
    policy_problem.compare(policy_problem.differentiated(data, lambda given: sharded(given, loss)), expected)


BAD = {
    "level": (lambda: Correction("document"), "level", "'document'"),
    "kind": (lambda: Correction(kind="clip"), "kind", "'clip'"),
    "low negative": (lambda: Correction(kind="mask", low=-0.1), "low", "-0.1"),
    "low above 1": (lambda: Correction(kind="mask", low=1.5), "low", "1.5"),
    "low NaN": (lambda: Correction(kind="mask", low=math.nan), "low", "nan"),
    "low of a truncation": (lambda: Correction(low=0.5), "low", "0.5"),
    "high below 1": (lambda: Correction(high=0.9), "high", "0.9"),
    "normalize a number": (lambda: Correction(normalize=1), "normalize", "1"),
    "the sum of another class": (
        lambda: correction_weight_sum(grpo(), *[np.zeros(3, np.float32)] * 2),
        "correction",
        "",
    ),
    "the sum of log-probs above 0": (
        lambda: correction_weight_sum(Correction(), *[np.ones(3, np.float32)] * 2),
        "old_log_probs",
        "1.0",
    ),
    "the sum without documents": (
        lambda: correction_weight_sum(CORRECTIONS[2], *[np.zeros(3, np.float32)] * 2),
        "document_ids",
        "None",
    ),
    "high a name": (lambda: Correction(high="2"), "high", "2"),
    "a number in place of the correction": (lambda: grpo(correction=2.0), "correction", "2.0"),
    "a class in place of the correction": (lambda: PolicyLoss("x", correction=Correction), "correction", "class"),
}
GOOD = {
    "log_probs": np.full(SHAPE, -1.0, np.float32),
    "old_log_probs": np.full(SHAPE, -1.0, np.float32),
    "advantages": np.ones(SHAPE, np.float32),
    "sampler_log_probs": np.full(SHAPE, -1.0, np.float32),
    "loss": grpo(correction=Correction()),
}


def with_value(value):
    changed = GOOD["sampler_log_probs"].copy()
    changed[1, 2] = value
    return changed


BAD_ARRAYS = {
    "of another shape": ({"sampler_log_probs": np.zeros((4, 5), np.float32)}, "sampler_log_probs", "(4, 5)"),
    "of ints": ({"sampler_log_probs": np.zeros(SHAPE, np.int32)}, "sampler_log_probs", "int32"),
    "NaN": ({"sampler_log_probs": with_value(np.nan)}, "sampler_log_probs", "nan at position (1, 2)"),
    "infinite": ({"sampler_log_probs": with_value(-np.inf)}, "sampler_log_probs", "-inf at position (1, 2)"),
    "above 0": ({"sampler_log_probs": with_value(0.3)}, "sampler_log_probs", "0.3"),
    "without the mean": ({"loss": grpo(correction=NORMALIZED[0])}, "mean_weight", "None"),
    "with means": ({"loss": grpo(correction=NORMALIZED[0]), "mean_weight": np.ones(2)}, "mean_weight", "(2,)"),
    "without the old policy's": ({"old_log_probs": None}, "old_log_probs", "None"),
    "without documents": (
        {name: GOOD[name].reshape(-1) for name in GOOD if name != "loss"} | {"loss": grpo(correction=CORRECTIONS[2])},
        "document_ids",
        "None",
    ),
}


@pytest.mark.parametrize("name", [*BAD, *BAD_ARRAYS])
@pytest.mark.bad_input
def test_bad_input_is_named(name):
    if name in BAD:
        call, argument, seen = BAD[name]
    else:
        changes, argument, seen = BAD_ARRAYS[name]
        call = lambda: policy_loss(**{**GOOD, **changes})  # noqa: E731
    with pytest.raises(ValueError) as raised:
        call()
    message = str(raised.value)
    assert message.startswith(f"{argument}: expected ") and seen in message.partition(", got ")[2], message


@pytest.mark.bad_input
def test_the_linear_head_refuses_what_the_loss_refuses():
    data = head_problem()
    bad = data | {"sampler": jnp.where(data["mask"], 0.5, data["sampler"])}
    with pytest.raises(ValueError, match="^sampler_log_probs: expected log-probs of at most 0"):
        in_one_call(bad, grpo(correction=Correction()))


def test_the_good_arguments_are_good():
    assert float(policy_loss(**GOOD).mean()) == -1.0
