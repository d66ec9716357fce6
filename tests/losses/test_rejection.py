"""Labels and documents that leave a policy loss: rule by rule against float64, over shards, cuts and the linear head."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxlogp import losses, sharded_linear_policy_loss
from jaxlogp.head import record_head_runs
from jaxlogp.losses import PRESETS, Correction, Rejection, grpo, grpo_paper, gspo, policy_loss
from jaxlogp.losses.correction import LEVELS
from jaxlogp.policy.accumulate import StepSums
from jaxlogp.policy.metrics import LIMITS, policy_metrics
from tests.head import policy_problem
from tests.losses.correction_case import Oracle, loss_of, rejected_by, sampler, spread, weights_of
from tests.losses.policy_case import DOCUMENTS, ERROR, SHAPE, case, expected_count, scaled_error
from tests.losses.test_correction import EXTRAS, given_to, head_problem, in_one_call, in_two_calls

RULES = {
    "token": Rejection(token=(0.7, 1.4)),
    "sequence": Rejection(sequence=(0.6, 2.0)),
    "geometric": Rejection(geometric=(0.8, 1.3)),
    "veto": Rejection(veto=0.5),
    "k1": Rejection(k1=0.1),
    "k2": Rejection(k2=0.1),
    "k3": Rejection(k3=0.08),
    "negative_kl": Rejection(negative_kl=0.3),
    "probability_gap": Rejection(probability_gap=0.003),
    "several": Rejection(token=(0.7, 1.6), k3=0.15, negative_kl=0.3, keep_denominator=True),
}
BY_POLICY = ("negative_kl", "probability_gap", "several")


def test_every_rule_takes_some_labels_and_not_others():
    """The control: the tests below see every rule, and the rules differ."""
    given = case(seed=1)
    gone = {name: rejected_by(rule, given, sampler(given)) for name, rule in RULES.items()}
    for name, rejected in gone.items():
        assert 0 < rejected.sum() < given.mask.sum(), name
    # Only in a document that some labels leave and others do not is a denominator of all labels another one.
    for name in ("token", "several"):
        labels, left = (np.bincount(given.ids[mask], minlength=DOCUMENTS) for mask in (given.mask, gone[name]))
        assert ((left > 0) & (left < labels)).any(), name
    of_documents = {name for name, rule in RULES.items() if rule.needs_documents}
    assert of_documents == set(RULES) - {"token", "probability_gap"}
    assert {name for name, rule in RULES.items() if rule.needs_log_probs} == set(BY_POLICY)
    rules = {field.name for field in dataclasses.fields(Rejection)} - {"keep_denominator"}
    assert rules <= set(RULES)


def kept_oracle(loss, rule, given, values):
    """(losses of the kept labels, count, gradient): the loss of a mask without the rejected labels."""
    gone = rejected_by(rule, given, values)
    less = given._replace(mask=given.mask & ~gone)
    oracle, labels = Oracle(loss, less), less.ids[less.mask]
    weights, count = np.ones(len(labels)), expected_count(loss, less)
    if loss.correction is not None:
        weights = spread(weights_of(loss.correction, given, values), given)[less.mask]
    factors = np.ones(len(labels))
    if rule.keep_denominator:
        count = expected_count(loss, given)
        if loss.reduction == "document_mean":
            lengths = [np.bincount(each.ids[each.mask], minlength=DOCUMENTS) for each in (less, given)]
            factors = lengths[0][labels] / lengths[1][labels]
    terms = oracle.losses(weights) * factors
    return terms, count, oracle.gradient(weights, factors)


def rules_of(name):
    """The rules that keep a denominator, which depends on the reduction; of those that take labels alone, every third."""
    first = [*PRESETS].index(name)
    return [rule for n, rule in enumerate(RULES.values()) if rule.keep_denominator or (n + first) % 3 == 0]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_and_rule_in_float64(name):
    given = case(seed=1, dtype=np.float64)
    values = sampler(given)
    # A weight of a document counts the labels that are rejected too.
    correction = Correction(level=LEVELS[[*PRESETS].index(name) % len(LEVELS)], high=1.2)

    @jax.jit
    def run(new):
        results = []
        for rule in rules_of(name):
            options = given_to(loss_of(name, rejection=rule, correction=correction, **EXTRAS), given)

            def total(x, options=options):
                result = policy_loss(x, given.old, given.advantages, given.mask, sampler_log_probs=values, **options)
                return result.sum, result.count

            results.append(jax.value_and_grad(total, has_aux=True)(new))
        return results

    with jax.enable_x64(True):
        results = run(jnp.asarray(given.new))
    for rule, ((value, count), gradient) in zip(rules_of(name), results, strict=True):
        terms, wanted, slope = kept_oracle(loss_of(name, correction=correction, **EXTRAS), rule, given, values)
        assert int(count) == wanted, rule
        assert abs(float(value) - terms.sum()) < 1e-13 * np.abs(terms).max(), rule
        assert scaled_error(gradient, slope) < 1e-9, rule


def run_loss(loss, given, values, mask=None):
    def total(new):
        options = given_to(loss, given) | {"sampler_log_probs": values}
        result = policy_loss(new, given.old, given.advantages, given.mask if mask is None else mask, **options)
        return result.sum, result.count

    (value, count), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(given.new))
    return value, count, gradient


def test_rejected_labels_are_labels_that_the_mask_never_had():
    """Document 1 has one label, which leaves: M counts it, as every document without labels."""
    given = case(seed=1)
    values = sampler(given)
    rule = RULES["geometric"]
    gone = rejected_by(rule, given, values)
    assert gone[given.mask & (given.ids == 1)].all() and gone.sum() < given.mask.sum()
    for plain in (grpo(**EXTRAS), grpo_paper(), gspo(epsilon=0.2)):
        actual = run_loss(dataclasses.replace(plain, rejection=rule), given, values)
        wanted = run_loss(plain, given, values, given.mask & ~gone)
        for one, other in zip(actual, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
        assert int(actual[1]) == (DOCUMENTS if plain.needs_documents else (given.mask & ~gone).sum())
        np.testing.assert_array_equal(actual[2][gone], 0.0)


def test_without_a_sampler_no_rule_of_it_rejects():
    given = case(seed=1)
    plain = gspo(epsilon=0.2)
    for rule in (each for name, each in RULES.items() if name not in BY_POLICY):
        for one, other in zip(
            run_loss(dataclasses.replace(plain, rejection=rule), given, None), run_loss(plain, given, None), strict=True
        ):
            np.testing.assert_array_equal(one, other)


def test_strictly_on_policy_nothing_is_rejected():
    given = case(seed=1)
    for rule in RULES.values():
        options = given_to(grpo(rejection=rule), given)
        result = policy_loss(given.new, None, given.advantages, given.mask, **options)
        assert int(result.count) == given.mask.sum()


def test_equal_policies_pass_the_tightest_bounds():
    """A bound is the last value that stays, and a weight of exactly 1 is within every one."""
    one, zero = dict.fromkeys(("token", "sequence", "geometric"), (1.0, 1.0)), dict.fromkeys(("k1", "k2", "k3"), 0.0)
    rule = Rejection(**one, **zero, veto=1.0, negative_kl=0.0, probability_gap=0.0)
    log_probs, advantages = np.full((2, 4), -0.5, np.float32), np.float32([1, -1])
    for kind, low in (("truncate", 0.0), ("mask", 1.0)):
        loss = grpo(rejection=rule, correction=Correction(kind=kind, low=low, high=1.0))
        given = log_probs, log_probs, advantages
        metrics = policy_metrics(*given, sampler_log_probs=log_probs, loss=loss)
        limits = {name: float(value) for name, value in metrics.items() if name.startswith(LIMITS) and value}
        assert not limits and float(metrics["correction_weight"]) == 1.0
        assert int(policy_loss(*given, sampler_log_probs=log_probs, loss=loss).count) == 8
    # Rules of a sign say nothing where there is none.
    signed = grpo(rejection=Rejection(negative_kl=0.0, probability_gap=0.0))
    assert (
        int(policy_loss(log_probs - 1, log_probs, 0 * advantages, sampler_log_probs=log_probs, loss=signed).count) == 8
    )


@pytest.mark.parametrize(("rule", "bound"), [("k1", 6.0), ("k2", 60.0)])
def test_one_label_far_away_counts_with_the_bound_of_weights(rule, bound):
    """Of four labels one has x = -200, which is bounded to -20: the mean estimates are 5 and 50, not 50 and 5000."""
    old, sampler = np.float32([[-200, 0, 0, 0]]), np.zeros((1, 4), np.float32)
    arrays = {"old_log_probs": old, "advantages": np.ones(1, np.float32), "sampler_log_probs": sampler}
    for at, count in ((bound, 4), (bound / 2, 0)):
        loss = grpo(rejection=Rejection(**{rule: at}))
        assert int(policy_loss(old, **arrays, loss=loss).count) == count
    assert float(policy_metrics(old, **arrays)["mismatch_k1"]) == 5.0


@pytest.mark.parametrize("rule", ["token", "k3", "several"])
def test_masked_garbage_changes_no_bit(rule):
    given = case(seed=1)
    values = sampler(given)
    loss = grpo_paper(rejection=RULES[rule])
    clean = given._replace(
        **{name: np.where(given.mask, getattr(given, name), np.float32(-1.0)) for name in ("new", "old", "advantages")}
    )
    results = run_loss(loss, given, values), run_loss(loss, clean, np.where(given.mask, values, np.float32(-1.0)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_log_ratios_of_200_of_either_sign_stay_finite():
    old = np.repeat(np.float32([0.0, -200.0, 0.0, -200.0]), 6).reshape(SHAPE)
    advantages = np.repeat(np.float32([1.0, -1.0]), 12).reshape(SHAPE)
    arguments = old, advantages, np.ones(SHAPE, bool)
    for rule in RULES.values():
        loss = grpo(rejection=rule, kl_coefficient=0.1)

        def total(new, loss=loss):
            result = policy_loss(new, *arguments, sampler_log_probs=-200.0 - old, ref_log_probs=old, loss=loss)
            return result.sum, result.count

        # The policy is as far from the old one as the sampler is.
        (value, count), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(-200.0 - old))
        assert np.isfinite(value) and np.isfinite(gradient).all()
    assert int(count) == 24, "keep_denominator"


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("rule", ["token", "k3", "probability_gap"])
def test_a_traced_value_at_a_label_that_is_not_finite_reaches_the_loss(bad, rule):
    given = case(seed=1)
    values = sampler(given)
    values[0, 1] = bad
    loss = grpo(rejection=RULES[rule])
    assert np.isnan(jax.jit(lambda sampled: run_loss(loss, given, sampled)[0])(values))


def test_a_label_without_a_document_reaches_the_loss():
    given = case(seed=1)
    ids = given.ids.copy()
    ids[0, 1] = DOCUMENTS
    for rule in ("token", "k3"):
        loss = grpo(rejection=Rejection(token=(1.0, 1.0)) if rule == "token" else RULES[rule])
        traced = jax.jit(lambda ids, loss=loss: run_loss(loss, given._replace(ids=ids), sampler(given))[0])
        assert np.isnan(traced(ids))


@functools.lru_cache
def over_sequence_ranks(loss):
    mesh, specs = Mesh(np.array(jax.devices()[:8]), ("sequence",)), (P("sequence"),) * 6

    def local(new, old, advantages, mask, ids, values):
        def total(x):
            options = {"document_ids": ids, "num_documents": jnp.int32(DOCUMENTS), "document_axis_name": "sequence"}
            result = policy_loss(x, old, advantages, mask, sampler_log_probs=values, loss=loss, **options)
            return result.sum, result.count

        (value, count), gradient = jax.value_and_grad(total, has_aux=True)(new)
        return *jax.lax.psum((value, count), "sequence"), gradient

    out_specs = P(), P(), P("sequence")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs))


@pytest.mark.parametrize("rule", ["token", "sequence", "veto", "k3", "several"])
def test_documents_cut_over_sequence_ranks_are_rejected_as_whole_documents(rule):
    given = case(seed=1)
    values = sampler(given)
    for plain in (losses.sapo(), losses.cispo()):
        run = over_sequence_ranks(dataclasses.replace(plain, rejection=RULES[rule]))
        value, count, gradient = run(*(x.reshape(-1) for x in (*given[:5], values)))
        terms, wanted, slope = kept_oracle(plain, RULES[rule], given, values)
        assert int(count) == wanted
        assert abs(float(value) - terms.sum()) < ERROR * np.abs(terms).max()
        assert scaled_error(gradient, slope.reshape(-1)) < ERROR


@pytest.mark.parametrize("rule", ["token", "several"])
def test_any_cut_into_micro_batches_gives_the_step(rule):
    given = case(seed=1)
    values = sampler(given)

    def sums(loss, documents):
        def total(new):
            options = {"document_ids": given.ids, "num_documents": DOCUMENTS, "sampler_log_probs": values}
            mask = given.mask & np.isin(given.ids, documents)
            result = policy_loss(new, given.old, given.advantages, mask, loss=loss, **options)
            # Each part counts its own documents.
            count = len(documents) if loss.needs_documents and loss.reduction != "labels" else result.count
            return result.sum, dataclasses.replace(result, count=jnp.int32(count))

        gradient, result = jax.grad(total, has_aux=True)(jnp.asarray(given.new))
        return StepSums.of(gradient, result)

    for plain in (losses.cispo(), losses.sapo()):
        loss = dataclasses.replace(plain, rejection=RULES[rule])
        terms, count, slope = kept_oracle(plain, RULES[rule], given, values)
        for cut in ((range(5),), (range(2), range(2, 5)), tuple((d,) for d in range(DOCUMENTS))):
            step = sum(sums(loss, documents) for documents in cut).finish()
            np.testing.assert_allclose(step.loss, terms.sum() / count, rtol=0, atol=ERROR)
            assert scaled_error(step.gradients, slope / count) < ERROR


@pytest.mark.parametrize(
    "rule, way",
    [
        (Rejection(token=(0.5, 1.5)), "in one pass"),
        (Rejection(k3=0.15, keep_denominator=True), "in one pass"),
        (Rejection(probability_gap=0.02, negative_kl=0.05), "in two steps: the rejection reads"),
    ],
    ids=["token", "k3", "policy"],
)
def test_a_linear_head_gives_the_loss_of_its_log_probs(rule, way):
    data = head_problem()
    loss = grpo(rejection=rule, correction=Correction(), kl_coefficient=0.1)
    with record_head_runs() as runs:
        actual = policy_problem.run(in_one_call, data, loss)
    assert runs[-1].gradient.startswith(way)
    policy_problem.compare(actual, policy_problem.run(in_two_calls, data, loss))
    plain = policy_problem.run(in_two_calls, data, dataclasses.replace(loss, rejection=None))
    assert oracle_error(actual, plain) > 0.01, "the rule takes some labels"


def oracle_error(actual, wanted):
    one, other = (np.asarray(each[2].weight, np.float64) for each in (actual, wanted))
    return np.linalg.norm(one - other) / np.linalg.norm(other)


@pytest.mark.costly
@pytest.mark.parametrize("rule", [Rejection(k3=0.15), Rejection(probability_gap=0.02)], ids=["k3", "policy"])
def test_shards_of_vocabulary_and_tokens_give_the_unsharded_loss(rule):
    data, loss = head_problem(), grpo(rejection=rule)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))

    def sharded(data):
        operands = (data[name] for name in ("hidden", "weight", "targets", "old", "advantages", "mask"))
        options = policy_problem.OPTIONS | policy_problem.of_the_loss(data, loss) | {"bias": data["bias"]}
        options |= {"sampler_log_probs": data["sampler"], "loss": loss, "engine": "chunked", "mesh": mesh}
        return sharded_linear_policy_loss(*operands, **options)

    policy_problem.compare(policy_problem.differentiated(data, sharded), policy_problem.run(in_two_calls, data, loss))


BAD = {
    "no rule": ({}, "rejection", "no rule"),
    "keep_denominator alone": ({"keep_denominator": True}, "rejection", "no rule"),
    "keep_denominator a number": ({"k1": 0.1, "keep_denominator": 1}, "keep_denominator", "1"),
    "bounds a list": ({"token": [0.5, 2.0]}, "token", "[0.5, 2.0]"),
    "one bound": ({"sequence": (0.5,)}, "sequence", "(0.5,)"),
    "low above 1": ({"geometric": (1.1, 2.0)}, "geometric[0]", "1.1"),
    "high below 1": ({"token": (0.5, 0.9)}, "token[1]", "0.9"),
    "veto 0": ({"veto": 0.0}, "veto", "0.0"),
    "veto above 1": ({"veto": 2.0}, "veto", "2.0"),
    "k1 negative": ({"k1": -0.1}, "k1", "-0.1"),
    "k2 NaN": ({"k2": math.nan}, "k2", "nan"),
    "k3 infinite": ({"k3": math.inf}, "k3", "inf"),
    "negative_kl an array": ({"negative_kl": np.ones(1)}, "negative_kl", "array"),
    "probability_gap above 1": ({"probability_gap": 1.5}, "probability_gap", "1.5"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.bad_input
def test_a_wrong_choice_is_named(name):
    options, argument, seen = BAD[name]
    with pytest.raises(ValueError) as raised:
        Rejection(**options)
    message = str(raised.value)
    assert message.startswith(f"{argument}: expected ") and seen in message.partition(", got ")[2], message


@pytest.mark.bad_input
def test_what_a_rule_reads_has_to_be_there():
    given = case(seed=1)
    with pytest.raises(ValueError, match="^rejection: expected a jaxlogp.losses.Rejection or None, got 0.1"):
        grpo(rejection=0.1)
    with pytest.raises(ValueError, match="^log_probs: expected log-probs of the policy for Rejection.*, got None"):
        losses.loss_tokens(grpo(rejection=RULES["probability_gap"]), given.old, given.advantages, given.mask)
    flat = (x.reshape(-1) for x in given[:4])
    with pytest.raises(ValueError, match="^document_ids: expected"):
        policy_loss(*flat, loss=grpo(rejection=RULES["veto"]))
    data = head_problem()
    lse = jnp.zeros(data["mask"].shape)
    with pytest.raises(ValueError, match="^lse: expected .* the rejection compares the policy with the old one"):
        in_one_call(data, grpo(rejection=RULES["probability_gap"]), lse=lse)
