"""Documents dealt to data ranks: in turn, in blocks, and a whole rollout a step on any number of ranks."""

import numpy as np
import pytest

from experiments.sampling.rollout import RolloutStreams, deal
from jaxlogp import Document, DocumentSchedule


def documents(count, first=0):
    return [Document(np.array([3, 4 + first + i]), 1, np.zeros(1), 1.0) for i in range(count)]


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
    assert deal(list(range(count)), ranks, block) == wanted


def stream_of(rollouts, ranks, **options):
    waiting = [documents(count, first=100 * i) for i, count in enumerate(rollouts)]
    return RolloutStreams(lambda: waiting.pop(0) if waiting else [], ranks, rows=2, row_length=4, pad_id=0, **options)


def step(streams, target):
    collected = DocumentSchedule(docs_per_step=target).collect(streams.streams(), padding=streams.padding())
    found = [
        int(batch.tokens[row, 1]) - 4
        for ranks in collected.micro_batches
        for batch in ranks
        for row in range(int(batch.num_documents))
    ]
    return sorted(found), collected.exhausted


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_step_of_one_rollout_holds_this_rollout_on_any_number_of_ranks(ranks):
    """Three ranks with two rows each take six documents a round: nothing of the next rollout may fill the last round."""
    streams = stream_of([10, 10], ranks, block=2, share_rows=False)
    assert step(streams, 10) == (list(range(10)), False)
    assert step(streams, 10) == ([100 + i for i in range(10)], False)
    assert step(streams, 10) == ([], True)


def test_the_end_of_the_data_ends_every_rank():
    streams = stream_of([3], 4, block=1, share_rows=False)
    assert step(streams, 100) == ([0, 1, 2], True)
