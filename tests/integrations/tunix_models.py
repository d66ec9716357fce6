"""Small models of Tunix with random weights, and examples for its losses."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

VOCAB = 512
# One layer: what is tested begins behind the last one, and Tunix traces and compiles each layer.
SIZES = {"num_layers": 1, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2}


def make_model(name: str, vocab: int = VOCAB) -> nnx.Module:
    """Returns a model of the family `name`; "qwen3 untied" has a head of its own, "qwen3 bf16" is in bf16."""
    sizes = SIZES | {"vocab_size": vocab, "norm_eps": 1e-6, "rope_theta": 1_000_000}
    family, _, kind = name.partition(" ")
    if family == "qwen3":
        from tunix.models.qwen3 import model as module

        if kind == "bf16":
            sizes |= {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        model = module.Qwen3(module.ModelConfig(**sizes, use_tied_embedding=kind != "untied"), rngs=nnx.Rngs(0))
    elif family == "qwen2":
        from tunix.models.qwen2 import model as module

        model = module.Qwen2(module.ModelConfig(**sizes, use_tied_embedding=kind != "untied"), rngs=nnx.Rngs(0))
    elif family == "llama3":
        from tunix.models.llama3 import model as module

        model = module.Llama3(module.ModelConfig(**sizes, weight_tying=kind != "untied"), rngs=nnx.Rngs(0))
    else:
        small = SIZES | {"num_embed": vocab}
        # Gemma 3 is in bf16 otherwise, and Tunix rounds its logits to that.
        exact = small | {"param_dtype": jnp.float32}
        if family == "gemma2":
            from tunix.models.gemma import model as module

            model = module.Gemma(dataclasses.replace(module.ModelConfig.gemma2_2b(), **small), rngs=nnx.Rngs(0))
        else:
            from tunix.models.gemma3 import model as module

            model = module.Gemma3(dataclasses.replace(module.ModelConfig.gemma3_270m(), **exact), rngs=nnx.Rngs(0))
    return _filled(model)


def _filled(model: nnx.Module) -> nnx.Module:
    """Adds noise to parameters that begin as zeros or ones, such as norms and the MLPs of Gemma."""
    leaves, tree = jax.tree.flatten(nnx.state(model, nnx.Param))
    keys = jax.random.split(jax.random.key(1), len(leaves))

    def noisy(leaf, key):
        plain = leaf.ndim < 2 or not np.asarray(leaf).any()
        return leaf + 0.05 * jax.random.normal(key, leaf.shape, leaf.dtype) if plain else leaf

    nnx.update(model, jax.tree.unflatten(tree, [noisy(*pair) for pair in zip(leaves, keys, strict=True)]))
    return model


def rl_example(rows: int = 4, prompt: int = 5, completion: int = 12, vocab: int = VOCAB, **changes: Any) -> Any:
    """Returns a `TrainExample` with padding on both sides, old and reference log-probs near those of the model."""
    from tunix.rl import common

    rng = np.random.default_rng(0)
    ids = rng.integers(3, vocab, (rows, prompt + completion)).astype(np.int32)
    ids[:, :2] = 0
    mask = np.arange(completion) < rng.integers(completion // 2, completion + 1, rows)[:, None]
    noise = 0.3 * rng.normal(size=(2, rows, completion)).astype(np.float32)
    fields = {
        "prompt_ids": jnp.asarray(ids[:, :prompt]),
        "prompt_mask": jnp.asarray(ids[:, :prompt] != 0),
        "completion_ids": jnp.asarray(np.where(mask, ids[:, prompt:], 0)),
        "completion_mask": jnp.asarray(mask.astype(np.int32)),
        "advantages": jnp.asarray(rng.normal(size=rows).astype(np.float32)),
        "ref_per_token_logps": jnp.asarray(noise[0] - np.float32(np.log(vocab))),
        "old_per_token_logps": jnp.asarray(noise[1] - np.float32(np.log(vocab))),
    }
    return common.TrainExample(**fields | changes)


def full_inputs(rows: int = 4, length: int = 16, vocab: int = VOCAB) -> dict[str, jax.Array]:
    """Returns the inputs of supervised training: tokens, mask, positions and attention mask."""
    rng = np.random.default_rng(1)
    mask = np.arange(length) < rng.integers(length // 2, length + 1, rows)[:, None]
    causal = np.tril(np.ones((length, length), bool))[None] & mask[:, None, :]
    return {
        "input_tokens": jnp.asarray(rng.integers(3, vocab, (rows, length)).astype(np.int32)),
        "input_mask": jnp.asarray(mask & (np.arange(length) >= 4)),
        "positions": jnp.broadcast_to(jnp.arange(length), (rows, length)),
        "attention_mask": jnp.asarray(causal),
    }
