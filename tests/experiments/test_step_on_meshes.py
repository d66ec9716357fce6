"""One step of the learner on every kind of mesh: the same numbers, and what a device holds and sends."""

import functools
import math
import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from experiments.learner.optimizers import Optimizer
from experiments.loop import backends
from experiments.loop.assemble import assemble
from experiments.loop.loop import take_step
from experiments.tasks.rewards import rewards_of
from tests.experiments.tiny import TINY, tiny

pytestmark = pytest.mark.costly

# fp32 sums in another order: the loss is a sum of 64 documents, and Adam divides each gradient by its own size.
LOSS, PARAMS = 1e-5, 2e-4
QUICK = ["fsdp=2,tensor=2"]
# Every axis alone, with a size that divides nothing where there may be one, and all of them together.
MESHES = "data=3 fsdp=3 tensor=5 sequence=2 data=2,fsdp=2,tensor=2 fsdp=2,sequence=2,tensor=2"
SLOW = [pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES.split()]


def of_length(example, completion):
    return float(len(completion))


def setup_on(mesh, **changes):
    # Of 24 rows of the table and 40 features five ranks divide only the features.
    heads = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 8}
    model = replace(TINY.model, hidden_size=40, **heads)
    options = {"warm_start": {"max_steps": 0}, "loss": {"entropy_coefficient": 0.01}, "evaluation": {"kl": False}}
    config = tiny("unused", "unused", mesh=mesh, model=model, **options | changes)
    return assemble(config, rewards=rewards_of(of_length))


def two_steps(setup):
    feed = setup.feed()
    steps = [take_step(setup, feed)[0].metrics for _ in range(2)]
    return steps, jax.device_get(jax.tree.leaves(setup.learner.state.params))


@functools.cache
def single():
    return two_steps(setup_on(""))


def check_steps(steps, wanted):
    for mine, one in zip(steps, wanted, strict=True):
        assert mine["num_tokens"] == one["num_tokens"] and mine["reward_mean"] == one["reward_mean"]
        assert abs(mine["loss"] - one["loss"]) <= LOSS and abs(mine["grad_norm"] / one["grad_norm"] - 1) <= 10 * LOSS


def test_the_state_is_made_where_it_stays(monkeypatch):
    """An optimizer's numbers of a model that is split would not fit into one device."""
    seen, init = [], Optimizer.init
    monkeypatch.setattr(Optimizer, "init", lambda self, params: seen.append(params) or init(self, params))
    params = setup_on("fsdp=2,tensor=2").learner.state.params
    for given, kept in zip(*map(jax.tree.leaves, (seen[0], params)), strict=True):
        assert given.sharding == kept.sharding


@pytest.mark.parametrize("mesh", QUICK + SLOW)
def test_a_mesh_gives_the_step_of_one_device(mesh):
    setup = setup_on(mesh)
    begin = jax.device_get(jax.tree.leaves(setup.learner.state.params))
    (steps, params), (wanted_steps, wanted) = two_steps(setup), single()
    check_steps(steps, wanted_steps)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=PARAMS), params, wanted)
    assert max(float(np.abs(a - b).max()) for a, b in zip(begin, params, strict=True)) > 5 * PARAMS
    for leaf in jax.tree.leaves(setup.learner.state):
        assert leaf.sharding.mesh.shape == dict(setup.mesh.shape), "the second step would be compiled again"
    policy = setup.policy()
    first, *others = setup.feed().take(policy).documents
    policy.end()
    # Of one document on one rank; the others' are roundings.
    off = replace(first, sampler_log_probs=first.sampler_log_probs - 2.0)
    assert abs(setup.learner.step([off, *others]).metrics["drift_max"] - 2.0) < LOSS


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "rollout"), [("fsdp=2", "tensor=2"), ("data=2,fsdp=2", "")])
def test_rollouts_on_another_mesh_are_those_of_one_device(mesh, rollout):
    setup = setup_on(mesh, rollout={"mesh": rollout})
    (steps, _), (wanted, _) = two_steps(setup), single()
    for mine, one in zip(steps, wanted, strict=True):
        assert mine["num_tokens"] == one["num_tokens"] and mine["reward_mean"] == one["reward_mean"]
        assert 0.0 < mine["drift_max"] < LOSS


