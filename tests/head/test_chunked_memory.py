"""The chunked engine never holds the [tokens, vocab] logits, nor an fp32 copy of a bf16 weight.

Both are checked in the compiled program.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from jaxlogp import linear_log_probs
from jaxlogp.head import ChunkedEngine

pytestmark = pytest.mark.costly

TOKENS, HIDDEN, VOCAB = 512, 32, 8192
LOGITS_BYTES = TOKENS * VOCAB * 4
# The search for copies of the weight needs a weight that is large against one tile of the logits.
WIDE = 128
WIDE_WEIGHT_BYTES = VOCAB * WIDE * 4
CHUNKED = ChunkedEngine(token_chunk=64, vocab_tile=1024)
SHAPE = re.compile(r"\b([a-z]+\d+|pred)\[([\d,]+)\]")


def arrays(compiled):
    """Every (dtype, number of elements) named in the compiled program."""
    found = set(SHAPE.findall(compiled.as_text()))
    return {(dtype, math.prod(int(size) for size in sizes.split(","))) for dtype, sizes in found}


def forward(hidden, weight, targets, *, engine, fp32_head=False):
    result = linear_log_probs(hidden, weight, targets, with_entropy=True, engine=engine, fp32_head=fp32_head)
    return result.log_probs, result.entropy


def objective(hidden, weight, targets, g_lp, g_entropy, *, engine):
    log_probs, entropy = forward(hidden, weight, targets, engine=engine)
    return jnp.sum(log_probs * g_lp + entropy * g_entropy)


@functools.cache
def compiled_gradient(engine, dtype):
    arguments = (
        jax.ShapeDtypeStruct((TOKENS, HIDDEN), dtype),
        jax.ShapeDtypeStruct((VOCAB, HIDDEN), dtype),
        jax.ShapeDtypeStruct((TOKENS,), jnp.int32),
        jax.ShapeDtypeStruct((TOKENS,), jnp.float32),
        jax.ShapeDtypeStruct((TOKENS,), jnp.float32),
    )
    gradient = jax.value_and_grad(functools.partial(objective, engine=engine), argnums=(0, 1))
    return jax.jit(gradient).lower(*arguments).compile()


@functools.cache
def compiled_forward(engine, hidden_dtype, fp32_head):
    arguments = (
        jax.ShapeDtypeStruct((TOKENS, WIDE), hidden_dtype),
        jax.ShapeDtypeStruct((VOCAB, WIDE), jnp.bfloat16),
        jax.ShapeDtypeStruct((TOKENS,), jnp.int32),
    )
    return jax.jit(functools.partial(forward, engine=engine, fp32_head=fp32_head)).lower(*arguments).compile()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_array_of_the_logits_size_forward_or_backward(dtype):
    largest = max(size for _, size in arrays(compiled_gradient(CHUNKED, dtype)))
    # The largest arrays are of the weight's size; the logits would be 16 times that.
    assert largest < TOKENS * VOCAB // 4


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_temporary_memory_is_far_below_the_logits(dtype):
    # Needed: fp32 accumulators and a working copy of the weight's size, one 64 x 1024 tile, vectors: under a quarter.
    assert compiled_gradient(CHUNKED, dtype).memory_analysis().temp_size_in_bytes < LOGITS_BYTES // 4


def test_the_reference_engine_is_seen_to_hold_the_logits():
    """The positive control: the same two searches must find what they look for."""
    compiled = compiled_gradient("reference", jnp.float32)
    assert ("f32", TOKENS * VOCAB) in arrays(compiled)
    assert compiled.memory_analysis().temp_size_in_bytes >= LOGITS_BYTES


@pytest.mark.parametrize("fp32_head", [False, True], ids=["default", "fp32 head"])
@pytest.mark.parametrize("hidden_dtype", [jnp.float32, jnp.bfloat16])
def test_no_fp32_copy_of_a_bf16_weight_in_the_forward(hidden_dtype, fp32_head):
    compiled = compiled_forward(CHUNKED, hidden_dtype, fp32_head)
    assert ("bf16", VOCAB * WIDE) in arrays(compiled), "the weight itself must be found"
    largest = max(size for dtype, size in arrays(compiled) if dtype == "f32")
    assert largest < VOCAB * WIDE // 2
    assert compiled.memory_analysis().temp_size_in_bytes < WIDE_WEIGHT_BYTES


def test_the_search_for_an_fp32_copy_can_find_one():
    def upcast(hidden, weight, targets):
        return forward(hidden, weight.astype(jnp.float32), targets, engine=CHUNKED)

    arguments = (
        jax.ShapeDtypeStruct((TOKENS, WIDE), jnp.float32),
        jax.ShapeDtypeStruct((VOCAB, WIDE), jnp.bfloat16),
        jax.ShapeDtypeStruct((TOKENS,), jnp.int32),
    )
    found = arrays(jax.jit(upcast).lower(*arguments).compile())
    assert max(size for dtype, size in found if dtype == "f32") >= VOCAB * WIDE


def test_only_vectors_are_saved_between_forward_and_backward():
    """Residuals: hidden, weight, targets and vectors of one number a token; of the vocabulary only the weight."""
    hidden = jnp.zeros((TOKENS, HIDDEN), jnp.float32)
    weight = jnp.zeros((VOCAB, HIDDEN), jnp.float32)
    targets = jnp.zeros((TOKENS,), jnp.int32)
    _, pull_back = jax.vjp(lambda h, w: forward(h, w, targets, engine=CHUNKED), hidden, weight)
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(pull_back) if hasattr(leaf, "size"))
    assert sizes[-1] == VOCAB * HIDDEN
    extra = [size for size in sizes if size > TOKENS and size not in (TOKENS * HIDDEN, VOCAB * HIDDEN)]
    assert not extra
