"""The triton engine on a GPU: `pytest -m gpu tests/head/test_triton_gpu.py`. Skipped where there is none.

JAXLOGP_TEST_GPU=1 must be set, otherwise tests/conftest.py hides the GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import linear_log_probs
from jaxlogp.head import HeadSpec, TritonEngine
from jaxlogp.head.triton import launch
from jaxlogp.head.triton.availability import device_capability, why_not_device, why_not_installed
from jaxlogp.head.triton.operands import Launch, Operands
from jaxlogp.head.triton.tiles import TABLE
from tests.head import cases
from tests.head import triton_plain as plain
from tests.head.test_hopper_gpu import (
    SHAPES,
    both,
    check_values_gradients_and_repeatability,
    float64,
    inputs,
    relative,
)

reason = why_not_device() or why_not_installed()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(reason is not None, reason=str(reason))]
VALUE_ERROR = 5e-5
GRADIENT_ERROR = 5e-3
ALL_OPTIONS = {"temperature": 0.7, "logit_scale": 1.3, "softcap": 30.0}


@pytest.mark.parametrize("tokens, hidden_size, vocab", SHAPES)
def test_values_gradients_and_repeatability(tokens, hidden_size, vocab):
    check_values_gradients_and_repeatability(TritonEngine(), tokens, hidden_size, vocab)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("hidden_size, vocab", [(128, 1), (72, 257), (64, 600), (1000, 5003)])
@pytest.mark.parametrize("extra", [{}, ALL_OPTIONS], ids=["plain", "all options"])
def test_odd_shapes_match_the_oracle(dtype, hidden_size, vocab, extra):
    data = cases.case((333,), hidden_size, vocab, dtypes=dtype, bias=jnp.float32 if extra else None)
    data["mask"] = jnp.arange(333) % 4 != 2
    data["hidden"] = jnp.where(data["mask"][:, None], data["hidden"], jnp.nan)
    result, gradients = cases.run(data, TritonEngine(window=256), **extra)
    cases.check(result, gradients, cases.expected(data, **extra), VALUE_ERROR, GRADIENT_ERROR)


# 151944 and 5032 are multiples of 8, not of 16; the last of their windows starts at such a column.
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias and all options"])
@pytest.mark.parametrize("tokens, hidden_size, vocab", [(2169, 896, 151944), (1530, 2048, 32256), (333, 72, 5032)])
def test_a_weight_of_the_other_layout(tokens, hidden_size, vocab, bias):
    hidden, weight, targets, g, g_entropy = inputs(tokens, hidden_size, vocab)
    mask = jnp.arange(tokens) % 5 != 1
    options = {"bias": jnp.linspace(-1.0, 1.0, vocab), **ALL_OPTIONS} if bias else {}
    engine = TritonEngine(window=1024 if vocab < 10_000 else None)

    @functools.partial(jax.jit, static_argnames="layout")
    def run(weight, layout):
        call = {**options, "weight_layout": layout}
        return both(engine, call, hidden, weight, targets, mask, g, g_entropy)

    plain, of_plain = run(weight, "vh")
    turned, (d_hidden, d_weight) = run(weight.T, "hv")
    again, gradients_again = run(weight.T, "hv")
    cases.same_bits((turned, d_hidden, d_weight), (again, *gradients_again))
    cases.same_bits(turned, plain)
    # XLA may sum its products in another order: a few roundings of sums, and one of bf16.
    assert relative(d_hidden, of_plain[0]) < 1e-3 and relative(d_weight.T, of_plain[1]) < 1e-3
    if not bias:
        wanted = float64(hidden, weight, targets, mask, g, g_entropy)
        assert relative(d_hidden, wanted[2]) < GRADIENT_ERROR and relative(d_weight.T, wanted[3]) < GRADIENT_ERROR


@pytest.mark.parametrize("vocab_dim", [0, 1])
@pytest.mark.parametrize("extra", [{}, ALL_OPTIONS], ids=["plain", "all options"])
def test_the_kernels_compute_what_their_specification_says(extra, vocab_dim):
    hidden, weight, column, g, g_entropy = inputs(512, 256, 1504)
    bias = jnp.linspace(-2.0, 2.0, 1504).at[700].set(-jnp.inf) if extra else None
    column = jnp.where(column == 700, 5, column).at[7].set(-1)
    spec = HeadSpec(**extra)
    config = TABLE[device_capability()].forward
    # The last row tile is not live, and the last 104 columns are padding.
    bounds = jnp.asarray([0, 1400, 384], jnp.int32)
    column = jnp.where(column < 1400, column, -1)
    weight = weight if vocab_dim == 0 else weight.T
    head = Operands(hidden, weight, bias, spec, vocab_dim)
    operands = head, column, bounds, True, Launch(config)
    actual, wanted = (np.asarray(x.forward_statistics(*operands))[:, :, :384] for x in (launch, plain))
    np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-5)
    maximum = jnp.max(jnp.asarray(wanted)[:, 0], axis=0)
    pad = jnp.zeros(128)
    zeros = jnp.zeros(512).at[:384]
    scalars = launch.RowScalars(
        jnp.concatenate([maximum, pad]), zeros.set(5.0), zeros.set(g[:384]), zeros.set(g_entropy[:384]),
        zeros.set(g[:384]), column,
    )  # fmt: skip
    bounds = jnp.asarray([600, 1400, 384], jnp.int32)
    config = TABLE[device_capability()].gradient
    operands = head, scalars, bounds, 904, True, Launch(config)
    actual, wanted = (np.asarray(x.window_gradient(*operands), np.float32) for x in (launch, plain))
    assert np.linalg.norm(actual - wanted) < 2e-3 * np.linalg.norm(wanted)
    assert not actual[384:].any() and not actual[:, 800:].any()


def test_tile_statistics_are_bitwise_invariant():
    hidden, weight, column, _, _ = inputs(2048, 1024, 131072)
    config = TABLE[device_capability()].forward
    tile = config.columns

    @jax.jit
    def statistics(hidden, weight, column):
        bounds = jnp.asarray([0, weight.shape[0], hidden.shape[0]], jnp.int32)
        return launch.forward_statistics(Operands(hidden, weight, None), column, bounds, True, Launch(config))

    whole = np.asarray(statistics(hidden, weight, column))
    for shards in (2, 4):
        width = weight.shape[0] // shards
        for shard in range(shards):
            start = shard * width
            local = jnp.where((column >= start) & (column < start + width), column - start, -1)
            part = np.asarray(statistics(hidden, weight[start : start + width], local))
            np.testing.assert_array_equal(part, whole[start // tile : (start + width) // tile])
    np.testing.assert_array_equal(np.asarray(statistics(hidden[1024:], weight, column[1024:])), whole[:, :, 1024:])


@pytest.mark.parametrize("extra", [{}, ALL_OPTIONS], ids=["plain", "all"])
def test_log_probs_are_bitwise_invariant_to_programs_shards_masks_and_batches(extra):
    tokens, vocab = 12500, 131072 + 8
    hidden, weight, targets, g, g_entropy = inputs(tokens, 512, vocab)

    @jax.jit
    def forward(hidden, weight, targets, mask):
        options = {"mask": mask, "with_entropy": True, "engine": TritonEngine(), **extra}
        return linear_log_probs(hidden, weight, targets, **options)

    mask = jnp.ones(tokens, bool)
    whole = forward(hidden, weight, targets, mask)
    with_backward, _ = jax.jit(lambda *x: both(TritonEngine(), extra, *x))(hidden, weight, targets, mask, g, g_entropy)
    part = slice(2001, 4501)
    some = forward(hidden[part], weight, targets[part], mask[part])
    third = jnp.arange(tokens) % 3 == 0
    masked = forward(hidden, weight, targets, third)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=auto, devices=jax.devices()[:1])
    p = jax.P

    def local(hidden, weight, targets):
        call = {"axis_name": "tensor", "with_entropy": True, "engine": "triton", **extra}
        return linear_log_probs(hidden, weight, targets, **call)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(p(), p("tensor"), p()), out_specs=p())
    over_mesh = jax.jit(mapped)(hidden, weight, targets)
    for name in ("log_probs", "entropy"):
        wanted = np.asarray(getattr(whole, name))
        np.testing.assert_array_equal(np.asarray(getattr(with_backward, name)), wanted)
        np.testing.assert_array_equal(np.asarray(getattr(over_mesh, name)), wanted)
        np.testing.assert_array_equal(np.asarray(getattr(some, name)), wanted[part])
        np.testing.assert_array_equal(np.asarray(getattr(masked, name))[third], wanted[np.asarray(third)])


@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_memory_beside_inputs_and_gradients(layout):
    tokens, hidden_size, vocab = 8192, 4096, 151936
    weight = (vocab, hidden_size) if layout == "vh" else (hidden_size, vocab)
    shapes = [((tokens, hidden_size), jnp.bfloat16), (weight, jnp.bfloat16), ((tokens,), jnp.int32)]
    shapes += [((tokens,), bool), ((tokens,), jnp.float32), ((tokens,), jnp.float32)]
    operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    options = {"weight_layout": layout}
    compiled = jax.jit(lambda *x: both(TritonEngine(), options, *x)).lower(*operands).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.6 * 2**30
    turned = ",".join(map(str, weight[::-1]))
    assert f"bf16[{turned}]" not in compiled.as_text()
