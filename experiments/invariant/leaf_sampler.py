"""The sampler of `--invariant`: its log-probs are bitwise equal to the trainer's.

Hidden states come from the program that the trainer uses, with a key-value cache: for every new token it reads the block
of the row that the token is in, of which the tokens up to it have the bits that they will have in the trainer. The head
then gives the log-probs of all tokens drawn in a group, on the ids that they were drawn from where these are recorded; its
results do not depend on the batch that a token is in.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from experiments.invariant.block_forward import BodyWeights
from experiments.invariant.leaf_programs import LeafParameters, LeafPrograms
from experiments.models.attention import RowCache
from experiments.models.compiled_program import bytes_in_turn, lower_program, shapes_on
from experiments.sampling.sample_token import CompletionRule, keys_of_rows
from experiments.sampling.sampler import Sampler, Samples
from experiments.sampling.support import RecordedSupport, flat_support
from jaxlogp.errors import require

STEPS_AHEAD = 4
"""Steps that may be started before the host knows whether one is needed, so that the device has work meanwhile."""


class _Given(NamedTuple):
    """A group of rows to complete, on the host: whole rows of S slots with their prompts, and their numbers. A row without
    a prompt is `done`."""

    tokens: Int[np.ndarray, "B S"]
    lengths: Int[np.ndarray, " B"]
    done: Bool[np.ndarray, " B"]
    row_ids: Int[np.ndarray, " B"]


class _Rows(NamedTuple):
    """Rows of one rank that are being completed; all on its device, so that no step waits for the host.

    `tokens` are whole rows of S slots, and `lengths` the tokens so far. `starts` is the first slot of the block that holds
    each row's newest token. A row is `done` that has ended, or holds no prompt. After `step` draws, `drawn` are the tokens
    drawn, padding after the end, `hidden` the states that they were drawn from, and `support` the ids, where they are
    recorded.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    starts: Int[Array, " B"]
    done: Bool[Array, " B"]
    step: Int[Array, ""]
    drawn: Int[Array, "B N"]
    hidden: Float[Array, "B N H"]
    support: RecordedSupport | None


