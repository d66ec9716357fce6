"""A Llama-style decoder out of a GGUF file: sizes, tensors and, as they lie there, the tokenizer's tables.

Needs the extra `gguf`. GGUF files of the architecture "llama" hold the rows of the query and key matrices in another
order than checkpoints: features 2i and 2i + 1 of a head are rotated together there, features i and i + head_dim / 2 here.
`paired_rows` undoes it; a model loaded without that still writes words, but its perplexity is far too high.

Shapes: N heads, D features of a head, H hidden features, V vocabulary entries.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from experiments.extras import import_extra
from experiments.models.decoder_config import DecoderConfig
from experiments.models.huggingface.config import MAX_LAYERS
from experiments.models.huggingface.files import JsonObject
from experiments.models.rope import LinearScaling
from jaxlogp.errors import require

MAGIC = b"GGUF"
ARCHITECTURE = "llama"
MAX_READS = 2**20
"""Values outside of the tensors, of which the reader takes some 700 bytes and 10 µs each. SmolLM2's files have 250,000."""


@dataclass(frozen=True)
class GgufFile:
    metadata: JsonObject
    tensors: dict[str, Any]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(int(size) for size in reversed(each.shape)) for name, each in self.tensors.items()}

    def read(self, name: str) -> Float[np.ndarray, "..."]:
        """Returns a tensor as fp32, however it is quantized; of queries and keys with the rows in checkpoint order."""
        import gguf

        stored = self.tensors[name]
        try:
            tensor = np.asarray(gguf.dequantize(stored.data, stored.tensor_type), np.float32).reshape(self.shapes[name])
        except NotImplementedError:
            expected, place = "a type that the package gguf reads as numbers", f"{self.metadata.place}, tensor {name}"
            raise ValueError(f"{place}: expected {expected}, got {stored.tensor_type.name}") from None
        for part, heads in (("attn_q.", "attention.head_count"), ("attn_k.", "attention.head_count_kv")):
            if part in name:
                return paired_rows(tensor, self.metadata.integer(f"{ARCHITECTURE}.{heads}"))
        return tensor


def read_gguf(path: Path) -> GgufFile:
    """Opens a GGUF file; ValueError if there is none, it is another kind or damaged, or the extra is not installed."""
    gguf = import_extra("gguf", "gguf", "gguf")
    require(path.is_file(), "gguf", "a file", f"{path.name}, which is not a file")
    with path.open("rb") as stream:
        magic = stream.read(len(MAGIC))
    require(magic == MAGIC, "gguf", f"a GGUF file, which begins with {MAGIC!r}", f"{path.name} with {magic!r}")
    try:
        reader = _bounded_reader(gguf.GGUFReader)(path)
        # The reader's own entries, such as its version, are not metadata of the model.
        fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        metadata = {name: field.contents() for name, field in fields.items()}
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise ValueError(f"gguf: expected a whole GGUF file, got {path.name}, which ends in {error!r}") from None
    return GgufFile(JsonObject(path.name, metadata), {tensor.name: tensor for tensor in reader.tensors})


def _bounded_reader(reader: Any) -> Any:
    """Bounds the package's reader, which takes what lies beyond the end of a file for empty, as often as a length says."""

    class BoundedReader(reader):
        reads = 0
        _bytes: np.ndarray

        @property
        def data(self) -> np.ndarray:
            return self._bytes

        @data.setter
        def data(self, mapped: np.memmap) -> None:
            # Slices of a plain array take a third of the time.
            self._bytes = mapped.view(np.ndarray)

        def _get(self, offset: int, dtype: Any, count: int = 1, *options: Any, **named: Any) -> np.ndarray:
            self.reads += 1
            if self.reads > MAX_READS:
                raise ValueError(f"more than {MAX_READS} values in addition to the tensors")
            values = super()._get(offset, dtype, count, *options, **named)
            if len(values) < count:
                raise IndexError("a value beyond the end of the file")
            return values

    return BoundedReader


def decoder_config(file: GgufFile) -> DecoderConfig:
    """Returns the model's sizes and options, all in fp32; ValueError for other architectures and what `Decoder` lacks."""
    metadata = file.metadata
    seen = metadata.text("general.architecture")
    require(seen == ARCHITECTURE, f"{metadata.place}, general.architecture", repr(ARCHITECTURE), repr(seen))
    unscaled = "rope_freqs.weight" not in file.tensors
    require(
        unscaled, metadata.place, "rotary frequencies that follow from the metadata", "the tensor rope_freqs.weight"
    )
    sizes = {name: metadata.integer(f"{ARCHITECTURE}.{key}") for name, key in _SIZES.items()}
    layers = sizes["num_layers"]
    require(layers <= MAX_LAYERS, f"{metadata.place}, {ARCHITECTURE}.block_count", f"at most {MAX_LAYERS}", layers)
    head_dim = metadata.integer(f"{ARCHITECTURE}.attention.key_length", sizes["hidden_size"] // sizes["num_heads"])
    dimensions = f"{ARCHITECTURE}.rope.dimension_count"
    rotated = metadata.integer(dimensions, head_dim)
    require(rotated == head_dim, f"{metadata.place}, {dimensions}", f"all {head_dim} features of a head", rotated)
    return DecoderConfig(
        vocab_size=len(metadata.texts("tokenizer.ggml.tokens")),
        head_dim=head_dim,
        context_length=metadata.integer(f"{ARCHITECTURE}.context_length"),
        rope_theta=metadata.number(f"{ARCHITECTURE}.rope.freq_base", 10_000.0),
        rope_scaling=_rope_scaling(metadata),
        rms_norm_eps=metadata.number(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in file.tensors,
        **sizes,
    )


def _rope_scaling(metadata: JsonObject) -> LinearScaling | None:
    """Returns how rotary frequencies are scaled; a factor without a type scales linearly, as llama.cpp reads it."""
    prefix = f"{ARCHITECTURE}.rope."
    kind = metadata.text(f"{prefix}scaling.type", "linear")
    require(kind in ("none", "linear"), f"{metadata.place}, {prefix}scaling.type", "none or linear", repr(kind))
    # The second key is the older name.
    factor = metadata.number(f"{prefix}scaling.factor", metadata.number(f"{prefix}scale_linear", 1.0))
    return None if kind == "none" or factor == 1.0 else LinearScaling(factor)


_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
}


def paired_rows(matrix: Float[np.ndarray, "rows H"], heads: int) -> Float[np.ndarray, "rows H"]:
    """Reorders rows of a query or key matrix from pairs (2i, 2i + 1) of each head to pairs (i, i + D / 2).

    Example:
        >>> paired_rows(np.arange(4)[:, None], heads=1)[:, 0].tolist()
        [0, 2, 1, 3]
    """
    halves = matrix.reshape(heads, -1, 2, matrix.shape[1])
    return halves.swapaxes(1, 2).reshape(matrix.shape)
