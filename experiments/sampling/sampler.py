"""Sampling from a `Decoder`: one prefill, then one token per step, with the log-probs of the tokens drawn.

`sample` is the simple entry point. A training loop builds its own function once and calls it with new parameters every
step; nothing is traced again as long as the shapes stay the same:

    graph, state = nnx.split(model)
    draw = make_sampler(graph, max_new_tokens=8, eos_ids=(1,), pad_id=0)
    for step in range(steps):
        samples = draw(state, prompts, prompt_lengths, jax.random.fold_in(key, step))
        state = train(state, samples)

Shapes: B rows, P slots of a prompt, N new tokens, V vocabulary entries.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, Key

from experiments.models.decoder import Decoder
from jaxlogp import HeadSpec, head_logits, log_probs_from_logits
from jaxlogp.errors import require


class Samples(NamedTuple):
    """Completions, right-padded.

    Attributes:
        tokens: int32 [B, N]; `pad_id` after the end of a completion.
        log_probs: fp32 [B, N], nats, each token given the prompt and the tokens before it; 0.0 after the end.
        lengths: int32 [B], in [1, N], tokens of each completion, including its end token.
    """

    tokens: Int[Array, "B N"]
    log_probs: Float[Array, "B N"]
    lengths: Int[Array, " B"]


def sample(
    model: Decoder,
    prompts: Int[Array | np.ndarray, "B P"],
    prompt_lengths: Int[Array | np.ndarray, " B"],
    key: Key[Array, ""],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    greedy: bool = False,
    eos_ids: tuple[int, ...],
    pad_id: int,
    row_ids: Int[Array | np.ndarray, " B"] | None = None,
) -> Samples:
    """Draws one completion for every prompt: y_i ~ softmax(logits_i / temperature), until an end token or `max_new_tokens`.

    A row's draws depend only on the key, its row id and its own prompt, so the same row gives the same completion in
    any batch (up to the rounding of the products, which may depend on the batch size).

    Args:
        model: the decoder.
        prompts: int32 [B, P], right-padded with any id of the vocabulary.
        prompt_lengths: int32 [B], tokens of each prompt, in [1, P].
        key: a JAX random key.
        max_new_tokens: N, at least 1.
        temperature: divisor of the logits, positive.
        greedy: take the most likely token (the lowest id among equals). Its log-prob is still the one under
            softmax(logits / temperature), which a trainer can recompute, not 0.0.
        eos_ids: tokens each of which ends a completion.
        pad_id: token after the end; may be one of `eos_ids`.
        row_ids: int32 [B], ids of the rows for the random numbers; default 0, 1, 2 … With global ids, a batch drawn in
            several parts equals the whole batch.

    Returns:
        Samples with log-probs in nats.

    Raises:
        ValueError: a temperature that is not positive and finite, an empty batch, lengths or ids out of range, shapes
            that do not match. Values are checked where they are known, that is, outside JAX transformations.
    """
    graph, state = nnx.split(model)
    draw = make_sampler(
        graph,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        greedy=greedy,
        eos_ids=eos_ids,
        pad_id=pad_id,
    )
    return draw(state, prompts, prompt_lengths, key, row_ids)


def make_sampler(
    graph: nnx.GraphDef[Decoder],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    greedy: bool = False,
    eos_ids: tuple[int, ...],
    pad_id: int,
    copies: int = 1,
) -> Callable[..., Samples]:
    """Builds `draw(state, prompts, prompt_lengths, key, row_ids=None) -> Samples`, compiled once per shape.

    Functions built from equal arguments share what has been compiled.

    Args:
        graph: first half of `nnx.split(model)`; `state` is the second half, from this model or a later version of it.
        max_new_tokens: see `sample`.
        temperature: see `sample`.
        greedy: see `sample`.
        eos_ids: see `sample`.
        pad_id: see `sample`.
        copies: completions of every prompt, in adjacent rows; each prompt is prefilled once.

    Returns:
        The function; it checks the values of its arguments, then runs the compiled sampler.

    Raises:
        ValueError: an option out of range.
    """
    options = SamplerOptions(max_new_tokens, temperature, greedy, tuple(eos_ids), pad_id, copies)

    def draw(state, prompts, prompt_lengths, key, row_ids=None):
        vocab_size = nnx.merge(graph, state).config.vocab_size
        for name, token in (("pad_id", options.pad_id), *(("eos_ids", each) for each in options.eos_ids)):
            require(0 <= token < vocab_size, name, f"ids in [0, {vocab_size})", token)
        check_prompts(prompts, prompt_lengths, vocab_size)
        is_key = jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()
        require(is_key, "key", "one key from jax.random.key", f"{key.dtype} of shape {key.shape}")
        rows = prompts.shape[0] * options.copies
        if row_ids is None:
            row_ids = jnp.arange(rows, dtype=jnp.int32)
        require(row_ids.shape == (rows,), "row_ids", f"shape ({rows},)", row_ids.shape)
        return _run(graph, options, state, prompts, prompt_lengths, key, row_ids)

    return draw


@dataclass(frozen=True)
class SamplerOptions:
    """The options compiled into a sampler; `sample` explains the fields."""

    max_new_tokens: int
    temperature: float
    greedy: bool
    eos_ids: tuple[int, ...]
    pad_id: int
    copies: int

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 1, "max_new_tokens", "at least 1", self.max_new_tokens)
        require(self.copies >= 1, "copies", "at least 1", self.copies)
        is_divisor = 0.0 < self.temperature < math.inf
        require(is_divisor, "temperature", "a positive, finite number", self.temperature)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(graph, options, state, prompts, prompt_lengths, key, row_ids):
    model = nnx.merge(graph, state)
    head = model.head()
    rows, width = prompts.shape
    row_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, row_ids)
    # The last token drawn is never read, so it needs no slot.
    cache = model.empty_cache(rows, width + options.max_new_tokens - 1)
    hidden, cache = model.prefill(prompts, prompt_lengths, cache)
    hidden = jnp.take_along_axis(hidden, (prompt_lengths - 1)[:, None, None], axis=1)[:, 0]
    if options.copies > 1:
        hidden, prompt_lengths = (jnp.repeat(x, options.copies, axis=0) for x in (hidden, prompt_lengths))
        cache = cache.repeat_rows(options.copies)
    done = jnp.zeros(hidden.shape[0], jnp.bool_)
    first = _pick(options, hidden, head, row_keys, 0, done)

    def extend(carry, step):
        tokens, done, cache = carry
        hidden, cache = model.decode_step(tokens, prompt_lengths + step, cache, width + step)
        tokens, log_probs = _pick(options, hidden, head, row_keys, step + 1, done)
        return (tokens, done | _is_end(options, tokens), cache), (tokens, log_probs, done)

    carry = (first[0], _is_end(options, first[0]), cache)
    steps = jnp.arange(options.max_new_tokens - 1, dtype=jnp.int32)
    _, later = lax.scan(extend, carry, steps)
    tokens, log_probs, done = (
        jnp.concatenate([one[None], many]).T for one, many in zip((*first, done), later, strict=True)
    )
    return Samples(tokens, log_probs, jnp.sum(~done, axis=1, dtype=jnp.int32))


def _is_end(options, tokens):
    return functools.reduce(
        jnp.logical_or, (tokens == end for end in options.eos_ids), jnp.zeros_like(tokens, jnp.bool_)
    )


def _pick(options, hidden, head, row_keys, step, done):
    """One token per row and its log-prob, from the same logits; padding and 0.0 for rows that are done."""
    logits = logits_of(hidden, *head)
    if options.greedy:
        drawn = jnp.argmax(logits, axis=-1)
    else:
        step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys, step)
        drawn = jax.vmap(jax.random.categorical)(step_keys, logits / options.temperature)
    drawn = drawn.astype(jnp.int32)
    scored = log_probs_from_logits(logits, drawn, mask=~done, temperature=options.temperature)
    return jnp.where(done, options.pad_id, drawn), scored.log_probs


def logits_of(hidden: Float[Array, "B H"], spec: HeadSpec, weight: Float[Array, "V H"]) -> Float[Array, "B V"]:
    """Logits before the temperature, with the arithmetic of the trainer's head."""
    return head_logits(hidden, weight, logit_scale=spec.logit_scale, softcap=spec.softcap, fp32_head=spec.fp32_head)