class InvariantSampler(Sampler):
    """A `Sampler`, leaf by leaf; the same draws on every mesh."""

    def __init__(self, programs: LeafPrograms, rule: CompletionRule, row_length: int, leaf_rows: int) -> None:
        rows = rule.options.rows
        require(rows is None, "rows", "None with --invariant, which draws as many rows as a leaf has", rows)
        expected = "False with --invariant, whose sampler computes what the trainer computes"
        require(not rule.options.int8_weights, "int8_weights", expected, True)
        self._programs, self._rule = programs, rule
        self._max_new_tokens, self._row_length = rule.options.max_new_tokens, row_length
        self._leaf_rows, self._group = leaf_rows, leaf_rows * programs.ranks.count
        options = {"donate_argnums": 2, "compiler_options": programs.compiler_options}
        self._advance = jax.jit(self._one_token, **options)
        self._flat_support = jax.jit(flat_support)

    def __call__(
        self, params: nnx.State, prompts: np.ndarray, lengths: np.ndarray, copies: int, key: jax.Array
    ) -> Samples:
        prompts, lengths = (np.repeat(x, copies, axis=0) for x in (prompts, lengths))
        loaded, count = self._programs.load(params), len(prompts)
        starts = range(0, count, self._group)
        groups = [self._complete_group(loaded, prompts, lengths, start, key, copies) for start in starts]
        drawn, log_probs, ends, support = jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *groups)
        return Samples(drawn, log_probs, ends - lengths, support)

    def lower(self, params: nnx.State, prompts: int, tokens: int, copies: int) -> Callable[[], int | None]:
        """Lowers the programs of the first rank, whatever there is to draw: a group of rows has one shape."""
        programs, size, device = self._programs, self._leaf_rows, self._programs.ranks.devices[0]
        loaded, given = programs.shapes(params), self._dealt(self._given(np.zeros((0, 1)), np.zeros(0), 0))[0]
        step, cache = programs.reader.lower(loaded.weights[0], size, self._row_length, device)
        block = jax.ShapeDtypeStruct((size, programs.reader.block, programs.config.hidden_size), programs.config.dtype)
        rows = shapes_on(device, jax.eval_shape(functools.partial(self._rows, device), *given[:3]))
        operands = shapes_on(device, (block, given.row_ids, jax.random.key(0), np.int32(copies)))
        advance = lower_program(self._advance, loaded.heads[0], operands[0], rows, *operands[1:])
        capacity = None if rows.support is None else rows.support.ids.size
        head, _ = programs.lower_head(size, self._max_new_tokens, capacity)

        def need() -> int | None:
            held = loaded.weights, loaded.heads, loaded.rows, cache, rows
            counted = (loaded.weights, cache), (loaded.heads, rows), (loaded.rows, rows.hidden)
            return bytes_in_turn(held, zip((step(), advance(), head()), counted, strict=True))

        return need

    def _complete_group(
        self, loaded: LeafParameters, prompts: np.ndarray, lengths: np.ndarray, start: int, key: jax.Array, copies: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, RecordedSupport | None]:
        """Returns tokens drawn [B, N], their log-probs, the lengths of the rows with them, and the recorded support."""
        ranks, group = self._programs.ranks, slice(start, start + self._group)
        given = self._given(prompts[group], lengths[group], start)
        operands = loaded.weights, loaded.heads, self._dealt(given), [key] * len(ranks.devices)
        rows = ranks.side_by_side(self._complete, *operands, [copies] * len(ranks.devices))
        columns = [(each.lengths, each.drawn, each.support) for each in rows]
        ends, drawn, support = jax.tree.map(lambda *parts: ranks.on_host(parts), *columns)
        return drawn, self._log_probs(loaded, rows, ends - given.lengths), ends, support

    def _given(self, prompts: np.ndarray, prompt_lengths: np.ndarray, start: int) -> _Given:
        """Returns a group, whose last rows may have no prompt."""
        slots = self._programs.reader.slots(self._row_length)
        tokens = np.full((self._group, slots), self._rule.pad_id, np.int32)
        lengths, numbers = np.ones(self._group, np.int32), np.arange(self._group, dtype=np.int32)
        tokens[: len(prompts), : prompts.shape[1]], lengths[: len(prompts)] = prompts, prompt_lengths
        return _Given(tokens, lengths, numbers >= len(prompts), start + numbers)

    def _dealt(self, whole: Any) -> list[Any]:
        """Splits arrays of all ranks' rows by data rank; returns those that this process computes."""
        ranks = self._programs.ranks
        by_rank = jax.tree.map(lambda x: x.reshape(ranks.count, self._leaf_rows, *x.shape[1:]), whole)
        return [jax.tree.map(operator.itemgetter(rank), by_rank) for rank in ranks.here]

    def _complete(self, weights: BodyWeights, head: Array, given: _Given, key: jax.Array, copies: int) -> _Rows:
        """Completes the rows of one rank, on its device."""
        reader, (device,) = self._programs.reader, head.devices()
        # All of it is there before the first token: what comes from elsewhere would hold up every one.
        (tokens, lengths, done, row_ids), *of_all = jax.device_put((given, key, np.int32(copies)), device)
        cache = self._read_prompts(weights, tokens, given.lengths, device)
        rows, ended = self._rows(device, tokens, lengths, done), []
        for step in range(self._max_new_tokens):
            if step >= STEPS_AHEAD and np.all(jax.device_get(ended[-STEPS_AHEAD])):
                break
            block, cache = reader.step(weights, rows.tokens, rows.starts, cache)
            rows, flags = self._advance(head, block, rows, row_ids, *of_all)
            flags.copy_to_host_async()
            ended.append(flags)
        return rows

    def _rows(self, device: jax.Device, tokens: Array, lengths: Array, done: Array) -> _Rows:
        config, block = self._programs.config, self._programs.reader.block
        shape = len(lengths), self._max_new_tokens
        drawn = jnp.full(shape, self._rule.pad_id, jnp.int32, device=device)
        hidden = jnp.zeros((*shape, config.hidden_size), config.dtype, device=device)
        support = jax.device_put(self._rule.no_support(len(lengths), config.vocab_size), device)
        step = jnp.zeros((), jnp.int32, device=device)
        return _Rows(tokens, lengths, (lengths - 1) // block * block, done, step, drawn, hidden, support)

    def _read_prompts(
        self, weights: BodyWeights, tokens: jax.Array, lengths: np.ndarray, device: jax.Device
    ) -> tuple[RowCache, ...]:
        """Returns a cache with all blocks of the prompts but the last, which the first draw reads."""
        reader, last = self._programs.reader, (lengths - 1) // self._programs.reader.block
        cache = reader.empty_cache(len(lengths), self._row_length, device)
        for block in range(last.max()):
            starts = jax.device_put(np.minimum(block, last) * reader.block, device)
            _, cache = reader.step(weights, tokens, starts, cache)
        return cache

    def _log_probs(self, loaded: LeafParameters, ranks: list[_Rows], counts: np.ndarray) -> np.ndarray:
        """Returns log-probs [B, N] of the tokens drawn, 0 after the end."""
        live = self._dealt(np.arange(self._max_new_tokens) < counts[:, None])
        supports = [None if rows.support is None else self._flat_support(rows.support) for rows in ranks]
        columns = [rows.hidden for rows in ranks], [rows.drawn for rows in ranks]
        results = self._programs.head(loaded, *columns, live, supports)
        return self._programs.ranks.on_host([result.log_probs for result in results])

    def _one_token(self, weight, block, rows: _Rows, row_ids, key, copies) -> tuple[_Rows, Array]:
        """Returns the rows with one token more, and which are done, drawn from the hidden states of each row's block."""
        size, count = self._programs.reader.block, len(row_ids)
        hidden = jnp.take_along_axis(block, ((rows.lengths - 1) % size)[:, None, None], axis=1)[:, 0]
        keys, steps = keys_of_rows(key, row_ids), jnp.broadcast_to(rows.step, count)
        own = jnp.arange(count, dtype=jnp.int32)[None]
        recorded = self._rule.greedy_rows(row_ids, copies), rows.support, own
        head = self._programs.spec, weight
        sampled, done, support = self._rule.next_tokens(hidden, head, keys, steps, rows.done, *recorded)
        live = ~rows.done
        slot = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)
        newest = (slot == rows.lengths[:, None]) & live[:, None]
        lengths = rows.lengths + live.astype(jnp.int32)
        put = lambda x, new: lax.dynamic_update_slice_in_dim(x, new[:, None], rows.step, axis=1)  # noqa: E731
        tokens = jnp.where(newest, sampled.tokens[:, None], rows.tokens)
        columns = put(rows.drawn, sampled.tokens), put(rows.hidden, hidden)
        return _Rows(tokens, lengths, (lengths - 1) // size * size, done, rows.step + 1, *columns, support), done
