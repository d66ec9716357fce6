"""The sampler of `--invariant`: its log-probs are bitwise equal to the trainer's.

Hidden states come from the program that the trainer uses, with a key-value cache: for every new token it reads the block
of the row that the token is in, of which the tokens up to it have the bits that they will have in the trainer. The head
then gives the log-probs of all tokens drawn in a group, on the ids that they were drawn from where these are recorded; its
results do not depend on the batch that a token is in.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from experiments.invariant.leaf_programs import LeafParameters, LeafPrograms
from experiments.models.attention import RowCache
from experiments.sampling.sample_token import CompletionRule, keep, keys_of_rows, logits_of, most_likely
from experiments.sampling.sampler import Sampler, Samples
from experiments.sampling.support import RecordedSupport, flat_support
from jaxlogp.errors import require


class _Rows(NamedTuple):
    """Rows of one rank that are being completed; all on its device, so that no step waits for the host.

    `tokens` are whole rows of S slots, and `lengths` the tokens so far. `starts` is the first slot of the block that holds
    each row's newest token. A row is `done` that has ended, or holds no prompt. `drawn` are the tokens drawn, 0 after the
    end, `hidden` the states that they were drawn from, and `support` the ids, where they are recorded.
    """

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    starts: Int[Array, " B"]
    done: Bool[Array, " B"]
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
        starts, of_all = range(0, count, self._group), (key, copies)
        groups = [self._complete_group(loaded, prompts, lengths, start, *of_all) for start in starts]
        drawn, log_probs, ends, support = jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *groups)
        return Samples(drawn, log_probs, ends - lengths, support)

    def lower(self, params: nnx.State, prompts: int, tokens: int, copies: int) -> Callable[[], None]:
        return lambda: None

    def _complete_group(
        self, loaded: LeafParameters, prompts: np.ndarray, lengths: np.ndarray, start: int, key: jax.Array, copies: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, RecordedSupport | None]:
        """Returns tokens drawn [B, N], their log-probs, the lengths of the rows with them, and the recorded support."""
        tokens, begin, done = self._start(prompts[start : start + self._group], lengths[start : start + self._group])
        caches = self._read_prompts(loaded, tokens, begin)
        ranks = [self._rows(*each) for each in self._deal(tokens, begin, done)]
        row_ids = [ids for (ids,) in self._deal(np.arange(start, start + self._group, dtype=np.int32))]
        ended: list[list[jax.Array]] = []
        for step in range(self._max_new_tokens):
            # Of the step before the last, so that the devices have work while this waits for it.
            if len(ended) > 1 and all(np.all(each) for each in jax.device_get(ended[-2])):
                break
            hidden = self._read(loaded, [(rows.tokens, rows.starts) for rows in ranks], caches)
            operands = zip(loaded.heads, hidden, ranks, row_ids, strict=True)
            ranks, flags = zip(*(self._advance(*each, key, step, copies) for each in operands), strict=True)
            ended.append(list(flags))
        columns = [(rows.lengths, rows.drawn, rows.support) for rows in ranks]
        ends, drawn, support = jax.tree.map(lambda *parts: self._programs.ranks.on_host(parts), *columns)
        return drawn, self._log_probs(loaded, ranks, ends - begin), ends, support

    def _start(self, prompts: np.ndarray, prompt_lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns tokens [B, S], lengths and whether done; rows without a prompt are."""
        slots = self._programs.reader.slots(self._row_length)
        tokens = np.full((self._group, slots), self._rule.pad_id, np.int32)
        lengths = np.ones(self._group, np.int32)
        tokens[: len(prompts), : prompts.shape[1]], lengths[: len(prompts)] = prompts, prompt_lengths
        return tokens, lengths, np.arange(self._group) >= len(prompts)

    def _rows(self, tokens: jax.Array, lengths: jax.Array, done: jax.Array) -> _Rows:
        config, block = self._programs.config, self._programs.reader.block
        shape, (device,) = (len(lengths), self._max_new_tokens), tokens.devices()
        drawn = jnp.zeros(shape, jnp.int32, device=device)
        hidden = jnp.zeros((*shape, config.hidden_size), config.dtype, device=device)
        support = jax.device_put(self._rule.no_support(len(lengths), config.vocab_size), device)
        return _Rows(tokens, lengths, (lengths - 1) // block * block, done, drawn, hidden, support)

    def _read_prompts(
        self, loaded: LeafParameters, tokens: np.ndarray, lengths: np.ndarray
    ) -> list[tuple[RowCache, ...]]:
        """Returns each rank's cache with all blocks of its prompts but the last, which the first draw reads."""
        reader, size = self._programs.reader, self._leaf_rows
        caches = [reader.empty_cache(size, self._row_length, device) for device in self._programs.ranks.devices]
        last = (lengths - 1) // reader.block
        for block in range(last.max()):
            self._read(loaded, self._deal(tokens, np.minimum(block, last) * reader.block), caches)
        return caches

    def _read(
        self, loaded: LeafParameters, rows: list[tuple[jax.Array, ...]], caches: list[tuple[RowCache, ...]]
    ) -> list[jax.Array]:
        """Returns hidden states of one block of every row, of (tokens, starts) on each rank; replaces the caches."""
        hidden = []
        for rank, (weights, each) in enumerate(zip(loaded.weights, rows, strict=True)):
            block, caches[rank] = self._programs.reader.step(weights, *each, caches[rank])
            hidden.append(block)
        return hidden

    def _log_probs(self, loaded: LeafParameters, ranks: tuple[_Rows, ...], counts: np.ndarray) -> np.ndarray:
        """Returns log-probs [B, N] of the tokens drawn, 0 after the end."""
        live = [mask for (mask,) in self._deal(np.arange(self._max_new_tokens) < counts[:, None])]
        supports = [None if rows.support is None else self._flat_support(rows.support) for rows in ranks]
        columns = [rows.hidden for rows in ranks], [rows.drawn for rows in ranks]
        results = self._programs.head(loaded, *columns, live, supports)
        return self._programs.ranks.on_host([result.log_probs for result in results])

    def _deal(self, *arrays: np.ndarray) -> list[tuple[jax.Array, ...]]:
        """Splits arrays of all ranks' rows by data rank, and puts each part that is of this process on its rank's device."""
        ranks = self._programs.ranks
        by_rank = [array.reshape(ranks.count, self._leaf_rows, *array.shape[1:]) for array in arrays]
        return [
            jax.device_put(tuple(array[rank] for array in by_rank), device)
            for rank, device in zip(ranks.here, ranks.devices, strict=True)
        ]

    def _one_token(self, weight, block, rows: _Rows, row_ids, key, step, copies) -> tuple[_Rows, Array]:
        """Returns the rows with one token more, and which are done, drawn from the hidden states of each row's block."""
        size, spec = self._programs.reader.block, self._programs.spec
        hidden = jnp.take_along_axis(block, ((rows.lengths - 1) % size)[:, None, None], axis=1)[:, 0]
        logits, live = logits_of(hidden, spec, weight) / spec.temperature, ~rows.done
        options, support = self._rule.options, rows.support
        if options.filters:
            weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
            at = jnp.arange(len(live), dtype=jnp.int32)[None], jnp.broadcast_to(step, len(live))
            kept, cut = keep(logits, weights, options, None if support is None else support.room(*at))
            if support is not None:
                mass = jnp.where(kept, weights, 0.0).sum(axis=-1) / weights.sum(axis=-1)
                support = support.extended(*at, kept & live[:, None], cut & live, jnp.where(live, mass, 0.0))
            logits = jnp.where(kept, logits, -jnp.inf)
        greedy = self._rule.greedy_rows(row_ids, copies)
        if options.greedy:
            drawn = most_likely(logits)
        else:
            keys = keys_of_rows(jax.random.fold_in(key, step), row_ids)
            drawn = jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
        if greedy is not None:
            drawn = jnp.where(greedy, most_likely(logits), drawn)
        drawn = jnp.where(live, drawn, 0)
        slot = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)
        newest = (slot == rows.lengths[:, None]) & live[:, None]
        lengths = rows.lengths + live.astype(jnp.int32)
        done = rows.done | jnp.isin(drawn, jnp.asarray(self._rule.eos_ids, jnp.int32))
        put = lambda x, new: lax.dynamic_update_slice_in_dim(x, new[:, None], step, axis=1)  # noqa: E731
        tokens = jnp.where(newest, drawn[:, None], rows.tokens)
        columns = put(rows.drawn, drawn), put(rows.hidden, hidden)
        return _Rows(tokens, lengths, (lengths - 1) // size * size, done, *columns, support), done
