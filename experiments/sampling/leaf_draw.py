"""The draw of `--invariant`: its log-probs are bitwise equal to the trainer's.

Hidden states come from the program that the trainer uses, with a key-value cache: for every new token it reads the block
of the row that the token is in, of which the tokens up to it have the bits that they will have in the trainer. The head
then gives the log-probs of all tokens drawn in a group; its results do not depend on the batch that a token is in.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.models.attention import RowCache
from experiments.sampling.prompts import Sizes
from experiments.sampling.sampler import Samples, keys_of_rows, logits_of
from experiments.tasks.tokenizer import Tokenizer
from experiments.training.leaf_programs import LeafPrograms, Loaded


class _Rows(NamedTuple):
    """Rows being completed: tokens [B, S], their current lengths, the draws of each step, and which rows are done."""

    tokens: np.ndarray
    lengths: np.ndarray
    drawn: np.ndarray
    done: np.ndarray


class LeafDraw:
    """A `Draw`, leaf by leaf; the same draws on every mesh.

    Args:
      programs: the leaf's programs, shared with the trainer.
      tokenizer: end and padding tokens.
      sizes: bounds of completions and rows.
      leaf_rows: rows of a leaf.
      greedy: take the most likely token instead of drawing.
    """

    def __init__(
        self, programs: LeafPrograms, tokenizer: Tokenizer, sizes: Sizes, *, leaf_rows: int, greedy: bool
    ) -> None:
        self._programs, self._tokenizer, self._sizes = programs, tokenizer, sizes
        self._greedy, self._leaf_rows = greedy, leaf_rows
        self._group = leaf_rows * len(programs.devices)
        self._draw = jax.jit(self._one_draw, compiler_options=programs.compiler_options)
        self._stack = jax.jit(functools.partial(jnp.stack, axis=1))

    def __call__(
        self, params: nnx.State, prompts: np.ndarray, lengths: np.ndarray, copies: int, key: jax.Array
    ) -> Samples:
        """See `Draw`."""
        prompts, lengths = (np.repeat(x, copies, axis=0) for x in (prompts, lengths))
        loaded, count = self._programs.load(params), len(prompts)
        groups = [self._complete_group(loaded, prompts, lengths, start, key) for start in range(0, count, self._group)]
        drawn, log_probs, ends = (np.concatenate(column)[:count] for column in zip(*groups, strict=True))
        return Samples(drawn, log_probs, log_probs, ends - lengths)

    def _complete_group(
        self, loaded: Loaded, prompts: np.ndarray, lengths: np.ndarray, start: int, key: jax.Array
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens drawn [B, N], their log-probs, and the lengths of the rows with them."""
        rows = self._start(prompts[start : start + self._group], lengths[start : start + self._group])
        begin, row_ids = rows.lengths.copy(), np.arange(start, start + self._group, dtype=np.int32)
        caches, hidden = self._read_prompts(loaded, rows), []
        for step in range(self._sizes.completion):
            if rows.done.all():
                break
            drawn, last = self._next(loaded, rows, row_ids, jax.random.fold_in(key, step), caches)
            hidden.append(last)
            live = np.flatnonzero(~rows.done)
            rows.drawn[live, step] = drawn[live]
            rows.tokens[live, rows.lengths[live]] = drawn[live]
            rows.lengths[live] += 1
            rows.done[live] = np.isin(drawn[live], self._tokenizer.eos_ids)
        return rows.drawn, self._log_probs(loaded, hidden, rows.drawn, rows.lengths - begin), rows.lengths

    def _start(self, prompts: np.ndarray, prompt_lengths: np.ndarray) -> _Rows:
        """Prompts in rows; rows without one are done."""
        slots = self._programs.reader.slots(self._sizes.row)
        tokens = np.full((self._group, slots), self._tokenizer.pad_id, np.int32)
        lengths = np.ones(self._group, np.int32)
        tokens[: len(prompts), : prompts.shape[1]], lengths[: len(prompts)] = prompts, prompt_lengths
        done = np.arange(self._group) >= len(prompts)
        return _Rows(tokens, lengths, np.zeros((self._group, self._sizes.completion), np.int32), done)

    def _read_prompts(self, loaded: Loaded, rows: _Rows) -> list[tuple[RowCache, ...]]:
        """Each rank's cache with all blocks of its prompts but the last, which the first draw reads."""
        reader, size = self._programs.reader, self._leaf_rows
        caches = [reader.empty_cache(size, self._sizes.row, device) for device in self._programs.devices]
        last = (rows.lengths - 1) // reader.block
        for block in range(last.max()):
            self._read(loaded, rows, np.minimum(block, last) * reader.block, caches)
        return caches

    def _read(
        self, loaded: Loaded, rows: _Rows, starts: np.ndarray, caches: list[tuple[RowCache, ...]]
    ) -> list[jax.Array]:
        """Hidden states of one block of every row; replaces the caches."""
        hidden = []
        for rank, (weights, each) in enumerate(zip(loaded.weights, self._deal(rows.tokens, starts), strict=True)):
            block, caches[rank] = self._programs.reader.step(weights, *each, caches[rank])
            hidden.append(block)
        return hidden

    def _next(
        self, loaded: Loaded, rows: _Rows, row_ids: np.ndarray, key: jax.Array, caches: list[tuple[RowCache, ...]]
    ) -> tuple[np.ndarray, list[jax.Array]]:
        """The next token of every row, and the hidden states that they are drawn from."""
        last, block = rows.lengths - 1, self._programs.reader.block
        hidden = self._read(loaded, rows, last // block * block, caches)
        operands = zip(loaded.ranks, hidden, self._deal(last % block, row_ids), strict=True)
        states, drawn = zip(*(self._draw(params, x, *each, key) for params, x, each in operands), strict=True)
        return np.concatenate(jax.device_get(drawn)), list(states)

    def _log_probs(
        self, loaded: Loaded, hidden: list[list[jax.Array]], drawn: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """Log-probs [B, N] of the tokens drawn, 0 after the end."""
        missing = self._sizes.completion - len(hidden)
        states = [self._stack([*steps, *[steps[-1]] * missing]) for steps in zip(*hidden, strict=True)]
        live = np.arange(self._sizes.completion) < counts[:, None]
        targets, masks = zip(*self._deal(drawn, live), strict=True)
        results = self._programs.head(loaded, states, list(targets), list(masks))
        return np.concatenate(jax.device_get([result.log_probs for result in results]))

    def _deal(self, *arrays: np.ndarray) -> list[tuple[jax.Array, ...]]:
        """Each data rank's rows of the arrays, on the rank's device."""
        size = self._leaf_rows
        return [
            tuple(jax.device_put(array[rank * size : (rank + 1) * size], device) for array in arrays)
            for rank, device in enumerate(self._programs.devices)
        ]

    def _one_draw(self, params, hidden, last, row_ids, key):
        """Hidden states at the last token of every row, and the tokens drawn from them."""
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
        spec = self._programs.spec
        logits = logits_of(hidden, spec, self._programs.weight_of(params))
        if self._greedy:
            return hidden, jnp.argmax(logits, axis=-1).astype(jnp.int32)
        keys = keys_of_rows(key, row_ids)
        return hidden, jax.vmap(jax.random.categorical)(keys, logits / spec.temperature).astype(jnp.int32)
