"""Writes family_logits.npz: logits that Hugging Face transformers computes of the directories of tiny_directory.py.

Run by hand from the root, with the extra parity (torch 2.13.0 and transformers 5.23.0 for the file in place); the tests
read the file alone:

    PYTHONPATH=. python tests/experiments/golden/make_family_logits.py

`tokens` [2, 24], and for each family the logits of every fifth token of the vocabulary, fp32 [2, 24, 53]. Weights are not
stored: they are drawn from a stream of numbers that no version of NumPy changes.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.experiments.tiny_directory import CONFIGS, VOCAB, write_tiny_directory

TARGET = Path(__file__).with_name("family_logits.npz")
FAMILIES = ("llama3", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")


def main() -> None:
    """Runs the models and writes the file."""
    tokens = np.random.RandomState(1).randint(0, VOCAB, (2, 24))
    arrays = {"tokens": tokens.astype(np.int32)}
    assert set(FAMILIES) <= set(CONFIGS)
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            path = write_tiny_directory(Path(folder) / family, family)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            arrays[family] = model.eval()(input_ids=torch.tensor(tokens)).logits.numpy()[..., ::5]
    np.savez_compressed(TARGET, **arrays)


if __name__ == "__main__":
    main()
