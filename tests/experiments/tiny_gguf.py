"""A GGUF file of a few thousand parameters, and its forward pass in the file's own convention."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, DIM = 64, 96, 2, 8, 2, 8
THETA, EPS = 5000.0, 1e-5
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ t", "1 2")
METADATA = {
    "embedding_length": HIDDEN, "feed_forward_length": INNER, "block_count": LAYERS, "context_length": 512,
    "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "rope.dimension_count": DIM,
}  # fmt: skip


@dataclass(frozen=True)
class TinyGguf:
    """The file and what it holds: every tensor after dequantisation, by its name in the file, outputs first."""

    path: Path
    tensors: dict[str, np.ndarray]
    vocabulary: list[str]


def write_tiny_gguf(path: Path, *, quantised: bool = True, seed: int = 0, **changes) -> TinyGguf:
    """Writes the file.

    `changes` replace `architecture`, `pre` or `merges`, drop (`without`) or add (`extra`) a tensor. `metadata` has values by
    key, of the types that Python's have, for any other change; None drops a key. `stored_as` names the type of all matrices.
    """
    import gguf
    from tokenizers import pre_tokenizers

    rng = np.random.default_rng(seed)
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*CONTROL, *symbols, *(merge.replace(" ", "") for merge in MERGES)]
    shapes = tensor_shapes(len(vocabulary))
    if "extra" in changes:
        shapes[changes["extra"]] = (HIDDEN,)
    shapes.pop(changes.get("without"), None)
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    for key, value in METADATA.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.rope.freq_base", THETA)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", EPS)
    writer.add_name("tiny")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(vocabulary) - len(CONTROL)))
    writer.add_token_merges(list(changes.get("merges", MERGES)))
    writer.add_eos_token_id(2)
    for key, value in changes.get("metadata", {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    tensors = {}
    for name, shape in shapes.items():
        # Norms around 1, matrices that keep the scale of their input.
        one = len(shape) == 1
        values = rng.normal(1.0 if one else 0.0, 0.2 if one else shape[1] ** -0.5, shape).astype(np.float32)
        if quantised and not one and (name.startswith("token") or "ffn" in name):
            kind = gguf.GGMLQuantizationType.Q8_0
            stored = gguf.quantize(values, kind)
            writer.add_tensor(name, stored, raw_dtype=kind)
            values = gguf.dequantize(stored, kind)
        elif "stored_as" in changes and not one:
            writer.add_tensor(name, values.astype(changes["stored_as"]))
        else:
            writer.add_tensor(name, values)
        tensors[name] = values.astype(np.float64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyGguf(path, tensors, vocabulary)


def tensor_shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors, outputs first."""
    layer = {
        "attn_norm": (HIDDEN,), "attn_q": (HEADS * DIM, HIDDEN), "attn_k": (KV_HEADS * DIM, HIDDEN),
        "attn_v": (KV_HEADS * DIM, HIDDEN), "attn_output": (HIDDEN, HEADS * DIM), "ffn_norm": (HIDDEN,),
        "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    blocks = {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}
    return {"token_embd.weight": (vocab_size, HIDDEN), **blocks, "output_norm.weight": (HIDDEN,)}


def oracle_hidden(tensors: dict[str, np.ndarray], token_ids: np.ndarray) -> np.ndarray:
    """float64 hidden states [T, H] after the final norm, features 2i and 2i + 1 of a head rotated as one complex number."""

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * tensors[name]

    def rotate(x):
        angles = np.arange(len(x))[:, None] * THETA ** (-2.0 * np.arange(DIM // 2) / DIM)
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)

    x = tensors["token_embd.weight"][token_ids]
    causal = np.tril(np.ones((len(x), len(x)), bool))
    for layer in range(LAYERS):
        weight = {name: tensors[f"blk.{layer}.{name}.weight"] for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        normed = norm(x, f"blk.{layer}.attn_norm.weight")
        q, k, v = ((normed @ weight[f"attn_{one}"].T).reshape(len(x), -1, DIM) for one in "qkv")
        q, k = rotate(q), rotate(k)
        mixed = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = np.where(causal, q[:, head] @ k[:, group].T / np.sqrt(DIM), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(weights / weights.sum(-1, keepdims=True) @ v[:, group])
        x = x + np.concatenate(mixed, axis=1) @ weight["attn_output"].T
        normed = norm(x, f"blk.{layer}.ffn_norm.weight")
        gate, up = (normed @ tensors[f"blk.{layer}.ffn_{one}.weight"].T for one in ("gate", "up"))
        x = x + (gate / (1.0 + np.exp(-gate)) * up) @ tensors[f"blk.{layer}.ffn_down.weight"].T
    return norm(x, "output_norm.weight")
