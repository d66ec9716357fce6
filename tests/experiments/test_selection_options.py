"""Labels chosen by entropy and covariance, by the trainer's options: whole steps against a walk over labels in float64."""

import dataclasses
from functools import cache, partial

import jax
import numpy as np
import pytest
from flax import nnx

from experiments.config import LossConfig
from experiments.learner.learner import Learner
from experiments.learner.objectives import CrossEntropy, PolicyObjective
from experiments.learner.selection import ClipCov, KlCov, TopEntropy, label_mask
from experiments.loop.assemble import SELECTION, assemble
from experiments.loop.resume import resume
from experiments.loop.run import train
from jaxlogp import Document
from tests.experiments import test_objectives
from tests.experiments.decoder_oracle import oracle_forward
from tests.experiments.test_objectives import sums_of_leaves, sums_of_micro_batches
from tests.experiments.test_step_on_meshes import check_steps, setup_on, two_steps
from tests.experiments.tiny import assert_same_state, tiny, train_records

SHARE, LOW, HIGH, DRIFT, SEED = 0.3, 0.02, 0.5, 0.5, 3
LOSSES = {
    "top_entropy": {"name": "dapo", "top_entropy": SHARE},
    "clip_cov": {"name": "clip_cov", "cov_share": 0.1, "cov_low": LOW, "cov_high": HIGH},
    "kl_cov": {"name": "kl_cov", "cov_share": SHARE, "drift_coefficient": DRIFT},
}
# Bounds of the ratio; kl_cov has none.
BOUNDS = {"top_entropy": (0.8, 1.28), "clip_cov": (0.8, 1.2), "kl_cov": (0.0, np.inf)}
# fp32 sums of a hundred labels in another order; Adam divides each gradient by its own size.
LOSS, PARAMS = 1e-5, 2e-4
COUNT, VOCAB = 32, 24


def learner_setup(kind, mesh="", **changes):
    options = {"warm_start": {"max_steps": 0}, "evaluation": {"kl": False}, "seed": SEED, "loss": LOSSES[kind]}
    return assemble(tiny("unused", "unused", mesh=mesh, **options | changes))


def documents(seed):
    """Old log-probs are apart from those of the policy, which are near log(1 / VOCAB). The third has no label."""
    random, made = np.random.default_rng(seed), []
    for number in range(COUNT):
        tokens, labels = random.integers(0, VOCAB, random.integers(4, 12)).astype(np.int32), 0
        labels = np.arange(tokens.size) >= (tokens.size if number == 2 else 2)
        old = np.float32(random.uniform(-3.8, -2.6, labels.sum()))
        made.append(Document(tokens, labels, np.float32(random.normal()), old))
    return made


def scores(setup, made):
    """Log-probs and entropies of all labels in float64."""
    params, found = nnx.to_pure_dict(jax.device_get(setup.params)), []
    for each in made:
        logits = oracle_forward(params, each.tokens, setup.model.decoder) @ np.float64(params["lm_head"]["weight"]).T
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        entropies = -(np.exp(log_probs) * log_probs).sum(axis=-1)
        found += [(log_probs[at - 1, each.tokens[at]], entropies[at - 1]) for at in each.label_positions]
    return np.array(found).T


def chosen_labels(kind, log_probs, entropies, advantages, version):
    """True for labels that learn, of kl_cov for those penalized. No label is near a bound."""
    count = len(advantages)
    if kind == "top_entropy":
        threshold = np.quantile(entropies, 1.0 - SHARE)
        assert np.abs(entropies - threshold).min() > 1e-6
        return entropies >= threshold
    covariances = (advantages - advantages.mean()) * (log_probs - log_probs.mean())
    number = int(LOSSES[kind]["cov_share"] * count)
    if kind == "kl_cov":
        least, most = np.sort(covariances)[::-1][number - 1 : number + 1]
        assert least - most > 1e-6
        return covariances >= least
    assert np.abs(covariances[:, None] - [LOW, HIGH]).min() > 1e-6
    candidates = np.flatnonzero((covariances > LOW) & (covariances < HIGH))
    assert number < len(candidates) < count / 2, "a draw among a few"
    key = jax.random.fold_in(jax.random.key(SEED + SELECTION), version)
    draws = np.asarray(jax.random.uniform(key, 2 ** int(np.ceil(np.log2(count)))))[candidates]
    return ~np.isin(np.arange(count), candidates[np.argsort(draws)[:number]])


def expected_loss(kind, log_probs, old, advantages, chosen):
    log_ratios = log_probs - old
    ratios, (low, high) = np.exp(log_ratios), BOUNDS[kind]
    learning = advantages if kind == "kl_cov" else np.where(chosen, advantages, 0.0)
    terms = -np.minimum(ratios * learning, np.clip(ratios, low, high) * learning)
    return (terms + (DRIFT * chosen * np.abs(log_ratios) if kind == "kl_cov" else 0.0)).mean()


