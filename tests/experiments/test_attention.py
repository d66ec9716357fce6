"""Attention over packed rows against a float64 softmax of each query, written here from the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.attention import AttentionCall, AttentionRun, attend_packed, choose_attention, first_keys
from experiments.models.attention.chunked import BLOCK, attend_chunked

pytestmark = pytest.mark.costly

# Query heads, key-value heads, features.
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
LENGTH = 2 * BLOCK + 44
SCALE = 0.4


def packed_ids(length):
    """Three rows: documents of many lengths with padding at the end; one document; padding alone."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, length // 4, size=16)
    documents = np.repeat(np.arange(16), lengths)[: length - 9]
    first = np.concatenate([documents, np.full(length - len(documents), -1)])
    return np.stack([first, np.full(length, 3), np.full(length, -1)]).astype(np.int32)


def operands(length, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, rows=3, dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = [(rows, length, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def visible_keys(ids, window):
    """bool [B, T, T] from the definition: the same run of ids, not later, fewer than `window` slots before."""
    rows, length = ids.shape
    visible = np.zeros((rows, length, length), bool)
    for row in range(rows):
        for t in range(length):
            for s in range(t, max(-1, t - window), -1):
                if ids[row, s] != ids[row, t]:
                    break
                visible[row, t, s] = True
    return visible


def oracle(queries, keys, values, d_out, visible, softcap):
    """Out, and the gradients of Σ out · d_out."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (queries, keys, values, d_out))
    group = q.shape[2] // k.shape[2]
    k_of, v_of = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = SCALE * np.einsum("btnd,bsnd->bnts", q, k_of)
    slope = np.ones_like(scores)
    if softcap is not None:
        capped = softcap * np.tanh(scores / softcap)
        scores, slope = capped, 1 - np.tanh(scores / softcap) ** 2
    scores = np.where(visible[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = np.einsum("bnts,bsnd->btnd", p, v_of)
    d_p = np.einsum("btnd,bsnd->bnts", d_out, v_of)
    d_scores = p * (d_p - (p * d_p).sum(-1, keepdims=True)) * slope * SCALE
    summed = lambda x: x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3)  # noqa: E731
    d_q = np.einsum("bnts,bsnd->btnd", d_scores, k_of)
    d_k, d_v = (summed(np.einsum("bnts,btnd->bsnd", x, y)) for x, y in ((d_scores, q), (p, d_out)))
    return out, d_q, d_k, d_v


@functools.partial(jax.jit, static_argnames=("implementation", "softcap"))
def value_and_gradients(q, k, v, d_out, ids, window, *, implementation, softcap):
    allowed = AttentionRun(implementation, "named").allow(first_keys(ids, window))
    out, pull_back = jax.vjp(lambda *x: attend_packed(*x, allowed, scale=SCALE, softcap=softcap), q, k, v)
    return out, *pull_back(d_out)


@pytest.mark.parametrize("implementation", ["einsum", "chunked"])
@pytest.mark.parametrize(("window", "softcap"), [(10**6, None), (37, 2.5)])
def test_values_and_gradients_equal_float64(implementation, window, softcap):
    ids, data = packed_ids(LENGTH), operands(LENGTH)
    # Windows are traced: one program for layers that differ in them.
    seen = value_and_gradients(*data, ids, window, implementation=implementation, softcap=softcap)
    wanted = oracle(*data, visible_keys(ids, window), softcap)
    for name, got, exact in zip(("out", "dq", "dk", "dv"), seen, wanted, strict=True):
        # Sums of up to 300 fp32 products of size 1, and a softmax of scores of up to about 6.
        np.testing.assert_allclose(got, exact, atol=2e-5, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("window", [1, BLOCK, BLOCK + 1])
def test_windows_at_the_edges_of_blocks(window):
    data = operands(LENGTH, rows=1)
    ids = np.zeros((1, LENGTH), np.int32)
    seen = value_and_gradients(*data, ids, window, implementation="chunked", softcap=None)
    wanted = oracle(*data, visible_keys(ids, window), None)
    for got, exact in zip(seen, wanted, strict=True):
        np.testing.assert_allclose(got, exact, atol=2e-5, rtol=2e-5)


def test_bf16_is_as_near_to_float64_as_the_einsum():
    ids, data = packed_ids(LENGTH), operands(LENGTH, dtype=jnp.bfloat16)
    wanted = oracle(*data, visible_keys(ids, LENGTH), None)
    errors = {}
    for name in ("einsum", "chunked"):
        seen = value_and_gradients(*data, ids, LENGTH, implementation=name, softcap=None)
        pairs = zip(seen, wanted, strict=True)
        errors[name] = [np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y) for x, y in pairs]
    # A bf16 rounding is up to 2^-9; einsum's probabilities are rounded after the division, the blocks' before.
    assert all(chunked < max(1.3 * einsum, 4e-3) for einsum, chunked in zip(*errors.values(), strict=True)), errors


def test_blocks_of_other_documents_are_not_visited(monkeypatch):
    visits = []

    def counted(lower, upper, body, carry):
        visits.append(upper - lower)
        return carry

    # The loops' bounds, read where the loops begin.
    length = 64
    monkeypatch.setattr("experiments.models.attention.chunked.lax.fori_loop", counted)
    with jax.disable_jit():
        for documents in (1, 4):
            visits.append(0)
            ids = jnp.arange(length)[None] // (length // documents)
            attend_chunked(*operands(length, rows=1)[:3], first_keys(ids), scale=SCALE, block=8)
    one, four = sum(map(int, visits[1:9])), sum(map(int, visits[10:]))
    assert (one, four) == (36, 12)  # 8 · 9 / 2 pairs of blocks, and 4 · (2 · 3 / 2)


def temporaries(implementation, length):
    """MiB of temporary memory of forward and backward at this length; compiled, not run."""
    shapes = [jax.ShapeDtypeStruct((1, length, n, 64), jnp.bfloat16) for n in (2, 1, 1)]

    def loss(q, k, v, ids):
        allowed = AttentionRun(implementation, "named").allow(first_keys(ids))
        return jnp.sum(attend_packed(q, k, v, allowed, scale=SCALE).astype(jnp.float32))

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes, jax.ShapeDtypeStruct((1, length), jnp.int32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


def test_memory_of_the_blocks_grows_with_the_length_and_not_with_its_square():
    half, whole = (temporaries("chunked", length) for length in (4096, 8192))
    # The scores alone, fp32 [2, 8192, 8192], are 512 MiB.
    einsum = temporaries("einsum", 8192)
    assert whole < 2.2 * half and einsum > 512 and whole < 0.05 * einsum


def call(**changes):
    plain = {"rows": 2, "length": 2048, "heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "float32"}
    return AttentionCall(**(plain | changes))


def test_the_choice_says_why():
    asked = [("auto", call(length=64)), ("auto", call()), ("einsum", call()), ("repeatable", call())]
    chosen = [choose_attention(*each) for each in asked]
    assert [run.implementation for run in chosen] == ["einsum", "chunked", "einsum", "einsum"]
    assert "64 tokens" in chosen[0].reason and chosen[2].reason == "named by the caller"
    assert chosen[3].reason.startswith("repeatable; hopper not used: it needs")


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["cudnn", "tokamax", "flash"])
def test_an_implementation_that_cannot_run_here_is_refused_with_the_reason(name):
    with pytest.raises(ValueError, match="attention: expected .*" + ("'flash'" if name == "flash" else "NVIDIA GPU")):
        choose_attention(name, call(dtype="bfloat16"))
