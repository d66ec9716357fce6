"""Sampling from a `Decoder`: one prefill, then one token per step, with the log-probs of the tokens drawn.

`sample` is the simple entry point. A training loop builds its own function once and calls it with new parameters every
step; nothing is traced again as long as the shapes stay the same:

    graph, state = nnx.split(model)
    draw = make_sampler(graph, SamplerOptions(max_new_tokens=8, eos_ids=(1,), pad_id=0))
    for step in range(steps):
        samples = draw(state, prompts, prompt_lengths, jax.random.fold_in(key, step))
        state = train(state, samples)

Shapes: B rows, P slots of a prompt, N new tokens, V vocabulary entries.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key

from experiments.models.ahead import compiled_ahead, largest
from experiments.models.attention import KVCache, rows_of_ranks
from experiments.models.decoder import Decoder
from experiments.models.mesh import axes_of_rows, size_of
from experiments.models.placement import bytes_a_device, placed, whole_on_host
from experiments.sampling.sample_token import DrawOptions, SampledToken, sample_token
from jaxlogp import head_logits
from jaxlogp.errors import require
from jaxlogp.head import HeadSpec

FEWEST_ROWS = 16
"""No rank's batch is narrowed to fewer rows."""
SHORTEST_NARROWED = 256
"""Nor is one whose completions are shorter: a program for each size would have to be compiled."""


class Samples(NamedTuple):
    """Completions, right-padded.

    Attributes:
        tokens: int32; `pad_id` after the end of a completion.
        log_probs: fp32, nats, each token given the prompt and the tokens before it under softmax(logits / temperature) over
            the whole vocabulary, which a trainer recomputes; 0.0 after the end.
        drawn_log_probs: the same under the distribution drawn from, which top_k, top_p and min_p may narrow.
        lengths: int32, in [1, N], tokens of each completion, including its end token.
    """

    tokens: Int[Array, "B N"]
    log_probs: Float[Array, "B N"]
    drawn_log_probs: Float[Array, "B N"]
    lengths: Int[Array, " B"]


@dataclass(frozen=True)
class SamplerOptions:
    """The options compiled into a sampler.

    `max_new_tokens` (N) and `copies` are at least 1. Any of `eos_ids` ends a completion; `pad_id` after it may be one of
    them. `copies` completions of every prompt are in adjacent rows; each prompt is read once.
    """

    max_new_tokens: int
    eos_ids: tuple[int, ...]
    pad_id: int
    draw: DrawOptions = DrawOptions()
    copies: int = 1

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 1, "max_new_tokens", "at least 1", self.max_new_tokens)
        require(self.copies >= 1, "copies", "at least 1", self.copies)


def sample(
    model: Decoder,
    prompts: Int[Array | np.ndarray, "B P"],
    prompt_lengths: Int[Array | np.ndarray, " B"],
    key: Key[Array, ""],
    options: SamplerOptions,
    *,
    row_ids: Int[Array | np.ndarray, " B"] | None = None,
) -> Samples:
    """Draws one completion for every prompt: y_i ~ softmax(logits_i / temperature), until an end token or `max_new_tokens`.

    A row's draws depend only on the key, its row id and its own prompt, so the same row gives the same completion in
    any batch (up to the rounding of the products, which may depend on the batch size).

    Args:
        prompts: int32, right-padded with any id of the vocabulary.
        prompt_lengths: int32, tokens of each prompt, in [1, P].
        row_ids: int32, ids of the rows for the random numbers; default 0, 1, 2 … With global ids, a batch drawn in several
            parts equals the whole batch.

    Raises:
        ValueError: if the batch is empty, lengths or ids are out of range, or shapes do not match. Values are checked where
            they are known, that is, outside JAX transformations.
    """
    graph, state = nnx.split(model)
    return make_sampler(graph, options)(state, prompts, prompt_lengths, key, row_ids)


def make_sampler(graph: nnx.GraphDef[Decoder], options: SamplerOptions) -> Callable[..., Samples]:
    """Builds `draw(state, prompts, prompt_lengths, key, row_ids=None) -> Samples`, compiled once per shape.

    Functions built from equal arguments share what has been compiled.
    """

    def draw(state, prompts, prompt_lengths, key, row_ids=None):
        model = nnx.merge(graph, state)
        vocab_size = model.config.vocab_size
        for name, token in (("pad_id", options.pad_id), *(("eos_ids", each) for each in options.eos_ids)):
            require(0 <= token < vocab_size, name, f"ids in [0, {vocab_size})", token)
        check_prompts(prompts, prompt_lengths, vocab_size)
        is_key = jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()
        require(is_key, "key", "one key from jax.random.key", f"{key.dtype} of shape {key.shape}")
        rows = prompts.shape[0] * options.copies
        if row_ids is None:
            row_ids = jnp.arange(rows, dtype=jnp.int32)
        require(row_ids.shape == (rows,), "row_ids", f"shape ({rows},)", row_ids.shape)
        begun = _begin(graph, options, state, prompts, prompt_lengths, key, row_ids)
        return _complete(graph, options, state, begun)

    return draw


