"""Embedding lookup: bitwise the table's row in every layout, the gradient a scatter-add in a fixed order."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlogp import VocabShards, embedding_lookup, sharded_embedding_lookup
from tests import oracle

VOCAB, WIDTH = 1027, 16
LARGE = 32768, 256  # of contract B
PROBE = 411
# prompts x samples x prompt length x completion length, as in contract B
LAYOUTS = [(1, 2, 4, 6), (2, 3, 4, 8), (3, 4, 4, 10)]


@functools.cache
def table(dtype=jnp.float32, size=(VOCAB, WIDTH)):
    return jnp.asarray(np.random.default_rng(0).normal(size=size), dtype)


def token_ids(prompts, samples, prompt_length, completion_length, vocab=VOCAB):
    ids = np.random.default_rng(0).integers(0, vocab, (prompts * samples, prompt_length + completion_length))
    ids[:, 0], ids[-1, -1], ids[0, 1] = PROBE, vocab - 1, 0
    return ids.astype(np.int32)


def bits(array):
    return np.asarray(array).view(np.uint8)


def tensor_mesh(size):
    return jax.make_mesh((size,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])


lookup = jax.jit(embedding_lookup)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", [(VOCAB, WIDTH), LARGE], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_row_is_bitwise_the_tables_row(layout, size, dtype):
    rows, ids = table(dtype, size), token_ids(*layout, size[0])
    embedded = lookup(rows, jnp.asarray(ids))
    assert embedded.dtype == dtype and embedded.shape == (*ids.shape, size[1])
    np.testing.assert_array_equal(bits(embedded), bits(np.asarray(rows)[ids]))
    order = np.random.default_rng(1).permutation(ids.shape[0])
    np.testing.assert_array_equal(bits(lookup(rows, jnp.asarray(ids[order]))), bits(np.asarray(embedded)[order]))
    other = ids.copy()
    other[:, -2:] = 7  # other padding tokens leave the rest alone
    np.testing.assert_array_equal(bits(lookup(rows, jnp.asarray(other))[:, :-2]), bits(embedded[:, :-2]))


def test_signed_zeros_nan_and_inf_rows_survive_and_stay_in_their_place():
    rows = table().at[5].set(jnp.nan).at[6].set(jnp.inf).at[7].set(-0.0)
    ids = jnp.asarray([7, 5, 3, 6], jnp.int32)
    np.testing.assert_array_equal(bits(lookup(rows, ids)), bits(np.asarray(rows)[np.asarray(ids)]))


class Variants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_one_dimensional_ids(self):
        ids = jnp.asarray([0, PROBE, VOCAB - 1], jnp.int32)
        chex.assert_trees_all_equal(self.variant(embedding_lookup)(table(), ids), table()[ids])


def gradient_of(function, rows, ids, cotangent):
    return jax.jit(jax.grad(lambda t: jnp.sum((function(t, ids) * cotangent).astype(jnp.float32))))(rows)


def gradient_case(dtype=jnp.float32):
    ids = token_ids(2, 3, 4, 8)
    ids[:, 1:5] = PROBE  # 30 duplicates of one row
    cotangent = np.random.default_rng(2).normal(size=(*ids.shape, WIDTH))
    return jnp.asarray(ids), jnp.asarray(cotangent, dtype)


def rounding(ids, cotangent, vocab):
    """By which two sums of the rows of one id may differ, entry by entry."""
    most = np.bincount(np.ravel(ids)).max()
    return oracle.fp32_bound(oracle.embedding_gradient(ids, np.abs(cotangent), vocab), most)


def test_gradient_is_the_scatter_add():
    ids, cotangent = gradient_case()
    gradient = gradient_of(embedding_lookup, table(), ids, cotangent)
    wanted = oracle.embedding_gradient(ids, cotangent, VOCAB)
    assert (np.abs(gradient - wanted) <= rounding(ids, cotangent, VOCAB)).all()
    assert not np.asarray(gradient)[(wanted == 0).all(axis=-1)].any()


def test_gradient_of_small_integers_is_exact():
    ids, _ = gradient_case()
    cotangent = jnp.asarray(np.random.default_rng(3).integers(-3, 4, (*ids.shape, WIDTH)), jnp.float32)
    gradient = gradient_of(embedding_lookup, table(), ids, cotangent)
    np.testing.assert_array_equal(gradient, oracle.embedding_gradient(ids, cotangent, VOCAB))


def test_bf16_duplicates_are_summed_in_fp32():
    ids, cotangent = gradient_case(jnp.bfloat16)
    gradient = gradient_of(embedding_lookup, table(jnp.bfloat16), ids, cotangent)
    assert gradient.dtype == jnp.bfloat16
    wanted = oracle.embedding_gradient(ids, cotangent, VOCAB)[PROBE]
    # One rounding to bf16 at the end (2^-9 an entry); 30 additions in bf16 would be several times worse.
    assert oracle.relative_error(gradient[PROBE], wanted) < 2**-9


def test_gradient_is_bitwise_independent_of_the_layout():
    ids, cotangent = gradient_case()
    whole = gradient_of(embedding_lookup, table(), ids, cotangent)
    flat = gradient_of(embedding_lookup, table(), ids.reshape(-1), cotangent.reshape(-1, WIDTH))
    np.testing.assert_array_equal(bits(flat), bits(whole))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_sharded_rows_and_gradient_are_bitwise_the_unsharded_ones(size):
    shards = VocabShards.even(VOCAB, size)
    ids, cotangent = gradient_case()
    edges = np.array([edge for start, end in shards.ranges for edge in (start, end - 1)], np.int32)
    ids = ids.at[0, : len(edges)].set(edges[: ids.shape[1]]).at[1, : len(edges)].set(edges[-ids.shape[1] :])
    mesh = tensor_mesh(size)

    def sharded(rows, ids):
        return jax.shard_map(
            lambda block, i: embedding_lookup(block, i, axis_name="tensor", vocab=shards),
            mesh=mesh,
            in_specs=(P("tensor"), P()),
            out_specs=P(),
        )(shards.shard_rows(rows), ids)

    # A sum with the other shards' zeros must keep even the sign of a zero, and NaN and inf to their own rows.
    rows = table().at[PROBE].set(-0.0).at[0].set(jnp.nan).at[VOCAB - 1].set(jnp.inf)
    np.testing.assert_array_equal(bits(jax.jit(sharded)(rows, ids)), bits(np.asarray(rows)[np.asarray(ids)]))
    np.testing.assert_array_equal(
        bits(gradient_of(sharded, table(), ids, cotangent)),
        bits(gradient_of(embedding_lookup, table(), ids, cotangent)),
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_shards_of_a_large_table_have_its_bits(dtype):
    """And its gradient those of the table, whose probe row is read by every prompt."""
    rows, ids = table(dtype, LARGE), jnp.asarray(token_ids(*LAYOUTS[-1], LARGE[0]))
    cotangent = jnp.asarray(np.random.default_rng(2).normal(size=(*ids.shape, LARGE[1])), dtype)
    sharded = jax.shard_map(
        functools.partial(embedding_lookup, axis_name="tensor"),
        mesh=tensor_mesh(4),
        in_specs=(P("tensor"), P()),
        out_specs=P(),
    )
    np.testing.assert_array_equal(bits(jax.jit(sharded)(rows, ids)), bits(np.asarray(rows)[np.asarray(ids)]))
    gradients = (gradient_of(function, rows, ids, cotangent) for function in (sharded, embedding_lookup))
    np.testing.assert_array_equal(*map(bits, gradients))


KINDS = [(AxisType.Auto,) * 2, (AxisType.Explicit,) * 2, (AxisType.Explicit, AxisType.Auto)]


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_the_global_wrapper_on_a_data_and_tensor_mesh(kinds):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=kinds)
    ids, cotangent = gradient_case()
    rows = table()[:1024]
    ids = jnp.minimum(ids, 1023)

    def sharded(t, i):
        return sharded_embedding_lookup(t, i, mesh=mesh)

    np.testing.assert_array_equal(bits(jax.jit(sharded)(rows, ids)), bits(rows[ids]))
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(lambda t: jnp.sum(sharded(t, ids) * cotangent)))(rows)
    # Duplicates on two data ranks meet in one all-reduce.
    wanted = oracle.embedding_gradient(ids, cotangent, 1024)
    assert (np.abs(gradient - wanted) <= rounding(ids, cotangent, 1024)).all()


@pytest.mark.bad_input
@pytest.mark.parametrize("bad", [-1, VOCAB, 99_999])
def test_an_input_id_out_of_range_is_named_with_its_position(bad):
    ids = jnp.asarray(token_ids(*LAYOUTS[0])).at[1, 3].set(bad)
    with pytest.raises(ValueError) as raised:
        embedding_lookup(table(), ids)
    for fragment in ("token_ids", str(bad), "(1, 3)", str(VOCAB)):
        assert fragment in str(raised.value), raised.value


@pytest.mark.bad_input
def test_a_table_of_8_bits_is_refused():
    with pytest.raises(ValueError, match="^table: expected dtype bfloat16, float16 or float32, got float8_e4m3fn"):
        embedding_lookup(table().astype(jnp.float8_e4m3fn), jnp.zeros(2, jnp.int32))
