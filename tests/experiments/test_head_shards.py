"""A head whose shards begin elsewhere than those of its parameter: what the ranks exchange, and what a step gives."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.models.layers import named_axes
from experiments.models.mesh import make_mesh, parse_mesh
from experiments.sampling.stream import Packing
from experiments.training.micro_batch_sums import MicroBatchSums
from experiments.training.objectives import CrossEntropy
from jaxlogp import Document, HeadSpec, VocabShards

# A table of 480 rows a rank where the head wants 512, 512, 512 and 384.
VOCAB, HIDDEN, WIDTH = 1920, 16, 512


class Waves(nnx.Module):
    """Hidden states that are functions of the token alone, and a head."""

    def __init__(self) -> None:
        weight = jax.random.normal(jax.random.key(0), (VOCAB, HIDDEN))
        self.weight = nnx.Param(weight, **named_axes("vocab", "embed"))
        self.phase = nnx.Param(jnp.linspace(0.0, 3.0, HIDDEN))

    def hidden_states(self, tokens, positions, segment_ids):
        return jnp.sin(tokens[..., None].astype(jnp.float32) / 7.0 + self.phase[...])

    def head(self):
        return HeadSpec(), self.weight[...]


def batch(ranks):
    """Four rows, whatever the number of ranks; labels on both sides of every edge of either cut."""
    edges = [edge + side for edge in (480, 512, 960, 1024, 1440, 1536) for side in (-1, 0)]
    tokens = np.array([[0, *edges, VOCAB - 1]] * 4, np.int32) - np.arange(4)[:, None]
    documents = [Document(row % VOCAB, 1, np.zeros(len(row) - 1, np.float32), 1.0) for row in tokens.astype(np.int32)]
    (made,) = Packing(ranks, 4 // ranks, tokens.shape[1], VOCAB, 0, share_rows=False).rounds(documents)
    return made


def sums_on(mesh):
    mesh = make_mesh(parse_mesh(mesh))
    graph, params = nnx.split(Waves())
    made = MicroBatchSums(graph, mesh, CrossEntropy(), temperature=1.0, engine="chunked")
    return made, made.place(params)


def step(mesh):
    """Loss and gradients."""
    made, params = sums_on(mesh)
    ranks = parse_mesh(mesh).ranks
    found = made.sums_of(params, [batch(ranks)], 0).sums
    return float(found.loss.sum), jax.device_get(jax.tree.leaves(found.gradients))


@functools.cache
def single():
    return step("")


@pytest.mark.parametrize(
    "mesh", ["fsdp=2,tensor=4", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("tensor=8", "tensor=7"))]
)
def test_loss_and_gradients_are_those_of_one_device(mesh):
    # 7 ranks do not divide the table, which is whole on each of them.
    loss, gradients = step(mesh)
    wanted, wanted_gradients = single()
    # fp32 sums of 1920 exponentials a label and of 56 labels in another order.
    assert abs(loss / wanted - 1) < 1e-6
    for mine, one in zip(gradients, wanted_gradients, strict=True):
        assert np.linalg.norm(mine - one) < 1e-5 * np.linalg.norm(one)


def test_ranks_exchange_the_rows_between_the_two_cuts_and_nobody_holds_the_table():
    assert VocabShards.aligned(VOCAB, 4).widths == (WIDTH, WIDTH, WIDTH, VOCAB - 3 * WIDTH)
    made, params = sums_on("fsdp=2,tensor=4")
    text = made.compiled(params, batch(2)).as_text()
    # The most rows that a rank lacks, once on the way to the head and once back; features are split over fsdp before
    # and after, and gathered for the head.
    lacking = 3 * (WIDTH - VOCAB // 4)
    exchanged = re.findall(r"= f32\[(\d+),(\d+)\]\S* collective-permute\(", text)
    assert len(exchanged) == 2 and {int(rows) for rows, _ in exchanged} == {lacking}
    assert {int(features) for _, features in exchanged} <= {HIDDEN // 2, HIDDEN}
    assert not re.search(r"\[(1920|2048),", text), "an array of all rows"
    (gathered,) = re.findall(r"= f32\[(\d+),16\]\S* all-gather\(", text)
    assert int(gathered) <= WIDTH
