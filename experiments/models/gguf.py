"""A Llama-style decoder out of a GGUF file: sizes, weights and, as they lie there, the tokenizer's tables.

Needs the extra `gguf`. GGUF files of the architecture "llama" hold the rows of the query and key matrices in another
order than checkpoints: features 2i and 2i + 1 of a head are rotated together there, features i and i + head_dim / 2 here.
`paired_rows` undoes it; a model loaded without that still writes words, but its perplexity is far too high.

Shapes: N heads, D features of a head, H hidden features, V vocabulary entries.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from jaxlogp.errors import require

MAGIC = b"GGUF"
ARCHITECTURE = "llama"
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
}
"""Name in the file to name in `DecoderLayer`."""


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file holds.

    Attributes:
        metadata: its key-value pairs as Python values.
        tensors: readers of its tensors by name, memory-mapped.
    """

    metadata: dict[str, Any]
    tensors: dict[str, Any]

    def value(self, key: str) -> Any:
        """The metadata of that key.

        Raises:
            ValueError: the file has none.
        """
        require(key in self.metadata, "--gguf", f"a file with the metadata {key}", f"{len(self.metadata)} other keys")
        return self.metadata[key]

    def tensor(self, name: str, shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
        """A tensor as fp32, whatever it is quantised to.

        Args:
            name: of the tensor.
            shape: that it must have, outputs first.

        Raises:
            ValueError: the file has no tensor of that name and shape.
        """
        import gguf

        require(name in self.tensors, "--gguf", f"a file with the tensor {name}", f"{len(self.tensors)} other tensors")
        tensor = self.tensors[name]
        seen = tuple(int(size) for size in reversed(tensor.shape))
        require(seen == shape, f"--gguf, tensor {name}", f"shape {shape}", seen)
        return np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)


def read_gguf(path: Path) -> GgufFile:
    """Opens a GGUF file.

    Raises:
        ValueError: no such file, not a GGUF, damaged, or the extra is not installed.
    """
    try:
        import gguf
    except ImportError:
        require(False, "--gguf", 'the extra gguf (pip install -e ".[experiments,gguf]")', "no package gguf")
    require(path.is_file(), "--gguf", "a file", f"{path.name}, which is none")
    with path.open("rb") as stream:
        magic = stream.read(len(MAGIC))
    require(magic == MAGIC, "--gguf", f"a GGUF file, which begins with {MAGIC!r}", f"{path.name} with {magic!r}")
    try:
        reader = gguf.GGUFReader(path)
        # The reader's own entries, such as its version, are not metadata of the model.
        fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        metadata = {name: field.contents() for name, field in fields.items()}
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"--gguf: expected a whole GGUF file, got {path.name}, which ends in {error!r}") from None
    return GgufFile(metadata, {tensor.name: tensor for tensor in reader.tensors})


def decoder_config(file: GgufFile) -> DecoderConfig:
    """Sizes and options of the model in a file; fp32 activations and parameters.

    Raises:
        ValueError: another architecture than Llama's, or an option of it that `Decoder` does not have.
    """
    seen = file.value("general.architecture")
    require(seen == ARCHITECTURE, "--gguf, general.architecture", repr(ARCHITECTURE), repr(seen))
    scaling = file.metadata.get(f"{ARCHITECTURE}.rope.scaling.type", "none")
    scaled = scaling != "none" or "rope_freqs.weight" in file.tensors
    require(not scaled, "--gguf, rotary frequencies", "none that are scaled", repr(scaling))
    sizes = {name: int(file.value(f"{ARCHITECTURE}.{key}")) for name, key in _SIZES.items()}
    head_dim = int(
        file.metadata.get(f"{ARCHITECTURE}.attention.key_length", sizes["hidden_size"] // sizes["num_heads"])
    )
    rotated = int(file.metadata.get(f"{ARCHITECTURE}.rope.dimension_count", head_dim))
    require(rotated == head_dim, "--gguf, rope.dimension_count", f"all {head_dim} features of a head", rotated)
    return DecoderConfig(
        vocab_size=len(file.value("tokenizer.ggml.tokens")),
        head_dim=head_dim,
        rope_theta=float(file.metadata.get(f"{ARCHITECTURE}.rope.freq_base", 10_000.0)),
        rms_norm_eps=float(file.value(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon")),
        tie_embeddings="output.weight" not in file.tensors,
        **sizes,
    )


_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
}


def paired_rows(matrix: Float[np.ndarray, "rows H"], heads: int) -> Float[np.ndarray, "rows H"]:
    """Rows of a query or key matrix from pairs (2i, 2i + 1) of each head to pairs (i, i + D / 2).

    Args:
        matrix: [N · D, H].
        heads: N.

    Example:
        >>> paired_rows(np.arange(4)[:, None], heads=1)[:, 0].tolist()
        [0, 2, 1, 3]
    """
    halves = matrix.reshape(heads, -1, 2, matrix.shape[1])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def load_decoder(file: GgufFile) -> Decoder:
    """The decoder in a file, dequantised to fp32.

    Raises:
        ValueError: what `decoder_config` refuses, a missing or misshapen tensor, or one that would be left over.
    """
    config = decoder_config(file)
    names = [f"blk.{layer}.{name}.weight" for layer in range(config.num_layers) for name in LAYER_TENSORS]
    known = {*names, "token_embd.weight", "output_norm.weight", "output.weight"}
    left_over = sorted(set(file.tensors) - known)
    require(not left_over, "--gguf", "no other tensors than a Llama decoder's", ", ".join(left_over[:3]))
    table_shape = config.vocab_size, config.hidden_size
    params: dict[str, Any] = {
        "embed_tokens": file.tensor("token_embd.weight", table_shape),
        "norm": file.tensor("output_norm.weight", (config.hidden_size,)),
        "layers": _layers(file, config),
    }
    if not config.tie_embeddings:
        params["lm_head"] = file.tensor("output.weight", table_shape)
    # Shapes alone: drawing random weights that are overwritten at once would take longer than reading the file.
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    filled = jax.tree.map(lambda wanted, found: _filled(wanted, found), nnx.to_pure_dict(state), params)
    nnx.replace_by_pure_dict(state, filled)
    return nnx.merge(graph, state)


def _filled(wanted: jax.ShapeDtypeStruct, found: np.ndarray) -> jax.Array:
    assert wanted.shape == found.shape, (wanted.shape, found.shape)
    return jnp.asarray(found, wanted.dtype)


def _layers(file: GgufFile, config: DecoderConfig) -> dict[str, np.ndarray]:
    """Parameters of all layers, stacked, inputs first."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads, "attn_v": config.num_kv_heads}

    def parameter(name: str, layer: int) -> np.ndarray:
        full = f"blk.{layer}.{name}.weight"
        if name.endswith("norm"):
            return file.tensor(full, (hidden,))
        if name in heads:
            matrix = file.tensor(full, (heads[name] * dim, hidden))
            if name != "attn_v":
                matrix = paired_rows(matrix, heads[name])
            return matrix.T.reshape(hidden, heads[name], dim)
        if name == "attn_output":
            return file.tensor(full, (hidden, config.num_heads * dim)).T.reshape(config.num_heads, dim, hidden)
        return file.tensor(full, (hidden, inner) if name == "ffn_down" else (inner, hidden)).T

    return {
        ours: np.stack([parameter(name, layer) for layer in range(config.num_layers)])
        for name, ours in LAYER_TENSORS.items()
    }
