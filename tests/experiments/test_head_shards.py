"""A head whose shards begin elsewhere than those of its parameter: what the ranks exchange, and what a step gives."""

import functools
import re

import jax
import numpy as np
import pytest

from experiments.models.mesh import parse_mesh
from jaxlogp import VocabShards
from tests.experiments.waves import HIDDEN, VOCAB, batch, sums_on
from tests.oracle import fp32_bound

WIDTH = 512


def step(mesh):
    """Loss and gradients."""
    made, params = sums_on(mesh)
    ranks = parse_mesh(mesh).ranks
    found = made.accumulate(params, [batch(ranks)], 0).sums
    return float(found.loss.sum), jax.device_get(jax.tree.leaves(found.gradients))


@functools.cache
def single():
    return step("")


@pytest.mark.parametrize(
    "mesh", ["fsdp=2,tensor=4", *(pytest.param(f"tensor={n}", marks=pytest.mark.slow) for n in (8, 7))]
)
def test_loss_and_gradients_are_those_of_one_device(mesh):
    # 7 ranks do not divide the table's rows: it is split by features.
    loss, gradients = step(mesh)
    wanted, wanted_gradients = single()
    # Of 52 labels: two logits, of 28 products with Σ|h w| < 28, and the sum of 1920 exponentials, in another order.
    bound = 2 * fp32_bound(28.0, HIDDEN) + fp32_bound(1.0, VOCAB)
    assert abs(loss - wanted) < 52 * bound + fp32_bound(wanted, 52)
    for mine, one in zip(gradients, wanted_gradients, strict=True):
        assert np.linalg.norm(mine - one) < 1e-5 * np.linalg.norm(one)


def test_ranks_exchange_the_rows_between_the_two_cuts_and_nobody_holds_the_table():
    assert VocabShards.aligned(VOCAB, 4).widths == (WIDTH, WIDTH, WIDTH, VOCAB - 3 * WIDTH)
    made, params = sums_on("fsdp=2,tensor=4")
    text = made.lower(params, batch(2))().programs[0].compiled.as_text()
    # The most rows that a rank lacks, once on the way to the head and once back; features are split over fsdp before
    # and after, and gathered for the head.
    lacking = 3 * (WIDTH - VOCAB // 4)
    exchanged = re.findall(r"= f32\[(\d+),(\d+)\]\S* collective-permute\(", text)
    assert len(exchanged) == 2 and {int(rows) for rows, _ in exchanged} == {lacking}
    assert {int(features) for _, features in exchanged} <= {HIDDEN // 2, HIDDEN}
    assert not re.search(r"\[(1920|2048),", text), "an array of all rows"
    (gathered,) = re.findall(rf"= f32\[(\d+),{HIDDEN}\]\S* all-gather\(", text)
    assert int(gathered) <= WIDTH
