"""Training on the ids that the sampler drew from: what it records, and the numbers of the trainer on it."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.config import LossConfig, RolloutConfig
from experiments.experience.own_source import OwnSource, SourceFailed
from experiments.learner.objectives import PolicyObjective
from experiments.learner.packing import Packing
from experiments.loop.queue import DocumentQueue
from experiments.loop.resume import resume
from experiments.loop.run import train
from experiments.models.mesh import MeshSpec, make_mesh
from experiments.sampling import decoder_sampler
from experiments.sampling.decoder_sampler import DecoderSampler
from experiments.sampling.options import SamplingOptions
from experiments.sampling.recompute import RecomputeSampler
from experiments.sampling.sampler import SampledModel
from experiments.sampling.support import MOST_IDS, RecordedSupport
from jaxlogp import Document, Support
from tests.experiments import test_objectives
from tests.experiments.samples import rule
from tests.experiments.test_sample_token import allowed, drawn, drawn_by, keys, logits_of, probabilities
from tests.experiments.test_sampler import ENDS, ROUNDING, VOCAB, decoder, prompts
from tests.experiments.test_step_on_meshes import PARAMS, check_steps, setup_on, two_steps
from tests.experiments.tiny import TINY, tiny, train_records

NEW = 14
ON_SUPPORT = {"loss": {"on_support": True, "entropy_coefficient": 0.01}, "rollout": {"top_p": 0.8, "rescore": True}}


@pytest.mark.parametrize("room", [3, 1000])
@pytest.mark.parametrize("options", [drawn_by(top_k=5), drawn_by(0.8, top_p=0.7), drawn_by(min_p=0.1)], ids=str)
def test_a_token_is_drawn_from_the_most_likely_that_there_is_room_for(options, room):
    logits = logits_of(600)
    rooms = np.full(len(logits), room, np.int32)
    sampled = drawn(logits, keys(), options, rooms)
    scaled = logits.astype(np.float64) / options.temperature
    left = allowed(scaled, options)
    rank = np.argsort(np.argsort(-scaled, axis=1, kind="stable"), axis=1)
    np.testing.assert_array_equal(sampled.kept, left & (rank < room))
    np.testing.assert_array_equal(sampled.cut, left.sum(axis=1) > room)
    rows, tokens = np.arange(len(logits)), np.asarray(sampled.tokens)
    wanted = np.log(probabilities(scaled, np.asarray(sampled.kept))[rows, tokens])
    # Scaled logits are below 16: their rounding, and that of a difference of two of them.
    np.testing.assert_allclose(sampled.log_probs, wanted, atol=2 * 16 * 2**-24, rtol=0)
    whole = probabilities(scaled, np.ones_like(scaled, bool))
    # A sum of 600 and one of those that are left, in fp32, and one division.
    np.testing.assert_allclose(sampled.mass, np.sum(whole * np.asarray(sampled.kept), axis=1), rtol=2 * 600 * 2**-24)


def test_among_equals_the_lowest_ids_are_kept():
    logits = np.float32([[1.0, 3.0, 3.0, 5.0, 3.0, 0.0]])
    sampled = drawn(logits, keys()[:1], drawn_by(min_p=0.01), np.int32([3]))
    assert np.flatnonzero(sampled.kept[0]).tolist() == [1, 2, 3] and sampled.cut.all()


def test_every_token_of_a_row_has_room_for_the_ids_that_are_reserved():
    vocab, tokens = 280, 4
    first, rows = (np.zeros((1, 1), np.int32), np.zeros(1, np.int32)), np.arange(2, dtype=np.int32)[None]
    support, extended = RecordedSupport.empty(2, tokens, 128), jax.jit(RecordedSupport.extended)
    room_of = jax.jit(RecordedSupport.room)
    wanted = [[], []]
    for step in range(tokens):
        room = np.asarray(room_of(support, rows, np.full(2, step, np.int32)))
        kept = np.arange(vocab) < np.minimum(room, [vocab, 3])[:, None]
        done = np.array([False, step == 3])
        kept_now, step_of = kept & ~done[:, None], np.full(2, step, np.int32)
        support = extended(support, rows, step_of, kept_now, room < vocab, np.ones(2, np.float32))
        for row in range(2):
            wanted[row] += np.flatnonzero(kept[row]).tolist() * (not done[row])
    # 280 ids each, of 512 in all, while those after them keep theirs.
    assert np.asarray(support.counts).tolist() == [[280, 200, 16, 16], [3, 3, 3, 0]]
    for row, ids in enumerate(np.asarray(support.ids)):
        assert ids[: len(wanted[row])].tolist() == wanted[row]
    assert room_of(RecordedSupport.empty(1, 64, 128), *first).tolist() == [MOST_IDS]
    # However small the room, each has one.
    assert room_of(RecordedSupport.empty(1, 4, 1), *first).tolist() == [1]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
def test_ids_are_those_of_the_entries_that_are_kept(vocab):
    rng = np.random.default_rng(vocab)
    kept = rng.random((40, vocab)) < rng.random((40, 1))
    # Both ends of a word, and one with all of its entries.
    kept[0], kept[1, 0], kept[2, -1] = True, True, True
    rows, new = np.arange(40)[None], (kept, kept[:, 0], np.ones(40, np.float32))
    empty = RecordedSupport.empty(40, 8, min(vocab, 128))
    support = jax.jit(RecordedSupport.extended)(empty, rows, np.zeros(40, np.int32), *new)
    recorded, counts = np.asarray(support.ids), np.asarray(support.counts)
    for row, ids in enumerate(map(np.flatnonzero, kept)):
        found = recorded[row, : min(len(ids), 128 * 8)]
        assert found.tolist() == ids.tolist()[: len(found)] and counts[row, 0] == len(ids)


@jax.jit
def logits_after(state, tokens):
    """The model's logits after every token of one document, by the path that the trainer takes."""
    model = nnx.merge(nnx.split(decoder())[0], state)
    places = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    return model.hidden_states(tokens[None], places, 0 * places)[0] @ model.head()[1].T


