"""Metrics of sampler and old policy, corrections and rejections: against float64, over micro-batches and over ranks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxlogp.losses import Correction, Rejection, grpo, grpo_paper, policy_loss
from jaxlogp.policy.metrics import policy_metric_terms, policy_metrics
from tests import oracle
from tests.losses.correction_case import log_weights, ratios_at, rejected_by, sampler, weights_of
from tests.losses.policy_case import DOCUMENTS, case

# Means over at most 16 labels of values of eight roundings.
ERROR = oracle.fp32_bound(4.0, 16 + 8)
LOSSES = {
    "neither": grpo(),
    "truncate": grpo(correction=Correction("token", high=1.2)),
    "mask, reject": grpo_paper(
        correction=Correction("sequence", "mask", 0.6, 2.0), rejection=Rejection(geometric=(0.8, 1.3))
    ),
    "reject by policy": grpo(rejection=Rejection(token=(0.7, 1.4), negative_kl=0.3, keep_denominator=True)),
}


def document_shares(name, flags, ids, every):
    """Shares of documents with a label, or with every label, that is flagged: of all, and of those with labels."""
    labelled = np.unique(ids)
    hit = sum(bool((np.all if every else np.any)(flags[ids == d])) for d in labelled)
    return {f"{name}_document_fraction": hit / DOCUMENTS, f"{name}_document_fraction_labelled": hit / len(labelled)}


def expected_metrics(loss, given, values):
    logs, ids = log_weights(given, values), given.ids[given.mask]
    weights, metrics = np.exp(logs), {"mismatch_k1": -logs.mean(), "mismatch_k3": (np.exp(logs) - logs - 1).mean()}
    if loss.correction is not None:
        weights, ratios = weights_of(loss.correction, given, values), ratios_at(loss.correction.level, given, values)
        flags = (ratios < loss.correction.low) | (ratios > loss.correction.high)
        name = {"truncate": "truncated", "mask": "weight_masked"}[loss.correction.kind]
        metrics |= {f"{name}_fraction": flags.mean(), **document_shares(name, flags, ids, every=False)}
    if loss.rejection is not None:
        flags = rejected_by(loss.rejection, given, values)[given.mask]
        metrics |= {"rejected_fraction": flags.mean(), **document_shares("rejected", flags, ids, every=True)}
    metrics |= {"correction_weight": weights.mean(), "correction_weight_squared": (weights**2).mean()}
    effective = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    return metrics | {"max_correction_weight": weights.max(), "effective_sample_size": effective}


def assert_metrics(actual, expected):
    for name, value in expected.items():
        assert actual[name].dtype == jnp.float32, name
        assert abs(float(actual[name]) - value) < ERROR * max(abs(value), 0.1), (name, float(actual[name]), value)


def given_to(given, values):
    arrays = {"log_probs": given.new, "old_log_probs": given.old, "advantages": given.advantages, "mask": given.mask}
    return arrays | {"document_ids": given.ids, "sampler_log_probs": values}


@functools.partial(jax.jit, static_argnames="loss")
def metrics_of(arrays, *, loss):
    return policy_metrics(**arrays, num_documents=DOCUMENTS, loss=loss)


@pytest.mark.parametrize("name", LOSSES)
def test_every_metric_is_that_of_float64(name):
    given = case(seed=1)
    values = sampler(given)
    expected = expected_metrics(LOSSES[name], given, values)
    shares = {key: value for key, value in expected.items() if key.endswith("_fraction")}
    assert all(0 < value < 1 for value in shares.values()) and len(shares) == 2 * (name != "neither") + 2 * (
        "," in name
    )
    actual = metrics_of(given_to(given, values), loss=LOSSES[name])
    assert_metrics(actual, expected)
    plain = policy_metrics(**given_to(given, None), num_documents=DOCUMENTS, loss=grpo())
    assert set(actual) - set(plain) == set(expected), "and there is none without sampler, correction and rejection"


def test_the_count_of_the_loss_says_which_labels_the_denominator_has():
    given = case(seed=1)
    values = sampler(given)
    loss = LOSSES["reject by policy"]
    for keep in (True, False):
        loss = dataclasses.replace(loss, rejection=dataclasses.replace(loss.rejection, keep_denominator=keep))
        metrics = metrics_of(given_to(given, values), loss=loss)
        total = policy_loss(**given_to(given, values), num_documents=DOCUMENTS, loss=loss)
        gone = int(rejected_by(loss.rejection, given, values).sum())
        assert int(metrics["num_tokens"]) == given.mask.sum()
        assert int(metrics["loss_count"]) == int(total.count) == given.mask.sum() - (0 if keep else gone)
        np.testing.assert_allclose(metrics["loss_objective"], total.mean(), rtol=1e-6)


def test_without_a_sampler_every_weight_is_1():
    given = case(seed=1)
    metrics = metrics_of(given_to(given, None), loss=LOSSES["mask, reject"])
    ones = {"correction_weight", "correction_weight_squared", "max_correction_weight", "effective_sample_size"}
    zeros = {"mismatch_k1", "mismatch_k3", "weight_masked_fraction", "rejected_fraction", "rejected_document_fraction"}
    assert {float(metrics[name]) for name in ones} == {1.0} and {float(metrics[name]) for name in zeros} == {0.0}


def test_without_a_label_every_metric_is_0():
    given = case(seed=1)
    nothing = given._replace(mask=np.zeros_like(given.mask))
    metrics = metrics_of(given_to(nothing, sampler(given)), loss=LOSSES["mask, reject"])
    assert float(metrics["max_correction_weight"]) == -np.inf
    for name in expected_metrics(LOSSES["mask, reject"], given, sampler(given)).keys() - {"max_correction_weight"}:
        assert float(metrics[name]) == 0.0, name


@pytest.mark.parametrize("name", ["truncate", "mask, reject"])
def test_micro_batches_add_up_and_ranks_too(name):
    given, loss = case(seed=1), LOSSES[name]
    values = sampler(given)
    expected = expected_metrics(loss, given, values)
    arrays = given_to(given, values)
    parts = []
    for documents in (range(2), range(2, DOCUMENTS)):
        part = arrays | {"mask": given.mask & np.isin(given.ids, documents), "document_ids": given.ids - documents[0]}
        parts.append(policy_metric_terms(**part, num_documents=len(documents), loss=loss))
    assert_metrics(sum(parts).finish(), expected)
    means = {key: np.mean([float(part.finish()[key]) for part in parts]) for key in expected}
    with pytest.raises(AssertionError):
        assert_metrics({key: np.float32(value) for key, value in means.items()}, expected)

    def local(arrays):
        options = {"num_documents": jnp.int32(DOCUMENTS), "document_axis_name": "sequence", "axis_name": "sequence"}
        return policy_metrics(**arrays, **options, loss=loss)

    mesh = Mesh(np.array(jax.devices()[:8]), ("sequence",))
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("sequence"), out_specs=P()))
    assert_metrics(run({key: value.reshape(-1) for key, value in arrays.items()}), expected)
