"""The sampler of a `Decoder`: one token per row and step from a key-value cache, by a loop on the device.

Shapes: T completions of Q prompts, B rows that draw them, P slots of a prompt, N new tokens.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key

from experiments.models.attention import KVCache, continued
from experiments.models.compiled_program import LIBRARY_ALONE, CompiledProgram, compile_program, largest, lower_program
from experiments.models.decoder import Decoder
from experiments.models.mesh import num_ranks, put_in_ranks, row_axes, rows_of_ranks, split_rows
from experiments.models.placement import bytes_a_device, placed, whole_on_host
from experiments.sampling.sample_token import CompletionRule, keys_of_rows
from experiments.sampling.sampler import SampledModel, Sampler, Samples
from experiments.sampling.support import RecordedSupport

FEWEST_ROWS = 16
"""No rank's batch is narrowed to fewer rows."""
SHORTEST_NARROWED = 256
"""Nor is one whose completions are shorter: a program for each size would have to be compiled."""
FEWEST_FOR_LIBRARY = 64
"""Rows of a rank from which a GPU's library multiplies. XLA's own kernels for products were at most 1 % faster there, up to
14 % slower, and take longer to compile; with 8 rows they were 8 % faster (benchmarks/results/sampler_library_h100.md)."""


class DecoderSampler(Sampler):
    """A `Sampler` of a `Decoder`: reads every prompt once, then draws one token per row and step from a key-value cache.

    With `SamplingOptions.rows`, the completions that wait take the places of those that have ended; else all are drawn side
    by side. Equal models and rules share compiled programs.
    """

    def __init__(self, model: SampledModel, rule: CompletionRule) -> None:
        self._model, self._rule = model, rule

    def __call__(
        self, params: nnx.State, prompts: np.ndarray, lengths: np.ndarray, copies: int, key: jax.Array
    ) -> Samples:
        mesh, state = self._model.mesh, self._model.state(params)
        program = _Program(self._model.graph, self._rule, copies, mesh)
        rows = _prefilling()(program, state, *split_rows((prompts, lengths), mesh), key)
        # Rows stay on their rank. Finished ones leave: when few enough are left on every rank, these go on alone.
        for size in self._sizes(len(rows.done) // program.ranks):
            rows = _decoding(program, rows)(program, size, state, rows)
            done, left = whole_on_host((rows.done, _left(program, rows)))
            if not left.any():
                break
            # The unfinished ones of each rank first; finished ones fill the new size.
            kept = np.argsort(done.reshape(program.ranks, -1), axis=1, kind="stable")[:, :size].astype(np.int32)
            rows = _kept(rows, placed(kept, NamedSharding(mesh, P(row_axes(mesh)))))
        drawn = whole_on_host(rows.drawn)
        return jax.tree.map(lambda x: x[: len(prompts) * copies], self._samples(drawn))

    def lower(self, params: nnx.State, prompts: int, tokens: int, copies: int) -> Callable[[], int | None]:
        mesh = self._model.mesh
        program = _Program(self._model.graph, self._rule, copies, mesh)
        state, copied = self._model.shapes(params)
        given = split_rows((np.zeros((prompts, tokens), np.int32), np.ones(prompts, np.int32)), mesh)
        prefill = lower_program(_prefilling(), program, state, *given, jax.random.key(0))
        return functools.partial(self._memory, program, state, copied, prefill)

    def _memory(
        self, program: "_Program", state: nnx.State, copied: int, lowered: Callable[[], CompiledProgram]
    ) -> int | None:
        # All programs but those for the rows that are left when others have ended, which take less.
        prefill = lowered()
        rows = len(prefill.results.done) // program.ranks
        size = self._sizes(rows)[0]
        decode = compile_program(_decoding(program, prefill.results), program, size, state, prefill.results)
        # While rows leave, what those that stay have drawn is there twice, and their prompts if each has its own.
        cache = prefill.results.cache
        own = [held if cache.prompt_of_row is None else (held.keys, held.values) for held in cache.layers]
        twice = bytes_a_device(prefill.results) + bytes_a_device(own) * size // rows
        need = largest(twice, *(each.bytes_beside(bytes_a_device(state)) for each in (prefill, decode)))
        return None if need is None else need + copied

    def _sizes(self, rows: int) -> list[int]:
        """Returns how many unfinished ones of a rank's `rows` end each call of `_decode`: the batch is narrowed to them.

        Each is a program to compile: a few, and none but the last, 0, where completions are short.
        """
        is_long = self._rule.options.max_new_tokens >= SHORTEST_NARROWED
        narrower = [rows >> halvings for halvings in range(1, 4)] if is_long else []
        return [*(size for size in narrower if size >= FEWEST_ROWS), 0]

    def _samples(self, drawn: "_Drawn") -> Samples:
        """Returns what was drawn, with the number of tokens up to the first that ends a completion, itself included."""
        is_end = np.isin(drawn.tokens, self._rule.eos_ids)
        is_end[:, -1] = True
        lengths = (is_end.argmax(axis=1) + 1).astype(np.int32)
        return Samples(drawn.tokens, drawn.log_probs, lengths, drawn.support)


class _Program(NamedTuple):
    """What is known when a program is compiled. Each rank of the mesh completes its prompts, `copies` times each."""

    graph: nnx.GraphDef
    rule: CompletionRule
    copies: int
    mesh: Mesh

    @property
    def ranks(self) -> int:
        return num_ranks(self.mesh)


class _Drawn(NamedTuple):
    """Tokens of completions with their log-probs, and what they were drawn from, as in `Samples`."""

    tokens: Int[Array, "T N"]
    log_probs: Float[Array, "T N"]
    support: RecordedSupport | None


class _Waiting(NamedTuple):
    """Completions that have no row yet: the last ones of each rank, from number `begun` on.

    `hidden` are the states that follow the Q prompts.
    """

    begun: Int[Array, " ranks"]
    hidden: Float[Array, "Q H"]
    lengths: Int[Array, " Q"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Rows:
    """Completions [T] of prompts, and B rows that draw them.

    A row's completion has number `numbers` among those of its rank, and `steps` tokens so far. `tokens` are the newest ones.
    """

    drawn: _Drawn
    numbers: Int[Array, " B"]
    steps: Int[Array, " B"]
    tokens: Int[Array, " B"]
    done: Bool[Array, " B"]
    key: Key[Array, ""]
    cache: KVCache
    waiting: _Waiting | None


def _prefilling() -> Any:
    return _jitted(_prefill, 0, (), jax.default_backend() == "gpu")


def _decoding(program: _Program, rows: _Rows) -> Any:
    many = len(rows.done) >= FEWEST_FOR_LIBRARY * program.ranks
    # XLA's own kernels widen 8-bit matrices as they read them.
    by_library = jax.default_backend() == "gpu" and many and not program.rule.options.int8_weights
    return _jitted(_decode, (0, 1), 3, by_library)


@functools.cache
def _jitted(function: Callable[..., _Rows], static: Any, donated: Any, by_library: bool) -> Any:
    options = LIBRARY_ALONE if by_library else None
    return jax.jit(function, static_argnums=static, donate_argnums=donated, compiler_options=options)


def _prefill(program: _Program, state, prompts, lengths, key) -> _Rows:
    """Reads the prompts and draws the first token of every row."""
    rule, ranks, copies = program.rule, program.ranks, program.copies
    model, size = nnx.merge(program.graph, state), rule.options.max_new_tokens
    total = len(prompts) * copies
    count = total if rule.options.rows is None else min(total, rule.options.rows * ranks)
    # The last token drawn is never read, so it needs no slot.
    slots = max(size - 1, 1)
    numbers = jnp.broadcast_to(jnp.arange(count // ranks, dtype=jnp.int32), (ranks, count // ranks))
    waiting = None
    if count < total:
        at_once = -(-count // (ranks * copies))
        hidden, cache = _read_in_blocks(model, prompts, lengths, ranks, at_once)
        waiting = _Waiting(jnp.full(ranks, count // ranks, jnp.int32), hidden, cache.prompt_lengths)
        cache = continued(cache, numbers // copies, slots, model.mesh)
        hidden = rows_of_ranks(hidden, numbers // copies)
    else:
        hidden, cache = _read(model, prompts, lengths, slots)
        if copies > 1:
            hidden, cache = jnp.repeat(hidden, copies, axis=0), cache.repeat_rows(copies)
    head = model.head()
    support = rule.no_support(total, head[1].shape[0])
    nothing = _Drawn(jnp.full((total, size), rule.pad_id, jnp.int32), jnp.zeros((total, size), jnp.float32), support)
    zeros = jnp.zeros(count, jnp.int32)
    rows = _Rows(nothing, numbers.ravel(), zeros, zeros, jnp.zeros(count, jnp.bool_), key, cache, waiting)
    return _extended(program, rows, hidden, head)


def _read(model: Decoder, prompts, lengths, slots: int) -> tuple[Float[Array, "Q H"], KVCache]:
    """Reads prompts into a new cache; also returns the states that follow them."""
    hidden, cache = model.prefill(prompts, lengths, slots)
    return jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0], cache


def _read_in_blocks(model: Decoder, prompts, lengths, ranks: int, at_once: int) -> tuple[Float[Array, "Q H"], KVCache]:
    """Reads so many prompts of each rank at a time, into a cache without rows; the last one again in what is left."""
    own = len(lengths) // ranks
    blocks = -(-own // at_once)
    numbers = jnp.minimum(jnp.arange(blocks * at_once, dtype=jnp.int32), own - 1)

    def block_by_block(x: Array) -> Array:
        parts = x.reshape(ranks, own, *x.shape[1:])[:, numbers].reshape(ranks, blocks, at_once, *x.shape[1:])
        return parts.swapaxes(0, 1).reshape(blocks, ranks * at_once, *x.shape[1:])

    def rank_by_rank(x: Array) -> Array:
        parts = x.reshape(blocks, ranks, at_once, *x.shape[2:])
        return parts.swapaxes(0, 1).reshape(ranks * blocks * at_once, *x.shape[2:])

    given = block_by_block(prompts), block_by_block(lengths)
    hidden, cache = lax.map(lambda block: _read(model, *block, slots=0), given)
    layers = jax.tree.map(rank_by_rank, cache.layers)
    return rank_by_rank(hidden), replace(cache, layers=layers, prompt_lengths=rank_by_rank(cache.prompt_lengths))


def _decode(program: _Program, size: int, state, rows: _Rows) -> _Rows:
    """Draws until no rank has more than `size` completions that have not ended."""
    model = nnx.merge(program.graph, state)
    # Before the loop, which would do it in every step.
    int8 = program.rule.options.int8_weights
    head, layers = model.head_apart(int8=int8), model.layers_apart(int8=int8)

    def extend(rows: _Rows) -> _Rows:
        after_prompts = None
        if rows.waiting is not None:
            rows, after_prompts = _refilled(program, rows)
        hidden, cache = model.decode_step(rows.tokens, rows.cache, layers)
        if after_prompts is not None:
            hidden = jnp.where((rows.steps == 0)[:, None], after_prompts, hidden)
        return _extended(program, replace(rows, cache=cache), hidden, head)

    return lax.while_loop(lambda rows: jnp.max(_left(program, rows)) > size, extend, rows)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _left(program: _Program, rows: _Rows) -> Int[Array, " ranks"]:
    """Returns how many completions of each rank have not ended, those that wait included."""
    left = jnp.sum(~rows.done.reshape(program.ranks, -1), axis=1)
    return left if rows.waiting is None else left + len(rows.drawn.tokens) // program.ranks - rows.waiting.begun


def _refilled(program: _Program, rows: _Rows) -> tuple[_Rows, Float[Array, "B H"]]:
    """Gives the places of completions that have ended to waiting ones; also returns what follows the prompts of all rows.

    A completion that begins has no token yet that the next step could read. What that step makes of its row is left unused.
    """
    waiting, ranks = rows.waiting, program.ranks
    assert waiting is not None, "the caller has asked"
    done = rows.done.reshape(ranks, -1)
    candidates = waiting.begun[:, None] + jnp.cumsum(done, axis=1, dtype=jnp.int32) - 1
    begins = done & (candidates < len(rows.drawn.tokens) // ranks)
    numbers = jnp.where(begins, candidates, rows.numbers.reshape(ranks, -1))
    prompts, begins = numbers // program.copies, begins.ravel()
    done = rows.done & ~begins
    steps = jnp.where(begins, 0, rows.steps)
    # The newest token is not in the cache yet. Of a row that has ended, nothing is read.
    filled = jnp.where(done, 0, jnp.maximum(steps - 1, 0))
    places = {"prompt_of_row": prompts.ravel(), "prompt_lengths": rows_of_ranks(waiting.lengths, prompts)}
    begun = waiting.begun + jnp.sum(begins.reshape(ranks, -1), axis=1, dtype=jnp.int32)
    rows = replace(
        rows,
        numbers=numbers.ravel(),
        steps=steps,
        done=done,
        cache=replace(rows.cache, filled=filled, **places),
        waiting=waiting._replace(begun=begun),
    )
    return rows, rows_of_ranks(waiting.hidden, prompts)


@jax.jit
def _kept(rows: _Rows, kept) -> _Rows:
    """Returns the rows with these indices, int32 [ranks, C], among those of each rank."""
    parts = {name: rows_of_ranks(getattr(rows, name), kept) for name in ("numbers", "steps", "tokens", "done")}
    return replace(rows, cache=rows.cache.take_rows(kept), **parts)


def _extended(program: _Program, rows: _Rows, hidden, head) -> _Rows:
    """Adds a token to every completion that has a row and has not ended."""
    rule, before, each = program.rule, rows.drawn, len(rows.drawn.tokens) // program.ranks
    numbers = rows.numbers.reshape(program.ranks, -1)
    row_ids = (numbers + each * jnp.arange(program.ranks, dtype=jnp.int32)[:, None]).ravel()
    # What is drawn after the end goes nowhere.
    beyond = each + jnp.arange(numbers.shape[1], dtype=jnp.int32)
    places = jnp.where(rows.done.reshape(numbers.shape), beyond, numbers)
    keys, greedy = keys_of_rows(rows.key, row_ids), rule.greedy_rows(row_ids, program.copies)
    of_rows = (keys, rows.steps, rows.done, greedy, before.support, places, program.mesh)
    sampled, done, support = rule.next_tokens(hidden, head, *of_rows)
    at = places, rows.steps.reshape(numbers.shape)
    tokens, log_probs = (put_in_ranks(x, at, new) for x, new in zip(before[:2], sampled[:2], strict=True))
    steps = rows.steps + ~rows.done
    done |= steps == rule.options.max_new_tokens
    drawn = _Drawn(tokens, log_probs, support)
    return replace(rows, drawn=drawn, tokens=sampled.tokens, done=done, steps=steps)