# Documents of up to 7 tokens lie across the 16th of 32 slots, and across the 80th of 160, where attention is chunked.
SPREAD = {
    "gspo": {"loss": {"name": "gspo", "epsilon": 1e-4, "epsilon_high": 1e-4, "skip_zero_advantages": False}},
    "chunked": {"schedule": {"steps": 3, "docs_per_step": 64, "rows": 4, "row_length": 160}},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", SPREAD.values(), ids=SPREAD)
def test_documents_that_lie_on_several_sequence_ranks_are_one_document(options):
    parts, whole = (two_steps(setup_on(mesh, **options))[0] for mesh in ("sequence=2,tensor=2", ""))
    check_steps(parts, whole)
    for mine, one in zip(parts, whole, strict=True):
        assert mine.keys() == one.keys()
        for name in ("num_documents", "num_documents_labelled", "num_rewards", "num_stalenesses", "max_advantage"):
            assert mine[name] == one[name], name
        for name in ("entropy", "ratio_new_old_sum", "kl_new_old", "clipped_ratio_fraction", "staleness_mean"):
            assert abs(mine[name] - one[name]) <= 10 * LOSS * max(1.0, abs(one[name])), name


def program_on(mesh):
    """The compiled program of a micro-batch, and (kind, shape) of every collective in it."""
    setup = setup_on(mesh)
    learner = setup.learner
    program = learner.gradients.lower(learner.state.params, learner._step_packing.padding())().programs[0].compiled
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all"
    found = re.findall(rf"= \(?(\w+\[[\d,]*\]).*? ({kinds})\(", program.as_text())
    return program, [(kind, shape) for shape, kind in found]


def test_sequence_ranks_exchange_tokens_for_heads_and_gather_no_activations():
    _, found = program_on("sequence=2")
    # Queries, keys, values and what they read, forward and backward, of one layer.
    assert sum(kind == "all-to-all" for kind, _ in found) == 8
    gathered = {shape for kind, shape in found if kind == "all-gather"}
    # Parameters of the layer, [1, ...], of norms and head; and the ids [16, 32] that say who may read whom.
    assert "s32[16,32]" in gathered
    assert not [shape for shape in gathered if shape.startswith("f32[16,")]


def bytes_on(device, tree):
    shards = (shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def test_fsdp_splits_parameters_and_optimizer_state_and_gathers_them_where_they_are_used():
    setup = setup_on("fsdp=4,tensor=2")
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(setup.learner.state))
    # Norms of heads, counts and the vocabulary of 24 rows are all that is not split in 8.
    assert bytes_on(jax.devices()[0], setup.learner.state) < 0.14 * total
    program, found = program_on("fsdp=4,tensor=2")
    assert "all-gather" in {kind for kind, _ in found}
    shapes = [leaf.shape for leaf in jax.tree.leaves(setup.learner.state.params)]
    gradients = jax.tree.leaves(program.output_shardings)[: len(shapes)]
    placed = zip(shapes, gradients, strict=True)
    split = {math.prod(shape) // math.prod(place.shard_shape(shape)) for shape, place in placed}
    assert sorted(split - {1}) == [4, 8], split


def test_a_table_whose_rows_the_ranks_do_not_divide_is_split_by_features():
    setup = setup_on("tensor=5", optimizer={"name": "adamw"})
    table = setup.learner.state.params["embed_tokens"]["embedding"].get_value()
    assert table.shape == (24, 40) and table.sharding.shard_shape(table.shape) == (24, 8)
    _, found = program_on("tensor=5")
    # Looked up by features, which are put together; exchanged for rows before the head, and nobody has all of the table,
    # with or without the row that fills up the last shard.
    assert "all-to-all" in {kind for kind, _ in found}
    assert not [shape for _, shape in found if re.match(r"f32\[2[45],40\]", shape)]
    with pytest.raises(ValueError, match="^mesh: expected tensor ranks that divide the 24 rows or the 40 features of"):
        setup_on("tensor=7")


def test_tensor_ranks_draw_rows_of_their_own_where_each_may_have_all_matrices(monkeypatch):
    def drawing(**changes):
        setup = setup_on("data=2,tensor=2", **changes)
        assert setup.evaluation.shape.options.rows == 64 // setup.backend.rollout_ranks
        return setup.backend.rollout_ranks, "tensor ranks draw rows of their own" in setup.backend.sampler

    assert drawing() == (4, True)
    assert drawing(rollout={"mesh": "data=2,tensor=2"}) == (2, False)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(setup_on("").params))
    monkeypatch.setattr(backends, "MOST_WHOLE", 4 * numbers)
    assert drawing() == (4, True)
    monkeypatch.setattr(backends, "MOST_WHOLE", 4 * numbers - 1)
    assert drawing() == (2, False)
