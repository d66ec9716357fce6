"""Writes decoder_parity.npz: tiny random Qwen3 and Llama-3 models of Hugging Face transformers, and their results.

Run by hand, with torch and transformers installed (2.13.0 and 5.23.0 for the current file); the tests only read the
file:

    python tests/experiments/golden/make_decoder_parity.py

For each model the file holds its state dict (`<model>/<parameter>`), token ids [2, 20] and the last hidden state after
the final norm, fp32 [2, 20, hidden].
"""

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

TARGET = Path(__file__).with_name("decoder_parity.npz")
SIZES = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    attn_implementation="eager",
)
ROPE_SCALING = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


def build_models() -> dict[str, torch.nn.Module]:
    """The two models with every parameter drawn, norms around 1."""
    torch.manual_seed(0)
    models = {
        "qwen3": Qwen3Model(
            Qwen3Config(**SIZES, rms_norm_eps=1e-6, rope_parameters=dict(rope_type="default", rope_theta=1000.0))
        ),
        "llama3": LlamaModel(LlamaConfig(**SIZES, rms_norm_eps=1e-5, rope_parameters=ROPE_SCALING)),
    }
    for model in models.values():
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.2)
    return models


def main() -> None:
    """Runs the models and writes the file."""
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(1))
    arrays = {"tokens": tokens.numpy().astype(np.int32)}
    for family, model in build_models().items():
        with torch.no_grad():
            arrays[f"{family}/last_hidden_state"] = model.eval()(input_ids=tokens).last_hidden_state.numpy()
        for name, parameter in model.named_parameters():
            arrays[f"{family}/{name}"] = parameter.detach().numpy()
    np.savez_compressed(TARGET, **arrays)


if __name__ == "__main__":
    main()
