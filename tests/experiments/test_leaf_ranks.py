"""Ranks of one process: what runs on them side by side."""

import threading

import jax
import jax.numpy as jnp
import pytest

from experiments.invariant.leaf_ranks import LeafRanks
from experiments.models.mesh import MeshSpec, make_mesh

WAIT_SECONDS = 10


class Visits:
    """A function of a rank that, after a first visit of each, returns when all ranks are in it."""

    def __init__(self, count):
        self._first, self._together = [], threading.Barrier(count)
        self._count = count

    def of(self, rank, number):
        if len(self._first) < self._count:
            self._first.append(rank)
            return self._first.copy()
        self._together.wait(WAIT_SECONDS)
        return rank, number


def test_ranks_run_in_turns_once_and_then_side_by_side():
    ranks = LeafRanks(make_mesh(MeshSpec(data=3, tensor=2)))
    visits = Visits(3)
    assert ranks.side_by_side(visits.of, range(3), range(3)) == [[0], [0, 1], [0, 1, 2]]
    for _ in range(2):
        assert ranks.side_by_side(visits.of, range(3), [7, 8, 9]) == [(0, 7), (1, 8), (2, 9)]


def test_ranks_multiply_as_their_caller_does():
    ranks = LeafRanks(make_mesh(MeshSpec(data=2)))

    def precision(x):
        return str(jax.make_jaxpr(lambda x: x @ x)(x))

    square = jnp.ones((2, 2))
    with jax.default_matmul_precision("highest"):
        wanted, found = precision(square), [ranks.side_by_side(precision, [square] * 2) for _ in range(2)]
    assert "HIGHEST" in wanted and found == [[wanted, wanted]] * 2


def test_what_one_rank_raises_ends_the_call():
    ranks = LeafRanks(make_mesh(MeshSpec(data=2)))

    def fails(rank):
        if rank == 1:
            raise RuntimeError("no memory left")
        return rank

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory left"):
            ranks.side_by_side(fails, range(2))
