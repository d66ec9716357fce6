"""Agreement without a tolerance: where every sum is exact in fp32, engines, chunks, shards and orders agree bitwise.

Hidden states and weights are small integers in bf16, so logits are exact integers. Either the one-hot alone contributes
to the gradient, or the softmax is uniform over a power of two, so gradients are exact as well.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import linear_log_probs
from jaxlogp.head import ChunkedEngine, FixedOrderEngine
from jaxlogp.invariance import ReductionOrder
from tests.invariance.harness import FIXED, Setting, run

TOKENS, VOCAB, HIDDEN = 70, 256, 32
pytestmark = pytest.mark.slow
ENGINES = {
    "reference": "reference",
    "chunked 7 x 64": ChunkedEngine(7, 64),
    "chunked 64 x 100": ChunkedEngine(64, 100),
    "fixed order, 24 granules": FIXED,
    "fixed order, 8 granules": FixedOrderEngine(ReductionOrder(8, 64, 128)),
}


def integers(seed, shape, bound):
    return np.random.default_rng(seed).integers(-bound, bound + 1, shape)


def uniform_case():
    """Weight rows that are all equal: p = 1/256 up to the last bits of exp, which rounding to bf16 removes."""
    row = integers(1, HIDDEN, 3)
    return {
        "hidden": jnp.asarray(integers(0, (TOKENS, HIDDEN), 3), jnp.bfloat16),
        "weight": jnp.asarray(np.tile(row, (VOCAB, 1)), jnp.bfloat16),
        "bias": jnp.zeros(VOCAB, jnp.bfloat16),
        "targets": jnp.asarray(integers(2, TOKENS, 127) + 128, jnp.int32),
        "mask": jnp.ones(TOKENS, bool),
        "g_lp": jnp.asarray(2.0 ** integers(3, TOKENS, 2), jnp.float32),
        "g_entropy": jnp.zeros(TOKENS, jnp.float32),
    }


def exact_gradients(data):
    """(onehot - 1/256) g times the operands, in float64 where every step is exact."""
    hidden, weight, g = (np.asarray(data[name]).astype(np.float64) for name in ("hidden", "weight", "g_lp"))
    dz = (np.eye(VOCAB)[np.asarray(data["targets"])] - 1 / VOCAB) * g[:, None]
    return dz @ weight, dz.T @ hidden, dz.sum(axis=0)


@pytest.mark.parametrize("name", ENGINES)
def test_hidden_gradients_of_a_uniform_softmax_agree_bit_for_bit(name):
    data = uniform_case()
    # fp32 head: dz = g (onehot - 2^-8) has 8 to 10 bits, more than bf16 keeps; in fp32 nothing is rounded.
    setting = Setting(ENGINES[name], VOCAB, (("fp32_head", True),))
    wanted = exact_gradients(data)
    for size in (1, 4) if name in ("chunked 7 x 64", "fixed order, 24 granules") else (1,):
        seen = run(setting, size, data)
        for value, key in zip(wanted, ("hidden", "weight", "bias"), strict=True):
            np.testing.assert_array_equal(seen[key], np.asarray(jnp.asarray(value, jnp.bfloat16)), err_msg=key)


@pytest.mark.parametrize("name", ENGINES)
def test_log_probs_of_equal_logits_are_the_same_number(name):
    data = uniform_case()
    log_probs = jax.jit(linear_log_probs, static_argnames="engine")(
        data["hidden"], data["weight"], data["targets"], engine=ENGINES[name]
    ).log_probs
    assert len(set(np.asarray(log_probs).tolist())) == 1
    # 256 equal logits: log S is log 256 + (z - k ln 2), two roundings away from the engines that subtract the maximum.
    np.testing.assert_allclose(log_probs, -np.log(256.0), rtol=3 * 2**-24)


def test_target_logits_of_integers_are_exact():
    """A logit far above the rest makes lse exactly that logit, and log-probs of the others exact integers."""
    rng = np.random.default_rng(4)
    hidden = np.zeros((TOKENS, HIDDEN))
    hidden[:, 0], hidden[:, 1:] = 64, rng.integers(-2, 3, (TOKENS, HIDDEN - 1))
    weight = rng.integers(-1, 2, (VOCAB, HIDDEN)).astype(np.float64)
    weight[:, 0] = 0
    weight[9, 0] = 4
    logits = hidden @ weight.T
    targets = rng.integers(10, VOCAB, TOKENS)
    wanted = logits[np.arange(TOKENS), targets] - logits[:, 9]
    for name, engine in ENGINES.items():
        seen = jax.jit(linear_log_probs, static_argnames="engine")(
            jnp.asarray(hidden, jnp.bfloat16),
            jnp.asarray(weight, jnp.bfloat16),
            jnp.asarray(targets, jnp.int32),
            engine=engine,
        ).log_probs
        np.testing.assert_array_equal(seen, wanted, err_msg=name)