def check_prompts(
    prompts: Int[Array | np.ndarray, "B P"], prompt_lengths: Int[Array | np.ndarray, " B"], vocab_size: int
) -> None:
    """Checks shapes and dtypes always, and values where they are known: not under a JAX transformation.

    Args:
        prompts: int32 [B, P].
        prompt_lengths: int32 [B].
        vocab_size: ids are in [0, vocab_size).

    Raises:
        ValueError: names the argument, what was expected, what was seen and where.
    """
    require(prompts.ndim == 2 and prompts.size > 0, "prompts", "shape [B, P] with B, P ≥ 1", prompts.shape)
    rows, width = prompts.shape
    require(prompt_lengths.shape == (rows,), "prompt_lengths", f"shape ({rows},)", prompt_lengths.shape)
    for name, array in (("prompts", prompts), ("prompt_lengths", prompt_lengths)):
        require(array.dtype == jnp.int32, name, "int32", array.dtype)
    check_range("prompt_lengths", prompt_lengths, 1, width + 1)
    check_range("prompts", prompts, 0, vocab_size)


def check_range(name: str, array: Int[Array | np.ndarray, "..."], start: int, end: int) -> None:
    """Requires every element in [start, end), if the values are known here."""
    if isinstance(array, jax.core.Tracer) or (isinstance(array, jax.Array) and not array.is_fully_addressable):
        return
    values = np.asarray(array)
    outside = (values < start) | (values >= end)
    if outside.any():
        place = tuple(int(index) for index in np.argwhere(outside)[0])
        require(False, name, f"values in [{start}, {end})", f"{values[place]} at {place}")
