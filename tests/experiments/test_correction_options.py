"""Corrections and rejections by the trainer's options: the sampler's log-probs reach the loss and the metrics."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.config import CorrectionConfig, RejectionConfig
from experiments.learner.objectives import PolicyObjective
from experiments.learner.packing import Packing
from experiments.loop.run import train
from jaxlogp.policy.documents import SAMPLER_COLUMN
from tests.experiments.test_objectives import (
    LENGTH,
    ROWS,
    VOCAB,
    decoder,
    documents,
    sums_of_leaves,
    sums_of_micro_batches,
)
from tests.experiments.tiny import TINY, tiny, train_records

pytestmark = pytest.mark.costly

# The sampler is behind the old policy by one nat on every label: each ratio is e, beyond the bound of 2.
WEIGHT = 2.0
# Sums of a few dozen labels in fp32, in another order.
TOLERANCE = 2e-6


def sums_with(make_sums, changes, sampler_offset):
    config, graph, params = decoder()
    made = [
        dataclasses.replace(
            each,
            old_log_probs=each.sampler_log_probs,
            sampler_log_probs=each.sampler_log_probs + sampler_offset,
            columns={},
        )
        for each in documents()
    ]
    (batch,) = Packing(1, ROWS, LENGTH, VOCAB, 0, share_rows=False, columns=(SAMPLER_COLUMN,)).rounds(made)
    loss = dataclasses.replace(TINY, **changes).policy_loss(LENGTH)
    sums = make_sums(config, graph, PolicyObjective(loss, "basic"), 1.0)
    return sums.accumulate(params, [batch], 0).sums


@pytest.mark.parametrize("make_sums", [sums_of_micro_batches, pytest.param(sums_of_leaves, marks=pytest.mark.slow)])
def test_the_samplers_log_probs_reach_loss_and_gradient(make_sums):
    plain = sums_with(make_sums, {}, -1.0)
    weighted = sums_with(make_sums, {"correction": CorrectionConfig(level="token")}, -1.0)
    np.testing.assert_allclose(weighted.loss.sum, WEIGHT * plain.loss.sum, rtol=TOLERANCE)
    for mine, other in zip(jax.tree.leaves(weighted.gradients), jax.tree.leaves(plain.gradients), strict=True):
        scale = np.abs(np.asarray(other)).max()
        np.testing.assert_allclose(np.asarray(mine), WEIGHT * np.asarray(other), atol=10 * TOLERANCE * scale)
    metrics = weighted.finish().metrics
    assert float(metrics["correction_weight"]) == WEIGHT and float(metrics["truncated_fraction"]) == 1.0
    rejected = sums_with(make_sums, {"rejection": RejectionConfig(token=(0.5, 2.0))}, -1.0)
    assert float(rejected.loss.sum) == float(rejected.loss.count) == 0.0
    assert float(rejected.finish().metrics["rejected_fraction"]) == 1.0
    kept = sums_with(make_sums, {"rejection": RejectionConfig(token=(0.5, 3.0))}, -1.0)
    assert float(kept.loss.sum) == float(plain.loss.sum)


@pytest.mark.slow
def test_a_run_weights_and_rejects_labels(tmp_path):
    """Sampler and trainer differ by rounding alone: no weight is truncated, and most are not exactly 1."""
    short = {"warm_start": {"max_steps": 4}, "schedule": {"steps": 1}}
    plain = train(tiny(tmp_path, "plain", rollout={"rescore": True}, **short))
    weighted = train(tiny(tmp_path, "weighted", correction=CorrectionConfig(level="sequence"), **short))
    masked = train(tiny(tmp_path, "masked", correction=CorrectionConfig("token", "mask", 1.0, 1.0), **short))
    rejected = train(tiny(tmp_path, "rejected", rejection=RejectionConfig(token=(1.0, 1.0)), **short))
    (one,), (two,), (three,), (four,) = map(train_records, (plain, weighted, masked, rejected))
    assert weighted.setup.config.rollout.rescore, "what a correction reads"
    assert two["truncated_fraction"] == 0.0 and abs(two["correction_weight"] - 1.0) < 1e-4
    assert abs(two["loss"] - one["loss"]) < 1e-4 and abs(two["effective_sample_size"] - 1.0) < 1e-6
    assert 0.0 < three["weight_masked_fraction"] == four["rejected_fraction"] < 1.0
    assert three["loss_count"] == one["loss_count"] > four["loss_count"], (
        "a weight of 0 counts, a rejected label does not"
    )