@pytest.mark.parametrize("sampler", [DecoderSampler, RecomputeSampler])
def test_samplers_record_what_they_draw_from(monkeypatch, sampler):
    # Rows leave the batch when others have ended, and take their ids with them.
    monkeypatch.setattr(decoder_sampler, "SHORTEST_NARROWED", 1)
    monkeypatch.setattr(decoder_sampler, "FEWEST_ROWS", 2)
    kept, narrowed = decoder_sampler._kept, []
    monkeypatch.setattr(decoder_sampler, "_kept", lambda rows, some: narrowed.append(some) or kept(rows, some))
    how, (ids, lengths) = rule(NEW, **ENDS, temperature=1.2, top_p=0.8, record_support=True), prompts()
    graph, state = nnx.split(decoder())
    samples = sampler(SampledModel(graph, make_mesh(MeshSpec())), how)(state, ids, lengths, 2, jax.random.key(2))
    sizes = set()
    for row, (end, counts) in enumerate(zip(samples.lengths, samples.support.counts, strict=True)):
        support, prompt = Support(samples.support.ids[row], counts), ids[row // 2, : lengths[row // 2]]
        tokens = np.concatenate([prompt, samples.tokens[row, :end]])
        # Padded, so that one program does for all.
        whole = np.pad(tokens, (0, ids.shape[1] + NEW - tokens.size))
        scaled = np.asarray(logits_after(state, whole), np.float64)[len(prompt) - 1 : tokens.size - 1] / 1.2
        keep = allowed(scaled, how.options)
        for place in range(end):
            assert support.part(place, place + 1).ids.tolist() == np.flatnonzero(keep[place]).tolist()
        sizes |= set(counts[:end].tolist())
        wanted = np.log(probabilities(scaled, keep)[np.arange(end), samples.tokens[row, :end]])
        np.testing.assert_allclose(samples.log_probs[row, :end], wanted, atol=ROUNDING)
        assert not counts[end:].any() and not samples.support.cut[row].any()
    assert len(sizes) > 2 and max(sizes) < VOCAB and bool(narrowed) == (sampler is DecoderSampler)


def with_support(kept):
    """Documents, each label with the ids that `kept` says of its token."""
    made = []
    for document in test_objectives.documents():
        ids = [kept(int(token)) for token in document.tokens[document.label_positions]]
        made.append(replace(document, support=Support.from_lists(ids)))
    return made


PLAIN, WITH_KL = LossConfig(), LossConfig(kl_coefficient=0.3, entropy_coefficient=0.1)


def gradient_sums(documents, loss=PLAIN, *, rows=test_objectives.ROWS, capacity=None):
    """Loss, gradients and metrics of documents in micro-batches of so many rows."""
    config, graph, params = test_objectives.decoder()
    packing = replace(test_objectives.packing(), rows=rows, share_rows=True, support_capacity=capacity)
    objective = PolicyObjective(loss.policy_loss(test_objectives.LENGTH), "with_entropy")
    sums = test_objectives.sums_of_micro_batches(config, graph, objective, 0.9)
    rounds = packing.rounds(documents)
    total = sums.accumulate(params, rounds, 0).sums
    scored = np.concatenate([values for each in rounds for values in each.at_labels(sums.score(params, each))])
    return total, total.finish().metrics, scored, len(rounds)


def check_sums(found, wanted):
    np.testing.assert_allclose(found[0].loss.sum, wanted[0].loss.sum, rtol=test_objectives.TOLERANCE)
    for mine, other in zip(*(jax.tree.leaves(each[0].gradients) for each in (found, wanted)), strict=True):
        scale = np.abs(np.asarray(other)).max()
        np.testing.assert_allclose(np.asarray(mine), np.asarray(other), atol=test_objectives.TOLERANCE * scale)
    np.testing.assert_allclose(found[2], wanted[2], atol=1e-5)  # log-probs of about 3, of two programs
    np.testing.assert_allclose(found[1]["entropy"], wanted[1]["entropy"], rtol=1e-5)


@pytest.mark.costly
def test_the_whole_vocabulary_as_support_gives_the_numbers_of_the_whole_head():
    vocab = test_objectives.VOCAB
    documents = with_support(lambda token: range(vocab))
    found = gradient_sums(documents, WITH_KL, capacity=test_objectives.ROWS * test_objectives.LENGTH * vocab)
    check_sums(found, gradient_sums(test_objectives.documents(), WITH_KL))


@pytest.mark.costly
def test_a_step_on_the_support_does_not_depend_on_its_micro_batches():
    documents = with_support(lambda token: sorted({token, 3, (token * 7 + 1) % test_objectives.VOCAB}))
    one, several = (gradient_sums(documents, WITH_KL, capacity=size) for size in (500, 30))
    assert one[3] == 1 and several[3] > 2, "the ids end the micro-batches"
    check_sums(several, one)
    entropies = np.log([each.support.counts.max() for each in documents])
    assert 0.0 < one[1]["entropy"] <= entropies.max()


@pytest.mark.costly
def test_single_ids_teach_nothing():
    sums, metrics, scored, _ = gradient_sums(with_support(lambda token: [token]), capacity=99)
    assert not scored.any() and float(metrics["entropy"]) == 0.0
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(sums.gradients))


