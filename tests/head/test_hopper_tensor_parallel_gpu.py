"""The hopper engine with the vocabulary over several GPUs: `pytest -m gpu tests/head/test_hopper_tensor_parallel_gpu.py`.

Everything here is skipped where there are fewer than two Hopper GPUs. JAXLOGP_TEST_GPU=1 must be set, else tests/conftest.py
hides them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlogp import TokenLogProbs, VocabShards, linear_log_probs, linear_policy_loss, policy_loss
from jaxlogp._mosaic_gpu import why_not_available
from jaxlogp.head import HopperEngine
from jaxlogp.losses import grpo
from tests.head.test_hopper_gpu import float64, inputs, relative


def why_not():
    """Why nothing here can run, or None."""
    kinds = [str(getattr(device, "compute_capability", device.platform)) for device in jax.devices()]
    found = f"needs two or more GPUs of compute capability 9.0, found {kinds}"
    return why_not_available() or (None if kinds.count("9.0") >= 2 else found)


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
SIZES = [size for size in (2, 4) if size <= len(jax.devices())]
# 195 tiles and a part of one, so that even shards cut tiles; on one GPU two chunks of the backward.
TOKENS, HIDDEN, VOCAB = 600, 1024, 49952
VALUE_ERROR, GRADIENT_ERROR = 5e-5, 5e-3


@functools.cache
def operands():
    return inputs(TOKENS, HIDDEN, VOCAB)


def over_shards(local, shards, **options):
    """Runs local(hidden, weight, *others) with the weight in blocks over the GPUs; results come to the first one."""
    size = shards.num_shards
    mesh = jax.make_mesh((size,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])
    hidden, weight, *others = operands()
    weight = jax.device_put(shards.shard_rows(weight), NamedSharding(mesh, P("tensor")))
    rest = [jax.device_put(x, NamedSharding(mesh, P())) for x in (hidden, *others)]
    specs = P(), P("tensor"), *(P() for _ in others)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), P(), P("tensor")), **options)
    values, d_hidden, d_weight = jax.device_put(jax.jit(mapped)(rest[0], weight, *rest[1:]), jax.devices()[0])
    return values, d_hidden, shards.unshard_rows(d_weight)


def head(shards, engine):
    return functools.partial(linear_log_probs, with_entropy=True, axis_name="tensor", vocab=shards, engine=engine)


def with_gradients(shards, engine):
    def local(hidden, weight, targets, g, g_entropy):
        out, pull = jax.vjp(lambda h, w: head(shards, engine)(h, w, targets), hidden, weight)
        return out, *pull(TokenLogProbs(g, g_entropy))

    return local


@functools.cache
def gradients(size):
    shards = VocabShards.aligned(VOCAB, size)
    return over_shards(with_gradients(shards, HopperEngine()), shards)


@functools.cache
def wanted():
    hidden, weight, targets, *cotangents = operands()
    return float64(hidden, weight, targets, jnp.ones(TOKENS, bool), *cotangents)


def check(values, d_hidden, d_weight):
    for actual, value in zip((values.log_probs, values.entropy), wanted()[:2], strict=True):
        assert np.abs(np.asarray(actual, np.float64) - np.asarray(value)).max() < VALUE_ERROR
    # Summed never, or once more than needed, a gradient would be wrong by the number of GPUs.
    assert relative(d_hidden, wanted()[2]) < GRADIENT_ERROR
    assert relative(d_weight, wanted()[3]) < GRADIENT_ERROR


@pytest.mark.parametrize("size", SIZES)
def test_values_and_the_weights_gradient_are_bitwise_those_of_one_gpu(size):
    values, d_hidden, d_weight = gradients(size)
    check(values, d_hidden, d_weight)
    one, d_hidden_one, d_weight_one = gradients(1)
    np.testing.assert_array_equal(np.asarray(values.log_probs), np.asarray(one.log_probs))
    np.testing.assert_array_equal(np.asarray(values.entropy), np.asarray(one.entropy))
    assert bool((d_weight == d_weight_one).all())
    # Its psum adds in another order, and both are rounded to bf16 once.
    with jax.enable_x64(True):
        assert relative(d_hidden, d_hidden_one.astype(jnp.float64)) < 2e-3


@pytest.mark.parametrize("size", SIZES)
def test_run_to_run_no_bit_changes(size):
    shards = VocabShards.aligned(VOCAB, size)
    again = over_shards(with_gradients(shards, HopperEngine()), shards)
    for left, right in zip(jax.tree.leaves(gradients(size)), jax.tree.leaves(again), strict=True):
        assert bool((left == right).all())


@pytest.mark.parametrize("size", SIZES)
def test_even_shards_cut_tiles_and_stay_within_the_tolerance(size):
    shards = VocabShards.even(VOCAB, size)
    check(*over_shards(with_gradients(shards, HopperEngine()), shards))


@pytest.mark.parametrize("size", SIZES)
def test_without_replication_types_values_are_the_same_and_gradients_are_refused(size):
    shards = VocabShards.aligned(VOCAB, size)

    def local(hidden, weight, targets, g, g_entropy):
        return head(shards, HopperEngine())(hidden, weight, targets), hidden, weight

    values, _, _ = over_shards(local, shards, check_vma=False)
    np.testing.assert_array_equal(np.asarray(values.log_probs), np.asarray(gradients(1)[0].log_probs))
    np.testing.assert_array_equal(np.asarray(values.entropy), np.asarray(gradients(1)[0].entropy))
    with pytest.raises(ValueError, match="check_vma=True"):
        over_shards(with_gradients(shards, HopperEngine()), shards, check_vma=False)


@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_taken_outside_of_the_shard_map(size):
    shards = VocabShards.aligned(VOCAB, size)
    mesh = jax.make_mesh((size,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])
    hidden, weight, targets, g, g_entropy = (jax.device_put(x, NamedSharding(mesh, P())) for x in operands())
    specs = P(), P("tensor"), P()
    mapped = jax.shard_map(head(shards, HopperEngine()), mesh=mesh, in_specs=specs, out_specs=P())

    def objective(hidden, weight):
        out = mapped(hidden, shards.shard_rows(weight), targets)
        return jnp.sum(out.log_probs * g) + jnp.sum(out.entropy * g_entropy), out

    d_operands, values = jax.jit(jax.grad(objective, (0, 1), has_aux=True))(hidden, weight)
    check(*jax.device_put((values, *d_operands), jax.devices()[0]))


@pytest.mark.parametrize("size", SIZES)
def test_a_policy_loss_with_the_samplers_log_sum_exp(size):
    shards = VocabShards.aligned(VOCAB, size)
    mask = jnp.ones(TOKENS, bool)

    def two_steps(hidden, weight, targets, advantages, noise):
        # On policy the gradient of the loss with respect to the log-probs is minus the advantage.
        out, pull = jax.vjp(lambda h, w: head(shards, HopperEngine())(h, w, targets), hidden, weight)
        return out, *pull(TokenLogProbs(-advantages, jnp.zeros_like(noise)))

    def one_pass(hidden, weight, targets, advantages, noise):
        options = {"axis_name": "tensor", "vocab": shards, "engine": HopperEngine()}
        scored = linear_log_probs(hidden, weight, targets, with_lse=True, **options)

        def total(hidden, weight):
            labels = targets, scored.log_probs, advantages, mask
            return linear_policy_loss(hidden, weight, *labels, lse=scored.lse, **options)[0].sum

        return scored, *jax.grad(total, (0, 1))(hidden, weight)

    _, d_hidden, d_weight = over_shards(one_pass, shards)
    _, wanted_hidden, wanted_weight = over_shards(two_steps, shards)
    with jax.enable_x64(True):
        assert relative(d_hidden, wanted_hidden.astype(jnp.float64)) < GRADIENT_ERROR
        assert relative(d_weight, wanted_weight.astype(jnp.float64)) < GRADIENT_ERROR


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
@pytest.mark.parametrize("size", SIZES)
def test_a_policy_loss_in_one_pass(size, coefficient):
    shards, mask, loss = VocabShards.aligned(VOCAB, size), jnp.ones(TOKENS, bool), grpo(entropy_coefficient=coefficient)
    options = {"axis_name": "tensor", "vocab": shards, "engine": HopperEngine()}

    def differentiated(total_of):
        def local(hidden, weight, targets, advantages, noise):
            scored = head(shards, HopperEngine())(hidden, weight, targets)
            labels = targets, scored.log_probs + 0.2 * noise, advantages, mask
            total = lambda h, w: total_of(h, w, *labels)  # noqa: E731
            return scored, *jax.grad(total, (0, 1))(hidden, weight)

        return over_shards(local, shards)

    def one_pass(hidden, weight, *labels):
        return linear_policy_loss(hidden, weight, *labels, loss=loss, **options)[0].sum

    def two_steps(hidden, weight, targets, *labels):
        values = linear_log_probs(hidden, weight, targets, with_entropy=True, **options)
        return policy_loss(values.log_probs, *labels, loss=loss, entropy=values.entropy).sum

    _, d_hidden, d_weight = differentiated(one_pass)
    _, wanted_hidden, wanted_weight = differentiated(two_steps)
    with jax.enable_x64(True):
        assert relative(d_hidden, wanted_hidden.astype(jnp.float64)) < GRADIENT_ERROR
        assert relative(d_weight, wanted_weight.astype(jnp.float64)) < GRADIENT_ERROR
