"""The token drawn from given logits and a given uniform number, and its log-probs, against float64."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.models.mesh import TENSOR_AXIS, MeshSpec, make_mesh, row_axes
from experiments.sampling.options import SamplingOptions
from experiments.sampling.sample_token import BLOCK, sample_token
from tests.oracle import fp32_bound

ROWS = 64
# Called without jit it would be a program for each of its operations.
drawn = jax.jit(sample_token, static_argnums=2)


def drawn_by(temperature=1.0, **options):
    return SamplingOptions(1, temperature, **options)


@functools.cache
def keys():
    return jax.random.split(jax.random.key(1), ROWS)


@functools.cache
def uniform():
    """The number between 0 and 1 that each key gives."""
    return np.asarray(jax.vmap(jax.random.uniform)(keys()), np.float64)


def logits_of(vocab):
    return (np.random.default_rng(vocab).normal(size=(ROWS, vocab)) * 3).astype(np.float32)


def allowed(scaled, options):
    """Which entries of float64 logits may be drawn, by sorting."""
    keep = np.ones_like(scaled, bool)
    order = np.argsort(-scaled, axis=1, kind="stable")
    rank = np.argsort(order, axis=1)
    if options.top_k is not None:
        keep &= rank < options.top_k
    if options.top_p < 1.0:
        weights = np.where(keep, np.exp(scaled - scaled.max(1, keepdims=True)), 0.0)
        in_order = np.take_along_axis(weights / weights.sum(1, keepdims=True), order, axis=1)
        # The sum of the likelier ones is not enough yet; a rounding of fp32 sums decides nothing here.
        before = np.cumsum(in_order, axis=1) - in_order
        assert np.abs(before - options.top_p).min() > fp32_bound(1.0, int(keep.sum(axis=1).max()))
        keep &= np.take_along_axis(before < options.top_p, rank, axis=1)
    return keep & (scaled >= scaled.max(1, keepdims=True) + np.log(max(options.min_p, 1e-300)))


def probabilities(scaled, keep):
    weights = np.where(keep, np.exp(scaled - scaled.max(1, keepdims=True)), 0.0)
    return weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize("vocab", [1, 5, BLOCK, 2 * BLOCK + 88])
@pytest.mark.parametrize(
    "options",
    [
        drawn_by(),
        drawn_by(0.7),
        drawn_by(top_k=3),
        drawn_by(top_p=0.6),
        drawn_by(min_p=0.1),
        drawn_by(0.9, top_k=20, top_p=0.9, min_p=0.01),
    ],
    ids=str,
)
def test_the_token_is_where_the_cumulative_probability_exceeds_the_uniform_number(vocab, options):
    sampled = drawn(logits_of(vocab), keys(), options)
    scaled = logits_of(vocab).astype(np.float64) / options.temperature
    drawn_from = probabilities(scaled, allowed(scaled, options))
    rows, tokens = np.arange(ROWS), np.asarray(sampled.tokens)
    np.testing.assert_array_equal(tokens, (np.cumsum(drawn_from, axis=1) > uniform()[:, None]).argmax(axis=1))
    # Scaled logits are below 16: their rounding, and that of a difference of two of them.
    tolerance = {"atol": 2 * 16 * 2**-24, "rtol": 0}
    whole = probabilities(scaled, np.ones_like(scaled, bool))
    np.testing.assert_allclose(sampled.log_probs, np.log(whole[rows, tokens]), **tolerance)
    if options.filters:
        room = np.full(ROWS, vocab, np.int32)
        recorded = drawn(logits_of(vocab), keys(), options, room)
        np.testing.assert_allclose(recorded.log_probs, np.log(drawn_from[rows, tokens]), **tolerance)


@pytest.mark.parametrize("vocab", [8 * BLOCK, 2 * BLOCK + 88, pytest.param(4 * BLOCK + 4, marks=pytest.mark.costly)])
@pytest.mark.parametrize(
    "spec",
    [
        MeshSpec(tensor=2),
        *(pytest.param(spec, marks=pytest.mark.costly) for spec in (MeshSpec(data=2, tensor=4), MeshSpec(tensor=8))),
    ],
    ids=str,
)
def test_ranks_that_split_the_vocabulary_draw_the_token_of_one_device(vocab, spec):
    """Also where none of their blocks is whole, or a rank has nothing that may be drawn, or cannot have an equal part."""
    mesh, logits = make_mesh(spec), logits_of(vocab)
    axes = P(row_axes(mesh), TENSOR_AXIS if vocab % spec.tensor == 0 else None)
    split = jax.device_put(logits, NamedSharding(mesh, axes))
    for options in (drawn_by(), drawn_by(top_k=2)):
        draw = functools.partial(sample_token, options=options)
        one, many = jax.jit(draw)(logits, keys()), jax.jit(functools.partial(draw, mesh=mesh))(split, keys())
        np.testing.assert_array_equal(one.tokens, many.tokens)
        # Sums of weights up to 1 in another order, and a difference of logits below 16.
        np.testing.assert_allclose(one.log_probs, many.log_probs, atol=2 * 16 * 2**-24 + fp32_bound(1.0, vocab), rtol=0)


def test_greedy_takes_the_lowest_of_the_likeliest_and_ties_at_a_threshold_stay():
    logits = np.float32([[1.0, 3.0, 3.0, 0.0]])
    greedy = drawn(logits, keys()[:1], drawn_by(greedy=True))
    assert int(greedy.tokens[0]) == 1
    tied = drawn(np.repeat(logits, ROWS, axis=0), keys(), drawn_by(top_k=1), np.full(ROWS, 4, np.int32))
    assert set(np.asarray(tied.tokens).tolist()) == {1, 2}
    np.testing.assert_allclose(tied.log_probs, np.log(0.5), atol=1e-6)  # one log


def test_tokens_of_no_weight_are_never_drawn():
    logits = np.full((ROWS, 3 * BLOCK), -np.inf, np.float32)
    logits[:, [7, BLOCK + 1]] = 0.0
    assert set(np.asarray(drawn(logits, keys(), drawn_by()).tokens).tolist()) == {7, BLOCK + 1}


def test_logits_that_are_not_numbers_give_log_probs_that_are_none():
    logits = np.float32([[0.0, 0.0, np.nan, 0.0]])
    assert np.isnan(drawn(logits, keys()[:1], drawn_by()).log_probs).all()
