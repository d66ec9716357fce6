"""GRPO in an optax loop with a Flax NNX model. Run: python -m examples.recipes.nnx_loop"""

import jax
import optax
from flax import nnx

from examples.recipes.repeat_task import KL, VOCAB, assert_equal, sample_batch, stored_logits_loss
from jaxlogp import linear_log_probs, linear_policy_loss, losses


class Model(nnx.Module):
    """Embedding, one causal attention layer and a head."""

    def __init__(self, rngs, width=32):
        self.embedding = nnx.Embed(VOCAB, width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs)
        self.head = nnx.Linear(width, VOCAB, use_bias=False, rngs=rngs)

    def hidden_states(self, tokens):
        x = self.embedding(tokens)
        return x + self.attention(x, mask=nnx.make_causal_mask(tokens))

    def __call__(self, tokens):
        return self.head(self.hidden_states(tokens))


def grpo_loss(model, reference, batch):
    """Returns the loss of a step. An NNX `Linear` stores [H, V]: `weight_layout="hv"`."""
    hidden = reference.hidden_states(batch.tokens)
    ref = linear_log_probs(hidden, reference.head.kernel[...], batch.targets, batch.mask, weight_layout="hv")
    hidden, kernel = model.hidden_states(batch.tokens), model.head.kernel[...]
    data = batch.targets, batch.old_log_probs, batch.advantages, batch.mask
    options = {"loss": losses.grpo(kl_coefficient=KL), "ref_log_probs": ref.log_probs, "weight_layout": "hv"}
    return linear_policy_loss(hidden, kernel, *data, **options)[0].mean()


def loss_from_logits(model, reference, batch):
    """Returns the same loss from stored logits."""
    return stored_logits_loss(model(batch.tokens), reference(batch.tokens), batch)


def main(steps=40):
    """Trains on samples of the model, and prints the mean reward of every fifth batch."""
    model, reference = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def update(model, optimizer, reference, batch):
        optimizer.update(model, nnx.grad(grpo_loss)(model, reference, batch))

    sample = nnx.jit(sample_batch)
    arguments = Model(nnx.Rngs(1)), reference, sample(model, jax.random.key(0))
    assert_equal(*(nnx.value_and_grad(loss)(*arguments) for loss in (grpo_loss, loss_from_logits)))
    for step in range(steps):
        batch = sample(model, jax.random.key(step))
        if step % 5 == 0:
            print(f"step {step}: reward {batch.reward:.2f}")
        for _ in range(2):
            update(model, optimizer, reference, batch)


if __name__ == "__main__":
    main()
