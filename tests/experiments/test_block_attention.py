"""Attention of a block of tokens a row against a float64 softmax of each token's row, written here from the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.models import decoder_layer
from experiments.models.attention import NormAndRotation, attend_block_triton, mask_bias, put_block
from experiments.models.attention.triton_block import SLOTS
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.models.rope import rope_frequencies, rope_tables

pytestmark = pytest.mark.costly

HEAD_DIM, SCALE = 64, 0.2
# (tokens of a block, query heads, key-value heads, where each row's block begins)
SHAPES = [
    (8, 4, 2, (0, SLOTS, SLOTS + 8, 5 * SLOTS)),
    (3, 6, 2, (0, 3, SLOTS + 1)),
    (1, 4, 4, (0, SLOTS - 1)),
    (SLOTS + 8, 4, 1, (0, SLOTS + 8)),
    (2 * SLOTS, 8, 2, (2 * SLOTS,)),
]


def numbers(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)


@functools.cache
def case(length, heads, kv_heads, starts):
    """Projections, and a cache whose slots from the block on hold something else."""
    rng, rows = np.random.default_rng(0), len(starts)
    slots = -(-(max(starts) + length) // SLOTS) * SLOTS
    cache = numbers(rng, rows, 2 * kv_heads, slots, HEAD_DIM)
    return numbers(rng, rows, length, heads + 2 * kv_heads, HEAD_DIM), cache


def by_kernel(projections, cache, starts, *, window=None, softcap=None, interpret=True):
    """With queries and keys that are to stay as they are: an angle of 0, and no norm."""
    ones = jnp.ones((*projections.shape[:2], HEAD_DIM // 2))
    options = {"window": window, "scale": SCALE, "softcap": softcap, "interpret": interpret}
    return attend_block_triton(projections, NormAndRotation(ones, 0 * ones), cache, jnp.asarray(starts), **options)


def wanted(shape, window, softcap):
    length, heads, kv_heads, starts = shape
    projections, cache = case(*shape)
    queries, keys, values = np.split(np.asarray(projections, np.float64), [heads, heads + kv_heads], axis=2)
    out = np.zeros_like(queries)
    for row, start in enumerate(starts):
        for head in range(heads):
            mine = head // (heads // kv_heads)
            both = zip(np.split(cache, 2, axis=1), (keys, values), strict=True)
            k, v = (
                np.concatenate([np.asarray(old[row, mine, :start], np.float64), new[row, :, mine]]) for old, new in both
            )
            for token in range(length):
                read = slice(max(start + token + 1 - window, 0) if window else 0, start + token + 1)
                scores = k[read] @ queries[row, token, head] * SCALE
                scores = softcap * np.tanh(scores / softcap) if softcap else scores
                weights = np.exp(scores - scores.max())
                out[row, token, head] = weights @ v[read] / weights.sum()
    return out


def check(shape, window, softcap, interpret=True):
    starts, (projections, cache) = shape[-1], case(*shape)
    out, held = by_kernel(projections, cache, starts, window=window, softcap=softcap, interpret=interpret)
    # The probabilities and the result are rounded to bf16, 2^-9 each; values are below 4.
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted(shape, window, softcap), atol=2**-9 * 4 * 2, rtol=0)
    _, heads, kv_heads, _ = shape
    _, keys, values = jnp.split(projections, [heads, heads + kv_heads], axis=2)
    np.testing.assert_array_equal(held, put_block(cache, keys, values, jnp.asarray(starts)))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, 2.0), (SLOTS + 1, None)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_token_reads_its_row_up_to_itself(shape, window, softcap):
    check(shape, window, softcap)


def test_neither_later_tokens_nor_other_rows_nor_later_slots_change_a_bit():
    """What sampler and trainer of --invariant rely on: at a token, the one has none after it, the other all of them."""
    length, heads, kv_heads, starts = SHAPES[0]
    projections, cache = case(*SHAPES[0])
    before, _ = by_kernel(projections, cache, starts)
    row, token = 2, 3
    others = jnp.arange(len(starts))[:, None] != row
    later = jnp.arange(length) > token
    changed = jnp.where((others | later)[..., None, None], -3 * projections, projections)
    slot = jnp.arange(cache.shape[2])
    unread = (slot >= starts[row])[None, None, :, None] | others[..., None, None]
    after, _ = by_kernel(changed, jnp.where(unread, jnp.nan, cache), starts)
    seen = [np.asarray(x[row, : token + 1]).tobytes() for x in (before, after)]
    assert seen[0] == seen[1]
    assert not np.isfinite(np.asarray(after[:row], np.float32)).all()


def test_the_kernel_norms_and_rotates_as_the_model_does(monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
    options = {"qk_norm": True, "norm_plus_one": True, "attention_bias": True, "dtype": "bfloat16"}
    config = DecoderConfig(vocab_size=32, head_dim=HEAD_DIM, **sizes, **options)
    graph, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)).layers_apart()[0])
    # As initialised, norms multiply by 1 and biases are 0.
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = (0.3 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True))
    state = jax.tree.unflatten(tree, [leaf + more for leaf, more in zip(leaves, noise, strict=True)])
    plain, joined = nnx.merge(graph, state), nnx.merge(graph, state)
    joined.join_projections()
    rng, starts = np.random.default_rng(0), jnp.asarray([0, 20])
    cache = numbers(rng, 2, 4, SLOTS, HEAD_DIM)
    x, positions = numbers(rng, 2, 5, 64), starts[:, None] + jnp.arange(5)
    tables = rope_tables(positions, rope_frequencies(HEAD_DIM, 10.0))
    bias = mask_bias(jnp.arange(SLOTS) <= positions[..., None])
    monkeypatch.setattr(decoder_layer, "attend_block_triton", functools.partial(attend_block_triton, interpret=True))
    wanted, put = plain.attend_block(x, tables, cache, starts, None, bias)
    seen, held = joined.attend_block(x, tables, cache, starts, None, None)
    # Compilers may leave out a rounding: queries and keys are one of 2^-8 apart, and with them their products.
    queries, _, _ = (jnp.abs(each.astype(jnp.float32)) for each in plain.queries_keys_values(x, tables))
    keys, values = (jnp.repeat(jnp.abs(each.astype(jnp.float32)), 2, axis=1) for each in jnp.split(put, 2, axis=1))
    np.testing.assert_allclose(*(np.asarray(each[:, :2], np.float32) for each in (held, put)), atol=0, rtol=2**-8)
    products = jnp.einsum("btnd,bnsd->btns", queries, keys).max(axis=-1) * config.attention_scale
    score = 2 * 2**-8 * products[..., None]
    # A share is off by as much relative as two scores absolute; it and the result are rounded to bf16.
    bound = (2 * score + 2 * 2**-9) * values.max(axis=2)[:, None]
    assert (jnp.abs(seen.astype(jnp.float32) - wanted) <= bound).all()
    assert bound.max() < 1.0 < jnp.abs(wanted).max()
