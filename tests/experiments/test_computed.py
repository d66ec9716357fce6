"""Documents whose advantages are all 0: counted and not computed, with loss and parameters of the full computation."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.config import Config, LossConfig, RejectionConfig, validate
from experiments.learner.computed import COMPUTED, has_effect, of_all
from experiments.learner.objectives import CrossEntropy, PolicyObjective
from experiments.loop.assemble import assemble
from jaxlogp import Document
from jaxlogp.losses import PRESETS
from jaxlogp.policy.metrics import METRICS
from tests.experiments.tiny import tiny

COUNT, VOCAB = 32, 24
# fp32 sums of a hundred labels in another order; Adam divides each gradient by its own size.
LOSS, PARAMS = 1e-5, 2e-4
SHARES = {"none": 0, "half": COUNT // 2, "all": COUNT}
WITHOUT_COLUMNS = [name for name, preset in PRESETS.items() if name not in ("kl_cov", "clip_cov")]
QUICK = ["grpo", "gspo", "dr_grpo"]


LEARNERS = {}


def learner(skips, mesh="", loss="grpo", **changes):
    """At its beginning; those of equal options are one, so that they are compiled once."""
    options = {"warm_start": {"max_steps": 0}, "evaluation": {"kl": False}, "mesh": mesh, **changes}
    options["loss"] = {"name": loss, "skip_zero_advantages": skips}
    key = repr(options)
    if key not in LEARNERS:
        made = assemble(tiny("unused", "unused", **options)).learner
        LEARNERS[key] = made, jax.tree.map(jnp.copy, made.saved().arrays), made.saved().counters
    made, arrays, counters = LEARNERS[key]
    # A step takes over the memory of its state.
    made.restore(jax.tree.map(jnp.copy, arrays), counters)
    return made


def documents(zeros, seed, learner):
    """Documents 0, 2, 4, ... have advantages of 0 first, in both of their forms; number 2 has no label."""
    random, made = np.random.default_rng(seed), []
    without = set([*range(0, COUNT, 2), *range(1, COUNT, 2)][:zeros])
    for number in range(COUNT):
        tokens = random.integers(0, VOCAB, random.integers(4, 12)).astype(np.int32)
        labels = np.arange(tokens.size) >= (tokens.size if number == 2 else 2)
        advantages = np.float32(random.normal(size=labels.sum()) if number % 3 else random.normal())
        advantages = np.zeros_like(advantages) if number in without else advantages
        old = np.float32(random.uniform(-3.8, -2.6, labels.sum()))
        reward = float(random.normal())
        made.append(Document(tokens, labels, advantages, old, reward=reward, versions=max(learner.version - number, 0)))
    return made


def two_steps(learner, zeros):
    """Metrics of both steps, and the parameters after them."""
    results = [learner.step(documents(zeros, seed, learner)) for seed in range(2)]
    assert all(result.refusal is None for result in results)
    return [result.metrics for result in results], jax.device_get(jax.tree.leaves(learner.state))


def check_equal(mine, wanted):
    (steps, params), (other_steps, other_params) = mine, wanted
    for one, other in zip(steps, other_steps, strict=True):
        assert abs(one["loss"] - other["loss"]) <= LOSS and abs(one["grad_norm"] - other["grad_norm"]) <= 10 * LOSS
        for name, value in other.items():
            if name in METRICS and name in one:
                assert one[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=PARAMS), params, other_params)


@pytest.fixture(scope="module")
def full():
    """Two steps of the full computation, by loss, mesh and number of zeros."""
    found = {}

    def of(zeros, **options):
        key = zeros, *sorted(options.items())
        if key not in found:
            found[key] = two_steps(learner(False, **options), zeros)
        return found[key]

    return of


LOSSES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in WITHOUT_COLUMNS]


@pytest.mark.costly
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_is_that_of_the_full_computation(full, loss):
    for share, zeros in SHARES.items() if loss in QUICK else [("half", SHARES["half"])]:
        mine = two_steps(learner(True, loss=loss), zeros)
        check_equal(mine, full(zeros, loss=loss))
        for step in mine[0]:
            assert step[COMPUTED + "num_documents"] == (COUNT - zeros if zeros else COUNT - 1), share
            assert step["num_documents"] == step["num_rewards"] == COUNT and step["num_documents_labelled"] == COUNT - 1
            assert step["micro_batches"] == (0 if share == "all" else 1)
            assert "entropy" not in step and (step["loss"] == 0.0) == (step["grad_norm"] == 0.0) == (share == "all")


@pytest.mark.costly
def test_what_is_computed_has_the_metrics_of_its_own_step():
    """Half of the documents, alone in a step of the full computation."""
    mine, alone = learner(True), learner(False)
    (step, _), _ = two_steps(mine, COUNT // 2)
    assert mine.version == 2 * COUNT, "those that are not computed have been seen too"
    kept = [each for each in documents(COUNT // 2, 0, alone) if np.any(each.advantages)]
    wanted = alone.step(kept).metrics
    named = {name.removeprefix(COMPUTED) for name in step if name.startswith(COMPUTED)}
    assert {"entropy_labelled", "ratio_new_old", "clipped_ratio_fraction", "max_ratio_new_old", "drift_max"} <= named
    for name in named:
        assert step[COMPUTED + name] == pytest.approx(wanted[name], rel=1e-6), name


@pytest.mark.costly
def test_documents_without_any_label_make_a_step_of_0():
    """All of them truncated, and masked."""
    mine = learner(True)
    made = [Document(np.arange(3, 9, dtype=np.int32), np.zeros(6, bool), np.float32(0.5), np.zeros(0, np.float32))] * 2
    result = mine.step(made)
    assert result.refusal is None and result.metrics["num_documents"] == 2
    assert (result.metrics["tokens"], result.metrics["micro_batches"]) == (2 * 6, 1)
    named = ("loss", "loss_objective", "grad_norm", "num_tokens", "advantage_labelled", "loss_count")
    assert [result.metrics[name] for name in named] == [0.0] * len(named)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=3", "fsdp=2,tensor=2", "sequence=2"])
@pytest.mark.parametrize("zeros", SHARES.values(), ids=SHARES)
def test_meshes_and_micro_batches(full, mesh, zeros):
    """Four rows a rank, so that a step has several micro-batches; all against one device that computes everything."""
    rows = {"rows": 4, "docs_per_step": COUNT}
    mine = two_steps(learner(True, mesh, schedule=dataclasses.replace(tiny("", "").schedule, **rows)), zeros)
    check_equal(mine, full(zeros))


@pytest.mark.slow
@pytest.mark.parametrize("zeros", [0, COUNT // 2, COUNT // 2 + 9, COUNT])
def test_an_invariant_step_has_the_bits_of_the_full_computation(zeros):
    """Of 24 + 1 documents in a row some leaves, and of 3 ranks some rounds, are skipped whole."""

    def states(skips, mesh):
        options = {"invariant": True, "invariance": {"block": 4, "leaf_rows": 2}, "schedule": {"row_length": 12}}
        steps, state = two_steps(learner(skips, mesh, **options), zeros)
        return steps, [np.asarray(leaf).tobytes() for leaf in state]

    whole, wanted = states(False, "data=1")
    (skipped, state), (three, other) = (states(True, mesh) for mesh in ("data=1", "data=3"))
    assert wanted == state == other
    for one, two, full in zip(skipped, three, whole, strict=True):
        assert (one["loss"], one["grad_norm"]) == (full["loss"], full["grad_norm"]) == (two["loss"], two["grad_norm"])
        assert {**one, "micro_batches": 0} == {**two, "micro_batches": 0}
        # Every second document, so that the leaves of two are skipped beyond the first half alone.
        assert one[COMPUTED + "num_documents"] == COUNT - 2 * max(0, zeros - COUNT // 2)


@pytest.mark.parametrize("computed", [0, 2])
def test_nothing_is_known_of_no_computed_document(computed):
    """Not an entropy or a ratio of 0, which console and curves would show as a policy that has collapsed."""
    sums = {
        "entropy_labelled": 0.0,
        "max_ratio_new_old": -np.inf,
        "num_documents": computed,
        "loss_count": 0,
        "drift_max": None,
    }
    found = of_all(sums, documents(COUNT, 0, SimpleNamespace(version=0)), 9, 0)
    assert (found["computed/num_documents"], found["num_documents"], found["loss_count"]) == (computed, COUNT, 9)
    assert (found["computed/entropy_labelled"], found["computed/max_ratio_new_old"]) == (
        (0.0, -np.inf) if computed else (None, None)
    )


def test_what_is_known_of_all_documents_by_hand():
    """Of two, one and no labels; the first has an advantage and a version of each label."""
    two, one, none = np.array([0, 1, 1], bool), np.array([0, 1], bool), np.array([0, 0], bool)
    made = [
        Document(np.int32([5, 6, 7]), two, np.float32([2.0, 4.0]), reward=1.0, versions=np.int32([5, 3])),
        Document(np.int32([5, 6]), one, -1.0, reward=2.0, versions=7),
        Document(np.int32([5, 6]), none, np.float32([]), reward=6.0, versions=np.int32([])),
    ]
    wanted = {"num_documents": 3, "num_documents_labelled": 2, "num_tokens": 3, "loss_count": 3}
    wanted |= {"advantage": (3 - 1) / 3, "advantage_labelled": (3 - 1) / 2, "max_advantage": 4.0, "min_advantage": -1.0}
    wanted |= {"num_rewards": 3, "num_stalenesses": 3}
    wanted |= {"reward_mean": 3.0, "reward_max": 6.0, "reward_min": 1.0}
    wanted |= {"staleness_mean": (5 + 1 + 8) / 3, "staleness_max": 8.0, "staleness_min": 1.0}
    computed = {**dict.fromkeys(wanted, 2), "loss_objective": 0.6}
    found = of_all(computed, made, 3, 8)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-12)
    assert (found["computed/num_documents"], found["computed/num_tokens"]) == (2, 2)
    # 0.6 of the two labels of the documents that were computed, of three.
    assert found["loss_objective"] == pytest.approx(0.4, rel=1e-12)
    found = of_all({**computed, "loss_objective": 0.0, "loss_count": 0}, made[2:], 0, 8)
    assert (found["loss_objective"], found["advantage"], found["advantage_labelled"]) == (0.0, 0.0, 0.0)
    assert (found["max_advantage"], found["min_advantage"]) == (-np.inf, np.inf)


def test_a_loss_of_documents_counts_also_those_without_a_label():
    made = documents(0, 0, SimpleNamespace(version=0))
    labels = sum(document.num_labels for document in made)
    for name, wanted in (("dapo", labels), ("gspo", COUNT), ("grpo_paper", COUNT)):
        assert PolicyObjective(LossConfig(name=name).policy_loss(9), "basic").count(made) == wanted, name
    assert CrossEntropy().count(made) == labels


def test_one_label_with_an_advantage_is_an_effect():
    labels = np.array([False, True, True])
    given = ([0.0, 2.0], [-1.0, 0.0], [-1.0, 1.0], [0.0, 0.0])
    made = [Document(np.int32([5, 6, 7]), labels, np.float32(advantages)) for advantages in given]
    assert [has_effect(each) for each in made] == [True, True, True, False]


WITH_EFFECT = {
    "entropy": Config(loss=LossConfig(entropy_coefficient=0.1)),
    "entropy target": Config(loss=LossConfig(entropy_target=0.1)),
    "KL": Config(loss=LossConfig(kl_coefficient=0.1)),
    "top entropy": Config(loss=LossConfig(name="dapo", top_entropy=0.5)),
    "clip_cov": Config(loss=LossConfig(name="clip_cov")),
    "kl_cov": Config(loss=LossConfig(name="kl_cov")),
    "rejection": Config(rejection=RejectionConfig(token=(0.5, 2.0))),
}


@pytest.mark.parametrize("name", WITH_EFFECT)
def test_where_they_have_an_effect_they_are_computed(name):
    config = WITH_EFFECT[name]
    validate(config)
    assert not config.skips_documents()
    told = dataclasses.replace(config, loss=dataclasses.replace(config.loss, skip_zero_advantages=True))
    words = r"--loss.skip-zero-advantages: expected None or False for loss '\w+' with these"
    with pytest.raises(ValueError, match=words):
        validate(told)


@pytest.mark.parametrize("name", WITHOUT_COLUMNS)
def test_every_other_algorithm_skips_them_unless_it_is_told_not_to(name):
    assert Config(loss=LossConfig(name=name)).skips_documents()
    assert not Config(loss=LossConfig(name=name, skip_zero_advantages=False)).skips_documents()