def marked_by_hand(kind, made, chosen):
    """The documents with the choice in them."""
    marked, start = [], 0
    for each in made:
        own = chosen[start : start + each.num_labels]
        start += each.num_labels
        advantages = np.float32([each.advantages if learns else 0.0 for learns in own])
        column = {"columns": {"penalized": np.float32(own)}}
        marked.append(dataclasses.replace(each, **column if kind == "kl_cov" else {"advantages": advantages}))
    return marked


def learner_by_hand(setup, kind):
    """A learner with the same parameters and loss that chooses nothing."""
    config, columns = setup.config, ("penalized",) if kind == "kl_cov" else ()
    objective = PolicyObjective(config.policy_loss(1), config.loss.metrics)
    packing = dataclasses.replace(setup.learner.packing, columns=columns)
    optimizer = config.optimizer.optimizer(config.schedule.steps)
    return Learner(setup.backend, objective, optimizer, packing, jax.tree.map(jax.numpy.copy, setup.params))


def leaves(learner):
    return jax.device_get(jax.tree.leaves(learner.state.params))


@pytest.mark.costly
@pytest.mark.parametrize("kind", LOSSES)
def test_two_steps_are_those_of_labels_chosen_by_hand(kind):
    setup = learner_setup(kind)
    other = learner_by_hand(setup, kind)
    for step in range(2):
        made, version = documents(step), setup.learner.version
        assert version == step * COUNT
        log_probs, entropies = scores(setup, made)
        sizes = [each.num_labels for each in made]
        advantages = np.repeat(np.float64([each.advantages for each in made]), sizes)
        chosen = chosen_labels(kind, log_probs, entropies, advantages, version)
        old = np.concatenate([each.sampler_log_probs for each in made])
        metrics = setup.learner.step(made).metrics
        assert metrics["selected_fraction"] == chosen.mean() and 0.0 < chosen.mean() < 1.0
        wanted = expected_loss(kind, log_probs, old, advantages, chosen)
        assert abs(metrics["loss"] - wanted) < LOSS
        control = expected_loss(kind, log_probs, old, advantages, ~chosen)
        assert abs(metrics["loss"] - control) > 100 * LOSS
        by_hand = other.step(marked_by_hand(kind, made, chosen)).metrics
        assert "selected_fraction" not in by_hand
        assert (metrics["loss"], metrics["grad_norm"]) == (by_hand["loss"], by_hand["grad_norm"])
        assert metrics["loss_count"] == sum(sizes), "the divisor counts all labels"
        jax.tree.map(np.testing.assert_array_equal, leaves(setup.learner), leaves(other))


CUTS = {
    "rows": {"schedule": {"rows": 2, "docs_per_step": COUNT, "row_length": 32}},
    "data and tensor": {"mesh": "data=2,tensor=2"},
}


def step_with_reference(kind, **changes):
    """Metrics and parameters of a step with a KL to the reference, whose log-probs are another column."""
    setup = learner_setup(kind, loss=LOSSES[kind] | {"kl_coefficient": 0.1}, **changes)
    setup.learner.begin(setup.params)
    return setup.learner.step(documents(0)).metrics, leaves(setup.learner)


@cache
def whole_step(kind):
    return step_with_reference(kind)


@pytest.mark.costly
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", LOSSES)
def test_the_choice_does_not_depend_on_the_cut_or_the_mesh(kind, cut):
    (whole, params), (cut_up, parts_params) = whole_step(kind), step_with_reference(kind, **CUTS[cut])
    assert cut == "data and tensor" or cut_up["micro_batches"] > whole["micro_batches"]
    assert whole["selected_fraction"] == cut_up["selected_fraction"]
    assert abs(whole["loss"] - cut_up["loss"]) < LOSS and abs(whole["grad_norm"] / cut_up["grad_norm"] - 1) < 10 * LOSS
    jax.tree.map(partial(np.testing.assert_allclose, atol=PARAMS), parts_params, params)


@pytest.mark.costly
def test_entropies_on_supports_that_sequence_ranks_split_choose_the_same_labels():
    """Each entropy is over the ids that its token was drawn from."""
    options = {"loss": {"on_support": True, "top_entropy": SHARE}, "rollout": {"top_k": 6}}
    (whole, _), (parts, _) = (two_steps(setup_on(mesh, **options)) for mesh in ("", "sequence=2"))
    check_steps(parts, whole)
    assert [each["selected_fraction"] for each in parts] == [each["selected_fraction"] for each in whole]
    assert all(0.0 < each["selected_fraction"] < 0.5 for each in whole)


@pytest.mark.costly
@pytest.mark.parametrize("make_sums", [sums_of_micro_batches, pytest.param(sums_of_leaves, marks=pytest.mark.slow)])
def test_both_kinds_of_sums_compute_the_entropies_of_labels(make_sums):
    config, graph, params = test_objectives.decoder()
    (batch,) = test_objectives.packing().rounds(test_objectives.documents())
    sums = make_sums(config, graph, CrossEntropy(), 0.7)
    flat = batch.micro_batch(0)
    model = nnx.merge(graph, params)
    hidden = np.float64(model.hidden_states(flat.tokens, flat.positions, flat.segment_ids))
    logits = hidden @ np.float64(model.head()[1]).T / 0.7
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    wanted = {
        "entropies": -(np.exp(log_probs) * log_probs).sum(axis=-1),
        "score": np.take_along_axis(log_probs, flat.targets[..., None], axis=-1)[..., 0],
    }
    for name, values in wanted.items():
        found = getattr(sums, name)(params, batch)
        np.testing.assert_allclose(found[0], np.where(flat.mask, values, 0.0), atol=1e-5)


