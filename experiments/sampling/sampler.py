"""Samplers: weights and prompts in, completions and their log-probs out.

A sampler is made once and called with new parameters every step; nothing is traced again as long as shapes stay the same:

    model = SampledModel(graph, mesh)
    sampler = DecoderSampler(model, CompletionRule(SamplingOptions(8, temperature=1.0), eos_ids=(1,), pad_id=0))
    for step in range(steps):
        samples = sampler(params, prompts, lengths, copies, jax.random.fold_in(key, step))
        params = train(params, samples)

Shapes: B rows, P slots of a prompt, N new tokens.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from experiments.models.attention import KVCache, rows_of_ranks
from experiments.models.compiled_program import compile_program, largest
from experiments.models.mesh import num_ranks, row_axes, split_rows
from experiments.models.placement import bytes_a_device, placed, whole_on_host
from experiments.sampling.sample_token import CompletionRule, keys_of_rows
from experiments.sampling.support import RecordedSupport

FEWEST_ROWS = 16
"""No rank's batch is narrowed to fewer rows."""
SHORTEST_NARROWED = 256
"""Nor is one whose completions are shorter: a program for each size would have to be compiled."""


class Samples(NamedTuple):
    """Completions, right-padded.

    Attributes:
        tokens: int32; `pad_id` after the end of a completion.
        log_probs: fp32, nats, each token given the prompt and the tokens before it under softmax(logits / temperature) over
            the whole vocabulary, or over `support`, which a trainer recomputes; 0.0 after the end.
        lengths: int32, in [1, N], tokens of each completion, including its end token.
        support: what each token was drawn from, where that is recorded.
    """

    tokens: Int[Array | np.ndarray, "B N"]
    log_probs: Float[Array | np.ndarray, "B N"]
    lengths: Int[Array | np.ndarray, " B"]
    support: RecordedSupport | None = None


class Sampler(Protocol):
    """Draws completions; for `--invariant`, `experiments.invariant.leaf_sampler` has one of its own."""

    def __call__(
        self, params: nnx.State, prompts: np.ndarray, lengths: np.ndarray, copies: int, key: jax.Array
    ) -> Samples:
        """Draws `copies` completions of every prompt, in adjacent rows, as NumPy arrays.

        A row's draws depend only on the key, its number and its own prompt, up to the rounding of products, which may
        depend on the batch size. Prompts are int32 [B, P], right-padded with any id, and `lengths` int32 [B], in [1, P].
        `params` are the trained parameters.
        """

    def memory(self, params: nnx.State, prompts: int, tokens: int, copies: int) -> int | None:
        """Returns the most bytes it takes per device beside the parameters, of which shapes, dtypes and places are enough.

        Its programs for [`prompts`, `tokens`] are compiled for that before their first call; None if they are many small
        ones, or if the compiler does not say.
        """


