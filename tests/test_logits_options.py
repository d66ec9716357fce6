"""Options of log_probs_from_logits, its form on global arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxlogp
from jaxlogp import log_probs_from_logits, sharded_log_probs_from_logits

TOKENS, VOCAB = (4, 3), 12
# Logits up to 12: the difference to the maximum, exp, log and their sum round by a few 2^-24 of that.
ERROR = 12 * 8 * 2.0**-24


@functools.cache
def case():
    rng = np.random.default_rng(0)
    logits = rng.normal(0.0, 2.0, (*TOKENS, VOCAB)).astype(np.float32)
    targets = rng.integers(0, VOCAB, TOKENS).astype(np.int32)
    targets[1, 2] = VOCAB + 3  # only out_of_vocab "zero" takes it
    return logits, targets, rng.random(TOKENS) < 0.8


def float64(logit_scale, temperature):
    """(log_probs, lse, gradient of Σ log_probs); the target outside of the vocabulary has log-prob 0 and gradient -p."""
    logits, targets, mask = case()
    factor = logit_scale / temperature
    z = np.float64(logits) * factor
    lse = np.log(np.exp(z).sum(-1))
    inside = targets < VOCAB
    onehot = (np.arange(VOCAB) == targets[..., None]) * 1.0
    log_probs = np.where(inside & mask, (z * onehot).sum(-1) - lse, 0.0)
    gradient = factor * (onehot - np.exp(z - lse[..., None]))
    return log_probs, np.where(mask, lse, 0.0), np.where(mask[..., None], gradient, 0.0)


@pytest.mark.parametrize("logit_scale, temperature", [(1.0, 1.0), (0.5, 1.0), (-1.5, 0.75)])
def test_scale_lse_and_targets_outside_against_float64(logit_scale, temperature):
    logits, targets, mask = case()
    options = {"logit_scale": logit_scale, "temperature": temperature, "out_of_vocab": "zero", "with_lse": True}

    def total(logits):
        values = log_probs_from_logits(logits, targets, mask, **options)
        return jnp.sum(values.log_probs), values

    gradient, values = jax.jit(jax.grad(total, has_aux=True))(jnp.asarray(logits))
    for actual, expected in zip(
        (values.log_probs, values.lse, gradient), float64(logit_scale, temperature), strict=True
    ):
        np.testing.assert_allclose(actual, expected, atol=ERROR)
    assert log_probs_from_logits(logits, np.minimum(targets, 2)).lse is None


def test_the_lse_is_a_constant():
    logits, targets, mask = case()
    options = {"out_of_vocab": "zero", "with_lse": True}
    gradient = jax.grad(lambda x: log_probs_from_logits(x, targets, mask, **options).lse.sum())(jnp.asarray(logits))
    np.testing.assert_array_equal(gradient, np.zeros_like(logits))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("ranges", [None, ((0, 7), (7, 12))], ids=["equal", "unequal"])
def test_on_global_arrays(kind, ranges):
    logits, targets, mask = case()
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind,) * 2)
    options = {"logit_scale": 0.5, "out_of_vocab": "zero", "with_lse": True, "with_entropy": True}
    vocab = None if ranges is None else jaxlogp.VocabShards(ranges, VOCAB)

    def total(logits):
        values = sharded_log_probs_from_logits(logits, targets, mask, mesh=mesh, vocab=vocab, **options)
        return jnp.sum(values.log_probs), values

    with jax.set_mesh(mesh):
        split = jax.device_put(logits, jax.NamedSharding(mesh, P("data", None, "tensor")))
        gradient, values = jax.grad(total, has_aux=True)(split)
    log_probs, lse, wanted = float64(0.5, 1.0)
    for actual, expected in zip((values.log_probs, values.lse, gradient), (log_probs, lse, wanted), strict=True):
        np.testing.assert_allclose(actual, expected, atol=ERROR)
    entropy = log_probs_from_logits(logits, targets, mask, **options).entropy
    np.testing.assert_allclose(values.entropy, entropy, atol=ERROR)


def test_garbage_in_the_padding_of_a_shard_has_no_effect_and_no_gradient():
    logits, targets, mask = case()
    shards = jaxlogp.VocabShards(((0, 7), (7, 12)), VOCAB)
    padded = shards.shard_rows(jnp.asarray(logits), 2).at[..., 12:].set(jnp.nan)
    specs = P(None, None, "tensor"), P(), P()
    options = {"out_of_vocab": "zero", "axis_name": "tensor", "vocab": shards}

    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P())
    def run(logits, targets, mask):
        return log_probs_from_logits(logits, targets, mask, **options).log_probs

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient_of_sum(logits):
        log_probs = run(logits, targets, mask)
        return jnp.sum(log_probs), log_probs

    gradient, log_probs = gradient_of_sum(padded)
    wanted, _, slopes = float64(1.0, 1.0)
    np.testing.assert_allclose(log_probs, wanted, atol=ERROR)
    np.testing.assert_allclose(gradient[..., :12], slopes, atol=ERROR)
    np.testing.assert_array_equal(gradient[..., 12:], 0.0)


def test_one_program_for_all_calls_outside_of_jit():
    logits, targets, mask = case()
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    run = functools.partial(sharded_log_probs_from_logits, logits, np.minimum(targets, 3), mask, mesh=mesh)
    run()
    with jax.no_tracing():
        run()


def sharded(**changes):
    logits, targets, _ = case()
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    return sharded_log_probs_from_logits(**{"logits": logits, "targets": targets % VOCAB, "mesh": mesh, **changes})


BAD = {
    "vocab_axis": lambda: sharded(vocab_axis="model"),
    "token_axes": lambda: sharded(token_axes=("rows",)),
    "token_axes ": lambda: sharded(vocab_axis="data"),
    "logits": lambda: sharded(logits=np.zeros((3, 3, VOCAB), np.float32), targets=np.zeros((3, 3), np.int32)),
    "logits ": lambda: sharded(logits=np.zeros((4, 3, 14), np.float32), vocab=jaxlogp.VocabShards.even(VOCAB, 2)),
    "vocab": lambda: sharded(vocab=jaxlogp.VocabShards.even(VOCAB, 4)),
    "vocab ": lambda: sharded(vocab=12),
    "targets": lambda: sharded(targets=case()[1]),
    "axis_name": lambda: sharded(axis_name="tensor"),
    "logit_scale": lambda: sharded(logit_scale=0.0),
    "temperature": lambda: sharded(temperature=jnp.float32(0.7)),
    "out_of_vocab ": lambda: sharded(out_of_vocab=["zero"]),
    "out_of_vocab": lambda: log_probs_from_logits(case()[0], case()[1], out_of_vocab="ignore"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    sharded()
    with pytest.raises(ValueError, match=f"^{name.strip()}: expected"):
        BAD[name]()
