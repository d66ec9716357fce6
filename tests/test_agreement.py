"""Vocabulary shards with different tokens: refused by type, or NaN on all shards, never a number."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlogp import embedding_lookup, linear_log_probs, linear_policy_loss, log_probs_from_logits
from jaxlogp._agreement import counters, id_codes, same_ids
from jaxlogp.head import ChunkedEngine, FixedOrderEngine
from jaxlogp.head.fold import finish_sums, spoiled_together, sum_shards, sum_tiles
from jaxlogp.invariance import ReductionOrder, nan_unless_equal
from tests import oracle

pytestmark = pytest.mark.costly

# fp32 on the same inputs against float64 (contract), as in test_head_sharded.
VALUE_ERROR = 1e-5
VOCAB, HIDDEN, TOKENS = 264, 16, 12


def tensor_mesh(size):
    return jax.make_mesh((size,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])


def from_logits(hidden, weight, targets, mask):
    logits = hidden @ weight.T
    return log_probs_from_logits(logits, targets, mask=mask, with_entropy=True, axis_name="tensor")


def from_head(engine):
    def run(hidden, weight, targets, mask):
        options = {"with_entropy": True, "axis_name": "tensor", "engine": engine}
        return linear_log_probs(hidden, weight, targets, mask=mask, **options)

    return run


def from_one_pass(hidden, weight, targets, mask):
    old, advantages = jnp.zeros(TOKENS), jnp.ones(TOKENS)
    options = {"with_entropy": True, "axis_name": "tensor", "engine": ChunkedEngine(token_chunk=5)}
    return linear_policy_loss(hidden, weight, targets, old, advantages, mask, **options)


PATHS = {
    "logits": from_logits,
    "chunked": from_head(ChunkedEngine(token_chunk=5, vocab_tile=20)),
    "reference": from_head("reference"),
    "one pass": from_one_pass,
    "fixed_order": from_head(FixedOrderEngine(ReductionOrder(granules=8))),
}


@functools.cache
def data():
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(TOKENS, HIDDEN)), jnp.float32),
        jnp.asarray(rng.normal(size=(VOCAB, HIDDEN)), jnp.float32),
        rng.integers(0, VOCAB, TOKENS).astype(np.int32),
        np.arange(TOKENS) % 5 != 4,
    )


@functools.cache
def program_apart(path, size, gathered):
    def local(hidden, weight, targets, mask):
        if gathered:
            targets, mask = (jax.lax.all_gather(x[0], "tensor")[0] for x in (targets, mask))
        else:
            targets, mask = targets[0], mask[0]

        def total(hidden):
            result = PATHS[path](hidden, weight, targets, mask)
            if path == "one pass":
                return result[0].sum, result[1]
            return jnp.sum(result.log_probs) + jnp.sum(result.entropy), result

        if path == "fixed_order":
            # Its gradient needs a mask that is the same by its type; see below.
            gradient, result = jnp.zeros_like(hidden), total(hidden)[1]
        else:
            gradient, result = jax.grad(total, has_aux=True)(hidden)
        return result.log_probs[None], result.entropy[None], gradient

    specs = P(), P("tensor"), P("tensor"), P("tensor")
    outs = P("tensor"), P("tensor"), P()
    return jax.jit(jax.shard_map(local, mesh=tensor_mesh(size), in_specs=specs, out_specs=outs))


def run_apart(path, targets, masks, gathered=False):
    """Each rank has its own row of targets and masks; (log-probs, entropies), a row each rank, and d hidden."""
    run = program_apart(path, len(targets), gathered)
    return [np.asarray(x) for x in run(*data()[:2], jnp.asarray(targets), jnp.asarray(masks))]


def rows(size):
    _, _, targets, mask = data()
    return np.tile(targets, (size, 1)), np.tile(mask, (size, 1))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_targets_that_differ_are_nan_on_every_shard(path, size):
    targets, masks = rows(size)
    # Of one rank; the mean of both ends on a rank in between, whose own id is the mean; and of a masked token.
    targets[size - 1, 1] += 1 if targets[size - 1, 1] + 1 < VOCAB else -1
    targets[:, 3] = np.linspace(10, 20, size).astype(np.int32)
    targets[0, 4] = -100
    differ = np.isin(np.arange(TOKENS), (1, 3))
    log_probs, entropy, gradient = run_apart(path, targets, masks)
    assert np.isnan(log_probs[:, differ]).all() and np.isnan(entropy[:, differ]).all()
    assert path == "fixed_order" or np.isnan(gradient[differ]).any(axis=-1).all()
    hidden, weight, alike, mask = data()
    wanted = oracle.head_log_probs(hidden, weight, alike, mask)
    for seen, truth in zip((log_probs, entropy), wanted, strict=True):
        for row in seen:
            assert oracle.scaled_error(row[~differ], truth[~differ]) < VALUE_ERROR
    assert np.isfinite(gradient[~differ]).all()


@pytest.mark.parametrize("path", PATHS)
def test_masks_that_differ_are_nan_on_every_shard(path):
    targets, masks = rows(2)
    masks[1, 2] = False
    log_probs, entropy, _ = run_apart(path, targets, masks)
    assert np.isnan(log_probs[:, 2]).all() and np.isnan(entropy[:, 2]).all()
    assert np.isfinite(np.delete(log_probs, 2, axis=1)).all() and np.isfinite(np.delete(entropy, 2, axis=1)).all()


@pytest.mark.parametrize("path", PATHS)
def test_targets_of_other_tokens_are_nan_and_gathered_ones_are_right(path):
    """The mistake itself: a batch that is sharded over the axis of the vocabulary as well."""
    hidden, weight, alike, mask = data()
    apart = np.stack([alike, np.roll(alike, 1)])
    masks = np.ones_like(apart, bool)
    log_probs, entropy, _ = run_apart(path, apart, masks)
    same = apart[0] == apart[1]
    assert np.isnan(log_probs[:, ~same]).all() and np.isnan(entropy[:, ~same]).all()
    log_probs, entropy, gradient = run_apart(path, *rows(2), gathered=True)
    wanted = oracle.head_log_probs(hidden, weight, alike, mask)
    assert oracle.scaled_error(log_probs[1], wanted[0]) < VALUE_ERROR
    assert oracle.scaled_error(entropy[1], wanted[1]) < VALUE_ERROR
    assert np.isfinite(gradient).all()


@pytest.mark.bad_input
def test_the_fixed_order_names_a_gathered_mask_where_it_is_differentiated():
    def local(hidden, weight, targets, mask):
        gathered = jax.lax.all_gather(mask, "tensor")[0]
        return jax.grad(lambda h: jnp.sum(PATHS["fixed_order"](h, weight, targets, gathered).log_probs))(hidden)

    specs = P(), P("tensor"), P(), P()
    with pytest.raises(ValueError, match="^mask: expected an array that is the same on all vocabulary shards"):
        jax.eval_shape(jax.shard_map(local, mesh=tensor_mesh(2), in_specs=specs, out_specs=P()), *data())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_that_differ_in_a_bit_are_nan_on_every_shard(dtype):
    alike = jnp.asarray([[1.0, 2.0], [0.0, 3.0], [-4.0, 5.0], [-jnp.inf, 6.0]], dtype)
    # Another sign of zero, and the number next to -4.
    other = alike.at[1, 0].set(-0.0).at[2, 0].multiply(1.0 + float(jnp.finfo(dtype).eps))

    def total(x):
        result = nan_unless_equal(x, "tensor")
        return jnp.sum(jnp.where(jnp.isfinite(result), 2.0 * result, 0.0).astype(jnp.float32)), result

    @functools.partial(jax.shard_map, mesh=tensor_mesh(2), in_specs=P("tensor"), out_specs=P("tensor"))
    def run(x):
        return jax.grad(total, has_aux=True)(x)

    gradient, result = jax.jit(run)(jnp.concatenate([alike, other]))
    kept = np.where([[False], [True], [True], [False]], np.nan, np.asarray(alike, np.float32))
    np.testing.assert_array_equal(np.asarray(result, np.float32), np.tile(kept, (2, 1)))
    np.testing.assert_array_equal(gradient, np.where(np.isfinite(np.tile(kept, (2, 1))), 2.0, 0.0))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_embedding_ids_that_differ_are_nan_rows(dtype, size):
    table = jnp.asarray(np.random.default_rng(1).normal(size=(VOCAB, HIDDEN)), dtype).at[7].set(-0.0)
    ids = np.tile(np.array([0, 7, 100, 261, 3], np.int32), (size, 1))
    ids[:, 3] = np.linspace(10, 20, size).astype(np.int32)
    ids[size - 1, 4] = 2

    def local(table, ids):
        return embedding_lookup(table, ids[0], axis_name="tensor")[None]

    specs = P("tensor"), P("tensor")
    mapped = jax.shard_map(local, mesh=tensor_mesh(size), in_specs=specs, out_specs=P("tensor"))
    seen = np.asarray(jax.jit(mapped)(table, jnp.asarray(ids)))
    assert np.isnan(seen[:, 3:].astype(np.float32)).all()
    for row in seen:
        np.testing.assert_array_equal(row[:3].view(np.uint8), np.asarray(table)[ids[0, :3]].view(np.uint8))


def folded(codes):
    """The fold of the GPU kernels' tile statistics, two ranks of one tile each, the target on the last."""
    stats = jnp.asarray(np.random.default_rng(2).uniform(1.0, 2.0, (2, 1, 4, TOKENS)), jnp.float32)

    def local(stats, codes):
        last = jax.lax.axis_index("tensor") == 1
        stats = jnp.where(last, stats[0], stats[0].at[:, 3].set(0.0))
        column = jnp.where(last, 0, -1) + jnp.zeros(TOKENS, jnp.int32)
        maximum = jax.lax.pmax(jnp.max(stats[:, 0], axis=0), "tensor")
        sums = spoiled_together(sum_shards(sum_tiles(stats, maximum, column, True), "tensor", codes[0]))
        return finish_sums(sums, codes[0] > 0, 512, None)[0]

    mapped = jax.shard_map(local, mesh=tensor_mesh(2), in_specs=P("tensor"), out_specs=P("tensor"))
    return [np.asarray(x) for x in jax.jit(mapped)(stats, jnp.asarray(codes))]