@dataclass(frozen=True)
class SampledModel:
    """A model on the mesh where completions are drawn, over whose data ranks rows are split.

    `frozen` is what is not trained. Trained parameters are copied to `places` for every draw; None if they are there.
    """

    graph: nnx.GraphDef
    mesh: Mesh
    frozen: nnx.State = field(default_factory=lambda: nnx.State({}))
    places: nnx.State | None = None

    def state(self, params: nnx.State) -> nnx.State:
        return nnx.merge_state(params if self.places is None else placed(params, self.places), self.frozen)

    def shapes(self, params: nnx.State) -> tuple[nnx.State, int]:
        """Returns shapes, dtypes and places of `state`, and the bytes per device that its copies take."""
        if self.places is None:
            return nnx.merge_state(params, self.frozen), 0

        def copy(leaf: jax.Array, place: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

        copies = jax.tree.map(copy, params, self.places)
        return nnx.merge_state(copies, self.frozen), bytes_a_device(copies)


class DecoderSampler(Sampler):
    """A `Sampler` of a `Decoder`: reads every prompt once, then draws one token per row and step from a key-value cache.

    Equal models and rules share compiled programs.
    """

    def __init__(self, model: SampledModel, rule: CompletionRule) -> None:
        self._model, self._rule = model, rule

    def __call__(
        self, params: nnx.State, prompts: np.ndarray, lengths: np.ndarray, copies: int, key: jax.Array
    ) -> Samples:
        graph, mesh, state = self._model.graph, self._model.mesh, self._model.state(params)
        rows = _prefill(graph, self._rule, copies, state, *split_rows((prompts, lengths), mesh), key)
        count, ranks = len(rows.done), num_ranks(mesh)
        completed = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), rows.samples)
        # Rows stay on their rank. Finished ones leave: when few enough are left on every rank, these go on alone.
        places = np.arange(count).reshape(ranks, -1)
        for size in self._sizes(count // ranks):
            rows = _decode(graph, self._rule, size, ranks, state, rows)
            samples, done, step = whole_on_host((rows.samples, rows.done, rows.step))
            for whole, new in zip(*map(jax.tree.leaves, (completed, samples)), strict=True):
                whole[places.ravel()] = new
            if done.all() or step == self._rule.options.max_new_tokens:
                break
            # The unfinished ones of each rank first; finished ones fill the new size.
            kept = np.argsort(done.reshape(ranks, -1), axis=1, kind="stable")[:, :size].astype(np.int32)
            places = np.take_along_axis(places, kept, axis=1)
            rows = _kept(rows, placed(kept, NamedSharding(mesh, P(row_axes(mesh)))))
        return jax.tree.map(lambda x: x[: len(prompts) * copies], completed)

    def memory(self, params: nnx.State, prompts: int, tokens: int, copies: int) -> int | None:
        # All programs but those for the rows that are left when others have ended, which take less.
        graph, mesh = self._model.graph, self._model.mesh
        state, copied = self._model.shapes(params)
        given = split_rows((np.zeros((prompts, tokens), np.int32), np.ones(prompts, np.int32)), mesh)
        prefill = compile_program(_prefill, graph, self._rule, copies, state, *given, jax.random.key(0))
        ranks = num_ranks(mesh)
        rows = len(prefill.results.done) // ranks
        size = self._sizes(rows)[0]
        decode = compile_program(_decode, graph, self._rule, size, ranks, state, prefill.results)
        # While rows leave, those that stay are there twice.
        twice = bytes_a_device(prefill.results) * (rows + size) // rows
        need = largest(twice, *(program.bytes_beside(bytes_a_device(state)) for program in (prefill, decode)))
        return None if need is None else need + copied

    def _sizes(self, rows: int) -> list[int]:
        """Returns how many unfinished ones of a rank's `rows` end each call of `_decode`: the batch is narrowed to them.

        Each is a program to compile: a few, and none but the last, 0, where completions are short.
        """
        is_long = self._rule.options.max_new_tokens >= SHORTEST_NARROWED
        narrower = [rows >> halvings for halvings in range(1, 4)] if is_long else []
        return [*(size for size in narrower if size >= FEWEST_ROWS), 0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Rows:
    samples: Samples
    tokens: Array
    done: Array
    keys: Array
    greedy: Array | None
    step: Array
    cache: KVCache


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _prefill(graph, rule: CompletionRule, copies, state, prompts, lengths, key) -> _Rows:
    """Reads the prompts and draws the first token of every row."""
    model, size = nnx.merge(graph, state), rule.options.max_new_tokens
    # The last token drawn is never read, so it needs no slot.
    hidden, cache = model.prefill(prompts, lengths, max(size - 1, 1))
    hidden = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    if copies > 1:
        hidden, cache = jnp.repeat(hidden, copies, axis=0), cache.repeat_rows(copies)
    count = len(hidden)
    zeros, row_ids = jnp.zeros(count, jnp.int32), jnp.arange(count, dtype=jnp.int32)
    keys, greedy = keys_of_rows(key, row_ids), rule.greedy_rows(row_ids, copies)
    log_probs = jnp.zeros((count, size), jnp.float32)
    head = model.head()
    support = rule.no_support(count, head[1].shape[0])
    samples = Samples(jnp.full((count, size), rule.pad_id, jnp.int32), log_probs, zeros, support)
    rows = _Rows(samples, zeros, jnp.zeros(count, jnp.bool_), keys, greedy, jnp.int32(0), cache)
    return _extended(rule, rows, hidden, head)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=5)
def _decode(graph, rule: CompletionRule, size, ranks, state, rows: _Rows) -> _Rows:
    """Draws until no rank has more than `size` unfinished rows, or all have their longest completion."""
    model = nnx.merge(graph, state)
    # Before the loop, which would do it in every step.
    head, layers = model.head_apart(), model.layers_apart()

    def unfinished(rows: _Rows):
        left = jnp.sum(~rows.done.reshape(ranks, -1), axis=1)
        return (rows.step < rule.options.max_new_tokens) & (jnp.max(left) > size)

    def extend(rows: _Rows) -> _Rows:
        hidden, cache = model.decode_step(rows.tokens, rows.cache, layers)
        return _extended(rule, replace(rows, cache=cache), hidden, head)

    return lax.while_loop(unfinished, extend, rows)


@jax.jit
def _kept(rows: _Rows, kept) -> _Rows:
    """Returns the rows with these indices, int32 [ranks, C], among those of each rank."""
    parts = {name: getattr(rows, name) for name in ("samples", "tokens", "done", "keys", "greedy")}
    own = jax.tree.map(lambda x: rows_of_ranks(x, kept), parts)
    return replace(rows, cache=rows.cache.take_rows(kept), **own)


def _extended(rule: CompletionRule, rows: _Rows, hidden, head) -> _Rows:
    """Adds a token to every row that is not done."""
    before = rows.samples
    of_rows = (rows.keys, rows.step, rows.done, rows.greedy, before.support)
    sampled, done, support = rule.next_tokens(hidden, head, *of_rows)

    def put(column: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(column, new[:, None], rows.step, axis=1)

    lengths = before.lengths + (~rows.done).astype(jnp.int32)
    samples = Samples(*map(put, before[:2], sampled[:2]), lengths, support)
    return replace(rows, samples=samples, tokens=sampled.tokens, done=done, step=rows.step + 1)