def bytes_beside_parameters(graph, options: SamplerOptions, state, prompts, prompt_lengths) -> int | None:
    """Returns the most bytes that `draw` takes per device beside the parameters; None if the compiler does not say.

    Its programs are compiled for it, and found again by `draw`: all but those for the rows that are left when others have
    ended, which take less.
    """
    count, held = prompts.shape[0] * options.copies, bytes_a_device(state)
    row_ids = jnp.arange(count, dtype=jnp.int32)
    begin = compiled_ahead(_begin, graph, options, state, prompts, prompt_lengths, jax.random.key(0), row_ids)
    mesh = nnx.merge(graph, state).mesh
    ranks = size_of(mesh, *axes_of_rows(prompts.shape[0], mesh))
    sizes = _sizes(count // ranks, options.max_new_tokens)
    advance = compiled_ahead(_advance, graph, options, state, begin.results, sizes[0], ranks)
    # While rows leave, those that stay are there twice.
    kept = bytes_a_device(begin.results) * (count // ranks + sizes[0]) // (count // ranks)
    return largest(kept, begin.bytes_beside(held), advance.bytes_beside(held))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Rows:
    """Rows being completed."""

    samples: Samples
    tokens: Array
    done: Array
    keys: Array
    step: Array
    cache: KVCache


def _complete(graph, options, state, rows: _Rows) -> Samples:
    """Draws until all rows are done. Finished rows leave: when few enough are left on every rank, these go on alone."""
    mesh, count = nnx.merge(graph, state).mesh, len(rows.done)
    # Rows stay on their rank.
    axes = axes_of_rows(count // options.copies, mesh)
    ranks = size_of(mesh, *axes)
    sizes = _sizes(count // ranks, options.max_new_tokens)
    if len(sizes) == 1:
        return _advance(graph, options, state, rows, *sizes, ranks).samples
    places = np.arange(count).reshape(ranks, -1)
    whole = Samples(*(np.array(x) for x in whole_on_host(rows.samples)))
    for size in sizes:
        rows = _advance(graph, options, state, rows, size, ranks)
        samples, done, step = whole_on_host((rows.samples, rows.done, rows.step))
        for drawn, new in zip(whole, samples, strict=True):
            np.asarray(drawn)[places.ravel()] = new
        if step == options.max_new_tokens or done.all():
            break
        # The unfinished ones of each rank first; finished ones fill the new size.
        kept = np.argsort(done.reshape(ranks, -1), axis=1, kind="stable")[:, :size].astype(np.int32)
        places = np.take_along_axis(places, kept, axis=1)
        rows = _kept(rows, kept if mesh is None else placed(kept, NamedSharding(mesh, P(axes))))
    return whole


def _sizes(rows: int, max_new_tokens: int) -> list[int]:
    """Returns how many unfinished ones of a rank's `rows` end each call of `_advance`: the batch is narrowed to them.

    Each is a program to compile: a few, and none but the last, 0, where completions are short.
    """
    narrower = [rows >> halvings for halvings in range(1, 4)] if max_new_tokens >= SHORTEST_NARROWED else []
    return [*(size for size in narrower if size >= FEWEST_ROWS), 0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _begin(graph, options, state, prompts, prompt_lengths, key, row_ids) -> _Rows:
    """Reads the prompts and draws the first token of every row."""
    model = nnx.merge(graph, state)
    # The last token drawn is never read, so it needs no slot.
    hidden, cache = model.prefill(prompts, prompt_lengths, max(options.max_new_tokens - 1, 1))
    hidden = jnp.take_along_axis(hidden, (prompt_lengths - 1)[:, None, None], axis=1)[:, 0]
    if options.copies > 1:
        hidden, cache = jnp.repeat(hidden, options.copies, axis=0), cache.repeat_rows(options.copies)
    count, size = len(hidden), options.max_new_tokens
    log_probs = jnp.zeros((count, size), jnp.float32)
    samples = Samples(
        jnp.full((count, size), options.pad_id, jnp.int32), log_probs, log_probs, jnp.zeros(count, jnp.int32)
    )
    keys = keys_of_rows(key, row_ids)
    step = jnp.zeros((), jnp.int32)
    rows = _Rows(samples, jnp.zeros(count, jnp.int32), jnp.zeros(count, jnp.bool_), keys, step, cache)
    return _drawn(options, rows, hidden, model.head())


@functools.partial(jax.jit, static_argnums=(0, 1, 5), donate_argnums=3)
def _advance(graph, options, state, rows: _Rows, size, ranks) -> _Rows:
    """Draws until no rank has more than `size` unfinished rows, or all have their longest completion."""
    model = nnx.merge(graph, state)
    # Before the loop, which would do it in every step.
    head, layers = model.head_apart(), model.layers_apart()

    def unfinished(rows: _Rows):
        left = jnp.sum(~rows.done.reshape(ranks, -1), axis=1)
        return (rows.step < options.max_new_tokens) & (jnp.max(left) > size)

    def extend(rows: _Rows) -> _Rows:
        hidden, cache = model.decode_step(rows.tokens, rows.cache, layers)
        return _drawn(options, replace(rows, cache=cache), hidden, head)

    return lax.while_loop(unfinished, extend, rows)


@jax.jit
def _kept(rows: _Rows, kept) -> _Rows:
    """Returns the rows with these indices, int32 [ranks, C], among those of each rank."""
    samples = Samples(*(rows_of_ranks(x, kept) for x in rows.samples))
    own = {name: rows_of_ranks(getattr(rows, name), kept) for name in ("tokens", "done", "keys")}
    return replace(rows, samples=samples, cache=rows.cache.take_rows(kept), **own)


def _drawn(options: SamplerOptions, rows: _Rows, hidden, head) -> _Rows:
    """Adds a token to every row that is not done."""
    sampled, done = next_tokens(options, hidden, head, rows.keys, rows.step, rows.done)
    put = lambda x, new: lax.dynamic_update_slice_in_dim(x, new[:, None], rows.step, axis=1)  # noqa: E731
    *held, lengths = rows.samples
    samples = Samples(*map(put, held, sampled), lengths + (~rows.done).astype(jnp.int32))
    return replace(rows, samples=samples, tokens=sampled.tokens, done=done, step=rows.step + 1)


def keys_of_rows(key: Key[Array, ""], row_ids: Int[Array, " B"]) -> Key[Array, " B"]:
    """Returns a random key for each row, by its id."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, row_ids)


def next_tokens(options: SamplerOptions, hidden, head, row_keys, step, done) -> tuple[SampledToken, Bool[Array, " B"]]:
    """Returns one token per row, padding and log-probs of 0.0 where the row is done, and which rows are done after it."""
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys, step)
    sampled = sample_token(logits_of(hidden, *head), keys, options.draw)
    empty = SampledToken(jnp.int32(options.pad_id), jnp.float32(0.0), jnp.float32(0.0))
    sampled = SampledToken(*(jnp.where(done, nothing, new) for nothing, new in zip(empty, sampled, strict=True)))
    ended = functools.reduce(jnp.logical_or, (sampled.tokens == end for end in options.eos_ids), jnp.zeros_like(done))
    return sampled, done | ended


def logits_of(hidden: Float[Array, "B H"], spec: HeadSpec, weight: Float[Array, "V H"]) -> Float[Array, "B V"]:
    """Returns logits before the temperature, with the arithmetic of the trainer's head."""
    return head_logits(hidden, weight, logit_scale=spec.logit_scale, softcap=spec.softcap, fp32_head=spec.fp32_head)


def check_prompts(
    prompts: Int[Array | np.ndarray, "B P"], prompt_lengths: Int[Array | np.ndarray, " B"], vocab_size: int
) -> None:
    """Checks shapes and dtypes always, and values where they are known: not under a JAX transformation."""
    require(prompts.ndim == 2 and prompts.size > 0, "prompts", "shape [B, P] with B, P ≥ 1", prompts.shape)
    rows, width = prompts.shape
    require(prompt_lengths.shape == (rows,), "prompt_lengths", f"shape ({rows},)", prompt_lengths.shape)
    for name, array in (("prompts", prompts), ("prompt_lengths", prompt_lengths)):
        require(array.dtype == jnp.int32, name, "int32", array.dtype)
    check_range("prompt_lengths", prompt_lengths, 1, width + 1)
    check_range("prompts", prompts, 0, vocab_size)


def check_range(name: str, array: Int[Array | np.ndarray, "..."], start: int, end: int) -> None:
    """Requires every element in [start, end), if the values are known here."""
    if isinstance(array, Tracer) or (isinstance(array, jax.Array) and not array.is_fully_addressable):
        return
    values = np.asarray(array)
    outside = (values < start) | (values >= end)
    if outside.any():
        place = tuple(int(index) for index in np.argwhere(outside)[0])
        require(False, name, f"values in [{start}, {end})", f"{values[place]} at {place}")
