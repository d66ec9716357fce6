"""Specific to the chunked engine: its accumulators, and vocabularies much larger than a tile."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from jaxlogp.head import ChunkedEngine, GradientFilter
from jaxlogp.head.chunked import blocks
from jaxlogp.head.live_rows import live_rows, select_live
from tests import oracle
from tests.head import cases


def test_accumulator_error_does_not_grow_with_the_number_of_chunks():
    # 512 tokens in 1 or 128 chunks, 257 columns in 1 or 65 tiles. Both runs end in one rounding to bf16 (relative
    # 2^-9); a bf16 accumulator would add a rounding a chunk, about sqrt(128) times that.
    data = cases.case((512,), hidden_size=16, vocab=257, seed=12)
    wanted = cases.expected(data)[1]
    errors = {}
    for sizes in ((512, 257), (4, 4)):
        _, gradients = cases.run(data, ChunkedEngine(*sizes))
        errors[sizes] = [oracle.relative_error(gradients[index], wanted[index]) for index in range(2)]
    for one, many in zip(errors[512, 257], errors[4, 4], strict=True):
        assert one < cases.GRADIENT_ERROR
        assert many < 1.2 * one, errors


def test_a_vocabulary_of_262144():
    data = cases.case((3,), hidden_size=8, vocab=262_144, dtypes=jnp.float32, seed=13)
    result, gradients = cases.run(data, ChunkedEngine(token_chunk=8, vocab_tile=60_000))
    cases.check(result, gradients, cases.expected(data), gradient_error=cases.FP32_GRADIENT_ERROR)


def test_blocks_of_a_gpu_are_larger_unless_they_are_given_or_filtered(monkeypatch):
    engines = ChunkedEngine(), ChunkedEngine(token_chunk=3), ChunkedEngine(vocab_tile=5)
    filtered = ChunkedEngine(gradient_filter=GradientFilter())
    assert [engine.sizes for engine in engines] == [(512, 2048), (3, 2048), (512, 5)]
    of_a_gpu = SimpleNamespace(devices=lambda: [SimpleNamespace(platform="gpu")])
    monkeypatch.setattr(blocks, "jax", of_a_gpu)
    assert [engine.sizes for engine in engines] == [(8192, 4096), (3, 4096), (8192, 5)]
    # Small blocks skip more.
    assert filtered.sizes == (512, 2048)


def test_live_rows_come_first_and_the_others_are_0_whatever_stands_behind():
    values, behind = jnp.float32([10, 11, 12, 13]), jnp.float32([1, 2, 3, 4, 5, 6])

    def moved(live, block, **options):
        rows = live_rows(live, 6, **options)
        packed = rows.pack(values, -1), rows.pack_block(values, -1, block, 2), rows.unpack(behind)
        return *packed, select_live(behind, rows.count), rows.count

    def lists(values):
        return [each.tolist() for each in values]

    some = lists(jax.jit(moved)(np.array([False, True, False, True]), np.int32(1)))
    assert some == [[11, 13, -1, -1, -1, -1], [13, -1], [0, 1, 0, 2], [1, 2, 0, 0, 0, 0], 2]
    *every, _, count = lists(jax.jit(lambda *x: moved(*x, all_live=True))(np.ones(4, bool), np.int32(3)))
    assert every == [[10, 11, 12, 13, -1, -1], [13, -1], [1, 2, 3, 4]] and count == 4
