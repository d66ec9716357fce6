"""Hugging Face directories of a few thousand random parameters, one for each family, written without transformers."""

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from experiments.models.decoder import Decoder
from experiments.models.huggingface.config import decoder_config
from experiments.models.huggingface.files import JsonObject
from experiments.models.parameters import HUGGING_FACE, abstract_decoder, parameters_of
from experiments.models.pretrained import open_pretrained
from experiments.models.sharding import on_one_device

SPECIAL = ("<|end|>", "<|user|>", "<|model|>")
END = 256
VOCAB = 264
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'].replace('assistant', 'model') + '|>' }}"
    "{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|model|>' }}{% endif %}"
)
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 256,
}  # fmt: skip
_LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_GEMMA = {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 20, "sliding_window": 6}
CONFIGS: dict[str, dict[str, Any]] = {
    # Llama 3 as transformers 5 writes it, and Llama 2 as 4 wrote it.
    "llama3": {
        **_SIZES, "model_type": "llama", "head_dim": 12, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **_LLAMA3},
    },
    "llama2": {
        **_SIZES, "model_type": "llama", "num_key_value_heads": 4, "rope_theta": 300.0, "rope_scaling": None,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
    },
    "smollm2": {**_SIZES, "model_type": "llama", "tie_word_embeddings": True, "rope_theta": 400.0},
    "qwen2": {
        **_SIZES, "model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 600.0, "sliding_window": 5,
        "use_sliding_window": True, "max_window_layers": 1,
    },
    "qwen2.5": {
        **_SIZES, "model_type": "qwen2", "tie_word_embeddings": False, "sliding_window": 5, "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
    },
    "qwen3": {
        **_SIZES, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True, "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 800.0},
    },
    "mistral": {**_SIZES, "model_type": "mistral", "sliding_window": 7, "rope_parameters": {"rope_theta": 900.0}},
    "gemma2": {
        **_SIZES, **_GEMMA, "model_type": "gemma2", "rope_theta": 200.0, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        **_SIZES, **_GEMMA, "model_type": "gemma3_text", "sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
}  # fmt: skip


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """fp32 tensors of a config.json under their names; the same numbers with every version of NumPy."""
    draw = np.random.RandomState(seed)
    norm = 0.0 if config["model_type"].startswith("gemma") else 1.0
    return {
        name: draw.normal(norm if "norm" in name else 0.0, 0.2, parameter.stored_shape).astype(np.float32)
        for parameter in parameters_of(decoder_config(JsonObject("config.json", config)))
        for name in parameter.tensors(HUGGING_FACE)
    }


def write_tiny_directory(
    path: Path, family: str = "llama3", *, dtype: str = "float32", shards: int = 1, **changes: Any
) -> Path:
    """Writes the directory; `changes` replace fields of config.json."""
    from safetensors.numpy import save_file

    config = {**CONFIGS[family], **changes}
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stored = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    tensors = {name: tensor.astype(stored) for name, tensor in random_tensors(config).items()}
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    else:
        numbers = [number % shards + 1 for number in range(len(names))]
        files = {name: f"model-{n:05d}-of-{shards:05d}.safetensors" for name, n in zip(names, numbers, strict=True)}
        for file in set(files.values()):
            held = {name: tensors[name] for name in names if files[name] == file}
            save_file(held, path / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": files}
        (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    tokens = {"eos_token": SPECIAL[0], "pad_token": SPECIAL[0]}
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **tokens}
    (path / "tokenizer_config.json").write_text(json.dumps(options), encoding="utf-8")
    ends = {"eos_token_id": [END, END + 1], "pad_token_id": END}
    (path / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    return path


def tokenizer_json() -> str:
    """A byte-level tokenizer of 256 bytes and three special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(symbols)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return inner.to_str()


def decoder_on_disk(path: Path, *, chat_template: bool = True) -> Decoder:
    """The whole model on one device."""
    found = open_pretrained(path, chat_template=chat_template)
    graph, _ = abstract_decoder(found.config)
    return nnx.merge(graph, found.weights().load(found.config, on_one_device(jax.devices()[0])))