@pytest.mark.costly
def test_a_run_with_draws_resumes_to_the_same_bits(tmp_path):
    loss = {"name": "clip_cov", "cov_share": 0.2, "cov_low": 0.0, "cov_high": 100.0}
    whole = train(tiny(tmp_path, "whole", loss=loss, warm_start={"max_steps": 4}, checkpoint={"every": 1}))
    for record in train_records(whole):
        assert 0.0 < record["selected_fraction"] < 1.0 and record["update_applied"] == 1
    resumed = resume(f"{whole.run.path}@2", {"quiet": True})
    assert_same_state(resumed, whole)


@pytest.mark.costly
def test_a_choice_that_meets_scores_that_are_not_finite_refuses_the_step():
    setup = learner_setup("top_entropy")
    before = leaves(setup.learner)
    setup.learner.gradients.entropies = lambda params, scored: np.full(scored.shape, np.nan, np.float32)
    result = setup.learner.step(documents(0))
    assert "entropies of the trainer" in str(result.refusal) and not result.metrics and setup.learner.version == 0
    jax.tree.map(np.testing.assert_array_equal, leaves(setup.learner), before)


@pytest.mark.parametrize("choose", [TopEntropy(0.5), ClipCov(), KlCov()], ids=lambda choose: type(choose).__name__)
def test_a_step_without_labels_has_nothing_to_choose(choose):
    made = [Document(np.int32([1, 2, 3]), np.zeros(3, bool))] * 2
    marked = choose(made, [np.zeros(0, np.float32)] * 2, jax.random.key(0))
    assert [label_mask(count).size for count in (0, 1, 4, 5)] == [1, 1, 4, 8]
    assert choose.fraction(marked) is None and all(np.shape(each.advantages) in ((), (0,)) for each in marked)


def test_an_advantage_of_each_label_is_kept():
    """A document of several turns may bring its own."""
    made = [Document(np.int32([1, 2, 3]), np.array([False, True, True]), np.float32([2.0, -3.0]), np.float32([-1, -1]))]
    (marked,) = TopEntropy(1.0)(made, [np.float32([0.5, 0.7])], jax.random.key(0))
    np.testing.assert_array_equal(marked.advantages, [2.0, -3.0])
    (marked,) = TopEntropy(0.5)(made, [np.float32([0.5, 0.7])], jax.random.key(0))
    np.testing.assert_array_equal(marked.advantages, [0.0, -3.0])
    assert TopEntropy(0.5).fraction([marked]) == 0.5


def test_labels_are_penalized_by_covariance_beside_other_columns():
    """Of 3 and 1 labels; the last one alone has a large covariance."""
    three, one = np.array([False, True, True, True]), np.array([False, True])
    reference = {"ref_log_probs": np.float32([-1, -1, -1])}
    made = [Document(np.int32([1, 2, 3, 4]), three, 1.0, columns=reference), Document(np.int32([1, 2]), one, -7.0)]
    marked = KlCov(0.25)(made, [np.float32([-1, -1, -1]), np.float32([-9])], jax.random.key(0))
    assert [each.columns["penalized"].tolist() for each in marked] == [[0, 0, 0], [1]]
    assert marked[0].columns.keys() == {"ref_log_probs", "penalized"} and KlCov(0.25).fraction(marked) == 0.25


REFUSED = {
    "share 0 of clip_cov": (lambda: ClipCov(0.0), r"^cov_share: expected a number in \(0, 1\], got 0.0$"),
    "share 0 of kl_cov": (lambda: KlCov(0.0), r"^cov_share: expected a number in \(0, 1\], got 0.0$"),
    "top entropy in percent": (lambda: TopEntropy(20.0), r"^top_entropy: expected a number in \(0, 1\], got 20.0$"),
    "percent": (lambda: KlCov(2.0), r"^cov_share: expected a number in \(0, 1\], got 2.0$"),
    "nothing between": (lambda: ClipCov(cov_low=5.0), r"^cov_low: expected a number below cov_high = 5.0, got 5.0$"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", REFUSED)
def test_options_that_choose_nothing_or_more_than_all_are_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_an_algorithm_brings_its_choice():
    assert LossConfig().selection() is None and LossConfig(name="clip_cov").selection() == ClipCov(2e-4, 1.0, 5.0)
    assert LossConfig(name="kl_cov", cov_share=1.0).selection() == KlCov(1.0)
    assert LossConfig(name="gspo_token", top_entropy=0.2).selection() == TopEntropy(0.2)
