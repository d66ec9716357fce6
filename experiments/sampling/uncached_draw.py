"""The draw of a model without a key-value cache: for every new token its whole row is computed again."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.models.mesh import DATA_AXIS
from experiments.sampling.pick import DrawOptions, pick
from experiments.sampling.prompts import Sizes
from experiments.sampling.sampler import Samples, logits_of
from experiments.tasks.tokenizer import Tokenizer


class UncachedDraw:
    """A `Draw` with one static shape per number of prompts and copies; its work grows with the square of a row's tokens.

    Args:
      graph: graph definition of a `Model`.
      mesh: rows are split over its data axis where it divides them.
      tokenizer: end and padding token.
      sizes: bound of completions.
      options: how tokens are drawn.
    """

    def __init__(
        self, graph: nnx.GraphDef, mesh: Mesh, tokenizer: Tokenizer, sizes: Sizes, options: DrawOptions
    ) -> None:
        self._graph, self._mesh, self._tokenizer = graph, mesh, tokenizer
        self._steps, self._options = sizes.completion, options
        self._run = jax.jit(self._completed)

    def __call__(
        self, params: nnx.State, prompts: np.ndarray, lengths: np.ndarray, copies: int, key: jax.Array
    ) -> Samples:
        """See `Draw`."""
        prompts, lengths = (np.repeat(x, copies, axis=0) for x in (prompts, lengths))
        room = np.full((len(prompts), self._steps), self._tokenizer.pad_id, np.int32)
        spec = P(DATA_AXIS) if len(prompts) % self._mesh.shape[DATA_AXIS] == 0 else P()
        placed = jax.device_put((np.concatenate([prompts, room], axis=1), lengths), NamedSharding(self._mesh, spec))
        return jax.device_get(self._run(params, *placed, key))

    def _completed(self, params, rows, prompt_lengths, key) -> Samples:
        model = nnx.merge(self._graph, params)
        count, width = rows.shape
        row_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(count, dtype=jnp.int32))
        place = jnp.arange(width, dtype=jnp.int32)
        row_numbers = jnp.arange(count, dtype=jnp.int32)

        def extend(carry, step):
            rows, done = carry
            lengths = prompt_lengths + step
            # What follows the last token is another document.
            segments = (place >= lengths[:, None]).astype(jnp.int32)
            positions = jnp.where(segments == 0, place, place - lengths[:, None])
            hidden = model.hidden_states(rows, positions, segments)
            last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
            step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys, step)
            picked = pick(logits_of(last, *model.head()), step_keys, self._options)
            drawn = jnp.where(done, self._tokenizer.pad_id, picked.tokens)
            scores = (jnp.where(done, 0.0, x) for x in (picked.log_probs, picked.drawn_log_probs))
            ended = jnp.isin(drawn, jnp.array(self._tokenizer.eos_ids, jnp.int32))
            return (rows.at[row_numbers, lengths].set(drawn), done | ended), (drawn, *scores, done)

        steps = jnp.arange(self._steps, dtype=jnp.int32)
        _, columns = lax.scan(extend, (rows, jnp.zeros(count, jnp.bool_)), steps)
        drawn, log_probs, drawn_log_probs, done = (column.T for column in columns)
        return Samples(drawn, log_probs, drawn_log_probs, jnp.sum(~done, axis=1, dtype=jnp.int32))
