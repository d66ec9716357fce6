"""Specific to the chunked engine: its accumulators, and vocabularies much larger than a tile."""

import jax.numpy as jnp

from jaxlogp.head import ChunkedEngine
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
