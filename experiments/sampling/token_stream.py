"""One completion, token by token as it is drawn: for a reader who waits, not for a rollout.

Prompts are padded to lengths of a few sizes, so that a conversation compiles each program a few times at most.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.models.attention import KVCache
from experiments.models.decoder import Decoder
from experiments.sampling.sample_token import logits_of, most_likely
from jaxlogp.errors import require

SMALLEST = 64
"""Slots of the shortest padded prompt, and of the shortest answer."""


@dataclass(frozen=True)
class StreamOptions:
    max_new_tokens: int
    temperature: float

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 1, "--max-new-tokens", "at least 1", self.max_new_tokens)
        within = 0.0 <= self.temperature < float("inf")
        require(within, "--temperature", "a finite number of at least 0", self.temperature)


def stream_tokens(
    graph: nnx.GraphDef[Decoder], params: nnx.State, prompt: Sequence[int], key: jax.Array, options: StreamOptions
) -> Iterator[int]:
    """Draws tokens until the reader stops or `max_new_tokens` are drawn; end tokens are the reader's business."""
    width, slots = _round_up(len(prompt)), _round_up(options.max_new_tokens)
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(prompt)] = prompt
    hidden, cache = _read(graph, params, padded, np.array([len(prompt)], np.int32), slots)
    for step in range(options.max_new_tokens):
        token = _draw(graph, params, hidden, jax.random.fold_in(key, step), options.temperature)
        yield int(token[0])
        if step + 1 < options.max_new_tokens:
            hidden, cache = _extend(graph, params, token, cache)


def _round_up(size: int) -> int:
    return max(SMALLEST, 1 << (size - 1).bit_length())


@functools.partial(jax.jit, static_argnums=(0, 4))
def _read(graph, params, prompt, lengths, slots):
    hidden, cache = nnx.merge(graph, params).prefill(prompt, lengths, slots)
    return jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0], cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _extend(graph, params, token, cache: KVCache):
    return nnx.merge(graph, params).decode_step(token, cache)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _draw(graph, params, hidden, key, temperature):
    logits = logits_of(hidden, *nnx.merge(graph, params).head())
    if temperature == 0.0:
        return most_likely(logits)
    return jax.random.categorical(key, logits / temperature).astype(jnp.int32)
