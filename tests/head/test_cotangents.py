"""Cotangents of fp16 heads: multiplied by a power of two that raises the largest bound of |dz| to at most 2^13."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlogp import TokenLogProbs
from jaxlogp._targets import LocalTargets
from jaxlogp.head.call import HeadCall, scaled_cotangents
from jaxlogp.head.projection import HeadSpec

MASK = np.array([True, True, True, False])
G_LOG_PROBS = np.float32([0.5, -3.0, 1.0, 1e6])
G_ENTROPY = np.float32([1e-3, 0.0, -0.75, 1e6])
ZEROS = np.zeros(4, np.float32)
PLAIN = HeadSpec()


def scaled(g_log_probs, g_entropy, *, vocab=1000, spec=PLAIN, dtype=jnp.float16, invalid=False):
    """The cotangents of four tokens, of which the last is masked and the first may have a target that is invalid."""
    invalid = jnp.asarray([invalid, False, False, False])
    targets = LocalTargets(jnp.zeros(4, jnp.int32), jnp.asarray(MASK), invalid, jnp.int32(vocab))
    call = HeadCall(jnp.zeros((4, 2)), jnp.zeros((vocab, 2), dtype), None, targets, spec, vocab)
    given = TokenLogProbs(jnp.asarray(g_log_probs), None if g_entropy is None else jnp.asarray(g_entropy))
    return scaled_cotangents(call, given, same_on_all_ranks=False)


@pytest.mark.parametrize("vocab", [2, 1000])
@pytest.mark.parametrize("spec", [PLAIN, HeadSpec(temperature=0.125, logit_scale=-3.0)], ids=["plain", "scaled"])
@pytest.mark.parametrize(
    "g_log_probs, g_entropy", [(G_LOG_PROBS, None), (G_LOG_PROBS, G_ENTROPY), (ZEROS, G_ENTROPY), (ZEROS, -G_ENTROPY)]
)
def test_the_largest_bound_is_raised_to_the_range_of_fp16(g_log_probs, g_entropy, spec, vocab):
    values, unscale = scaled(g_log_probs, g_entropy, vocab=vocab, spec=spec)
    # |dz| <= |g| + |g_H| (log V + 1), and the logits' own factor.
    of_entropy = 0.0 if g_entropy is None else np.abs(np.float64(g_entropy[MASK])).max() * (math.log(vocab) + 1.0)
    bound = (np.abs(np.float64(g_log_probs[MASK])).max() + of_entropy) * abs(spec.logit_scale) / spec.temperature
    assert math.frexp(float(unscale))[0] == 0.5, "a power of two"
    assert 2.0**12 < bound / float(unscale) <= 2.0**13
    for value, given in ((values.log_probs, g_log_probs), (values.entropy, g_entropy)):
        if given is not None:
            np.testing.assert_array_equal(value, np.where(MASK, given, 0.0) / np.float32(unscale))


def test_the_smallest_cotangents_are_raised_as_far_as_fp32_holds_the_factor():
    values, unscale = scaled(np.float32([0.0, 2.0**-126, 0.0, 0.0]), None)
    assert (values.log_probs[1], unscale) == (2.0**-6, 2.0**-120)


@pytest.mark.parametrize("bad", ["none", "infinite", "invalid"])
def test_cotangents_without_a_finite_bound_above_0_stay_as_they_are(bad):
    given = {"none": ZEROS, "infinite": np.float32([np.inf, -3.0, 1.0, 1e6]), "invalid": G_LOG_PROBS}[bad]
    values, unscale = scaled(given, ZEROS, invalid=bad == "invalid")
    assert unscale == 1.0
    wanted = np.where(MASK, np.where([bad == "invalid", False, False, False], np.float32(np.nan), given), 0.0)
    np.testing.assert_array_equal(values.log_probs, wanted)


@pytest.mark.parametrize("dtype, spec", [(jnp.bfloat16, PLAIN), (jnp.float16, HeadSpec(fp32_head=True))])
def test_only_products_of_fp16_have_their_cotangents_scaled(dtype, spec):
    values, unscale = scaled(G_LOG_PROBS, None, dtype=dtype, spec=spec)
    assert unscale is None
    np.testing.assert_array_equal(values.log_probs, np.where(MASK, G_LOG_PROBS, 0.0))


@pytest.mark.parametrize("same", [True, False])
def test_ranks_whose_gradients_are_added_before_the_division_have_one_factor(same):
    def of_rank(g):
        targets = LocalTargets(jnp.zeros(4, jnp.int32), jnp.asarray(MASK), None, jnp.int32(10))
        call = HeadCall(jnp.zeros((4, 2)), jnp.zeros((10, 2), jnp.float16), None, targets, PLAIN, 10)
        values, unscale = scaled_cotangents(call, TokenLogProbs(g[0], None), same_on_all_ranks=same)
        return values.log_probs[None], jnp.broadcast_to(unscale, (1,))

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    mapped = jax.shard_map(of_rank, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    largest = np.float32([1.0, 2.0**-10])
    values, unscale = jax.jit(mapped)(np.broadcast_to(largest[:, None], (2, 4)))
    np.testing.assert_array_equal(unscale, 2.0**-13 * (np.ones(2) if same else largest))
    np.testing.assert_array_equal(values, np.where(MASK, largest[:, None] / unscale[:, None], 0.0))
