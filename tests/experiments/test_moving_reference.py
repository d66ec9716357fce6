"""A reference that follows the policy: its rule in float64, its steps, and a run that resumes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.config import Config, LossConfig, RewardConfig, validate
from experiments.learner.moving_reference import MovingReference
from experiments.loop.assemble import assemble
from experiments.loop.resume import resume
from experiments.loop.run import train
from experiments.refusal import Refusal
from tests.experiments.test_selection_options import documents
from tests.experiments.tiny import assert_same_state, tiny, train_records

KL = {"kl_coefficient": 0.5, "metrics": "basic"}
HALF = {**KL, "reference_every": 2, "reference_share": 0.25}


def learner_with(loss, **changes):
    options = {"warm_start": {"max_steps": 0}, "evaluation": {"kl": False}, "loss": loss}
    learner = assemble(tiny("unused", "unused", **options | changes)).learner
    learner.keep_reference()
    return learner


def leaves(tree):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(jax.device_get(tree))]


def assert_mixed(found, old, new, share=0.25):
    for mine, before, policy in zip(*map(leaves, (found, old, new)), strict=True):
        # One rounding of each product and of the sum, to fp32.
        bound = 3 * 2.0**-24 * (np.abs(before) + np.abs(policy)).max()
        np.testing.assert_allclose(mine, share * policy + (1 - share) * before, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_reference_moves_by_the_share_after_so_many_updates(dtype):
    old, new = (nnx.State({"w": jax.random.normal(jax.random.key(seed), (64,), dtype)}) for seed in range(2))
    rule = MovingReference(3, 0.25)
    assert rule.after(2, old, new) == (2, old)
    before = leaves(old)
    age, moved = rule.after(3, old, new)
    (mine,), (was,), (policy,) = leaves(moved), before, leaves(new)
    assert age == 0 and jax.tree.leaves(moved)[0].dtype == dtype
    half_of_last_place = 2.0**-24 if dtype == jnp.float32 else 2.0**-9
    wanted = 0.25 * policy + 0.75 * was
    np.testing.assert_allclose(mine, wanted, rtol=0, atol=2 * half_of_last_place * np.abs(wanted).max())
    _, copied = MovingReference(1).after(1, moved, new)
    np.testing.assert_array_equal(leaves(copied), leaves(new))
    assert not new["w"].is_deleted()


@pytest.mark.costly
def test_steps_move_it_and_the_kl_is_that_to_where_it_is(monkeypatch):
    learner, still = (learner_with(loss, mesh="fsdp=2,tensor=2") for loss in (HALF, KL))
    first = jax.tree.map(jnp.copy, learner.reference)
    places = [leaf.sharding for leaf in jax.tree.leaves(first)]
    results = [(learner.step(documents(seed)).metrics, still.step(documents(seed)).metrics) for seed in range(2)]
    assert_mixed(learner.reference, first, learner.state.params)
    results.append((learner.step(documents(2)).metrics, still.step(documents(2)).metrics))
    assert [moving["reference_age"] for moving, _ in results] == [0, 1, 0]
    assert [moving["loss"] == frozen["loss"] for moving, frozen in results] == [True, True, False]
    assert [leaf.sharding for leaf in jax.tree.leaves(learner.reference)] == places
    update, before = learner._update, leaves(learner.reference)

    def refused(state, *rest):
        _, outcome = update(jax.tree.map(jnp.copy, state), *rest)
        return state, outcome._replace(applied=False)

    monkeypatch.setattr("experiments.learner.learner.explain_refusal", lambda *_: Refusal("refused"))
    learner._update = refused
    assert [learner.step(documents(0)).metrics["reference_age"] for _ in range(2)] == [1, 1], (
        "a refused step does not count"
    )
    jax.tree.map(np.testing.assert_array_equal, leaves(learner.reference), before)


@pytest.mark.costly
def test_a_run_resumes_between_two_moves_to_the_same_bits(tmp_path):
    short = {"warm_start": {"max_steps": 4}, "checkpoint": {"every": 1, "keep": 5}, "schedule": {"steps": 4}}
    whole = train(tiny(tmp_path, "whole", loss=HALF, **short))
    assert [record["reference_age"] for record in train_records(whole)] == [0, 1, 0, 1]
    resumed = resume(f"{whole.run.path}@3", {"quiet": True})
    assert_same_state(resumed, whole)
    jax.tree.map(np.testing.assert_array_equal, resumed.setup.learner.reference, whole.setup.learner.reference)
    before = resume(f"{whole.run.path}@2", {"quiet": True, "schedule.steps": 2})
    assert_mixed(whole.setup.learner.reference, before.setup.learner.reference, whole.params)


def test_options_reach_the_rule():
    assert LossConfig().moving_reference() is None
    assert LossConfig(reference_every=3).moving_reference() == MovingReference(3, 1.0)
    assert LossConfig(reference_every=3, reference_share=0.5).moving_reference() == MovingReference(3, 0.5)
    validate(Config(loss=LossConfig(reference_every=1, kl_coefficient=0.0)))
    validate(Config(loss=LossConfig(reference_every=1), reward=RewardConfig(kl_coefficient=0.1)))
