"""One step of the trainer on every kind of mesh: the same numbers, and what a device holds and sends."""

import functools
import math

import jax
import numpy as np
import pytest

from experiments.models.mesh import parse_mesh
from experiments.tasks.rewards import rewards_of
from experiments.training.trainer import Trainer
from tests.experiments.tiny import tiny

# fp32 sums in another order: the loss is a sum of 64 documents, and Adam divides each gradient by its own size.
LOSS, PARAMS = 1e-5, 2e-4
QUICK = ["fsdp=2,tensor=2"]
MESHES = ["data=2", "fsdp=2", "fsdp=8", "tensor=2", "tensor=5", "data=2,fsdp=2", "data=2,fsdp=4", "fsdp=4,tensor=2"]
MESHES += ["data=2,tensor=4", "data=2,fsdp=2,tensor=2", "data=-1,tensor=2"]
SLOW = [pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES]


def of_length(example, completion):
    return float(len(completion))


def trainer_on(mesh, **changes):
    options = {"warm_start": {"max_steps": 0}, "loss": {"entropy_coefficient": 0.01}, "evaluation": {"kl": False}}
    config = tiny("unused", "unused", mesh=mesh, **options, **changes)
    return Trainer(config, rewards=rewards_of(of_length))


def two_steps(trainer):
    return [trainer.train_step()[0] for _ in range(2)], jax.device_get(jax.tree.leaves(trainer.state.params))


@functools.cache
def single():
    return two_steps(trainer_on(""))


@pytest.mark.parametrize("mesh", QUICK + SLOW)
def test_a_mesh_gives_the_step_of_one_device(mesh):
    trainer = trainer_on(mesh)
    begin = jax.device_get(jax.tree.leaves(trainer.state.params))
    (steps, params), (wanted_steps, wanted) = two_steps(trainer), single()
    for mine, one in zip(steps, wanted_steps, strict=True):
        assert mine["num_tokens"] == one["num_tokens"] and mine["reward_mean"] == one["reward_mean"]
        assert abs(mine["loss"] - one["loss"]) <= LOSS and abs(mine["grad_norm"] / one["grad_norm"] - 1) <= 10 * LOSS
    for mine, one in zip(params, wanted, strict=True):
        np.testing.assert_allclose(mine, one, atol=PARAMS)
    assert max(float(np.abs(a - b).max()) for a, b in zip(begin, params, strict=True)) > 5 * PARAMS
    for leaf in jax.tree.leaves(trainer.state):
        assert leaf.sharding.mesh.shape == dict(trainer.mesh.shape), "the second step would be compiled again"


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "rollout"), [("fsdp=2", "tensor=2"), ("data=2,fsdp=2", "")])
def test_rollouts_on_another_mesh_are_those_of_one_device(mesh, rollout):
    trainer = trainer_on(mesh, rollout={"mesh": rollout})
    (steps, _), (wanted, _) = two_steps(trainer), single()
    for mine, one in zip(steps, wanted, strict=True):
        assert mine["num_tokens"] == one["num_tokens"] and mine["reward_mean"] == one["reward_mean"]
        assert 0.0 < mine["drift_max"] < LOSS


def bytes_on(device, tree):
    arrays = (
        shard.data for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards if shard.device == device
    )
    return sum(array.nbytes for array in arrays)


def test_fsdp_splits_parameters_and_optimizer_state_and_gathers_them_where_they_are_used():
    trainer = trainer_on("fsdp=4,tensor=2")
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state))
    # Norms of heads, counts and the vocabulary of 24 rows are all that is not split in 8.
    assert bytes_on(jax.devices()[0], trainer.state) < 0.14 * total
    program = trainer.sums.ahead(trainer.state.params, trainer._stream_packing.padding()).compiled
    text = program.as_text()
    assert "all-gather" in text
    gradients = jax.tree.leaves(program.output_shardings)[: len(jax.tree.leaves(trainer.state.params))]
    split = [
        math.prod(leaf.shape) // math.prod(place.shard_shape(leaf.shape))
        for leaf, place in zip(jax.tree.leaves(trainer.state.params), gradients, strict=True)
    ]
    assert sorted(set(split)) == [1, 4, 8] or sorted(set(split)) == [4, 8], split


def test_the_rest_of_the_devices():
    assert str(parse_mesh("fsdp=-1,tensor=2")) == "data=1,fsdp=4,tensor=2"
