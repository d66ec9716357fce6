"""What a process does on its host: the benchmark on a few small documents."""

import dataclasses

import pytest

from benchmarks import host_speed
from benchmarks.host_speed import HostSpeedConfig, rollouts_of, step

SMALL = HostSpeedConfig(
    ranks=(2, 4), ranks_per_process=2, documents=8, generations=4, tokens=9, rows=2, row_length=64, repeats=1
)


def test_the_table_has_every_number_of_ranks(capsys):
    result = host_speed.main(SMALL)
    assert list(result.seconds) == [2, 4]
    assert all(min(parts) > 0.0 for pair in result.seconds.values() for parts in pair)
    printed = capsys.readouterr().out
    assert result.markdown in printed and "| 4 | 32 |" in printed


def test_a_step_cuts_all_documents_into_rounds_and_makes_arrays_of_its_own_ranks_alone():
    rollouts, packing = rollouts_of(SMALL, 4)
    rounds = []
    plain = packing.rounds
    object.__setattr__(packing, "rounds", lambda documents: rounds.extend(plain(documents)) or rounds)
    with host_speed.as_first_of(2):
        step(rollouts, packing, 2)
    assert sum(each.num_documents for each in rounds) == 4 * 8
    assert {rank for each in rounds for rank in each._made} == {0, 1}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "change, words",
    [
        ({"ranks": (3,)}, "^ranks: expected multiples of the 2 ranks of a process, got 3"),
        ({"row_length": 20}, "^row_length: expected at least 25, a prompt and a completion, got 20"),
        ({"documents": 6}, "^documents: expected a multiple of 4 completions a prompt, got 6"),
        ({"repeats": 0}, "^options: expected numbers of at least 1, got 0"),
    ],
)
def test_sizes_that_cannot_be(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SMALL, **change)
