"""The draw of `--invariant`: its log-probs are bitwise equal to the trainer's.

It has no key-value cache. For every new token it recomputes the whole row with the program that the trainer uses for
the body: a row of one document, followed by padding, gives the same bits at a position whatever follows that position,
because a masked key has a probability of exactly 0. The head's results do not depend on the batch that a token is in.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.sampling.prompts import Sizes
from experiments.sampling.sampler import Samples, keys_of_rows, logits_of
from experiments.tasks.tokenizer import Tokenizer
from experiments.training.leaf_programs import LeafPrograms, Loaded


class _Rows(NamedTuple):
    """Rows being completed: tokens [B, T], their current lengths, the draws of each step, and which rows are done."""

    tokens: np.ndarray
    lengths: np.ndarray
    log_probs: np.ndarray
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
        self._draw = jax.jit(self._one_draw)

    def __call__(
        self, params: nnx.State, prompts: np.ndarray, lengths: np.ndarray, copies: int, key: jax.Array
    ) -> Samples:
        """See `Draw`."""
        prompts, lengths = (np.repeat(x, copies, axis=0) for x in (prompts, lengths))
        loaded, count = self._programs.load(params), len(prompts)
        groups = [self._complete_group(loaded, prompts, lengths, start, key) for start in range(0, count, self._group)]
        drawn, log_probs, ends = (
            np.concatenate([getattr(group, name) for group in groups])[:count]
            for name in ("drawn", "log_probs", "lengths")
        )
        return Samples(drawn, log_probs, log_probs, ends - lengths)

    def _complete_group(
        self, loaded: Loaded, prompts: np.ndarray, lengths: np.ndarray, start: int, key: jax.Array
    ) -> _Rows:
        rows = self._start(prompts[start : start + self._group], lengths[start : start + self._group])
        row_ids = np.arange(start, start + self._group, dtype=np.int32)
        for step in range(self._sizes.completion):
            if rows.done.all():
                break
            drawn, log_probs = self._next(loaded, rows, row_ids, jax.random.fold_in(key, step))
            live = np.flatnonzero(~rows.done)
            rows.drawn[live, step], rows.log_probs[live, step] = drawn[live], log_probs[live]
            rows.tokens[live, rows.lengths[live]] = drawn[live]
            rows.lengths[live] += 1
            rows.done[live] = np.isin(drawn[live], self._tokenizer.eos_ids)
        return rows

    def _start(self, prompts: np.ndarray, prompt_lengths: np.ndarray) -> _Rows:
        """Prompts in rows; rows without one are done."""
        tokens = np.full((self._group, self._sizes.row), self._tokenizer.pad_id, np.int32)
        lengths = np.ones(self._group, np.int32)
        tokens[: len(prompts), : prompts.shape[1]], lengths[: len(prompts)] = prompts, prompt_lengths
        shape = (self._group, self._sizes.completion)
        done = np.arange(self._group) >= len(prompts)
        return _Rows(tokens, lengths, np.zeros(shape, np.float32), np.zeros(shape, np.int32), done)

    def _next(self, loaded: Loaded, rows: _Rows, row_ids: np.ndarray, key: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        """The next token of every row and its log-prob."""
        place = np.arange(self._sizes.row, dtype=np.int32)
        within = place < rows.lengths[:, None]
        positions = np.where(within, place, 0).astype(np.int32)
        segments = np.where(within, np.arange(self._group, dtype=np.int32)[:, None], -1).astype(np.int32)
        hidden = self._programs.body(loaded, self._deal(rows.tokens, positions, segments))
        operands = zip(loaded.ranks, hidden, self._deal(rows.lengths - 1, row_ids), strict=True)
        last, drawn = zip(*(self._draw(params, x, *each, key) for params, x, each in operands), strict=True)
        live = [mask for (mask,) in self._deal(~rows.done)]
        results = self._programs.head(loaded, list(last), list(drawn), live)
        log_probs = [result.log_probs for result in results]
        return np.concatenate(jax.device_get(drawn)), np.concatenate(jax.device_get(log_probs))

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
