"""Documents that wait in one queue, and rounds of them that are dealt to data ranks."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.experience.experience import Experience
from experiments.experience.order import EpochOrder
from experiments.experience.own_source import SourceFailed
from experiments.experience.rollout_metrics import RolloutMetrics
from experiments.learner.packing import Packing
from experiments.loop.feed import DocumentFeed
from experiments.loop.queue import DocumentQueue
from experiments.refusal import NotFinite, Refusal
from experiments.tasks.protocol import TaskFailed
from experiments.tasks.rewards import RewardFailed
from jaxlogp import Document, DocumentSchedule, Support
from tests.experiments.stacked import stacked


def documents(count, first=0):
    return [Document.of_completion([3], [4 + first + i], [0.0], advantages=1.0) for i in range(count)]


def of_lengths(*lengths):
    return [Document.of_completion([3], np.arange(4, 3 + n), np.zeros(n - 1), advantages=1.0) for n in lengths]


@pytest.mark.parametrize(
    "lengths, ranks, share_rows, wanted",
    [
        # In turn, where documents are alike, and else to the rank with the fewest tokens.
        ([2] * 5, 1, True, [[0, 1, 2, 3]]), ([2] * 5, 2, True, [[0, 2, 4], [1, 3]]),
        ([4, 2, 2, 3], 2, True, [[0, 3], [1, 2]]), ([2] * 3, 3, False, [[0, 1], [2], []]),
        # Document 2 has no room, and the shorter one behind it waits, too.
        ([3, 4, 3, 3, 2], 1, True, [[0, 1]]), ([3, 3, 4, 3, 4, 2], 2, True, [[0, 2], [1, 3]]),
        ([2] * 7, 3, False, [[0, 1], [2, 3], [4, 5]]), ([], 2, True, [[], []]), ([], 2, False, [[], []]),
    ],
)  # fmt: skip
def test_a_round_holds_the_first_documents(lengths, ranks, share_rows, wanted):
    packing = Packing(ranks, rows=2, row_length=4, vocab_size=999, pad_id=0, share_rows=share_rows)
    taken = packing.round_of(of_lengths(*lengths))
    assert [list(numbers) for numbers in taken.by_rank] == wanted
    assert [document.tokens.size for document in taken.documents] == lengths[: sum(map(len, wanted))]


def step(queue, ranks, target, at_most=None, **options):
    """Numbers of the documents of a step that ends at a number of them."""
    packing = Packing(ranks, rows=2, row_length=4, vocab_size=999, pad_id=0, **options)
    collected = DocumentSchedule(target).collect([queue.rounds(packing, at_most)], padding=packing.padding())
    numbers = [int(document.tokens[1]) - 4 for (each,) in collected.micro_batches for document in each.documents]
    return numbers, collected.exhausted


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_step_may_end_at_any_document_on_any_number_of_ranks(ranks):
    """Three ranks with two rows each take six documents a round: the last round has no document of the next step."""
    queue = DocumentQueue(documents(27))
    found = [step(queue, ranks, 10, at_most=10, share_rows=False) for _ in range(3)]
    assert found == [([*range(10)], False), ([*range(10, 20)], False), ([*range(20, 27)], True)]
    assert step(queue, ranks, 10, at_most=10, share_rows=False) == ([], True)


@pytest.mark.parametrize("ranks, steps", [(1, [12, 12, 3]), (2, [16, 11])])
def test_or_with_the_micro_batch_that_reaches_the_number(ranks, steps):
    queue, found = DocumentQueue(documents(27)), []
    while not queue.lacks(0):
        found += [step(queue, ranks, 10)[0]]
    assert [len(each) for each in found] == steps and sum(found, []) == [*range(27)]


def test_a_queue_lacks_documents_below_a_number():
    queue = DocumentQueue(documents(1))
    queue.add(documents(2))
    assert [queue.lacks(number) for number in (0, 3, 4)] == [False, False, True] and DocumentQueue().lacks(0)


@pytest.mark.bad_input
def test_an_id_outside_of_the_vocabulary_is_named_where_it_is_packed():
    packing = Packing(2, rows=1, row_length=8, vocab_size=10, pad_id=0)
    good, bad = (Document.of_completion([3], ids, [0.0, 0.0], advantages=1.0) for ids in ([9, 5], [10, 9]))
    packing.rounds([good] * 4)
    message = r"^documents: expected token ids in \[0, 10\), got 10 in document 3 of a micro-batch, position 1$"
    with pytest.raises(ValueError, match=message):
        packing.rounds([good, good, good, bad])
    # Numbers are those within its round: the first has room for four documents.
    with pytest.raises(ValueError, match=message.replace("document 3", "document 1")):
        packing.rounds([good] * 5 + [bad])


def test_a_round_is_made_into_arrays_for_the_ranks_that_ask():
    packing = Packing(2, rows=2, row_length=4, vocab_size=999, pad_id=2)
    (taken,) = packing.rounds(documents(5))
    assert (taken.num_documents, taken.num_tokens, taken.shape) == (5, 10, (2, 2, 4))
    first = taken.micro_batch(1)
    assert first.tokens.tolist() == [[3, 5, 3, 7], [2, 2, 2, 2]]
    assert taken.micro_batch(1).tokens is first.tokens and list(taken._made) == [1]
    assert set(first.per_token) == {"old_log_probs", "advantages"}


@pytest.mark.parametrize("share_rows", [True, False])
def test_values_at_labels_are_those_of_each_document(share_rows):
    """By the masks of the arrays, which are written by other lines."""
    lengths = [(4, 1), (3, 3), (2, 0), (5, 2), (1, 0), (4, 2), (3, 1)]
    made = [Document.of_completion(np.arange(3, 3 + p), np.arange(3 + p, 3 + n), np.zeros(n - p)) for n, p in lengths]
    (taken,) = Packing(2, rows=4, row_length=6, vocab_size=99, pad_id=0, share_rows=share_rows).rounds(made)
    assert [document.tokens.size for document in taken.documents] == [n for n, _ in lengths]
    batch = stacked(taken)
    places = np.arange(batch.mask.size).reshape(batch.mask.shape)
    found = taken.at_labels(places)
    assert sorted(np.concatenate(found).tolist()) == places[batch.mask].tolist()
    for number, (document, held) in enumerate(zip(taken.documents, found, strict=True)):
        assert held.shape == document.sampler_log_probs.shape, number
        assert batch.targets.ravel()[held].tolist() == document.tokens[document.labels].tolist()


@pytest.mark.bad_input
def test_other_columns_are_refused_whichever_rank_has_them():
    packing = Packing(2, rows=1, row_length=4, vocab_size=9, pad_id=0, columns=("lse",))
    with pytest.raises(ValueError, match=r"^documents: expected columns \['lse'\], got \[\] of document 0$"):
        packing.rounds(documents(2))


def test_queued_documents_come_back_with_their_columns_and_support():
    columns, support = {"ref_log_probs": np.float32([-0.1, -1 / 3])}, Support.from_lists([[4, 8], [5]])
    given = {"advantages": 1.0, "columns": columns, "support": support}
    document = Document.of_completion([3], [4, 5], np.float32([-2 / 3, -1.0]), **given)
    packing = Packing(1, rows=1, row_length=4, vocab_size=9, pad_id=0, columns=("ref_log_probs",), support_capacity=4)
    # Of no label, as where a truncated completion is masked, and so of no id.
    none = {"columns": {"ref_log_probs": np.float32([])}, "support": support.part(0, 0)}
    queue = DocumentQueue([document, Document.of_completion([3], [], [], **none)])
    other = DocumentQueue.from_json(json.loads(json.dumps(queue.to_json())))
    kept = other.documents[0].support
    assert (kept.ids.tolist(), kept.counts.tolist()) == ([4, 8, 5], [2, 1])
    assert other.documents[1].support.ids.shape == other.documents[1].support.counts.shape == (0,)
    before, after = (next(each.rounds(packing)).micro_batch(0) for each in (queue, other))
    np.testing.assert_array_equal(before.per_token["ref_log_probs"], after.per_token["ref_log_probs"])
    assert after.per_token["ref_log_probs"][0, :2].tolist() == columns["ref_log_probs"].tolist()


NUMBERS = {
    "numpy": (np.float32(-0.3), np.float32(2.5), np.int64(7)),
    "jax": (jnp.float32(-0.3), jnp.float32(2.5), jnp.int32(7)),
    "of each label": (jnp.float32([-0.3, 0.1]), 2.5, [np.int64(7), np.int64(8)]),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_queued_documents_keep_numbers_of_numpy_and_jax(kind):
    """A source that indexes an array of advantages gives such numbers."""
    advantages, reward, versions = NUMBERS[kind]
    given = {"advantages": advantages, "reward": reward, "versions": versions}
    given["old_log_probs"] = np.float32([-2 / 3, -1 / 3])
    # Of certain tokens fp32 may give a little more than 0, which is allowed there and not in fp64.
    sampled = np.float32([5e-6, -1 / 7])
    (queued,) = DocumentQueue([Document.of_completion([3], [4, 5], sampled, **given)]).to_json()
    (document,) = DocumentQueue.from_json([json.loads(json.dumps(queued))]).documents
    given["sampler_log_probs"] = sampled
    assert document.sampler_log_probs.dtype == document.old_log_probs.dtype == np.float32
    for name, value in given.items():
        np.testing.assert_array_equal(np.float32(getattr(document, name)), np.float32(value), err_msg=name)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_queued_log_probs_keep_their_dtype_and_with_it_what_is_allowed_above_0(dtype):
    given = dtype([1e-3 if dtype == np.float16 else 1e-15, -1 / 7])
    queued = DocumentQueue([Document.of_completion([3], [4, 5], given, old_log_probs=given)]).to_json()
    (document,) = DocumentQueue.from_json(json.loads(json.dumps(queued))).documents
    for found in (document.sampler_log_probs, document.old_log_probs):
        assert found.dtype == dtype and found.tolist() == given.tolist()


class Counting:
    """A source of six numbered documents a call."""

    calls = 0

    def next(self, policy):
        self.calls += 1
        return Experience(tuple(documents(6, 6 * (self.calls - 1))), RolloutMetrics(groups=2))

    def state(self):
        return {"calls": self.calls}

    def restore(self, state):
        self.calls = state["calls"]


def feed(number=4, source=None, **options):
    packing = Packing(1, rows=2, row_length=4, vocab_size=999, pad_id=0)
    options = {"exact": True, "rescore": False, "epochs": 3, "seed": 5} | options
    return DocumentFeed(source or Counting(), packing, number, **options)


def numbers_of(taken):
    return [int(document.tokens[1]) - 4 for document in taken.documents]


def test_several_passes_over_a_rollout_have_orders_of_their_own_and_resume():
    """Three passes over six documents a rollout, in steps of four."""
    whole = feed()
    steps = [numbers_of(whole.take(None)) for _ in range(9)]
    passes = np.reshape(steps, (6, 6))
    assert [sorted(each) for each in passes.tolist()] == [list(range(6))] * 3 + [list(range(6, 12))] * 3
    assert len({tuple(each % 6) for each in passes}) == 6, "each pass is in an order of its own"
    assert numbers_of(feed(seed=6).take(None)) != steps[0], "and each seed"
    assert sorted(numbers_of(feed(12, epochs=2).take(None))) == sorted([*range(6)] * 2)
    for stop in (1, 4, 5):
        begun, resumed = feed(), feed()
        for _ in range(stop):
            begun.take(None)
        resumed.restore(json.loads(json.dumps(begun.state())))
        assert [numbers_of(resumed.take(None)) for _ in range(9 - stop)] == steps[stop:]


def test_an_order_is_that_of_its_seed_and_pass_also_where_one_goes_back():
    """As a call that fails does. Other numbers would be another run for what was begun before."""
    order, wanted = EpochOrder(6, 5), [3, 2, 4, 5, 0, 1, 2, 0, 1, 5, 4, 3]
    for _ in range(2):
        assert [order[position] for position in range(12)] == wanted
    assert [EpochOrder(6, 6)[position] for position in range(6)] == [3, 0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    ("number", "exact", "wanted"), [(3, True, 3), (3, False, 4), (8, True, 8), (9, False, 12), (0, True, 6)]
)
def test_a_step_ends_at_the_number_or_with_its_micro_batch(number, exact, wanted):
    """A micro-batch has room for four documents, a rollout has six; what was drawn for the step is counted."""
    taken = feed(number, exact=exact, epochs=1).take(None)
    assert numbers_of(taken) == list(range(wanted)) and taken.counts.groups == (2 if number < 6 else 4)


class Failing(Counting):
    """Its second call fails, and then no other does."""

    def __init__(self, failure):
        self.failure = failure

    def next(self, policy):
        experience, failure = super().next(policy), self.failure
        if self.calls == 2 and failure is not None:
            self.failure = None
            if isinstance(failure, Refusal):
                return Experience((), RolloutMetrics(groups=1), failure)
            raise failure
        return experience


@pytest.mark.parametrize("failure", [RewardFailed("broken"), SourceFailed("broken"), TaskFailed("broken")], ids=repr)
def test_a_call_that_fails_has_taken_nothing_of_the_data(failure):
    broken = feed(20, Failing(failure))
    before = broken.state()
    with pytest.raises(type(failure), match="^broken$"):
        broken.take(None)
    assert broken.state() == before
    assert numbers_of(broken.take(None)) == numbers_of(feed(20).take(None))


def test_a_refused_rollout_refuses_its_step_and_what_waits_is_kept():
    refused = feed(10, Failing(Refusal("not finite")), epochs=1)
    taken = refused.take(None)
    assert (taken.documents, taken.refusal, taken.counts.groups) == ((), Refusal("not finite"), 3)
    assert numbers_of(refused.take(None)) == [*range(6), *range(12, 16)]


class Scoring:
    """A policy whose old log-probs, minus the last token, are finite at the second call."""

    calls = 0

    def log_probs(self, given):
        self.calls += 1
        if self.calls == 1:
            raise NotFinite(Refusal("log-probs not finite"))
        return [np.float32([-each.tokens[1]]) for each in given]


class WithOldLogProbs(Counting):
    """Every second document brings old log-probs."""

    def next(self, policy):
        experience = super().next(policy)
        given = [dataclasses.replace(each, old_log_probs=np.float32([-0.5])) for each in experience.documents[::2]]
        pairs = zip(given, experience.documents[1::2], strict=True)
        return dataclasses.replace(experience, documents=tuple(each for pair in pairs for each in pair))


def test_old_log_probs_are_the_policys_where_it_scores_and_refuse_a_step_where_they_are_not_finite():
    scored, policy = feed(6, rescore=True, epochs=1), Scoring()
    refused = scored.take(policy)
    assert (refused.refusal, refused.counts.groups) == (Refusal("log-probs not finite"), 2)
    taken = scored.take(policy)
    assert numbers_of(taken) == list(range(6, 12))
    assert [each.old_log_probs.tolist() for each in taken.documents] == [[-4.0 - number] for number in range(6, 12)]
    own = feed(6, WithOldLogProbs(), rescore=True, epochs=1).take(policy)
    assert [each.old_log_probs.tolist() for each in own.documents] == [[-0.5], [-5.0], [-0.5], [-7.0], [-0.5], [-9.0]]
