"""Documents dealt to data ranks: in turn, in blocks, and one whole rollout per step on any number of ranks."""

import json

import numpy as np
import pytest

from experiments.sampling.packing import Packing
from experiments.sampling.stream import RoundStream
from jaxlogp import Document, DocumentSchedule
from tests.experiments.stacked import stacked


def documents(count, first=0):
    return [Document.of_completion([3], [4 + first + i], [0.0], advantages=1.0) for i in range(count)]


@pytest.mark.parametrize(
    "count, ranks, block, wanted",
    [
        (5, 1, 1, [[0, 1, 2, 3, 4]]),
        (5, 2, 1, [[0, 2, 4], [1, 3]]),
        (7, 2, 3, [[0, 1, 2, 6], [3, 4, 5]]),
        (2, 3, 4, [[0, 1], [], []]),
        (0, 2, 1, [[], []]),
    ],
)
def test_blocks_are_dealt_in_turn(count, ranks, block, wanted):
    packing = Packing(ranks, rows=2, row_length=4, vocab_size=999, pad_id=0, consecutive=block)
    assert [list(queue) for queue in packing.deal(range(count))] == wanted


def stream_of(rollouts, ranks, **options):
    waiting = [documents(count, first=100 * i) for i, count in enumerate(rollouts)]
    packing = Packing(ranks, rows=2, row_length=4, vocab_size=999, pad_id=0, **options)
    return RoundStream(lambda: waiting.pop(0) if waiting else [], packing), packing


def step(source, target):
    stream, packing = source
    collected = DocumentSchedule(docs_per_step=target).collect([stream], padding=packing.padding())
    found = [int(document.tokens[1]) - 4 for (each,) in collected.micro_batches for document in each.documents]
    return sorted(found), collected.exhausted


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_step_of_one_rollout_holds_this_rollout_on_any_number_of_ranks(ranks):
    """Three ranks with two rows each take six documents a round: nothing of the next rollout may fill the last round."""
    streams = stream_of([10, 10], ranks, consecutive=2, share_rows=False)
    assert step(streams, 10) == (list(range(10)), False)
    assert step(streams, 10) == ([100 + i for i in range(10)], False)
    assert step(streams, 10) == ([], True)


def test_the_end_of_the_data_ends_every_rank():
    streams = stream_of([3], 4, consecutive=1, share_rows=False)
    assert step(streams, 100) == ([0, 1, 2], True)


@pytest.mark.bad_input
def test_an_id_outside_of_the_vocabulary_is_named_where_it_is_packed():
    packing = Packing(2, rows=1, row_length=8, vocab_size=10, pad_id=0)
    good, bad = (Document.of_completion([3], [token, 5], [0.0, 0.0], advantages=1.0) for token in (9, 10))
    packing.rounds([good] * 4)
    message = r"^documents: expected token ids in \[0, 10\), got 10 in document 1 of a micro-batch, position 1$"
    with pytest.raises(ValueError, match=message):
        packing.rounds([good, good, good, bad])


def test_a_round_is_made_into_arrays_for_the_ranks_that_ask():
    packing = Packing(2, rows=2, row_length=4, vocab_size=999, pad_id=0)
    (taken,) = packing.rounds(documents(5))
    assert (taken.num_documents, taken.num_tokens, taken.shape) == (5, 10, (2, 2, 4))
    first = taken.micro_batch(1)
    assert first.tokens.tolist() == [[3, 5, 3, 7], [0, 0, 0, 0]]
    assert taken.micro_batch(1).tokens is first.tokens and list(taken._made) == [1]
    assert set(taken.leaving_out(["advantages"]).micro_batch(1).per_token) == {"old_log_probs"}
    assert set(first.per_token) == {"old_log_probs", "advantages"}


@pytest.mark.parametrize("share_rows", [True, False])
def test_values_at_labels_are_those_of_each_document(share_rows):
    """By the masks of the arrays, which are written by other lines."""
    lengths = [(4, 1), (3, 3), (2, 0), (5, 2), (1, 0), (4, 2), (3, 1)]
    made = [Document.of_completion(np.arange(3, 3 + p), np.arange(3 + p, 3 + n), np.zeros(n - p)) for n, p in lengths]
    (taken,) = Packing(2, rows=4, row_length=6, vocab_size=99, pad_id=0, share_rows=share_rows).rounds(made)
    assert [document.tokens.size for document in taken.documents] == [4, 2, 1, 3, 3, 5, 4]
    batch = stacked(taken)
    places = np.arange(batch.mask.size).reshape(batch.mask.shape)
    found = taken.at_labels(places)
    assert np.concatenate(found).tolist() == places[batch.mask].tolist()
    for number, (document, held) in enumerate(zip(taken.documents, found, strict=True)):
        assert held.shape == document.sampler_log_probs.shape, number
        assert batch.targets.ravel()[held].tolist() == document.tokens[document.labels].tolist()


@pytest.mark.bad_input
def test_other_columns_are_refused_whichever_rank_has_them():
    packing = Packing(2, rows=1, row_length=4, vocab_size=9, pad_id=0, columns=("lse",))
    with pytest.raises(ValueError, match=r"^documents: expected columns \['lse'\], got \[\] of document 0$"):
        packing.rounds(documents(2))


def test_queued_documents_come_back_with_their_columns():
    columns = {"ref_log_probs": np.float32([-0.1, -1 / 3])}
    document = Document.of_completion(
        np.int32([3]), np.int32([4, 5]), np.float32([-2 / 3, -1.0]), advantages=1.0, columns=columns
    )
    packing = Packing(1, rows=1, row_length=4, vocab_size=9, pad_id=0, columns=("ref_log_probs",))
    stream, other = (RoundStream(lambda: [], packing) for _ in range(2))
    stream.queues[0].append(document)
    other.restore(json.loads(json.dumps(stream.queued())))
    before, after = (next(each).micro_batch(0) for each in (stream, other))
    np.testing.assert_array_equal(before.per_token["ref_log_probs"], after.per_token["ref_log_probs"])
    assert after.per_token["ref_log_probs"][0, :2].tolist() == columns["ref_log_probs"].tolist()
