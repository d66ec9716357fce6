"""SkyRL-tx with the log-probs of its models from jaxlogp. Run: python -m examples.recipes.skyrl_tx"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from skyrl.tx.models.configs import Qwen3Config
from skyrl.tx.models.qwen3 import Qwen3ForCausalLM
from skyrl.tx.utils.logits_processor import LogitsProcessorMixin
from transformers import Qwen3Config as SourceConfig

from jaxlogp import linear_log_probs


def compute_logprobs(self, hidden_states, target_ids, adapter_indices=None):
    """Replaces `LogitsProcessorMixin.compute_logprobs`, with LoRA adapters on the head or without."""
    if self.lm_head is None:
        return linear_log_probs(hidden_states, self.model.embed_tokens.embedding[...], target_ids).log_probs
    head, kernel = self.lm_head, self.lm_head.kernel[...]
    if head.max_lora_adapters and adapter_indices is not None:
        # x A B scale = (x A scale) B: a row's x A scale stands in the columns of its adapter.
        low_rank = jnp.einsum("bth,bhr->btr", hidden_states, head.lora_A[...][adapter_indices])
        low_rank = low_rank * head.lora_scaling[...][adapter_indices][:, None, None]
        columns = jnp.einsum("btr,bn->btnr", low_rank, jax.nn.one_hot(adapter_indices, head.max_lora_adapters))
        hidden_states = jnp.concatenate([hidden_states, columns.reshape(*target_ids.shape, -1)], axis=-1)
        kernel = jnp.concatenate([kernel, head.lora_B[...].reshape(-1, kernel.shape[1])])
    return linear_log_probs(hidden_states, kernel, target_ids, weight_layout="hv").log_probs


def tiny_model(tied):
    """A Qwen3 with two adapters, with noise on every parameter and scale."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, head_dim=16)
    source = SourceConfig(vocab_size=96, num_key_value_heads=1, tie_word_embeddings=tied, **sizes)
    config = Qwen3Config(source, max_lora_adapters=2, max_lora_rank=4, shard_attention_heads=True)
    model = Qwen3ForCausalLM(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    state, key = nnx.state(model), jax.random.key(1)
    nnx.update(model, jax.tree.map(lambda x: (x + 0.1 * jax.random.normal(key, x.shape)).astype(x.dtype), state))
    return model


def mean_log_prob(model, tokens, adapters):
    hidden = model(tokens, attention_mask=jnp.ones_like(tokens), adapter_indices=adapters).last_hidden_state
    return model.compute_logprobs(hidden[:, :-1], tokens[:, 1:], adapters).mean()


def main():
    tokens, adapters = jax.random.randint(jax.random.key(2), (3, 8), 0, 96), jnp.array([1, 0, 1])
    stock = LogitsProcessorMixin.compute_logprobs
    for tied in (True, False):
        model, found = tiny_model(tied), {}
        for method in (stock, compute_logprobs):
            LogitsProcessorMixin.compute_logprobs = method
            found[method] = nnx.value_and_grad(mean_log_prob)(model, tokens, adapters)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *found.values())
        print(f"tied={tied}: {found[stock][0]:.6f}, with jaxlogp {found[compute_logprobs][0]:.6f}; gradients equal")


if __name__ == "__main__":
    with jax.set_mesh(jax.make_mesh((1, 1, 1), ("fsdp", "ep", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 3)):
        main()
