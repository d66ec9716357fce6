"""GRPO in an optax loop with an Equinox model. Run: python -m examples.recipes.equinox_loop"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from examples.recipes.repeat_task import KL, LENGTH, VOCAB, assert_equal, sample_batch, stored_logits_loss
from jaxlogp import linear_log_probs, linear_policy_loss, losses


class Model(eqx.Module):
    """Embedding, one causal attention layer and a head."""

    embedding: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    head: eqx.nn.Linear

    def __init__(self, key, width=32):
        keys = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(VOCAB, width, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(2, width, key=keys[1])
        self.head = eqx.nn.Linear(width, VOCAB, use_bias=False, key=keys[2])

    def hidden_states(self, tokens):
        x, causal = self.embedding.weight[tokens], jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        return x + jax.vmap(lambda row: self.attention(row, row, row, mask=causal))(x)

    def __call__(self, tokens):
        return jax.vmap(jax.vmap(self.head))(self.hidden_states(tokens))


def grpo_loss(model, reference, batch):
    """Returns the loss of a step. An Equinox `Linear` stores [V, H], the default layout."""
    ref = linear_log_probs(reference.hidden_states(batch.tokens), reference.head.weight, batch.targets, batch.mask)
    hidden, weight = model.hidden_states(batch.tokens), model.head.weight
    data = batch.targets, batch.old_log_probs, batch.advantages, batch.mask
    loss = losses.grpo(kl_coefficient=KL)
    return linear_policy_loss(hidden, weight, *data, loss=loss, ref_log_probs=ref.log_probs)[0].mean()


def loss_from_logits(model, reference, batch):
    """Returns the same loss from stored logits."""
    return stored_logits_loss(model(batch.tokens), reference(batch.tokens), batch)


def main(steps=40):
    """Trains on samples of the model, and prints the mean reward of every fifth batch."""
    model = reference = Model(jax.random.key(0))
    optimizer = optax.adam(1e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def update(model, state, batch):
        changes, state = optimizer.update(eqx.filter_grad(grpo_loss)(model, reference, batch), state)
        return eqx.apply_updates(model, changes), state

    sample = eqx.filter_jit(sample_batch)
    arguments = Model(jax.random.key(1)), reference, sample(model, jax.random.key(0))
    assert_equal(*(eqx.filter_value_and_grad(loss)(*arguments) for loss in (grpo_loss, loss_from_logits)))
    for step in range(steps):
        batch = sample(model, jax.random.key(step))
        if step % 5 == 0:
            print(f"step {step}: reward {batch.reward:.2f}")
        for _ in range(2):
            model, state = update(model, state, batch)


if __name__ == "__main__":
    main()
