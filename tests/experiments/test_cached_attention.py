"""Attention over the sampler's cache against a float64 softmax of a row's tokens, written here from the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.attention.cache import KVCache
from experiments.models.attention.cached import attend_cached, choose_cached, empty_cache
from experiments.models.attention.triton_cached import BLOCK, attend_triton

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 64, 2
SCALE, SOFTCAP = 0.2, 2.0
# One prompt shorter than a block, one longer; two rows continue the first.
PROMPT_LENGTHS, WIDTH, OF_ROW = (5, BLOCK + 3), BLOCK + 6, (0, 0, 1)
NEW = BLOCK + 2


def numbers(rng, *shape):
    # bf16 exactly, so that no rounding of operands counts.
    return rng.normal(size=shape).astype(jnp.bfloat16).astype(np.float32)


@functools.cache
def case(dtype="float32"):
    rng = np.random.default_rng(0)
    prompts = [numbers(rng, LAYERS, 2, WIDTH, KV_HEADS, HEAD_DIM) for _ in range(2)]
    queries, *news = (numbers(rng, NEW, 3, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    return tuple(x.astype(dtype) for x in (*prompts, queries, *news))


def wanted(step, window, softcap):
    """[rows, heads, head_dim] of the last layer, after `step` generated tokens before this one."""
    prompt_keys, prompt_values, queries, keys, values = (np.asarray(x, np.float64) for x in case())
    out = np.zeros((3, HEADS, HEAD_DIM))
    for row, prompt in enumerate(OF_ROW):
        for head in range(HEADS):
            mine = head // (HEADS // KV_HEADS)
            length = PROMPT_LENGTHS[prompt]
            k, v = (
                np.concatenate([before[-1, prompt, :length, mine], new[: step + 1, row, mine]])
                for before, new in ((prompt_keys, keys), (prompt_values, values))
            )
            k, v = (x[max(len(x) - window, 0) if window else 0 :] for x in (k, v))
            scores = k @ queries[step, row, head] * SCALE
            scores = softcap * np.tanh(scores / softcap) if softcap else scores
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ v / weights.sum()
    return out


def generated(implementation, attend, steps, dtype):
    """What the last layer attends to in the last step, every step before it having been cached."""
    prompt_keys, prompt_values, queries, keys, values = map(jnp.asarray, case(dtype))
    cache = empty_cache(prompt_keys, prompt_values, jnp.asarray(PROMPT_LENGTHS), NEW, implementation)
    cache = cache.take_rows(jnp.asarray(OF_ROW))
    assert cache.shared == (implementation == "triton")
    layers = list(cache.layers)
    # All tokens but the last in one go: what single steps would have stored.
    stored = [x[: steps - 1].transpose(1, 2, 0, 3) for x in (keys, values)]
    layers[-1] = layers[-1]._replace(
        keys=layers[-1].keys.at[:, :, : steps - 1].set(stored[0]),
        values=layers[-1].values.at[:, :, : steps - 1].set(stored[1]),
    )
    filled = jnp.asarray(steps - 1, jnp.int32)
    cache = KVCache(tuple(layers), cache.prompt_lengths, cache.prompt_of_row, filled, implementation)
    out, held = attend(queries[steps - 1], keys[steps - 1], values[steps - 1], cache, LAYERS - 1)
    np.testing.assert_array_equal(held.keys[:, :, steps - 1], keys[steps - 1])
    np.testing.assert_array_equal(held.values[:, :, : steps - 1], stored[1])
    return np.asarray(out, np.float64)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, SOFTCAP), (BLOCK + 1, None)])
@pytest.mark.parametrize("steps", [1, 3, NEW])
def test_every_row_reads_its_prompt_and_what_it_has_generated(steps, window, softcap):
    attend = functools.partial(attend_cached, window=window, scale=SCALE, softcap=softcap)
    out = generated("einsum", attend, steps, "float32")
    np.testing.assert_allclose(out, wanted(steps - 1, window, softcap), atol=2e-6, rtol=0)


def interpreted(queries, keys, values, cache, layer, *, window, softcap):
    first = jnp.maximum(cache.prompt_lengths + cache.filled + 1 - (window or 10**6), 0)
    options = {"scale": SCALE, "softcap": softcap, "interpret": True}
    return attend_triton(queries, keys, values, cache, layer, first, **options)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, SOFTCAP), (BLOCK + 1, None)])
@pytest.mark.parametrize("steps", [1, 3, NEW])
def test_the_kernel_reads_the_same_from_shared_prompts(steps, window, softcap):
    attend = functools.partial(interpreted, window=window, softcap=softcap)
    out = generated("triton", attend, steps, "bfloat16")
    # The probabilities and the result are rounded to bf16, 2^-9 each; values are below 4.
    np.testing.assert_allclose(out, wanted(steps - 1, window, softcap), atol=2**-9 * 4 * 2, rtol=0)


def test_the_choice_says_why():
    reasons = [
        choose_cached("auto", 64, "float32").reason,
        choose_cached("einsum", 64, "bfloat16").reason,
        choose_cached("auto", 96, "bfloat16").reason,
        choose_cached("auto", 64, "bfloat16", jax.make_mesh((2, 1), ("data", "tensor"))).reason,
    ]
    for reason, part in zip(reasons, ("float32", "asked for", "96", "one device"), strict=True):
        assert part in reason
