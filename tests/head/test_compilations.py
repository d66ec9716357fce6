"""A second call of the same shapes compiles nothing, also outside of jit: JAX's own event is counted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxlogp import (
    embedding_lookup,
    linear_log_probs,
    linear_policy_loss,
    log_probs_from_logits,
    sharded_embedding_lookup,
    sharded_linear_log_probs,
    sharded_linear_policy_loss,
)
from jaxlogp.head import ChunkedEngine, GradientFilter, record_head_runs

pytestmark = pytest.mark.costly

EVENT = "/jax/core/compile/backend_compile_duration"
VOCAB, HIDDEN = 26, 8
RNG = np.random.default_rng(0)
H, W = (jnp.asarray(RNG.normal(size=size), jnp.float32) for size in [(4, HIDDEN), (VOCAB, HIDDEN)])
TARGETS = jnp.asarray([0, 12, 13, 25])
OLD, ONES = jnp.asarray(-RNG.random(4), jnp.float32), jnp.ones(4)
LABELS = ONES > 0


@functools.cache
def mesh():
    return jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])


ENGINES = {
    "reference": "reference",
    "chunked": ChunkedEngine(token_chunk=3, vocab_tile=10),
    "filtered": ChunkedEngine(token_chunk=3, vocab_tile=10, gradient_filter=GradientFilter()),
    "fixed_order": "fixed_order",
    "a sequence": ["hopper", "chunked"],
}
HEADS = {
    "log-probs": lambda h, w, **options: linear_log_probs(h, w, TARGETS, **options).log_probs.sum(),
    "loss": lambda h, w, **options: linear_policy_loss(h, w, TARGETS, OLD, ONES, LABELS, **options)[0].sum,
    "sharded log-probs": lambda h, w, **options: sharded_linear_log_probs(
        h, w, TARGETS, mesh=mesh(), **options
    ).log_probs.sum(),
    "sharded loss": lambda h, w, **options: (
        sharded_linear_policy_loss(h, w, TARGETS, OLD, ONES, LABELS, mesh=mesh(), **options)[0].sum
    ),
}
OTHERS = {
    "logits": lambda h, w: log_probs_from_logits(h @ w.T, TARGETS).log_probs.sum(),
    "embedding": lambda h, w: embedding_lookup(w, TARGETS).sum(),
    "sharded embedding": lambda h, w: sharded_embedding_lookup(w, TARGETS, mesh=mesh()).sum(),
}


def compilations(run):
    """The number of programs that XLA compiles while it runs."""
    names = []

    def listen(name, *_, **__):
        names.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.block_until_ready(run())
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return names.count(EVENT)


def check(function):
    """Each call differentiates a new function, as a user's step outside of jit does."""
    runs = lambda: function(H, W), lambda: jax.grad(lambda h, w: function(h, w), argnums=(0, 1))(H, W)
    for run in runs:
        first = compilations(run)
        assert first > 0, "the event is not counted"
        assert compilations(run) == 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", HEADS)
def test_a_second_call_compiles_nothing(name, engine):
    check(lambda h, w: HEADS[name](h, w, engine=ENGINES[engine]))


@pytest.mark.parametrize("name", OTHERS)
def test_a_second_call_without_an_engine_compiles_nothing(name):
    check(OTHERS[name])


@pytest.mark.parametrize("name", HEADS)
def test_every_call_outside_of_jit_is_recorded(name):
    for _ in range(2):
        with record_head_runs() as runs:
            HEADS[name](H, W, engine="chunked")
        shards = 2 if "sharded" in name else 1
        assert [(run.engine, run.num_vocab_shards) for run in runs] == [("chunked", shards)]


def test_a_program_is_not_reused_for_other_options():
    plain, scaled = (sharded_linear_log_probs(H, W, TARGETS, mesh=mesh(), logit_scale=scale) for scale in (1.0, 0.5))
    assert jnp.max(jnp.abs(plain.log_probs - scaled.log_probs)) > 0.1
