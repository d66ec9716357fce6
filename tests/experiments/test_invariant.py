"""`--invariant`: bitwise equal parameters on every mesh, the same numbers in sampler and trainer."""

import jax
import numpy as np
import pytest

from experiments.invariant.leaf_sums import TreeFold
from experiments.loop.assemble import assemble
from experiments.loop.loop import take_step
from experiments.loop.run import train
from experiments.sampling.options import SamplingOptions
from tests.experiments.tiny import tiny, train_records

pytestmark = pytest.mark.costly

# Vocabulary of 24 tokens: 24 granules, which 1, 2, 3, 4, 6 and 8 tensor ranks divide. Three data ranks leave leaves
# over.
BOTH_ENDS = ["data=2,tensor=3"]
# Every axis, and ranks that are no power of two. Every data rank compiles the programs once more.
# Three of them, with two tensor ranks, are in the test on a support; six tensor ranks in tests/invariance; two processes in
# test_two_processes.py.
SLOW = ["data=1,tensor=8", "data=2,fsdp=2,tensor=2"]
MESHES = [pytest.param(each, marks=(pytest.mark.slow, pytest.mark.both_ends)) for each in BOTH_ENDS]
MESHES += [pytest.param(each, marks=pytest.mark.slow) for each in SLOW]


def config(out, mesh, **changes):
    schedule = {"steps": 2, "row_length": None, **changes.get("schedule", {})}
    options = {"mesh": mesh, "invariant": True, "warm_start": {"max_steps": 3}, **changes, "schedule": schedule}
    if options["invariant"]:
        # Several blocks a row, and prompts that end within one.
        options["invariance"] = {"block": 4}
    name = "-".join([mesh.replace(",", "-"), *changes])
    return tiny(out, name, **options)


def run(out, mesh, **changes):
    return train(config(out, mesh, **changes))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("invariant")


@pytest.fixture(scope="module")
def single(runs):
    return run(runs, "data=1,tensor=1")


def state_bytes(setup):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(setup.learner.state)]


@pytest.mark.parametrize("mesh", MESHES)
def test_the_state_after_two_steps_is_the_same_to_the_last_bit(single, runs, mesh):
    result = run(runs, mesh)
    assert state_bytes(result.setup) == state_bytes(single.setup)
    numbers = ("loss", "grad_norm", "reward_mean", "computed/entropy", "computed/new_logprobs", "num_tokens")
    for mine, other in zip(train_records(result), train_records(single), strict=True):
        assert {name: mine[name] for name in numbers} == {name: other[name] for name in numbers}
    assert (result.before, result.after) == (single.before, single.after)


def test_sampler_and_trainer_have_the_same_numbers(single):
    """Not by scoring again: the old log-probs are those of the steps in which the tokens were drawn."""
    for record in train_records(single):
        assert record["computed/drift_max"] == 0.0 and record["computed/kl_new_old"] == 0.0
        assert record["computed/ratio_new_old_labelled"] == 1.0 and record["computed/clipped_ratio_fraction"] == 0.0
        sums = {record[f"computed/{name}"] for name in ("ratio_new_old_sum", "ratio_new_old_squared_sum", "num_tokens")}
        assert len(sums) == 1 and record["head_engine"] == "fixed_order"
    assert 0.0 < train_records(single)[0]["reward_mean"] < 1.0, "without a gradient all of this would be easy"


def test_the_last_copy_of_a_prompt_may_be_greedy_beside_draws(single):
    backend, row_length = single.setup.backend, single.setup.sizes.row
    inputs = np.full((3, 2), 4, np.int32), np.full(3, 2, np.int32)

    def draw(copies, **options):
        sampler = backend.make_sampler(SamplingOptions(3, temperature=1.0, **options), row_length)
        return sampler(single.params, *inputs, copies, jax.random.key(0)).tokens

    both, drawn = draw(2, greedy_last=True), draw(2)
    assert (both[1::2] != drawn[1::2]).any()
    np.testing.assert_array_equal(both[1::2], draw(1, greedy=True))
    np.testing.assert_array_equal(both[::2], drawn[::2])


@pytest.mark.slow
def test_rollouts_on_another_mesh_draw_the_trainers_numbers(single, runs):
    result = run(runs, "fsdp=2", rollout={"mesh": "data=2,tensor=4"})
    assert state_bytes(result.setup) == state_bytes(single.setup)
    assert {record["computed/drift_max"] for record in train_records(result)} == {0.0}


