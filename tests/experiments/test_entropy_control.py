"""The entropy bonus that follows a target: its rule, its steps against constant coefficients, and a run that resumes."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.config import LossConfig
from experiments.learner.entropy_control import EntropyControl
from experiments.learner.objectives import LossConstants, PolicyObjective
from experiments.loop.assemble import assemble
from experiments.loop.resume import resume
from experiments.loop.run import train
from tests.experiments import test_objectives
from tests.experiments.test_objectives import LENGTH, sums_of_leaves, sums_of_micro_batches
from tests.experiments.test_selection_options import CUTS, LOSS, PARAMS, VOCAB, documents
from tests.experiments.tiny import assert_same_state, tiny, train_records

FIRST, STEP = 0.25, 0.5


def learner_with(loss, **changes):
    options = {"warm_start": {"max_steps": 0}, "evaluation": {"kl": False}, "loss": loss}
    return assemble(tiny("unused", "unused", **options | changes)).learner


def controlled(target=9.0, **changes):
    loss = {"entropy_target": target, "entropy_coefficient": FIRST, "entropy_step": STEP, "entropy_maximum": 1.0}
    return learner_with(loss, **changes)


def params_of(learner):
    return jax.device_get(jax.tree.leaves(learner.state.params))


def test_the_coefficient_rises_below_the_target_falls_above_it_and_stays_in_bounds():
    control = EntropyControl(target=1.0, first=0.25, step=0.5, maximum=1.0)

    def after(coefficient, entropy, labelled=3):
        return control.after(coefficient, {"entropy_labelled": entropy, "num_documents_labelled": labelled})

    assert after(0.25, 0.9) == 0.75 and after(0.75, 1.1) == 0.25
    assert after(0.75, 0.9) == 1.0 and after(0.25, 1.1) == 0.0
    assert after(1.0, 0.0) == 1.0 and after(0.0, 2.0) == 0.0
    assert after(0.25, 1.0) == 0.25, "on target"
    assert after(0.25, 0.0, labelled=0) == 0.25, "no label has an entropy"
    assert EntropyControl(target=0.0, first=1.0).maximum == 1.0, "both are allowed"


@pytest.mark.costly
def test_two_steps_are_those_of_their_coefficients_by_hand():
    learner, first, second = controlled(), *(learner_with({"entropy_coefficient": each}) for each in (0.25, 0.75))
    metrics = [learner.step(documents(seed)).metrics for seed in range(2)]
    assert [each["entropy_coefficient"] for each in metrics] == [0.25, 0.75] and learner.entropy_coefficient == 1.0
    wanted = first.step(documents(0)).metrics
    before = params_of(first)
    second.state, second.version = first.state, first.version
    then = second.step(documents(1)).metrics
    assert "entropy_coefficient" not in then
    for mine, other in zip(metrics, (wanted, then), strict=True):
        for name in ("loss", "loss_entropy", "grad_norm"):
            assert abs(mine[name] - other[name]) < LOSS, name
        assert 2.5 < mine["entropy_labelled"] < np.log(VOCAB)
    assert abs(metrics[1]["loss_entropy"] - metrics[0]["loss_entropy"]) > 1.0, "the control"
    for mine, other, old in zip(params_of(learner), params_of(second), before, strict=True):
        np.testing.assert_allclose(mine, other, atol=PARAMS)
        assert np.abs(mine - old).max() > PARAMS


@pytest.mark.costly
@pytest.mark.parametrize("changes", CUTS.values(), ids=CUTS)
def test_the_coefficient_does_not_depend_on_the_cut_or_the_mesh(changes):
    whole, parts = controlled(target=1.0), controlled(target=1.0, **changes)
    for seed in range(3):
        mine, other = (each.step(documents(seed)).metrics for each in (whole, parts))
        assert mine["entropy_coefficient"] == other["entropy_coefficient"] == (FIRST if seed == 0 else 0.0)
        assert abs(mine["loss"] - other["loss"]) < LOSS and abs(mine["grad_norm"] / other["grad_norm"] - 1) < 1e-4


@pytest.mark.costly
def test_another_coefficient_compiles_nothing(caplog):
    learner = controlled(target=9.0)
    for seed in range(4):
        caplog.clear()
        with jax.log_compiles():
            learner.step(documents(0))
        compiled = [each.getMessage()[:80] for each in caplog.records if "Compiling" in each.getMessage()]
        assert seed > 0 or compiled, "the log says what is compiled"
        assert seed < 2 or compiled == []
    assert learner.gradients.num_compilations == 1 and learner.entropy_coefficient == 1.0


@pytest.mark.costly
@pytest.mark.parametrize("make_sums", [sums_of_micro_batches, pytest.param(sums_of_leaves, marks=pytest.mark.slow)])
def test_both_kinds_of_sums_take_the_factor(make_sums):
    config, graph, params = test_objectives.decoder()
    (batch,) = test_objectives.packing().rounds(test_objectives.documents())
    results = []
    for coefficient, scale in ((1.0, 0.7), (0.7, 1.0)):
        loss = LossConfig(entropy_coefficient=coefficient).policy_loss(LENGTH)
        objective = PolicyObjective(loss, "basic", scales_entropy=True)
        constants = LossConstants(entropy_scale=np.asarray(scale, np.float32))
        results.append(make_sums(config, graph, objective, 1.0).accumulate(params, [batch], 0, constants).sums)
    scaled, plain = results
    np.testing.assert_allclose(scaled.loss.sum, plain.loss.sum, rtol=2e-6)
    for mine, other in zip(jax.tree.leaves(scaled.gradients), jax.tree.leaves(plain.gradients), strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5 * np.abs(np.asarray(other)).max())


@pytest.mark.costly
def test_a_refused_step_leaves_the_coefficient():
    learner = controlled()
    plain = learner.gradients.accumulate

    def poisoned(*arguments):
        total = plain(*arguments)
        loss = dataclasses.replace(total.sums.loss, sum=total.sums.loss.sum * np.nan)
        return total._replace(sums=dataclasses.replace(total.sums, loss=loss))

    learner.gradients.accumulate = poisoned
    result = learner.step(documents(0))
    assert result.refusal is not None and result.metrics["entropy_coefficient"] == FIRST
    assert learner.entropy_coefficient == FIRST


@pytest.mark.costly
def test_a_run_follows_its_target_and_resumes_to_the_same_bits(tmp_path):
    """The entropies of the steps, about 2.06, 2.03 and 1.99 nats, are on both sides of the target."""
    loss = {"entropy_target": 2.05, "entropy_coefficient": 0.1, "entropy_step": 0.03, "entropy_maximum": 0.2}
    short = {"warm_start": {"max_steps": 4}, "checkpoint": {"every": 1}}
    whole = train(tiny(tmp_path, "whole", loss=loss, **short))
    coefficient, records = 0.1, train_records(whole)
    for record in records:
        assert record["entropy_coefficient"] == coefficient and record["update_applied"] == 1
        change = 0.03 if record["entropy_labelled"] < 2.05 else -0.03
        coefficient = min(max(coefficient + change, 0.0), 0.2)
    assert len({record["entropy_labelled"] < 2.05 for record in records}) == 2, "it falls and rises"
    resumed = resume(f"{whole.run.path}@2", {"quiet": True})
    assert resumed.setup.learner.entropy_coefficient == whole.setup.learner.entropy_coefficient == coefficient
    assert_same_state(resumed, whole)
    assert train_records(resumed)[-1]["entropy_coefficient"] == records[-1]["entropy_coefficient"]


@pytest.mark.parametrize(
    ("coefficient", "metrics", "wanted"),
    [(0.0, "basic", False), (0.1, "basic", True), (0.1, "none", True), (0.0, "with_entropy", True)],
)
def test_a_bonus_or_metrics_need_the_entropies(coefficient, metrics, wanted):
    loss = LossConfig(entropy_coefficient=coefficient).policy_loss(LENGTH)
    assert PolicyObjective(loss, metrics).with_entropy is wanted


def test_options_reach_the_rule():
    assert LossConfig().entropy_control() is None and LossConfig(entropy_coefficient=0.1).entropy_control() is None
    assert LossConfig(entropy_target=0.2).entropy_control() == EntropyControl(0.2, 0.0, 0.005, 1.0)
    given = LossConfig(entropy_target=0.2, entropy_coefficient=0.1, entropy_step=0.01, entropy_maximum=0.5)
    assert given.entropy_control() == EntropyControl(0.2, 0.1, 0.01, 0.5)
    assert given.policy_loss(9).entropy_coefficient == 1.0, "the coefficient is its factor"