@functools.cache
def on_one_device():
    return two_steps(setup_on("", **ON_SUPPORT))


@pytest.mark.costly
@pytest.mark.parametrize(
    "mesh",
    ["sequence=2,tensor=2", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("data=2,fsdp=2", "tensor=5"))],
)
def test_steps_on_the_support_are_the_same_on_every_mesh(mesh):
    steps, params = two_steps(setup_on(mesh, **ON_SUPPORT))
    wanted = on_one_device()
    check_steps(steps, wanted[0])
    for mine, one in zip(params, wanted[1], strict=True):
        np.testing.assert_allclose(mine, one, atol=PARAMS)


@pytest.mark.costly
def test_a_run_with_little_room_draws_from_what_fits(tmp_path):
    changes = {"rollout": {"top_k": 12}, "loss": {"support_room": 3, "skip_zero_advantages": False}}
    changes |= {"warm_start": {"max_steps": 0}, "schedule": {"steps": 1}}
    result = train(tiny(tmp_path, "narrow", **changes))
    (record,) = train_records(result)
    assert result.setup.learner.packing.support_capacity == 16 * 32 * 3
    # A completion of an untrained model has sets of 12.
    assert record["support_cut"] > 0.3 and 1.0 <= record["support_ids"] <= 3.0
    assert record["drift_max"] < 1e-5 and record["update_applied"] == 1


