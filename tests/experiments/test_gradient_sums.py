"""Gradient sums over micro-batches in bf16, what does not depend on their dtype, and the head's gradient filter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.config import LossConfig
from experiments.learner.gradients import GspmdGradients
from experiments.learner.objectives import PolicyObjective
from experiments.learner.packing import Packing
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.models.mesh import MeshSpec, make_mesh
from jaxlogp import Document
from jaxlogp.losses import grpo
from tests import oracle

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
MODEL = DecoderConfig.qwen3(vocab_size=24, head_dim=8, **SIZES)


def rounds():
    """Five micro-batches of two rows."""
    rng = np.random.default_rng(0)
    documents = []
    for _ in range(20):
        tokens, advantage = rng.integers(0, 24, 8).astype(np.int32), float(rng.normal())
        old = np.full(5, -3.0, np.float32)
        documents.append(Document.of_completion(tokens[:3], tokens[3:], old, advantages=advantage))
    return Packing(1, 2, 16, 24, 0).rounds(documents)


@pytest.mark.slow
def test_bf16_sums_round_once_a_micro_batch_and_loss_and_counts_are_those_of_fp32_sums():
    mesh = make_mesh(MeshSpec())
    graph, params = nnx.split(Decoder(MODEL, rngs=nnx.Rngs(0), mesh=mesh))
    batches = rounds()
    assert len(batches) == 5
    totals, parts = {}, {}
    for dtype in ("float32", "bfloat16"):
        objective = PolicyObjective(grpo(), "basic")
        sums = GspmdGradients(graph, mesh, objective, temperature=1.0, engine="auto", accumulate=dtype)
        parts[dtype] = [sums.accumulate(params, [batch], 0).sums for batch in batches]
        totals[dtype] = sums.accumulate(params, batches, 0).sums
    wide, narrow = totals["float32"], totals["bfloat16"]
    assert int(wide.loss.count) == int(narrow.loss.count) == 20 * 5
    assert float(wide.loss.sum) == float(narrow.loss.sum)
    finished = wide.finish(), narrow.finish()
    jax.tree.map(np.testing.assert_array_equal, finished[0].metrics, finished[1].metrics)
    in_order = [[jax.tree.leaves(part.gradients) for part in parts[dtype]] for dtype in ("float32", "bfloat16")]
    for number, total in enumerate(jax.tree.leaves(narrow.gradients)):
        # bf16 + bf16 is exact in float64; adding rounds once, to the nearest number, of which NumPy's bf16 is another
        # implementation.
        mine = [np.asarray(leaves[number]) for leaves in in_order[1]]
        added = functools.reduce(lambda a, b: (a.astype(np.float64) + b.astype(np.float64)).astype(mine[0].dtype), mine)
        assert total.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(total), added)
        for part, exact in zip(mine, in_order[0], strict=True):
            # Half a unit in the last of eight bits.
            np.testing.assert_allclose(part.astype(np.float64), exact[number], rtol=2**-8, atol=1e-30)
    assert {leaf.dtype for leaf in jax.tree.leaves(finished[1].gradients)} == {jnp.dtype("float32")}


@pytest.mark.costly
def test_a_micro_batch_runs_beside_the_sums_of_those_before_alone(monkeypatch):
    mesh = make_mesh(MeshSpec())
    # No other array has the shape of this table.
    model = dataclasses.replace(MODEL, vocab_size=1201)
    graph, params = nnx.split(Decoder(model, rngs=nnx.Rngs(0), mesh=mesh))
    sums = GspmdGradients(graph, mesh, PolicyObjective(grpo(), "basic"), temperature=1.0, engine="auto")
    live, of_micro_batch = [], sums._sums

    def counted(*operands):
        live.append(sum(array.shape == (1201, 16) for array in jax.live_arrays()))
        return of_micro_batch(*operands)

    monkeypatch.setattr(sums, "_sums", counted)
    sums.accumulate(params, rounds(), 0)
    # The table itself, and its gradient once there is one.
    assert live == [1, 2, 2, 2, 2]


@pytest.mark.slow
def test_the_gradient_filter_leaves_out_blocks_of_the_heads_gradient():
    """Of four tiles of the vocabulary the first has all targets; no token of the untrained model has p >= 1/2."""
    mesh, tile = make_mesh(MeshSpec()), 256
    model = dataclasses.replace(MODEL, vocab_size=4 * tile, tie_embeddings=False)
    graph, params = nnx.split(Decoder(model, rngs=nnx.Rngs(0), mesh=mesh))

    def run(threshold):
        engine = LossConfig(gradient_filter=threshold).head_engine()
        sums = GspmdGradients(graph, mesh, PolicyObjective(grpo(), "basic"), temperature=1.0, engine=engine)
        gradients = sums.accumulate(params, rounds()[:1], 0).sums.gradients
        weight = np.asarray(gradients["lm_head"]["weight"][...])
        return sums.head_run, weight, np.asarray(gradients["embed_tokens"]["embedding"][...])

    plain, exact, _ = run(None)
    assert plain.gradient == "in one pass"
    runs, weights, embeddings = zip(*map(run, (0.0, 0.5)), strict=True)
    for each in runs:
        assert each.engine == "chunked" and each.reason.startswith("first of the sequence that can; hopper not used: ")
        assert each.gradient == "in two steps: its gradient filter needs the maxima of all tiles first"
    # Each is within 2e-5 of float64 (contract E).
    assert oracle.relative_error(weights[0], oracle.f64(exact)) < 4e-5
    assert np.abs(weights[0][tile:]).max(axis=1).all() and not weights[1][tile:].any()
    np.testing.assert_array_equal(weights[1][:tile], weights[0][:tile])
    assert (embeddings[0] != embeddings[1]).any(), "the hidden gradient lacks three tiles"
