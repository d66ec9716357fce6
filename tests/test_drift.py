"""The drift report: errors, the worst token and its owner, tails, and what is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import VocabShards, drift_report
from jaxlogp.invariance.drift import DriftReport

SHAPE = (4, 50)
VOCAB = VocabShards.from_ranges(((0, 2), (2, 7), (7, 13), (13, 17)), 17)
NAN, INF = np.float32("nan"), np.float32("inf")


def case(seed=0):
    rng = np.random.default_rng(seed)
    reference = rng.normal(-2.0, 1.0, SHAPE).astype(np.float32)
    candidate = (reference + rng.normal(0.0, 0.08, SHAPE)).astype(np.float32)
    targets = rng.integers(0, 17, SHAPE).astype(np.int32)
    mask = rng.random(SHAPE) < 0.8
    candidate[~mask] = rng.choice(np.float32([NAN, INF, 1e30]), int((~mask).sum()))
    targets[~mask] = -100
    return candidate, reference, targets, mask


def test_every_number_is_that_of_a_walk_through_the_tokens():
    candidate, reference, targets, mask = case()
    report = drift_report(candidate, reference, targets, vocab=VOCAB, mask=mask, backend="chunked", reduction="psum")
    errors, relative, outside, worst = [], [], 0, (-1.0, None)
    for index in np.ndindex(SHAPE):
        if not mask[index]:
            continue
        difference = float(candidate[index]) - float(reference[index])
        errors.append(abs(difference))
        relative.append(abs(difference) / max(abs(float(reference[index])), 1e-12))
        outside += not 0.9 <= np.exp(difference) <= 1.1
        if errors[-1] > worst[0]:
            worst = (errors[-1], index)
    assert report.active_count == len(errors) == mask.sum() and report.num_non_finite == 0
    assert report.first_non_finite is None
    assert report.max_abs_error == max(errors) and report.max_rel_error == max(relative)
    np.testing.assert_allclose([report.mean_abs_error, report.mean_rel_error], [np.mean(errors), np.mean(relative)])
    assert report.worst_index == worst[1] and report.worst_flat_index == np.ravel_multi_index(worst[1], SHAPE)
    assert report.worst_token_id == targets[worst[1]]
    assert report.worst_owner == int(VOCAB.owners(jnp.asarray(targets))[worst[1]])
    assert report.worst_owner_range == VOCAB.ranges[report.worst_owner]
    assert (report.worst_candidate, report.worst_reference) == (candidate[worst[1]], reference[worst[1]])
    assert report.worst_signed_error == report.worst_candidate - report.worst_reference
    assert 0.0 < report.share_outside == outside / len(errors)
    ordered = np.sort(errors)
    assert ordered[len(ordered) // 2 - 1] <= report.abs_error_quantiles[0] <= ordered[len(ordered) // 2]
    p90, p99, p999 = report.abs_error_quantiles[1:]
    assert ordered[-len(ordered) // 10 - 1] <= p90 <= ordered[-4] <= p99 <= p999 <= ordered[-1]
    labels = (report.tp_size, report.backend, report.reduction, report.candidate_dtype, report.reference_dtype)
    assert labels == (4, "chunked", "psum", "float32", "float32")


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_error_has_its_sign(sign):
    reference = np.float32([-1.0, -2.0, -3.0])
    candidate = reference + np.float32([0.0, sign * 0.25, 0.0])
    report = drift_report(candidate, reference, np.array([1, 2, 3]), vocab=VOCAB)
    assert report.worst_signed_error == sign * 0.25 and report.max_abs_error == 0.25
    assert report.max_rel_error == 0.125


def test_of_equal_errors_the_first_is_named():
    reference = np.zeros((2, 3), np.float32) - 1
    candidate = reference - np.float32([[0, 0.5, 0.5], [0.5, 0, 0.5]])
    report = drift_report(candidate, reference, np.zeros((2, 3), np.int64), vocab=VOCAB)
    assert report.worst_index == (0, 1) and report.worst_flat_index == 1


@pytest.mark.parametrize("edge", [edge for start, end in VOCAB.ranges for edge in (start, end - 1)])
def test_the_owner_at_both_edges_of_every_shard(edge):
    report = drift_report(np.float32([-1.0]), np.float32([-1.5]), np.array([edge]), vocab=VOCAB)
    start, end = report.worst_owner_range
    assert start <= edge < end and VOCAB.ranges[report.worst_owner] == (start, end)


def test_without_an_active_token_errors_are_zero_and_places_none():
    candidate, reference, targets, _ = case()
    report = drift_report(candidate, reference, targets, vocab=VOCAB, mask=np.zeros(SHAPE, bool))
    assert report.active_count == report.num_non_finite == 0
    assert report.max_abs_error == report.mean_abs_error == report.max_rel_error == report.mean_rel_error == 0.0
    assert report.abs_error_quantiles == (0.0, 0.0, 0.0, 0.0) and report.share_outside == 0.0
    places = {name: value for name, value in report._asdict().items() if name.startswith("worst_")}
    assert len(places) == 8 and set(places.values()) == {None}
    assert "worst" not in str(report)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_what_is_not_finite_is_counted_and_comes_first(bad, side):
    candidate, reference, targets, mask = case()
    values = {"candidate": candidate.copy(), "reference": reference.copy()}
    where, later = (tuple(int(i) for i in np.argwhere(mask)[place]) for place in (7, 9))
    values[side][where] = values[side][later] = bad
    report = drift_report(**values, targets=targets, vocab=VOCAB, mask=mask)
    assert report.num_non_finite == 2 and report.first_non_finite == where
    assert report.active_count == mask.sum() and np.isfinite(report.max_abs_error)
    assert str(report).startswith("NOT FINITE: 2 active tokens") and str(where) in str(report).splitlines()[0]


def test_active_tokens_of_which_none_is_finite_are_no_small_error():
    reference = np.full(3, -1.0, np.float32)
    report = drift_report(np.full_like(reference, NAN), reference, np.arange(3), vocab=VOCAB)
    assert report.num_non_finite == report.active_count == 3 and report.worst_index is None
    errors = (report.max_abs_error, report.mean_abs_error, report.max_rel_error, report.mean_rel_error)
    assert np.isnan([*errors, *report.abs_error_quantiles, report.share_outside]).all()
    assert not report.max_abs_error < 1.0 and "max nan" in str(report)


def test_a_mean_hides_what_the_quantiles_show():
    reference = np.full(1000, -1.0)
    candidate = reference.copy()
    candidate[:5] -= 2.0
    report = drift_report(candidate, reference, np.zeros(1000, np.int32), vocab=VOCAB)
    assert report.mean_abs_error == 0.01 and report.abs_error_quantiles == (0.0, 0.0, 0.0, 2.0)
    assert report.share_outside == 0.005


def test_huge_errors_do_not_overflow():
    report = drift_report(np.float32([0.0]), np.float32([-3e38]), np.array([0]), vocab=VOCAB)
    assert report.share_outside == 1.0 and report.max_abs_error == float(np.float32(3e38))


def test_bf16_values_are_compared_in_float64():
    candidate = jnp.asarray([-1.0, -2.0], jnp.bfloat16)
    report = drift_report(candidate, jnp.asarray([-1.0, -2.001]), jnp.asarray([0, 1]), vocab=VOCAB)
    # -2.001 is rounded to fp32, by 1.2e-7 at most.
    assert (report.candidate_dtype, report.reference_dtype) == ("bfloat16", "float32")
    assert abs(report.max_abs_error - 0.001) < 1e-6


def test_a_reference_of_0_divides_by_1e_12_nats():
    report = drift_report(np.float32([-0.5, 0.0]), np.zeros(2, np.float32))
    assert report.max_rel_error == 0.5e12 and report.mean_rel_error == 0.25e12


def test_the_text_in_full():
    """Errors 0.5, 0.25, 0 and 0; relative ones 0.25, 0.0625, 0 and 0."""
    reference = np.array([-2.0, -4.0, -1.0, -1.0])
    candidate = reference + np.array([-0.5, 0.25, 0.0, 0.0])
    named = {"backend": "chunked", "reduction": "psum", "candidate_dtype": "bfloat16"}
    report = drift_report(candidate, reference, np.array([8, 0, 0, 0]), vocab=VOCAB, **named)
    assert str(report).splitlines() == [
        "4 active tokens, 4 vocabulary shards, chunked, psum, bfloat16 against float64",
        "|error| max 0.5, mean 0.188, p50 / p90 / p99 / p99.9 0.125 / 0.425 / 0.492 / 0.499 nats",
        "relative error max 0.25, mean 0.0781; ratio outside [0.9, 1.1]: 50.00%",
        "worst token (0,): id 8 of shard 2 (7, 13), -2.5 against -2",
    ]


def test_the_18_fields_come_first():
    assert DriftReport._fields[17] == "reference_dtype" and len(DriftReport._fields) == 22


BAD = {
    "candidate": lambda c, r, t, m: drift_report(t, r, t, vocab=VOCAB, mask=m),
    "reference": lambda c, r, t, m: drift_report(c, r[:1], t, vocab=VOCAB, mask=m),
    "targets": lambda c, r, t, m: drift_report(c, r, c, vocab=VOCAB, mask=m),
    "targets ": lambda c, r, t, m: drift_report(c, r, t, vocab=VOCAB),
    "mask": lambda c, r, t, m: drift_report(c, r, t, vocab=VOCAB, mask=m.astype(np.int32)),
    "vocab": lambda c, r, t, m: drift_report(c, r, t, vocab=17, mask=m),
    "vocab ": lambda c, r, t, m: drift_report(c, r, t, m),
    "candidate ": lambda c, r, t, m: jax.jit(lambda x: drift_report(x, r, t, vocab=VOCAB, mask=m).max_abs_error)(c),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    with pytest.raises(ValueError, match=f"^{name.strip()}: expected "):
        BAD[name](*case())


@pytest.mark.bad_input
@pytest.mark.parametrize("bad", [-1, 17])
def test_the_first_active_id_outside_the_vocabulary_is_named(bad):
    candidate, reference, targets, mask = case()
    first, later = (tuple(int(i) for i in np.argwhere(mask)[place]) for place in (7, 9))
    targets[first], targets[later] = bad, 18
    with pytest.raises(ValueError) as raised:
        drift_report(candidate, reference, targets, mask, vocab=VOCAB)
    assert str(raised.value) == f"targets: expected active ids in [0, 17), got {bad} at position {first}"


def test_a_dtype_may_be_that_of_the_computation():
    """Log-probs are fp32 whatever a model computes in."""
    values = np.float32([-1.0])
    named = {"candidate_dtype": "bfloat16", "reference_dtype": "float32"}
    report = drift_report(values, values, np.array([1]), vocab=VOCAB, **named)
    assert "bfloat16 against float32" in str(report)


def test_without_targets_only_the_token_is_unknown():
    candidate, reference, targets, mask = case()
    report = drift_report(candidate, reference, mask=mask)
    unknown = dict.fromkeys(("worst_token_id", "worst_owner", "worst_owner_range", "tp_size"))
    assert report == drift_report(candidate, reference, targets, mask, vocab=VOCAB)._replace(**unknown)
    lines = str(report).splitlines()
    assert "None" not in str(report) and lines[-1].startswith(f"worst token {report.worst_index}: -")
