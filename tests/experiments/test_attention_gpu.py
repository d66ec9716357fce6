"""Attention kernels on a GPU against float64; run with JAXLOGP_TEST_GPU=1 and -m gpu."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.models.attention import AttentionCall, attend_packed, choose_attention, first_keys, triton_cached
from experiments.models.attention.choice import WHY_NOT
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from tests.experiments import test_attention as cases
from tests.experiments import test_block_attention as block_cases
from tests.experiments import test_cached_attention as cached_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.devices()[0].platform != "gpu", reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
LENGTH = 700


@functools.partial(jax.jit, static_argnames=("name", "softcap"))
def value_and_gradients(q, k, v, d_out, ids, window, *, name, softcap):
    call = AttentionCall(*q.shape[:3], k.shape[2], q.shape[3], dtype=str(q.dtype), softcap=softcap)
    allowed = choose_attention(name, call).allow(first_keys(ids, window))
    out, pull_back = jax.vjp(lambda *x: attend_packed(*x, allowed, scale=cases.SCALE, softcap=softcap), q, k, v)
    return out, *pull_back(d_out)


@functools.cache
def expected(head_dim, window, softcap):
    """Operands, ids, and float64 results."""
    data = cases.operands(LENGTH, heads=4, kv_heads=2, head_dim=head_dim, dtype=jnp.bfloat16)
    ids = cases.packed_ids(LENGTH)
    return data, ids, cases.oracle(*data, cases.visible_keys(ids, window), softcap)


@pytest.mark.parametrize("name", ["hopper", "tokamax", "cudnn", "chunked", "einsum"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("window", "softcap"), [(10**6, None), (300, 5.0)])
def test_values_and_gradients_in_bf16_are_near_float64(monkeypatch, name, head_dim, window, softcap):
    monkeypatch.setattr(cases, "SCALE", head_dim**-0.5)
    call = AttentionCall(3, LENGTH, 4, 2, head_dim, "bfloat16", softcap)
    if WHY_NOT[name](call) is not None:
        pytest.skip(WHY_NOT[name](call))
    data, ids, wanted = expected(head_dim, window, softcap)
    seen = value_and_gradients(*data, ids, window, name=name, softcap=softcap)
    errors = {}
    for part, got, exact in zip(("out", "dq", "dk", "dv"), seen, wanted, strict=True):
        got = np.asarray(got, np.float64)
        assert np.isfinite(got).all(), part
        errors[part] = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    # Results are rounded to bf16, up to 2^-9 = 2e-3 a number, and so are probabilities and their gradients inside.
    assert max(errors.values()) < 6e-3, errors


def test_the_automatic_choice_takes_a_kernel():
    chosen = choose_attention("auto", AttentionCall(2, 2048, 8, 2, 128, "bfloat16"))
    assert chosen.implementation in ("hopper", "tokamax", "cudnn"), chosen


def test_the_repeatable_choice_gives_the_same_bits_again():
    q, k, v, d_out = cases.operands(LENGTH, heads=4, kv_heads=2, head_dim=128, dtype=jnp.bfloat16)
    operands = q, k, v, d_out, cases.packed_ids(LENGTH), 10**6
    run = functools.partial(value_and_gradients, name="repeatable", softcap=None)
    first = jax.tree.map(np.asarray, run(*operands))
    for _ in range(10):
        for one, other in zip(first, run(*operands), strict=True):
            assert one.tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, 2.0)])
@pytest.mark.parametrize("steps", [1, cached_cases.NEW])
@pytest.mark.parametrize("fewest", [1, triton_cached.FEWEST_PROGRAMS])
@pytest.mark.parametrize("shared", [False, True])
def test_the_kernel_for_caches_is_near_float64(shared, fewest, steps, window, softcap, monkeypatch):
    monkeypatch.setattr(triton_cached, "FEWEST_PROGRAMS", fewest)
    if shared:
        cached_cases.share_blocks(monkeypatch)
    attend = functools.partial(cached_cases.by_kernel, window=window, softcap=softcap, interpret=False)
    out = cached_cases.generated("triton", attend, steps, "bfloat16")
    # As where the kernel is interpreted.
    np.testing.assert_allclose(out, cached_cases.wanted(steps - 1, window, softcap), atol=2**-9 * 4 * 2, rtol=0)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_the_kernel_for_caches_of_rows_at_different_tokens_is_near_float64(window, shared, monkeypatch):
    if shared:
        cached_cases.share_blocks(monkeypatch)
    steps = np.int32([0, cached_cases.NEW - 1, 3, triton_cached.BLOCK])
    attend = functools.partial(cached_cases.by_kernel, window=window, softcap=None, interpret=False)
    out = cached_cases.at_steps(attend, steps, "triton", "bfloat16")
    wanted = [cached_cases.wanted(step, window, None)[row] for row, step in enumerate(steps)]
    np.testing.assert_allclose(out, wanted, atol=2**-9 * 4 * 2, rtol=0)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, 2.0)])
@pytest.mark.parametrize("shape", block_cases.SHAPES, ids=str)
def test_the_kernel_for_blocks_is_near_float64(shape, window, softcap):
    block_cases.check(shape, window, softcap, interpret=False)


def test_tokens_read_one_by_one_are_as_near_to_fp32_as_the_whole_row():
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
    config = DecoderConfig.qwen3(vocab_size=512, head_dim=64, dtype="bfloat16", **sizes)
    model, exact = (Decoder(replace(config, dtype=dtype), rngs=nnx.Rngs(0)) for dtype in ("bfloat16", "float32"))
    ids = np.random.default_rng(0).integers(0, 512, (3, 260)).astype(np.int32)
    zeros, positions = np.zeros_like(ids), np.broadcast_to(np.arange(260, dtype=np.int32), ids.shape)
    of_rows = jax.jit(lambda model: model.hidden_states(ids, positions, zeros).astype(jnp.float32)[:, 130:])
    whole, wanted = map(np.asarray, map(of_rows, (model, exact)))

    @jax.jit
    def one_by_one(ids):
        _, cache = model.prefill(ids[:, :130], jnp.full(3, 130, jnp.int32), slots=130)
        read = lambda cache, token: model.decode_step(token, cache)[::-1]  # noqa: E731
        return jax.lax.scan(read, cache, ids[:, 130:].T)[1].swapaxes(0, 1)

    assert model.config.cached_attention_run().implementation == "triton"
    read = np.asarray(one_by_one(jnp.asarray(ids)), np.float32)
    assert np.linalg.norm(read - wanted) < 1.25 * np.linalg.norm(whole - wanted)