@pytest.mark.parametrize("other, changed", [(9, 3), (0, 3), (1, 11)])
def test_the_fold_of_packed_tokens_is_nan_everywhere(other, changed):
    """Kernels pack tokens by their masks: where one differs, the tokens behind it have met other tokens' sums."""
    codes = np.tile(np.arange(2, TOKENS + 2, dtype=np.int32), (2, 1))
    assert all(np.isfinite(x).all() for x in folded(codes))
    codes[0, changed] = other
    assert all(np.isnan(x).all() for x in folded(codes))


def test_codes_tell_masked_tokens_and_negative_ids_from_all_others():
    ids = jnp.asarray([-100, -1, 0, 1, 2**24 - 4, 2**24 - 3, 2**31 - 1, 0, -1], jnp.int32)
    codes = id_codes(ids, jnp.arange(9) < 7)
    assert codes.tolist() == [1, 1, 2, 3, 2**24 - 2, 2**24 - 1, 2**24 - 1, 0, 0]


@pytest.mark.parametrize("word_bits", [16, 24, 31])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_counters_tell_any_difference(size, word_bits):
    """Random ids, equal or different in one bit of one rank, over the ranks of a mesh; sums stay within a word."""
    rng = np.random.default_rng(size)
    ids = np.tile(np.append(rng.integers(0, 2**24 - 2, 400), [0, 0, -1, 2**24 - 3]), (size, 1)).astype(np.int32)
    counts = np.ones_like(ids, bool)
    for place in range(0, 400, 2):
        ids[rng.integers(size), place] ^= 1 << rng.integers(23)
    counts[rng.integers(size), 401] = False
    counts[:, 403] = False

    def local(ids, counts):
        sums = jax.lax.psum(counters(id_codes(ids[0], counts[0]), "tensor", word_bits), "tensor")
        return sums, same_ids(sums, "tensor", word_bits)

    mapped = jax.shard_map(local, mesh=tensor_mesh(size), in_specs=P("tensor"), out_specs=P())
    sums, same = jax.jit(mapped)(jnp.asarray(ids), jnp.asarray(counts))
    wanted = (ids == ids[0]).all(axis=0) & (counts == counts[0]).all(axis=0)
    np.testing.assert_array_equal(same, wanted)
    assert 0 <= int(sums.min()) and int(sums.max()) < 2**word_bits
    assert not wanted[400:402].all() and wanted[402:].all()


