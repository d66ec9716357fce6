"""Public functions of the head with any engine: layouts of tokens, the record of what ran, and logits themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import head_logits, linear_log_probs, linear_policy_loss
from jaxlogp.head import ChunkedEngine, record_head_runs
from tests import oracle
from tests.head import cases

CHUNKED = ChunkedEngine(token_chunk=7, vocab_tile=64)


def test_token_shapes_are_a_matter_of_layout():
    data = cases.case(dtypes=jnp.float32)
    result, gradients = cases.run(data, CHUNKED)
    tokens = ("hidden", "targets", "mask", "g_lp", "g_entropy")
    flat = {**data, **{key: data[key].reshape(20, *data[key].shape[2:]) for key in tokens}}
    flat_result, flat_gradients = cases.run(flat, CHUNKED)
    assert flat_result.log_probs.shape == (20,) and flat_gradients.hidden.shape == (20, cases.HIDDEN)
    # Each is within the contract's bound of float64.
    for seen, wanted in zip(
        *map(jax.tree.leaves, ((result, gradients[:2]), (flat_result, flat_gradients[:2]))), strict=True
    ):
        assert oracle.relative_error(seen.reshape(wanted.shape), wanted) < 2 * cases.FP32_GRADIENT_ERROR


@pytest.mark.parametrize(
    "engine, name", [("auto", "chunked"), ("chunked", "chunked"), ("reference", "reference"), (CHUNKED, "chunked")]
)
def test_the_engine_that_ran_is_recorded(engine, name):
    data = cases.case()
    with record_head_runs() as runs:
        jax.eval_shape(lambda h: linear_log_probs(h, data["weight"], data["targets"], engine=engine), data["hidden"])
    assert [(run.path, run.engine, run.num_vocab_shards) for run in runs] == [("linear_log_probs", name, 1)]


def test_head_logits_are_the_logits_before_the_temperature():
    data = cases.case(dtypes=jnp.float32, bias=jnp.float32, seed=14)
    logits = head_logits(data["hidden"], data["weight"], bias=data["bias"], logit_scale=1.3, softcap=5.0)
    wanted = oracle.head_logits(data["hidden"], data["weight"], data["bias"], oracle.Head(1.0, 1.3, 5.0))
    assert logits.dtype == jnp.float32
    assert oracle.scaled_error(logits, wanted) < cases.VALUE_ERROR
    # A product that overflows is NaN, and no other logit is.
    hidden, weight = data["hidden"].at[1, 3, 0].set(3e38), data["weight"].at[5, 0].set(-4.0)
    broken = np.isnan(head_logits(hidden, weight, bias=data["bias"], softcap=5.0))
    assert np.argwhere(broken).tolist() == [[1, 3, 5]]


@pytest.mark.bad_input
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn])
@pytest.mark.parametrize("argument", ["hidden", "weight", "bias"])
def test_floats_of_8_bits_and_fewer_are_refused(argument, dtype):
    shapes = {"hidden": (2, 4), "weight": (8, 4), "bias": (8,)}
    operands = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    operands[argument] = jax.ShapeDtypeStruct(shapes[argument], dtype)
    targets, ones = jnp.zeros(2, jnp.int32), jnp.ones(2)

    def log_probs(hidden, weight, bias):
        return linear_log_probs(hidden, weight, targets, bias=bias)

    def loss(hidden, weight, bias):
        return linear_policy_loss(hidden, weight, targets, ones, ones, ones > 0, bias=bias)

    def logits(hidden, weight, bias):
        return head_logits(hidden, weight, bias=bias)

    for function in (log_probs, loss, logits):
        with pytest.raises(ValueError, match=f"^{argument}: expected dtype bfloat16, float16 or float32, got float"):
            jax.eval_shape(function, **operands)


@pytest.mark.bad_input
@pytest.mark.parametrize("layout, other", [("vh", "hv"), ("hv", "vh")])
def test_a_transposed_weight_is_named_as_the_likely_cause(layout, other):
    shape = (5, 3) if layout == "hv" else (3, 5)
    expected = r"^weight: expected shape .* with H = 3, as in hidden, got float32 array of shape "
    with pytest.raises(ValueError, match=rf"{expected}.*\? pass weight_layout='{other}'\)$"):
        linear_log_probs(jnp.ones((2, 3)), jnp.ones(shape), jnp.zeros(2, jnp.int32), weight_layout=layout)
    with pytest.raises(ValueError, match="^hidden: expected a last dimension of H = 5, as in weight"):
        linear_log_probs(jnp.ones((2, 4)), jnp.ones((3, 5)), jnp.zeros(2, jnp.int32))


@pytest.mark.bad_input
def test_hopper_on_a_cpu_names_the_device_first():
    for engine in ("hopper", "triton"):
        with pytest.raises(ValueError, match="^engine: expected a call that .* takes, got it needs an NVIDIA.* is cpu"):
            linear_log_probs(jnp.ones((2, 3)), jnp.ones((5, 3)), jnp.zeros(2, jnp.int32), engine=engine)
