"""The metrics table: every name against float64, by level, over micro-batches and over a mesh."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxlogp.losses import (
    Correction,
    LogLikelihood,
    PolicyLoss,
    Rejection,
    StopGradientWeight,
    cispo,
    grpo,
    grpo_paper,
    gspo,
    gspo_token,
    policy_loss,
    sapo,
)
from jaxlogp.policy.metrics import (
    METRICS,
    PolicyMetricTerms,
    Reduction,
    policy_metric_terms,
    policy_metrics,
    reward_terms,
    staleness_terms,
)
from tests import oracle

SHAPE = (4, 8)
# Documents per row, so that rows can go to data ranks; the second of each row is cut by the middle of the row.
LENGTHS = ((2, 5, 1), (3, 2, 3), (1, 6, 1), (3, 5))
ROW_DOCUMENTS = tuple(len(lengths) for lengths in LENGTHS)
DOCUMENTS = sum(ROW_DOCUMENTS)
LOW, HIGH = 0.15, 0.3

# A mean over at most 32 labels of values of eight roundings, of one sign or of that size; their Σ|x| is at most four
# times the mean.
ERROR = oracle.fp32_bound(4.0, 32 + 8)

AVERAGES = (
    "new_logprobs",
    "old_logprobs",
    "ratio_new_old",
    "kl_new_old",
    "clipped_ratio_fraction",
    "stopped_low_fraction",
    "stopped_high_fraction",
    "kl_new_ref",
    "advantage",
    "entropy",
)


def case(seed=0):
    rng = np.random.default_rng(seed)
    ids = np.concatenate([np.repeat(np.arange(len(n)), n) + sum(ROW_DOCUMENTS[:i]) for i, n in enumerate(LENGTHS)])
    ids = ids.astype(np.int32).reshape(SHAPE)
    new = rng.normal(-2.0, 1.0, SHAPE).astype(np.float32)
    old = (new + rng.normal(0.0, 0.3, SHAPE)).astype(np.float32)
    advantages = rng.normal(0.0, 1.0, SHAPE).astype(np.float32)
    entropy = rng.uniform(0.0, 3.0, SHAPE).astype(np.float32)
    ref = (new - rng.normal(0.0, 0.5, SHAPE)).astype(np.float32)
    mask = (rng.random(SHAPE) < 0.7) & (ids != 3) & (ids != 8)  # two documents without a label
    for values in (new, old, advantages, entropy, ref):
        values[~mask] = rng.choice(np.float32([np.nan, np.inf, -np.inf, 3e38]), int((~mask).sum()))
    return {
        "log_probs": new,
        "old_log_probs": old,
        "advantages": advantages,
        "mask": mask,
        "document_ids": ids,
        "entropy": entropy,
        "ref_log_probs": ref,
    }


def expected_metrics(kind, arrays, num_documents=DOCUMENTS, low=LOW, high=HIGH):
    """Contracts D in float64, one document and one label at a time; without document ids every label counts alike."""
    sums = dict.fromkeys(AVERAGES, 0.0)
    ratio_sum = squared_sum = 0.0
    labelled, extremes, ratios = 0, [], []
    losses = {"objective": 0.0, "kl": 0.0, "entropy": 0.0}
    ids, mask = arrays.get("document_ids", np.zeros(SHAPE, int)), arrays["mask"]
    for d in range(num_documents):
        here = mask & (ids == d)
        if not here.any():
            continue
        new, old, a, h, ref = (
            np.float64(arrays[name][here])
            for name in ("log_probs", "old_log_probs", "advantages", "entropy", "ref_log_probs")
        )
        labelled += 1
        extremes += [a.min(), a.max()]
        x, kl = new - old, np.exp(ref - new) - (ref - new) - 1
        if kind == "gspo":
            x, a = np.full_like(x, x.mean()), np.full_like(a, a.mean())
        if kind == "gspo_token":
            x = np.full_like(x, x.mean())
        r = np.exp(x)
        ratios += list(r)
        ratio_sum += r[0] if kind != "grpo" else r.sum()
        squared_sum += r[0] ** 2 if kind != "grpo" else (r**2).sum()
        clipped = np.float64((r < 1 - low) | (r > 1 + high))
        below, above = np.float64((r < 1 - low) & (a < 0)), np.float64((r > 1 + high) & (a > 0))
        values = (new, old, r, r - x - 1, clipped, below, above, kl, a, h)
        for name, value in zip(AVERAGES, values, strict=True):
            sums[name] += value.mean() if "document_ids" in arrays else value.sum()
        weight = 1 / len(r) if kind != "grpo" else 1.0
        losses["objective"] -= weight * np.minimum(r * a, np.clip(r, 1 - low, 1 + high) * a).sum()
        losses["kl"] += weight * KL * kl.sum()
        losses["entropy"] -= weight * ENTROPY * h.sum()
    count = num_documents if kind != "grpo" else mask.sum()
    divisor = num_documents if "document_ids" in arrays else mask.sum()
    metrics = {name: value / divisor for name, value in sums.items()}
    metrics |= {"ratio_new_old_sum": ratio_sum, "ratio_new_old_squared_sum": squared_sum}
    metrics |= {"max_ratio_new_old": max(ratios), "min_ratio_new_old": min(ratios)}
    metrics |= {"max_advantage": max(extremes), "min_advantage": min(extremes), "num_tokens": mask.sum()}
    metrics |= {f"loss_{name}": value / count for name, value in losses.items()} | {"loss_count": np.int32(count)}
    if "document_ids" not in arrays:
        return metrics
    metrics |= {f"{name}_labelled": value / labelled for name, value in sums.items()}
    metrics |= {"num_documents": num_documents, "num_documents_labelled": labelled}
    return metrics | ({"num_segments": labelled} if kind != "grpo" else {})


KL, ENTROPY = 0.2, 0.1
BOUNDS = {"epsilon": LOW, "epsilon_high": HIGH, "kl_coefficient": KL, "entropy_coefficient": ENTROPY}
LOSSES = {"grpo": grpo(**BOUNDS), "gspo": gspo(**BOUNDS), "gspo_token": gspo_token(**BOUNDS)}


def options(kind, level="with_entropy"):
    return {"loss": LOSSES[kind], "level": level}


@functools.partial(jax.jit, static_argnames=("kind", "level"))
def metrics_of(arrays, num_documents, *, kind, level="with_entropy"):
    return policy_metrics(**arrays, num_documents=num_documents, **options(kind, level))


@functools.partial(jax.jit, static_argnames="kind")
def terms_of(arrays, num_documents, *, kind):
    return policy_metric_terms(**arrays, num_documents=num_documents, **options(kind))


def assert_metrics(actual, expected):
    assert set(actual) == set(expected)
    for name, value in expected.items():
        if isinstance(value, int | np.integer):
            assert actual[name].dtype == jnp.int32 and int(actual[name]) == value, name
        else:
            assert actual[name].dtype == jnp.float32
            scale = max(abs(value), 1e-2)  # kl is a difference of numbers of size 1, its smallest value here 0.03
            assert abs(float(actual[name]) - value) < ERROR * scale, (name, float(actual[name]), value)


@pytest.mark.parametrize("kind", LOSSES)
def test_every_metric_is_that_of_float64(kind):
    arrays = case()
    expected = expected_metrics(kind, arrays)
    assert 0 < expected["stopped_low_fraction"] < expected["clipped_ratio_fraction"]
    assert expected["clipped_ratio_fraction"] < 1 and expected["num_documents_labelled"] < DOCUMENTS
    assert_metrics(metrics_of(arrays, np.int32(DOCUMENTS), kind=kind), expected)


def test_without_documents_a_token_loss_has_means_over_labels():
    arrays = case()
    del arrays["document_ids"]
    flat = {name: values.ravel() for name, values in arrays.items()}
    actual = jax.jit(lambda x: policy_metrics(**x, **options("grpo")))(flat)
    assert_metrics(actual, expected_metrics("grpo", arrays, 1))


def test_the_parts_add_up_to_the_loss():
    arrays = case()
    names = ("loss_objective", "loss_kl", "loss_entropy", "loss_z", "loss_drift")
    for loss in (*LOSSES.values(), grpo_paper(entropy_coefficient=0.1, entropy_weights="labels")):
        loss = dataclasses.replace(loss, z_loss_coefficient=0.01, drift_coefficient=0.1)
        given = {
            **arrays,
            "penalized": arrays["document_ids"] % 2 == 0,
            "num_documents": DOCUMENTS,
            "loss": loss,
            "lse": arrays["entropy"] + 3.0,
        }
        given["labels_per_document"] = arrays["mask"].sum() / DOCUMENTS
        metrics = policy_metrics(**given, level="with_entropy")
        parts = [float(metrics[name]) for name in names if name in metrics]
        bound = oracle.fp32_bound(np.abs(parts).sum(), 32)
        assert sum(parts) == pytest.approx(float(policy_loss(**given).mean()), abs=bound)


def test_what_stops_the_gradient_is_counted_by_side():
    """With A of both signs at each ratio; above delta the gradient stops for A < 0 too, and a soft gate never stops."""
    ratio, advantages = np.float32([0.5, 0.5, 1.0, 1.5, 1.5, 4.0, 4.0, 4.0]), np.float32([1, -1, 1, 1, -1, 1, -1, 0])
    given = np.log(ratio)[None], np.zeros((1, 8), np.float32), advantages[None], np.ones((1, 8), bool)
    wanted = {grpo(): (1, 2), grpo(delta=3.0): (1, 3), sapo(): (0, 0), cispo(max_weight=1.2): (0, 0)}
    for loss, (low, high) in wanted.items():
        documents = {"document_ids": np.zeros((1, 8), np.int32), "num_documents": 1}
        metrics = policy_metrics(*given, loss=loss, **documents)
        assert (float(metrics["stopped_low_fraction"]), float(metrics["stopped_high_fraction"])) == (low / 8, high / 8)
    # The gradient of a log-ratio beyond `MAX_LOG_RATIO` is 0, although the objective has a slope there.
    far = policy_metrics(np.float32([29.0, 31.0]), np.zeros(2, np.float32), np.float32([-1, -1]), loss=grpo())
    assert float(far["stopped_high_fraction"]) == 0.5


def test_the_names_by_level():
    arrays = case()
    basic = set(metrics_of(arrays, np.int32(DOCUMENTS), kind="grpo", level="basic"))
    full = set(metrics_of(arrays, np.int32(DOCUMENTS), kind="grpo"))
    assert full - basic == {"entropy", "entropy_labelled", "loss_entropy"} and basic < full
    assert policy_metrics(**arrays, num_documents=DOCUMENTS, level="none") == {}
    without = {name: value for name, value in arrays.items() if name != "entropy"}
    assert set(policy_metrics(**without, num_documents=DOCUMENTS, loss=LOSSES["grpo"])) == basic


def test_the_table_has_a_reduction_for_every_term_and_nothing_else():
    arrays = case()
    parts = {"z_loss_coefficient": 0.1, "drift_coefficient": 0.1, "rejection": Rejection(k1=1.0)}
    loss = dataclasses.replace(LOSSES["gspo"], **parts)
    more = {"num_documents": DOCUMENTS, "lse": arrays["entropy"], "level": "with_entropy", "penalized": arrays["mask"]}
    found = {}
    for kind in ("truncate", "mask"):
        corrected = dataclasses.replace(loss, correction=Correction(kind=kind))
        found |= policy_metric_terms(**arrays, **more, loss=corrected).values
    terms = PolicyMetricTerms(found)
    ones, mask = jnp.ones(2, jnp.float32), jnp.ones(2, bool)
    terms = terms | reward_terms(ones, mask) | staleness_terms(3, jnp.ones(2, jnp.int32), mask)
    assert terms.values.keys() == METRICS.keys()
    divisors = {metric.divisor for metric in METRICS.values()} - {None}
    assert divisors <= METRICS.keys() and all(METRICS[name].reduction is Reduction.SUM for name in divisors)


@pytest.mark.parametrize("kind", LOSSES)
def test_micro_batches_add_up_to_the_whole_and_a_mean_of_means_does_not(kind):
    arrays = case(seed=1)
    expected = expected_metrics(kind, arrays)
    parts, first = [], 0
    for row, count in enumerate(ROW_DOCUMENTS):
        part = {name: values[row : row + 1] for name, values in arrays.items()}
        part["document_ids"] = part["document_ids"] - first
        parts.append((part, np.int32(count)))
        first += count
    terms = [terms_of(*part, kind=kind) for part in parts]
    assert_metrics(sum(terms[1:], terms[0]).finish(), expected)
    finished = [part.finish() for part in terms]
    wrong = {name: np.float32(np.mean([float(part[name]) for part in finished])) for name in AVERAGES}
    for name in ("new_logprobs", "ratio_new_old", "entropy"):
        with pytest.raises(AssertionError):
            assert_metrics({name: wrong[name]}, {name: expected[name]})


@functools.lru_cache
def sharded_metrics(kind, document_axis="sequence"):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "sequence"))
    counts = jnp.asarray(ROW_DOCUMENTS, jnp.int32)
    firsts = jnp.cumsum(counts) - counts

    def local(arrays):
        rank = jax.lax.axis_index("data")
        arrays = arrays | {"document_ids": arrays["document_ids"] - firsts[rank]}
        return policy_metrics(
            **arrays,
            num_documents=counts[rank],
            **options(kind),
            document_axis_name=document_axis,
            axis_name=("data", "sequence"),
        )

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data", "sequence"), out_specs=P()))


@pytest.mark.parametrize("kind", LOSSES)
def test_sharded_over_data_and_sequence_every_metric_is_the_unsharded_one(kind):
    arrays = case(seed=2)
    assert_metrics(sharded_metrics(kind)(arrays), expected_metrics(kind, arrays))


@pytest.mark.bad_input
def test_documents_cut_without_the_document_axis_are_refused():
    with pytest.raises(ValueError, match="^num_documents: expected the documents of this rank .*'sequence'"):
        sharded_metrics("gspo", None)(case(seed=2))


@pytest.mark.parametrize("kind", LOSSES)
def test_garbage_at_masked_places_changes_no_bit(kind):
    arrays = case()
    floating = ("log_probs", "old_log_probs", "advantages", "entropy", "ref_log_probs")
    clean = arrays | {name: np.where(arrays["mask"], arrays[name], np.float32(0.0)) for name in floating}
    actual, expected = (metrics_of(x, np.int32(DOCUMENTS), kind=kind) for x in (arrays, clean))
    for name, value in expected.items():
        assert float(actual[name]) == float(value), name


def test_a_part_without_labels_is_the_identity_of_the_sum():
    arrays = case()
    nothing = arrays | {"mask": np.zeros(SHAPE, bool)}
    terms = terms_of(arrays, np.int32(DOCUMENTS), kind="gspo")
    empty = terms_of(nothing, np.int32(0), kind="gspo")
    for name, value in terms.finish().items():
        assert float((terms + empty).finish()[name]) == float(value), name
    alone = empty.finish()
    assert (float(alone["max_advantage"]), float(alone["min_advantage"])) == (-np.inf, np.inf)
    assert all(float(value) == 0.0 for name, value in alone.items() if not name.startswith(("max_", "min_")))


@pytest.mark.parametrize("kind", LOSSES)
def test_huge_log_ratios_keep_the_metrics_finite(kind):
    arrays = case()
    arrays["old_log_probs"] = np.where(arrays["document_ids"] % 2 == 0, np.float32(-200.0), np.float32(200.0))
    metrics = metrics_of(arrays, np.int32(DOCUMENTS), kind=kind)
    assert all(np.isfinite(float(value)) for value in metrics.values())
    assert float(metrics["clipped_ratio_fraction_labelled"]) == pytest.approx(1.0, abs=oracle.fp32_bound(1.0, 32))


def test_a_ratio_exactly_on_a_bound_is_not_clipped():
    on_bound = float(jax.jit(jnp.exp)(np.float32(0.25)))
    row = {"log_probs": np.full((1, 2), 0.25, np.float32), "old_log_probs": np.zeros((1, 2), np.float32)}
    row |= {"advantages": np.ones((1, 2), np.float32), "mask": np.ones((1, 2), bool)}
    row |= {"document_ids": np.zeros((1, 2), np.int32), "num_documents": 1}
    below = float(np.nextafter(np.float32(on_bound), np.float32(1.0)))
    for bound, expected in ((on_bound, 0.0), (below, 1.0)):
        assert float(policy_metrics(**row, loss=grpo(epsilon_high=bound - 1))["clipped_ratio_fraction"]) == expected


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_the_clipped_fraction_is_what_the_objective_says(ratio):
    """Not what the bounds of another objective would say."""
    arrays = case()
    x = np.where(arrays["mask"], arrays["log_probs"], 0) - np.where(arrays["mask"], arrays["old_log_probs"], 0)
    expected, labelled = 0.0, 0
    for d in range(DOCUMENTS):
        here = arrays["mask"] & (arrays["document_ids"] == d)
        if here.any():
            r = np.exp(np.float64(x[here]).mean() if ratio == "sequence" else np.float64(x[here]))
            expected, labelled = expected + np.mean(r > 0.9), labelled + 1
    assert 0 < expected < labelled
    found = {}
    for objective in (StopGradientWeight(0.9), LogLikelihood()):
        loss = PolicyLoss("any", ratio=ratio, objective=objective, reduction="documents")
        metrics = policy_metrics(**arrays, num_documents=DOCUMENTS, loss=loss)
        found[type(objective)] = float(metrics["clipped_ratio_fraction"])
        assert ("num_segments" in metrics) == (ratio == "sequence")
    assert found[StopGradientWeight] == pytest.approx(expected / DOCUMENTS, rel=oracle.fp32_bound(1.0, 32))
    assert found[LogLikelihood] == 0.0


@pytest.mark.parametrize("kind", LOSSES)
def test_a_traced_label_outside_all_documents_is_not_silently_dropped(kind):
    arrays = case()
    first = tuple(np.argwhere(arrays["mask"])[0])
    arrays["document_ids"][first] = DOCUMENTS
    assert np.isnan(metrics_of(arrays, np.int32(DOCUMENTS), kind=kind)["new_logprobs"])


def test_no_gradient_flows_out_of_the_metrics():
    arrays = case()
    new = jnp.asarray(arrays.pop("log_probs"))
    gradient = jax.grad(
        lambda x: sum(
            value.astype(jnp.float32)
            for value in policy_metrics(x, **arrays, num_documents=DOCUMENTS, **options("gspo")).values()
        )
    )(new)
    np.testing.assert_array_equal(gradient, np.zeros(SHAPE))


def test_reward_statistics_are_over_documents_and_reduce_over_parts():
    rewards = np.float32([1.0, 0.0, np.nan, 0.5, -2.0, np.inf])
    mask = np.array([True, True, False, True, True, False])
    whole = reward_terms(rewards, mask).finish()
    parts = (reward_terms(rewards[:3], mask[:3]) + reward_terms(rewards[3:], mask[3:])).finish()
    for metrics in (whole, parts):
        assert {name: float(value) for name, value in metrics.items()} == {
            "reward_mean": -0.125,
            "reward_max": 1.0,
            "reward_min": -2.0,
            "num_rewards": 4.0,
        }


@pytest.mark.parametrize("jitted", [False, True])
def test_staleness_is_subtracted_as_integers(jitted):
    """2^30 + 7 and 2^30 are the same fp32 number: subtracted as floats the staleness would be 0."""
    seen, versions = 2**30 + 7, np.array([2**30, 2**30 + 6, 5, 2**31 - 1], np.int32)
    mask = np.array([True, True, False, False])
    assert np.float32(seen) - np.float32(versions[0]) == 0.0
    function = jax.jit(staleness_terms) if jitted else staleness_terms
    metrics = function(np.int32(seen) if jitted else seen, versions, mask).finish()
    assert {name: float(value) for name, value in metrics.items()} == {
        "staleness_mean": 4.0,
        "staleness_max": 7.0,
        "staleness_min": 1.0,
        "num_stalenesses": 2.0,
    }


def test_under_jit_counters_may_have_any_integer_dtypes():
    versions = np.array([100, 90], np.int8)
    for seen in (200, np.int16(200), np.int64(200), jnp.int32(200)):
        metrics = jax.jit(lambda versions, seen=seen: staleness_terms(seen, versions))(versions).finish()
        assert float(metrics["staleness_max"]) == 110.0, type(seen)
    metrics = jax.jit(staleness_terms)(np.int16(200), versions).finish()
    assert float(metrics["staleness_mean"]) == 105.0


def test_staleness_per_label_counts_labels():
    """Documents of 1 and 3 labels, under weights 94 and 94, 92, 94 documents old; per document it would be 93.67."""
    versions = np.array([[6, 6, 0], [6, 8, 6]], np.int32)
    mask = np.array([[True, False, False], [True, True, True]])
    assert float(staleness_terms(100, versions, mask).finish()["staleness_mean"]) == 93.5


def test_on_the_host_counters_may_exceed_32_bits():
    versions = np.array([2**40, 2**40 - 3], np.int64)
    metrics = staleness_terms(2**40 + 1, versions, np.ones(2, bool)).finish()
    assert (float(metrics["staleness_max"]), float(metrics["staleness_min"])) == (4.0, 1.0)


def bad(**changes):
    return policy_metrics(**{**case(), "num_documents": DOCUMENTS, **changes})


def nan_entropy():
    arrays = case()
    arrays["entropy"][tuple(np.argwhere(arrays["mask"])[0])] = np.nan
    return arrays["entropy"]


ONE, YES = np.ones(1, np.float32), np.ones(1, bool)
BAD = {
    "level": lambda: bad(level="all"),
    "loss": lambda: bad(loss="ppo"),
    "log_probs": lambda: bad(log_probs=[1.0]),
    "mask   ": lambda: bad(mask=[True]),
    "document_ids": lambda: bad(document_ids=None),
    "document_ids ": lambda: policy_metrics(*np.ones((3, 4), np.float32), loss=gspo()),
    "ref_log_probs": lambda: bad(ref_log_probs=np.zeros(3, np.float32)),
    "documents_seen  ": lambda: staleness_terms(np.array([5]), np.array([1]), YES),
    "num_documents": lambda: bad(num_documents=None),
    "entropy": lambda: bad(level="with_entropy", entropy=None),
    "entropy ": lambda: bad(level="with_entropy", entropy=np.zeros(3, np.float32)),
    "entropy  ": lambda: bad(level="with_entropy", entropy=nan_entropy()),
    "mask": lambda: bad(mask=np.ones(SHAPE, np.int32)),
    "rewards": lambda: reward_terms(np.float32([np.nan]), YES),
    "rewards ": lambda: reward_terms(np.ones(2, np.float32), YES),
    "rewards  ": lambda: reward_terms([1.0], YES),
    "mask  ": lambda: staleness_terms(5, np.array([1]), [True]),
    "mask    ": lambda: reward_terms(np.ones(0, np.float32), np.ones(0, bool)),
    "mask     ": lambda: staleness_terms(5, np.ones(0, np.int32), np.ones(0, bool)),
    "model_versions   ": lambda: staleness_terms(5, [1], YES),
    "documents_seen ": lambda: staleness_terms([5], np.array([1]), YES),
    "model_versions": lambda: staleness_terms(5, np.array([6]), YES),
    "model_versions ": lambda: staleness_terms(5, ONE, YES),
    "model_versions  ": lambda: staleness_terms(5, np.array([1, 2]), YES),
    "documents_seen": lambda: staleness_terms(np.float32(5), np.array([1], np.int32), YES),
    "mask ": lambda: staleness_terms(5, np.array([1]), ONE),
    "other": lambda: PolicyMetricTerms({}) + reward_terms(ONE, YES),
    "other ": lambda: reward_terms(ONE, YES) | reward_terms(ONE, YES),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.bad_input
def test_bad_input_names_the_argument(name):
    with pytest.raises(ValueError, match=f"^{name.strip()}: expected .*, got "):
        BAD[name]()


@pytest.mark.bad_input
@pytest.mark.parametrize("combine", [operator.add, operator.or_])
@pytest.mark.parametrize("other", [1, {}, None])
def test_terms_are_combined_with_nothing_else(combine, other):
    with pytest.raises(TypeError, match="unsupported operand"):
        combine(PolicyMetricTerms({}), other)
