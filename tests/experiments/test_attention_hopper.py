"""The Hopper kernels of attention on the CPU, through JAX's Mosaic GPU interpreter, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.attention import first_keys
from experiments.models.attention.hopper.attend import attend_hopper
from experiments.models.attention.hopper.bounds import SEGMENT, TILE, Bounds
from experiments.models.attention.hopper.settings import Settings
from experiments.models.attention.hopper.walk import Walk
from jaxlogp._mosaic_gpu import interpreter, why_not_available
from tests.experiments import test_attention as cases

# Called operation by operation, as no user does, they would be many small programs.
bounds_of = jax.jit(lambda ids: Bounds.of(first_keys(ids)))


@functools.partial(jax.jit, static_argnums=0)
def read_all(walk, tiles):
    """What a walk reads for every block, in each of its rounds."""
    read = jax.vmap(jax.vmap(functools.partial(walk.read, tiles), (None, 0)), (0, None))
    return read(jnp.arange(walk.blocks, dtype=jnp.int32), jnp.arange(walk.all_rounds, dtype=jnp.int32))


needs_mosaic = pytest.mark.skipif(why_not_available() is not None, reason=str(why_not_available()))


def test_bounds_list_the_keys_and_queries_of_each_tile():
    # 300 slots are three tiles: documents of 100, 150 and 50, and padding that reads itself.
    bounds = bounds_of(np.repeat(np.arange(3, dtype=np.int32), [100, 150, 50])[None])
    first, last = bounds.limits[0]
    assert first.tolist() == [0] * 100 + [100] * 150 + [250] * 50 + list(range(300, 3 * TILE))
    assert last.tolist() == list(range(3 * TILE))
    # First query, and lowest and highest first key: the tiles that read most keys come first.
    assert bounds.wide.tolist() == [[[128, 100, 250], [256, 250, 383], [0, 0, 100]]]
    halves = [[192, 100, 250], [64, 0, 100], [128, 100, 100], [256, 250, 319], [0, 0, 0], [320, 320, 383]]
    assert bounds.narrow.tolist() == [halves]
    # First key, and for each half of the keys the last reader of its first key and the last of any.
    assert bounds.keys.tolist() == [[[0, 99, 99, 99, 249], [128, 249, 249, 249, 299], [256, 299, 319, 320, 383]]]


def test_longest_tiles_of_a_segment_come_first():
    # A document fills the second segment; those of the first are short.
    ids = np.concatenate([np.arange(SEGMENT) // 64, np.full(SEGMENT, -1)]).astype(np.int32)[None]
    starts = np.asarray(bounds_of(ids).wide)[0, :, 0]
    second = range(2 * SEGMENT - TILE, SEGMENT - TILE, -TILE)
    assert starts.tolist() == [*second, *range(0, SEGMENT, TILE)]


@pytest.mark.parametrize("sizes", [(5, 2, 3, 3, 2), (4, 1, 4, 1, 4), (7, 3, 2, 2, 2), (2, 5, 3, 1, 3)])
def test_every_item_is_dealt_once(sizes):
    _, rows, tiles, units, _ = sizes
    listed = np.arange(rows * tiles, dtype=np.int32).reshape(rows, tiles, 1)
    exists, *dealt = map(np.asarray, read_all(Walk(*sizes), listed))
    every = [(tile // tiles, unit, tile) for tile in range(rows * tiles) for unit in range(units)]
    assert sorted(zip(*(x[exists].tolist() for x in dealt), strict=True)) == sorted(every)


@pytest.mark.parametrize("units", [8, 9])
def test_blocks_have_the_same_work(units):
    # A causal row of 2048 tokens, of tiles that read 1 to 32 blocks.
    walk = Walk(132, 16, 32, units, 32)
    work = np.broadcast_to(np.arange(32, 0, -1, dtype=np.int32), (16, 32))[:, :, None]
    exists, _, _, blocks = read_all(walk, work)
    loads = np.where(exists, blocks, 0).sum(axis=1)
    assert loads.max() < 1.04 * loads.mean()


@pytest.fixture
def registers_in_interpreter(monkeypatch):
    """Teaches the interpreter products of a left operand in registers, and accumulators that are written."""
    from jax._src.pallas.mosaic_gpu import primitives
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    plain = gpu_callbacks.wgmma

    def store(accumulator, value):
        # Stands for a product whose right operand is the accumulator.
        trees = dict.fromkeys(("acc_transforms_tree", "a_transforms_tree", "b_transforms_tree"))
        primitives.wgmma_ref_p.bind(accumulator, value, accumulator, **trees)

    def wgmma(**arguments):
        left = arguments["a_allocation_key_as_array"]
        if left.ndim != 2:
            return plain(**arguments)
        memory, thread = gpu_callbacks._get_shared_memory(), arguments["thread"]
        info = gpu_callbacks.memory.GPULoggingInfo(arguments["mesh_location"], thread, arguments["source_info"])

        def place(name):
            key = gpu_callbacks.HostAllocationKey.from_array(arguments[f"{name}_allocation_key_as_array"])
            transforms = gpu_callbacks._remove_noop_transforms(arguments[f"{name}_transforms"])
            return key, memory.access(key, jax.tree.map(int, transforms))

        result = np.asarray(left, np.float32)
        if place("b")[0] != place("acc")[0]:
            read = functools.partial(memory.get_buffer_content, logging_info=info)
            right, accumulator = (read(*place(name), thread)[0] for name in ("b", "acc"))
            result = accumulator + result @ np.asarray(right, np.float32)
        memory.store_buffer_content(*place("acc"), result, thread, logging_info=info)
        return arguments["token"]

    monkeypatch.setattr(gpu_callbacks, "wgmma", wgmma)
    monkeypatch.setattr(primitives, "wgmma_accumulator_store", store)


def value_and_gradients(data, ids, window=None, *, scale=0.2, softcap=None):
    q, k, v, d_out = data
    bounds = Bounds.of(first_keys(jnp.asarray(ids), window))
    settings = Settings(scale, softcap, interpret=interpreter())
    out, pull_back = jax.vjp(lambda *x: attend_hopper(*x, bounds, settings), q, k, v)
    return [np.asarray(x) for x in (out, *pull_back(d_out))]


# Two heads that share their keys are worked on together, an odd number of them one after the other.
@needs_mosaic
@pytest.mark.parametrize(
    "case", [(2, 64, 90, 3.0, jnp.bfloat16), (3, 64, 10**6, None, jnp.float16), (4, 128, 150, None, jnp.bfloat16)]
)
def test_values_and_gradients_equal_float64(registers_in_interpreter, monkeypatch, case):
    (heads, head_dim, window, softcap, dtype), length, scale = case, 200, 0.2
    monkeypatch.setattr(cases, "SCALE", scale)
    data = cases.operands(length, heads=heads, kv_heads=1, head_dim=head_dim, rows=1, dtype=dtype)
    ids = cases.packed_ids(length)[:1]
    seen = value_and_gradients(data, ids, window, scale=scale, softcap=softcap)
    wanted = cases.oracle(*data, cases.visible_keys(ids, window), softcap)
    for name, got, exact in zip(("out", "dq", "dk", "dv"), seen, wanted, strict=True):
        error = np.linalg.norm(got.astype(np.float64) - exact) / np.linalg.norm(exact)
        # Results, probabilities and their gradients are rounded to bf16, up to 2^-9 = 2e-3 a number.
        assert error < 5e-3, (name, error)


@needs_mosaic
@pytest.mark.parametrize("heads", [1, 2])
def test_blocks_of_other_documents_are_not_read(registers_in_interpreter, heads):
    # The documents are whole tiles and blocks, and 0 times NaN would be NaN.
    data = cases.operands(3 * TILE, heads=heads, kv_heads=1, head_dim=64, rows=1, dtype=jnp.bfloat16)
    ids = np.repeat(np.arange(3), TILE).astype(np.int32)[None]
    clean = value_and_gradients(data, ids)
    middle = slice(TILE, 2 * TILE)
    seen = value_and_gradients([x.at[:, middle].set(jnp.nan) for x in data], ids)
    for got, exact in zip(seen, clean, strict=True):
        assert np.isnan(got[:, middle].astype(np.float32)).any()
        for others in (slice(0, TILE), slice(2 * TILE, None)):
            np.testing.assert_array_equal(got[:, others], exact[:, others])


@needs_mosaic
def test_blocks_outside_of_the_window_are_not_read(registers_in_interpreter):
    data = cases.operands(3 * TILE, heads=1, kv_heads=1, head_dim=64, rows=1, dtype=jnp.bfloat16)
    ids = np.zeros((1, 3 * TILE), np.int32)
    clean = value_and_gradients(data, ids, window=40)
    # The last tile reads from key 217 on, in two blocks of keys; the first is read up to query 166, in three of queries.
    first, last = slice(0, TILE), slice(2 * TILE, None)
    q, k, v, d_out = data
    out, dq, _, _ = value_and_gradients((q, k.at[:, first].set(jnp.nan), v.at[:, first].set(jnp.nan), d_out), ids, 40)
    np.testing.assert_array_equal(out[:, last], clean[0][:, last])
    np.testing.assert_array_equal(dq[:, last], clean[1][:, last])
    _, _, dk, dv = value_and_gradients((q.at[:, last].set(jnp.nan), k, v, d_out.at[:, last].set(jnp.nan)), ids, 40)
    np.testing.assert_array_equal(dk[:, first], clean[2][:, first])
    np.testing.assert_array_equal(dv[:, first], clean[3][:, first])


@needs_mosaic
def test_a_row_has_the_same_bits_whatever_is_beside_it(registers_in_interpreter):
    data = cases.operands(200, heads=2, kv_heads=1, head_dim=64, rows=2, dtype=jnp.bfloat16)
    ids = cases.packed_ids(200)[:2]
    both = value_and_gradients(data, ids)
    alone = value_and_gradients([x[1:] for x in data], ids[1:])
    for one, other in zip(both, alone, strict=True):
        assert one[1:].tobytes() == other.tobytes()
