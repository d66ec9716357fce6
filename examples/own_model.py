"""Your own Flax model, here a GRU: no attention, no cache, two methods. Run: python -m examples.own_model"""

import jax
import jax.numpy as jnp
from flax import nnx

from experiments import Config, train
from experiments.models.tokenizer import tokenizer_for
from experiments.tasks import make_task
from jaxlogp.head import HeadSpec

TASK = "comparison:1"


class Gru(nnx.Module):
    """Token ids to hidden states, from left to right."""

    def __init__(self, vocab_size, features, *, rngs):
        self.embed = nnx.Embed(vocab_size, features, rngs=rngs)
        self.cell = nnx.GRUCell(features, features, rngs=rngs)
        self.head_weight = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (vocab_size, features)))

    def hidden_states(self, tokens, positions, segment_ids):
        """[B, T, H]; a token depends on its own document alone, up to itself."""

        def step(state, at):
            token, position = at
            # Rows are packed: position 0 begins another document.
            state = jnp.where(position[:, None] == 0, 0.0, state)
            return self.cell(state, self.embed(token))

        start = jnp.zeros((len(tokens), self.embed.features))
        _, hidden = jax.lax.scan(step, start, (tokens.T, positions.T))
        return hidden.swapaxes(0, 1)

    def head(self):
        """The head's options (soft cap, scale), and its weight [V, H]."""
        return HeadSpec(), self.head_weight[...]


def model(seed=0):
    """A model for the task's tokens."""
    return Gru(tokenizer_for(make_task(TASK).alphabet).vocab_size, 64, rngs=nnx.Rngs(seed))


if __name__ == "__main__":
    train(Config(task=TASK), model=model())
