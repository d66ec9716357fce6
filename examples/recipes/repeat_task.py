"""A toy task for the recipes, repeating the prompt, and the loss of GRPO from stored logits.

A row is one prompt token and seven completion tokens. The reward is the fraction of completion tokens equal to the prompt.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlogp import group_advantages

VOCAB, LENGTH, PROMPTS, COMPLETIONS = 12, 8, 8, 8
KL = 0.01


class Batch(NamedTuple):
    """Sampled rows. Every array but the last two has the shape [PROMPTS * COMPLETIONS, LENGTH].

    Attributes:
        tokens: sampled tokens.
        targets: the next token, which the hidden state of a token predicts.
        mask: True where the target is a completion token.
        old_log_probs: log-probs of the targets when they were sampled, in nats.
        advantages: one per row.
        reward: mean reward, a scalar.
    """

    tokens: jax.Array
    targets: jax.Array
    mask: jax.Array
    old_log_probs: jax.Array
    advantages: jax.Array
    reward: jax.Array


def sample_batch(logits, key):
    """Samples a `Batch` from `logits`, a function of tokens [B, T] that returns [B, T, V]."""
    prompts = jnp.repeat(jax.random.randint(key, (PROMPTS,), 0, VOCAB), COMPLETIONS)
    tokens = jnp.zeros((len(prompts), LENGTH), jnp.int32).at[:, 0].set(prompts)

    def append_token(t, tokens):
        return tokens.at[:, t + 1].set(jax.random.categorical(jax.random.fold_in(key, t), logits(tokens)[:, t]))

    tokens = jax.lax.fori_loop(0, LENGTH - 1, append_token, tokens)
    targets = jnp.roll(tokens, -1, axis=1)
    mask = jnp.broadcast_to(jnp.arange(LENGTH) < LENGTH - 1, tokens.shape)
    rewards = (tokens[:, 1:] == tokens[:, :1]).mean(axis=1)
    advantages = group_advantages(rewards.reshape(PROMPTS, COMPLETIONS)).advantages.reshape(-1)
    return Batch(tokens, targets, mask, stored_log_probs(logits(tokens), targets), advantages, rewards.mean())


def stored_log_probs(logits, targets):
    """Returns the log-probs [B, T] of the targets, in nats, from logits [B, T, V]."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]


def stored_logits_loss(logits, ref_logits, batch):
    """Returns the loss of GRPO with the k3 KL to a reference, as a token mean, from stored logits [B, T, V]."""
    log_probs = stored_log_probs(logits, batch.targets)
    ratio, advantages = jnp.exp(log_probs - batch.old_log_probs), batch.advantages[:, None]
    objective = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    to_reference = stored_log_probs(ref_logits, batch.targets) - log_probs
    per_token = -objective + KL * (jnp.expm1(to_reference) - to_reference)
    return jnp.where(batch.mask, per_token, 0.0).sum() / batch.mask.sum()


def assert_equal(fused, stored):
    """Raises unless two pairs of loss and gradients agree to fp32 accuracy, and prints the losses."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), fused, stored)
    print(f"loss {fused[0]:.6f}, from stored logits {stored[0]:.6f}; gradients equal")
