"""The sampler of a model without a key-value cache: for every new token its whole row is computed again."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from experiments.models.compiled_program import lower_program
from experiments.models.mesh import split_rows
from experiments.models.placement import bytes_a_device, whole_on_host
from experiments.sampling.sample_token import CompletionRule, keys_of_rows
from experiments.sampling.sampler import SampledModel, Sampler, Samples
from jaxlogp.errors import require


class RecomputeSampler(Sampler):
    """A `Sampler` whose work grows with the square of a row's tokens."""

    def __init__(self, model: SampledModel, rule: CompletionRule) -> None:
        rows = rule.options.rows
        require(rows is None, "rows (--rollout.rows)", "None for a model without a key-value cache", rows)
        expected = "False for a model that is not the built-in decoder"
        require(not rule.options.int8_weights, "int8_weights (--rollout.int8-weights)", expected, True)
        self._model, self._rule = model, rule
        self._run = jax.jit(self._completed, static_argnums=4)

    def __call__(
        self, params: nnx.State, prompts: np.ndarray, lengths: np.ndarray, copies: int, key: jax.Array
    ) -> Samples:
        samples = self._run(self._model.state(params), *self._placed(prompts, lengths, copies), key, copies)
        return jax.tree.map(lambda x: x[: len(prompts) * copies], whole_on_host(samples))

    def lower(self, params: nnx.State, prompts: int, tokens: int, copies: int) -> Callable[[], int | None]:
        rows = self._placed(np.zeros((prompts, tokens), np.int32), np.ones(prompts, np.int32), copies)
        state, copied = self._model.shapes(params)
        compiled = lower_program(self._run, state, *rows, jax.random.key(0), copies)

        def memory() -> int | None:
            beside = compiled().bytes_beside(bytes_a_device(state))
            return None if beside is None else beside + copied

        return memory

    def _placed(self, prompts: np.ndarray, lengths: np.ndarray, copies: int) -> tuple[jax.Array, jax.Array]:
        """Returns rows with room for completions, and their lengths without."""
        prompts, lengths = (np.repeat(x, copies, axis=0) for x in (prompts, lengths))
        room = np.full((len(prompts), self._rule.options.max_new_tokens), self._rule.pad_id, np.int32)
        return split_rows((np.concatenate([prompts, room], axis=1), lengths), self._model.mesh)

    def _completed(self, state, rows, prompt_lengths, key, copies) -> Samples:
        model = nnx.merge(self._model.graph, state)
        count, width = rows.shape
        place, row_numbers = (jnp.arange(size, dtype=jnp.int32) for size in (width, count))
        row_keys, greedy = keys_of_rows(key, row_numbers), self._rule.greedy_rows(row_numbers, copies)

        def extend(carry, step):
            rows, done, support = carry
            lengths = prompt_lengths + step
            # What follows the last token is another document.
            segments = (place >= lengths[:, None]).astype(jnp.int32)
            positions = jnp.where(segments == 0, place, place - lengths[:, None])
            hidden = model.hidden_states(rows, positions, segments)
            last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
            steps = jnp.broadcast_to(step, count)
            operands = (last, model.head(), row_keys, steps, done, greedy, support, row_numbers[None], self._model.mesh)
            sampled, after, support = self._rule.next_tokens(*operands)
            return (rows.at[row_numbers, lengths].set(sampled.tokens), after, support), (*sampled[:2], done)

        steps = jnp.arange(self._rule.options.max_new_tokens, dtype=jnp.int32)
        nothing = self._rule.no_support(count, model.head()[1].shape[0])
        (*_, support), columns = lax.scan(extend, (rows, jnp.zeros(count, jnp.bool_), nothing), steps)
        *drawn, done = (column.T for column in columns)
        return Samples(*drawn, jnp.sum(~done, axis=1, dtype=jnp.int32), support)
