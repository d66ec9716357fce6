"""GRPO in an optax loop with a Flax Linen model. Run: python -m examples.recipes.linen_loop"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from examples.recipes.repeat_task import KL, LENGTH, VOCAB, assert_equal, sample_batch, stored_logits_loss
from jaxlogp import linear_log_probs, linear_policy_loss, losses


class Model(nn.Module):
    """Embedding, one causal attention layer and a head."""

    def setup(self):
        self.embedding = nn.Embed(VOCAB, 32)
        self.attention = nn.MultiHeadDotProductAttention(2)
        self.head = nn.Dense(VOCAB, use_bias=False)

    def hidden_states(self, tokens):
        x = self.embedding(tokens)
        return x + self.attention(x, mask=nn.make_causal_mask(tokens))

    def __call__(self, tokens):
        return self.head(self.hidden_states(tokens))


MODEL = Model()


def grpo_loss(variables, reference, batch):
    """Returns the loss of a step. A Linen `Dense` stores [H, V]: `weight_layout="hv"`."""
    models = reference, variables
    ref_hidden, hidden = (MODEL.apply(each, batch.tokens, method=Model.hidden_states) for each in models)
    ref_kernel, kernel = (each["params"]["head"]["kernel"] for each in models)
    ref = linear_log_probs(ref_hidden, ref_kernel, batch.targets, batch.mask, weight_layout="hv")
    data = batch.targets, batch.old_log_probs, batch.advantages, batch.mask
    options = {"loss": losses.grpo(kl_coefficient=KL), "ref_log_probs": ref.log_probs, "weight_layout": "hv"}
    return linear_policy_loss(hidden, kernel, *data, **options)[0].mean()


def loss_from_logits(variables, reference, batch):
    """Returns the same loss from stored logits."""
    return stored_logits_loss(*(MODEL.apply(each, batch.tokens) for each in (variables, reference)), batch)


def main(steps=40):
    """Trains on samples of the model, and prints the mean reward of every fifth batch."""
    reference, other = (MODEL.init(jax.random.key(seed), jnp.zeros((1, LENGTH), jnp.int32)) for seed in (0, 1))
    optimizer = optax.adam(1e-2)
    variables, state = reference, optimizer.init(reference)

    @jax.jit
    def update(variables, state, batch):
        changes, state = optimizer.update(jax.grad(grpo_loss)(variables, reference, batch), state)
        return optax.apply_updates(variables, changes), state

    sample = jax.jit(lambda variables, key: sample_batch(lambda tokens: MODEL.apply(variables, tokens), key))
    arguments = other, reference, sample(variables, jax.random.key(0))
    assert_equal(*(jax.value_and_grad(loss)(*arguments) for loss in (grpo_loss, loss_from_logits)))
    for step in range(steps):
        batch = sample(variables, jax.random.key(step))
        if step % 5 == 0:
            print(f"step {step}: reward {batch.reward:.2f}")
        for _ in range(2):
            variables, state = update(variables, state, batch)


if __name__ == "__main__":
    main()
