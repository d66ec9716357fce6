"""Corrections and rejections by the trainer's options: the sampler's log-probs reach the loss and the metrics."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from experiments.config import CorrectionConfig, RejectionConfig
from experiments.learner.objectives import PolicyObjective, mean_weight
from experiments.learner.packing import Packing
from experiments.loop.assemble import assemble
from experiments.loop.loop import take_step
from experiments.loop.run import train
from experiments.tasks.rewards import rewards_of
from jaxlogp import Document
from jaxlogp.policy.documents import SAMPLER_COLUMN
from tests.experiments import test_objectives
from tests.experiments.test_objectives import LENGTH, VOCAB, decoder, sums_of_leaves, sums_of_micro_batches
from tests.experiments.test_selection_options import COUNT, CUTS, LOSS, PARAMS
from tests.experiments.tiny import TINY, parity, tiny, train_records

pytestmark = pytest.mark.costly

# The sampler is behind the old policy by one nat on every label: each ratio is e, beyond the bound of 2.
WEIGHT = 2.0
# Sums of a few dozen labels in fp32, in another order.
TOLERANCE = 2e-6
COLUMN = (SAMPLER_COLUMN,)


def sums_with(make_sums, changes, sampler_offset):
    config, graph, params = decoder()
    made = []
    for each in test_objectives.documents():
        old = each.sampler_log_probs
        made.append(dataclasses.replace(each, old_log_probs=old, sampler_log_probs=old + sampler_offset, columns={}))
    (batch,) = Packing(1, test_objectives.ROWS, LENGTH, VOCAB, 0, share_rows=False, columns=COLUMN).rounds(made)
    loss = dataclasses.replace(TINY, **changes).policy_loss(LENGTH)
    objective = PolicyObjective(loss, "basic")
    return make_sums(config, graph, objective, 1.0).accumulate(params, [batch], 0, objective.constants(made)).sums


@pytest.mark.parametrize("make_sums", [sums_of_micro_batches, pytest.param(sums_of_leaves, marks=pytest.mark.slow)])
def test_the_samplers_log_probs_reach_loss_and_gradient(make_sums):
    plain = sums_with(make_sums, {}, -1.0)
    weighted = sums_with(make_sums, {"correction": CorrectionConfig(level="token")}, -1.0)
    np.testing.assert_allclose(weighted.loss.sum, WEIGHT * plain.loss.sum, rtol=TOLERANCE)
    for mine, other in zip(jax.tree.leaves(weighted.gradients), jax.tree.leaves(plain.gradients), strict=True):
        scale = np.abs(np.asarray(other)).max()
        np.testing.assert_allclose(np.asarray(mine), WEIGHT * np.asarray(other), atol=10 * TOLERANCE * scale)
    normalized = sums_with(make_sums, {"correction": CorrectionConfig(level="token", normalize=True)}, -1.0)
    np.testing.assert_allclose(normalized.loss.sum, plain.loss.sum, rtol=TOLERANCE)
    metrics = weighted.finish().metrics
    assert float(metrics["correction_weight"]) == WEIGHT and float(metrics["truncated_fraction"]) == 1.0
    rejected = sums_with(make_sums, {"rejection": RejectionConfig(token=(0.5, 2.0))}, -1.0)
    assert float(rejected.loss.sum) == float(rejected.loss.count) == 0.0
    assert float(rejected.finish().metrics["rejected_fraction"]) == 1.0
    kept = sums_with(make_sums, {"rejection": RejectionConfig(token=(0.5, 3.0))}, -1.0)
    assert float(kept.loss.sum) == float(plain.loss.sum)


HIGH = 1.2
CUTS = CUTS | {"sequence": {"mesh": "sequence=2"}}


def of_another_sampler(seed):
    """Documents whose sampler is apart from the old policy, by more in later ones. The third has no label."""
    random, made = np.random.default_rng(seed), []
    for number in range(COUNT):
        tokens = random.integers(0, VOCAB, random.integers(4, 12)).astype(np.int32)
        labels = np.arange(tokens.size) >= (tokens.size if number == 2 else 2)
        old = np.float32(random.uniform(-3.8, -2.6, labels.sum()))
        sampler = np.float32(old + random.normal(0.02 * (number - 8), 0.3, old.size))
        advantage = np.float32(random.normal(1.0 if number < 16 else -1.0))
        made.append(Document(tokens, labels, advantage, sampler, old))
    return made


def weights_by_hand(level, made):
    """The truncated weights of all labels of the step, in float64."""
    found = []
    for each in made:
        logs = np.float64(each.old_log_probs) - np.float64(each.sampler_log_probs)
        found.append(np.minimum(np.exp(logs if level == "token" else np.full(logs.size, logs.sum())), HIGH))
    return np.concatenate(found)


def step_with(level, normalize=True, **changes):
    """The metrics of a step, and the parameters after it."""
    correction = CorrectionConfig(level=level, high=HIGH, normalize=normalize)
    options = {"warm_start": {"max_steps": 0}, "evaluation": {"kl": False}, "correction": correction}
    setup = assemble(tiny("unused", "unused", **options | {"rollout": {"rescore": True}} | changes))
    result = setup.learner.step(of_another_sampler(0))
    return result.metrics, jax.device_get(jax.tree.leaves(setup.learner.state.params))


@functools.cache
def whole_step(level):
    return step_with(level)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalized_weights_divide_the_step_by_their_mean(level):
    metrics, _ = whole_step(level)
    plain, _ = step_with(level, normalize=False)
    mean = weights_by_hand(level, of_another_sampler(0)).mean()
    assert abs(mean - 1.0) > 0.02, "the control"
    for name in ("loss", "loss_objective", "grad_norm"):
        assert abs(metrics[name] * mean / plain[name] - 1.0) < 1e-4, name
    assert abs(metrics["computed/correction_weight"] / mean - 1.0) < LOSS, "the mean before the division"
    assert metrics["loss_count"] == plain["loss_count"]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalized_weights_do_not_depend_on_the_cut_or_the_mesh(level, cut):
    (whole, params), (cut_up, parts_params) = whole_step(level), step_with(level, **CUTS[cut])
    assert cut != "rows" or cut_up["micro_batches"] > whole["micro_batches"]
    assert abs(whole["loss"] - cut_up["loss"]) < LOSS and abs(whole["grad_norm"] / cut_up["grad_norm"] - 1) < 10 * LOSS
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=PARAMS), parts_params, params)


def test_the_mean_weight_of_a_step_is_that_of_all_its_labels():
    made = of_another_sampler(1)
    for level in ("token", "sequence"):
        correction = CorrectionConfig(level=level, high=HIGH, normalize=True).correction()
        assert abs(mean_weight(correction, made) / weights_by_hand(level, made).mean() - 1.0) < LOSS
        nothing = Document(np.arange(5), np.zeros(5, bool), sampler_log_probs=np.zeros(0, np.float32))
        assert mean_weight(correction, [nothing]) == 1.0, "no label, nothing to divide"


@pytest.mark.slow
def test_a_run_weights_and_rejects_labels(tmp_path):
    """Sampler and trainer differ by rounding alone: no weight is truncated, and most are not exactly 1."""
    short = {"warm_start": {"max_steps": 0}, "schedule": {"steps": 1}, "loss": {"skip_zero_advantages": False}}

    def step(**changes):
        setup = assemble(tiny("unused", "unused", **short | changes), rewards=rewards_of(parity))
        return take_step(setup, setup.feed())[0].metrics

    def run(name, **changes):
        return train(tiny(tmp_path, name, **short | changes), reward=parity)

    one, three = step(rollout={"rescore": True}), step(correction=CorrectionConfig("token", "mask", 1.0, 1.0))
    weighted = run("weighted", correction=CorrectionConfig(level="sequence"))
    rejected = run("rejected", rejection=RejectionConfig(token=(1.0, 1.0)))
    (two,), (four,) = map(train_records, (weighted, rejected))
    assert weighted.setup.config.rollout.rescore, "what a correction reads"
    assert two["truncated_fraction"] == 0.0 and abs(two["correction_weight"] - 1.0) < 1e-4
    assert abs(two["loss"] - one["loss"]) < 1e-4 and abs(two["effective_sample_size"] - 1.0) < 1e-6
    assert 0.0 < three["weight_masked_fraction"] == four["rejected_fraction"] < 1.0
    # A weight of 0 counts, a rejected label does not.
    assert three["loss_count"] == one["loss_count"] > four["loss_count"]
