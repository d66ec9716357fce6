"""Specific to the chunked engine: its accumulators, and vocabularies much larger than a tile."""

import jax.numpy as jnp

from jaxlogp.head import ChunkedEngine
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


def test_live_rows_come_first_and_the_others_are_0_whatever_stands_behind():
    values, behind = jnp.float32([10, 11, 12, 13]), jnp.arange(1.0, 7.0)
    rows = live_rows(jnp.array([False, True, False, True]), 6)
    assert rows.pack(values, -1).tolist() == [11, 13, -1, -1, -1, -1] and int(rows.count) == 2
    assert rows.pack_block(values, -1, jnp.int32(1), 2).tolist() == [13, -1]
    assert rows.unpack(behind).tolist() == [0, 1, 0, 2]
    assert select_live(behind, rows.count).tolist() == [1, 2, 0, 0, 0, 0]
    every = live_rows(jnp.ones(4, bool), 6, all_live=True)
    assert every.pack(values, -1).tolist() == [10, 11, 12, 13, -1, -1] and int(every.count) == 4
    assert every.pack_block(values, -1, jnp.int32(3), 2).tolist() == [13, -1]
    assert every.unpack(behind).tolist() == [1, 2, 3, 4]