def test_the_comparison_adds_no_collective():
    hidden, weight, targets, mask = data()
    specs = P(), P("tensor"), P(), P()
    for path in PATHS:
        mapped = jax.shard_map(PATHS[path], mesh=tensor_mesh(4), in_specs=specs, out_specs=P())
        text = jax.jit(mapped).lower(hidden, weight, targets, mask).as_text()
        # A pmax and a psum.
        assert len(re.findall("stablehlo.all_reduce", text)) == 2, path
        assert not re.search("all_gather|reduce_scatter|all_to_all|collective_permute", text)
    lookup = functools.partial(embedding_lookup, axis_name="tensor")
    mapped = jax.shard_map(lookup, mesh=tensor_mesh(4), in_specs=(P("tensor"), P()), out_specs=P())
    text = jax.jit(mapped).lower(weight, targets).as_text()
    assert len(re.findall("stablehlo.all_reduce", text)) == 1


def on_a_replicated_block(function, mesh_size=2, **options):
    """The mistake: each shard gets all of the vocabulary, and takes it for its block."""
    hidden, weight, targets, mask = data()
    mapped = jax.shard_map(function, mesh=tensor_mesh(mesh_size), in_specs=P(), out_specs=P(), **options)
    return jax.jit(mapped)(hidden, weight, jnp.asarray(targets), jnp.asarray(mask))


REPLICATED = {
    "head": (lambda h, w, t, m: linear_log_probs(h, w, t, mask=m, axis_name="tensor"), "weight"),
    "logits": (from_logits, "logits"),
    "embedding": (lambda h, w, t, m: embedding_lookup(w, t, axis_name="tensor"), "table"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", REPLICATED)
def test_a_block_that_does_not_vary_over_the_axis_is_refused(name):
    function, argument = REPLICATED[name]
    with pytest.raises(ValueError, match=f"^{argument}: expected the local shard of each rank of axis 'tensor', got "):
        on_a_replicated_block(function)
    # One rank holds all of it; and without replication types only the shards tell.
    on_a_replicated_block(function, mesh_size=1)
    with pytest.raises(ValueError, match=r"^vocab: expected the shards under shard_map\(check_vma=False\)"):
        on_a_replicated_block(function, check_vma=False)