@pytest.mark.costly
def test_a_run_trains_on_what_it_draws_and_resumes_to_the_same_bits(tmp_path):
    changes = {"rollout": {"top_k": 6, "prompts_per_rollout": 24}, "checkpoint": {"every": 1}}
    changes |= {"loss": {"on_support": True, "kl_coefficient": 0.1}, "reward": {"kl_coefficient": 0.1}}
    whole = train(tiny(tmp_path, "whole", **changes))
    records = train_records(whole)
    for record in records:
        # Sampler and trainer have the same numbers on the support: the ratio of an unchanged policy is 1.
        assert record["drift_max"] < 1e-5 and record["support_cut"] == 0.0
        assert 1.0 <= record["support_ids"] <= 6.0
        assert 0.25 < record["support_mass"] < 1.0 and 0.0 <= record["support_narrow"] <= 1.0
        assert record["head_engine"] == "support" and record["entropy"] <= np.log(6.0) and record["kl_new_ref"] >= 0.0
    # The reference is the policy before the first step.
    assert abs(records[0]["reward_kl"]) < 1e-4 < abs(records[-1]["reward_kl"])
    # 64 of 96 documents are a step: others wait, with their supports.
    resumed = resume(f"{whole.run.path}@2", {"quiet": True})
    for mine, other in zip(*(jax.tree.leaves(each.setup.params) for each in (whole, resumed)), strict=True):
        np.testing.assert_array_equal(mine, other)


def document(support=None, tokens=(3, 4)):
    return Document.of_completion(tokens[:1], tokens[1:], [-0.5] * (len(tokens) - 1), support=support)


def test_documents_that_wait_keep_their_supports():
    given = document(Support.from_lists([[4, 2, 5]]))
    (found,) = DocumentQueue.from_json(DocumentQueue([given]).to_json()).documents
    assert found.support.ids.tolist() == [4, 2, 5] and found.support.counts.tolist() == [3]
    (found,) = DocumentQueue.from_json(DocumentQueue([document()]).to_json()).documents
    assert found.support is None


class Policy:
    version = 4


WRONG = {
    "none": (None, 9, "expected the support of its labels with --loss.on-support"),
    "one": (Support.from_lists([[4]]), None, "expected no support without --loss.on-support"),
    "large": (Support.from_lists([[4, 5, 6]]), 2, "expected a support of at most 2 ids, got 3"),
    "an id": (Support.from_lists([[4, 9]]), 9, "expected a support of ids below 9, got 9"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", WRONG)
def test_a_source_gives_the_supports_that_the_loss_takes(name):
    support, capacity, words = WRONG[name]
    limits = {"vocab_size": 9, "row_length": 4, "support_capacity": capacity}
    source = OwnSource(lambda policy, step: [document(support)], "mine", **limits)
    with pytest.raises(SourceFailed, match=f"^source mine: documents\\[0\\]: {re.escape(words)}"):
        source.next(Policy())


@pytest.mark.bad_input
def test_supports_are_refused_where_nothing_takes_them():
    packing = Packing(1, 2, 4, 9, 0)
    with pytest.raises(ValueError, match="^documents: expected documents without a support, got one in document 0"):
        packing.round_of([document(Support.from_lists([[4]]))])
    with pytest.raises(ValueError, match=r"^documents: expected ids in \[0, 9\) in each support, got 9 in document 0"):
        replace(packing, support_capacity=5).round_of([document(Support.from_lists([[4, 9]]))])
    with pytest.raises(ValueError, match="^record_support: expected False without top_k, top_p or min_p"):
        SamplingOptions(3, record_support=True)


def test_it_is_on_where_some_tokens_are_not_drawn():
    def resolved(**changes):
        return replace(TINY, **changes).resolved().loss.on_support

    narrow = RolloutConfig(min_p=0.1)
    assert resolved() is False and resolved(rollout=narrow) is True
    assert resolved(rollout=narrow, loss=LossConfig(on_support=False)) is False
    assert resolved(source="a:b") is False and resolved(source="a:b", loss=LossConfig(on_support=True)) is True
