"""The embedding's gradient in a fixed order: it depends only on each id's own cotangents in token order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxlogp import sharded_embedding_lookup
from jaxlogp.invariance.order import fold_tree, segment_tree_sum
from tests import oracle

VOCAB, WIDTH, TOKENS = 257, 16, 96
pytestmark = pytest.mark.slow
RNG = np.random.default_rng(0)
IDS = np.where(RNG.random(TOKENS) < 0.5, 11, RNG.integers(0, VOCAB, TOKENS)).astype(
    np.int32
)  # half of them the same id
COTANGENT = RNG.normal(size=(TOKENS, WIDTH)).astype(np.float32)


def gradient(ids, cotangent, sizes=(1, 1), fixed_order=True, dtype=jnp.float32):
    mesh = jax.make_mesh(
        sizes, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: np.prod(sizes)]
    )

    @jax.jit
    def run(table, ids, cotangent):
        def total(table):
            rows = sharded_embedding_lookup(table, ids, mesh=mesh, fixed_order=fixed_order)
            return jnp.sum(rows.astype(jnp.float32) * cotangent)

        return jax.grad(total)(table)

    return np.asarray(run(jnp.ones((VOCAB, WIDTH), dtype), jnp.asarray(ids), jnp.asarray(cotangent)))


@pytest.mark.parametrize(
    "dtype, meshes",
    [(jnp.float32, ((1, 3), (2, 4), (8, 1))), (jnp.bfloat16, ((4, 2),))],
    ids=["fp32", "bf16"],
)
def test_every_mesh_gives_the_bytes_of_one_device(dtype, meshes):
    wanted = gradient(IDS, COTANGENT, dtype=dtype)
    for sizes in meshes:
        assert gradient(IDS, COTANGENT, sizes, dtype=dtype).tobytes() == wanted.tobytes(), sizes


def test_the_scatter_and_the_all_reduce_break_in_this_harness():
    """The negative control: data ranks that add up their own duplicates first."""
    wanted = gradient(IDS, COTANGENT, fixed_order=False)
    assert gradient(IDS, COTANGENT, (4, 2), fixed_order=False).tobytes() != wanted.tobytes()


def test_what_stands_between_the_tokens_of_an_id_does_not_matter():
    wanted = gradient(IDS, COTANGENT)
    stretched, others = np.zeros((3 * TOKENS,), np.int32), np.zeros((3 * TOKENS, WIDTH), np.float32)
    places = np.sort(RNG.choice(3 * TOKENS, TOKENS, replace=False))
    stretched[:], others[places] = VOCAB - 1, COTANGENT  # an id that does not occur, with zero cotangents
    assert VOCAB - 1 not in IDS
    stretched[places] = IDS
    assert gradient(stretched, others).tobytes() == wanted.tobytes()
    assert gradient(IDS.reshape(8, 12), COTANGENT.reshape(8, 12, WIDTH), (2, 1)).tobytes() == wanted.tobytes()
    by_id = np.argsort(IDS, kind="stable")
    assert gradient(IDS[by_id], COTANGENT[by_id]).tobytes() == wanted.tobytes()


def test_the_gradient_is_the_scatter_add():
    wanted = oracle.embedding_gradient(IDS, COTANGENT, VOCAB)
    # A tree over at most 60 duplicates: six roundings of 2^-24.
    assert oracle.relative_error(gradient(IDS, COTANGENT), wanted) < 6 * 2**-24


def test_segments_are_summed_by_the_tree_and_others_dropped():
    values = RNG.normal(size=(40, 3)).astype(np.float32)
    segments = np.asarray([4, 0, 9, -1, 4, 4, 2, 4, 4, 0] * 4, np.int32)
    found = np.asarray(jax.jit(segment_tree_sum, static_argnums=2)(values, segments, 5))
    for segment in range(5):
        mine = values[segments == segment]
        wanted = np.asarray(fold_tree(jnp.asarray(mine), jnp.add)) if len(mine) else np.zeros(3, np.float32)
        assert found[segment].tobytes() == wanted.tobytes(), segment
    # No segment from the end of the table, where the last row has no value of its own.
    assert not np.asarray(segment_tree_sum(values, segments, 4))[3].any()
