"""The residual stream in fp32 under bf16 activations: values, gradients, and the drift that it takes away."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.models.decoder_config import DecoderConfig, SlidingLayers
from experiments.models.parameters import abstract_decoder
from jaxlogp import linear_log_probs
from tests.experiments.decoder_oracle import oracle_forward

SIZES = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16)
DEEP = DecoderConfig(**SIZES, num_layers=4, tie_embeddings=True, dtype="bfloat16")
GEMMA = DecoderConfig(
    **SIZES, num_layers=2, sliding=SlidingLayers(3, (True, False)), norm_plus_one=True, post_norms=True,
    embed_scale=8.0, tie_embeddings=True, dtype="bfloat16",
)  # fmt: skip
ROWS, PROMPT, LENGTH = 8, 8, 16
POSITIONS = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
TOKENS = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (ROWS, LENGTH)).astype(np.int32)


@functools.cache
def decoder(config):
    """Graph, and a state of numbers that bf16 holds: the same for every dtype."""
    graph, shapes = abstract_decoder(config)
    noise = np.random.default_rng(7)

    def drawn(leaf):
        # Matrices are [layers, inputs, outputs …] of 64 or 128 inputs; vectors are norms.
        scale, centre = (0.1, 0.0) if leaf.ndim > 2 or leaf.shape[0] == SIZES["vocab_size"] else (0.2, 1.0)
        return jnp.asarray(centre + scale * noise.normal(size=leaf.shape), jnp.bfloat16).astype(jnp.float32)

    return graph, jax.tree.map(drawn, shapes)


@functools.partial(jax.jit, static_argnums=0)
def whole_rows(graph, state):
    return nnx.merge(graph, state).hidden_states(TOKENS, POSITIONS, jnp.zeros_like(TOKENS))


@functools.partial(jax.jit, static_argnums=0)
def through_the_cache(graph, state):
    """Hidden states from the prompt's last token on."""
    model = nnx.merge(graph, state)
    hidden, cache = model.prefill(TOKENS[:, :PROMPT], jnp.full(ROWS, PROMPT, jnp.int32), LENGTH - PROMPT)

    def step(cache, token):
        hidden, cache = model.decode_step(token, cache)
        return cache, hidden

    _, later = jax.lax.scan(step, cache, jnp.asarray(TOKENS[:, PROMPT:]).T)
    return jnp.concatenate([hidden[:, -1:], later.swapaxes(0, 1)], axis=1)


def drift(config):
    """|log-prob through the cache - log-prob of whole rows|, nats."""
    graph, state = decoder(config)
    weight = nnx.merge(graph, state).head()[1]
    found = []
    for hidden in (through_the_cache(graph, state)[:, :-1], whole_rows(graph, state)[:, PROMPT - 1 : -1]):
        assert hidden.dtype == jnp.bfloat16
        found.append(np.asarray(linear_log_probs(hidden, weight, TOKENS[:, PROMPT:]).log_probs))
    return np.abs(found[0] - found[1])


@pytest.mark.slow
def test_an_fp32_residual_stream_takes_drift_away():
    narrow, wide = (drift(dataclasses.replace(DEEP, residual_dtype=each)) for each in ("auto", "float32"))
    # With few features the order of sums hardly ever tips a rounding: what differs are roundings of the residual stream
    # that XLA leaves out inside fusions, other ones in either program, and in fp32 there are none to leave out.
    assert narrow.mean() > 1e-4
    assert wide.mean() < narrow.mean() / 1.4 and wide.max() < narrow.max() / 1.4


@pytest.mark.parametrize("config", [DEEP, GEMMA], ids=["llama", "gemma"])
def test_hidden_states_are_those_of_float64_up_to_the_rounding_of_operands(config):
    graph, state = decoder(dataclasses.replace(config, residual_dtype="float32"))
    hidden = np.asarray(whole_rows(graph, state)[0], np.float64)
    wanted = oracle_forward(state, TOKENS[0], config)
    # A rounding is up to 2^-9, and about ten follow each other.
    assert np.linalg.norm(hidden - wanted) < 0.02 * np.linalg.norm(wanted)


@pytest.mark.slow
def test_gradients_are_those_of_fp32_up_to_rounding():
    def gradient(config):
        graph, state = decoder(config)
        weights = np.random.default_rng(1).normal(size=(ROWS, LENGTH, SIZES["hidden_size"])).astype(np.float32)
        loss = lambda state: jnp.sum(whole_rows(graph, state).astype(jnp.float32) * weights)  # noqa: E731
        return jax.jit(jax.grad(loss))(state)

    one_layer = dataclasses.replace(DEEP, num_layers=1)
    changes = ({"residual_dtype": "float32"}, {"dtype": "float32"})
    found = (jax.tree.leaves(gradient(dataclasses.replace(one_layer, **each))) for each in changes)
    for ours, wanted in zip(*found, strict=True):
        assert ours.dtype == jnp.float32
        # As many roundings again as in the values.
        assert np.linalg.norm(ours - wanted) < 0.03 * np.linalg.norm(wanted)


def test_with_fp32_activations_nothing_changes():
    texts = []
    for residual in ("auto", "float32"):
        graph, state = decoder(dataclasses.replace(DEEP, dtype="float32", residual_dtype=residual))
        texts.append(whole_rows.lower(graph, state).as_text())
    assert texts[0] == texts[1]