# And the ratio of a document, and what layers keep on GPUs.
NUCLEUS = {
    "rollout": {"top_p": 0.8},
    "loss": {"name": "gspo", "entropy_coefficient": 0.01},
    "model": {"remat": "attention"},
}


@pytest.fixture(scope="module")
def nucleus(runs):
    return run(runs, "data=1,tensor=1", **NUCLEUS)


def test_on_a_support_sampler_and_trainer_have_the_same_numbers(nucleus):
    """Tokens are drawn from a nucleus, and trained on the ids of it."""
    for record in train_records(nucleus):
        assert record["drift_max"] == 0.0 and record["kl_new_old"] == 0.0
        assert record["min_ratio_new_old"] == record["max_ratio_new_old"] == 1.0
        assert record["head_engine"] == "fixed_order"
    first = train_records(nucleus)[0]
    assert 1.0 < first["support_ids"] < 20.0 and 0.8 <= first["support_mass"] < 1.0 and first["grad_norm"] > 0.0


@pytest.mark.slow
def test_on_a_support_the_state_is_the_same_to_the_last_bit(nucleus, runs):
    result = run(runs, "data=3,tensor=2", **NUCLEUS)
    assert state_bytes(result.setup) == state_bytes(nucleus.setup)
    for mine, other in zip(train_records(result), train_records(nucleus), strict=True):
        assert (mine["support_ids"], mine["loss"]) == (other["support_ids"], other["loss"])
    assert {record["drift_max"] for record in train_records(result)} == {0.0}


@pytest.mark.slow
def test_the_plain_run_does_break(runs, few_optimizations):
    """The control: without --invariant a mesh changes the bits, and sampler and trainer differ."""
    # Untrained, so that the entropy alone is sure to have a gradient.
    changes = {"warm_start": {"max_steps": 0}, "loss": {"entropy_coefficient": 0.1}, "schedule": {"steps": 1}}
    meshes = ("data=1,tensor=1", "data=1,tensor=2")
    setups = [assemble(config(runs, mesh, invariant=False, **changes)) for mesh in meshes]
    steps = [take_step(setup, setup.feed())[0].metrics for setup in setups]
    assert state_bytes(setups[0]) != state_bytes(setups[1])
    assert steps[0]["drift_max"] > 0.0


@pytest.mark.slow
def test_a_step_of_any_number_of_documents_ends_exactly_there(runs):
    """44 of rollouts of 64: the last leaf is half full, and the second step begins with 20 that have waited."""
    schedule = {"docs_per_step": 44}
    results = [run(runs, mesh, schedule=schedule) for mesh in ("data=1,tensor=1", "data=3,tensor=1")]
    assert state_bytes(results[0].setup) == state_bytes(results[1].setup)
    for result, leaves in zip(results, (6, 2), strict=True):
        records = [(record["num_documents"], record["micro_batches"]) for record in train_records(result)]
        assert records == [(44, leaves)] * 2


@pytest.mark.parametrize("count", range(1, 18))
def test_the_fold_is_the_tree_over_the_order(count):
    """Against the definition, and with neutral parts behind: the fold of 2^k parts is itself a part of a longer fold."""

    def tree(parts):
        while len(parts) > 1:
            pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
            parts = [pair[0] if len(pair) == 1 else f"({pair[0]}{pair[1]})" for pair in pairs]
        return parts[0]

    letters = [chr(ord("a") + i) for i in range(count)]
    fold = TreeFold(lambda left, right: f"({left}{right})")
    for letter in letters:
        fold.push(letter)
    assert fold.total() == tree(letters) and TreeFold(None).total() is None


HOPPER = {"invariance": {"engine": "hopper"}}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"mesh": "tensor=5"}, "mesh: expected tensor ranks that divide the 24 granules"),
        (HOPPER | {"model": {"dtype": "bfloat16"}}, "invariance.engine: expected an engine that can run here, got engine: "),
        (HOPPER, "invariance.engine: expected fixed_order for operands of another dtype"),
    ],
)  # fmt: skip
def test_meshes_and_heads_that_cannot_be_are_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=f"^--{words}"):
        train(tiny(tmp_path, "bad", invariant=True, **changes))
