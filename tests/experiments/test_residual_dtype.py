"""The residual stream in fp32 under bf16 activations: its own bits, gradients, and the drift that it takes away."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig, SlidingLayers
from jaxlogp import linear_log_probs
from tests.experiments.decoder_oracle import oracle_forward

SIZES = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16)
DEEP = DecoderConfig(**SIZES, num_layers=12, tie_embeddings=True, dtype="bfloat16")
GEMMA = DecoderConfig(
    **SIZES, num_layers=2, sliding=SlidingLayers(3, (True, False)), norm_plus_one=True, post_norms=True,
    embed_scale=8.0, tie_embeddings=True, dtype="bfloat16",
)  # fmt: skip
ROWS, PROMPT, LENGTH = 16, 8, 24
POSITIONS = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
TOKENS = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (ROWS, LENGTH)).astype(np.int32)


@functools.cache
def decoder(config):
    """Graph, and a state of numbers that bf16 holds."""
    graph, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    return graph, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), state)


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
        assert hidden.dtype == jnp.dtype(config.dtype)
        found.append(np.asarray(linear_log_probs(hidden, weight, TOKENS[:, PROMPT:]).log_probs))
    return np.abs(found[0] - found[1])


def test_an_fp32_residual_stream_takes_drift_away():
    narrow, wide = (drift(dataclasses.replace(DEEP, residual_dtype=each)) for each in ("auto", "float32"))
    print(narrow.mean(), narrow.max(), wide.mean(), wide.max())


@pytest.mark.parametrize("config", [DEEP, GEMMA], ids=["llama", "gemma"])
def test_hidden_states_are_nearer_to_float64(config):
    errors = {}
    for residual in ("auto", "float32"):
        graph, state = decoder(dataclasses.replace(config, residual_dtype=residual))
        hidden = np.asarray(whole_rows(graph, state), np.float64)
        wanted = oracle_forward(state, TOKENS[0], config)
        errors[residual] = np.linalg.norm(hidden[0] - wanted) / np.linalg.norm(wanted)
    print(errors)


def test_with_fp32_activations_nothing_changes():
    plain = dataclasses.replace(DEEP, dtype="float32")
    texts = []
    for residual in ("auto", "float32"):
        graph, state = decoder(dataclasses.replace(plain, residual_dtype=residual))
        texts.append(whole_rows.lower(graph, state).as_text())
    assert texts[0] == texts[1]
