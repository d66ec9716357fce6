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
from jaxlogp.errors import require

MAGIC = b"GGUF"
ARCHITECTURE = "llama"
MAX_READS = 2**20
"""Values outside of the tensors, of which the reader takes some 700 bytes and 10 µs each. SmolLM2's files have 250,000."""


@dataclass(frozen=True)
class GgufFile:
    metadata: dict[str, Any]
    tensors: dict[str, Any]

    def value(self, key: str) -> Any:
        """Returns the metadata of a key, and raises ValueError if the file has none."""
        require(key in self.metadata, "gguf", f"a file with the metadata {key}", f"{len(self.metadata)} other keys")
        return self.metadata[key]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(int(size) for size in reversed(each.shape)) for name, each in self.tensors.items()}

    def read(self, name: str) -> Float[np.ndarray, "..."]:
        """Returns a tensor as fp32, however it is quantized; of queries and keys with the rows in checkpoint order."""
        import gguf

        stored = self.tensors[name]
        tensor = np.asarray(gguf.dequantize(stored.data, stored.tensor_type), np.float32).reshape(self.shapes[name])
        for part, heads in (("attn_q.", "attention.head_count"), ("attn_k.", "attention.head_count_kv")):
            if part in name:
                return paired_rows(tensor, int(self.value(f"{ARCHITECTURE}.{heads}")))
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
    return GgufFile(metadata, {tensor.name: tensor for tensor in reader.tensors})


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
    seen = file.value("general.architecture")
    require(seen == ARCHITECTURE, "gguf, general.architecture", repr(ARCHITECTURE), repr(seen))
    scaling = file.metadata.get(f"{ARCHITECTURE}.rope.scaling.type", "none")
    scaled = scaling != "none" or "rope_freqs.weight" in file.tensors
    require(not scaled, "gguf, rotary frequencies", "none that are scaled", repr(scaling))
    sizes: dict[str, int] = {}
    for name, key in _SIZES.items():
        size = file.value(f"{ARCHITECTURE}.{key}")
        is_size = isinstance(size, int) and size >= 1
        require(is_size, f"gguf, {ARCHITECTURE}.{key}", "a positive integer", repr(size))
        sizes[name] = size
    layers = sizes["num_layers"]
    require(layers <= MAX_LAYERS, f"gguf, {ARCHITECTURE}.block_count", f"at most {MAX_LAYERS}", layers)
    head_dim = int(
        file.metadata.get(f"{ARCHITECTURE}.attention.key_length", sizes["hidden_size"] // sizes["num_heads"])
    )
    rotated = int(file.metadata.get(f"{ARCHITECTURE}.rope.dimension_count", head_dim))
    require(rotated == head_dim, "gguf, rope.dimension_count", f"all {head_dim} features of a head", rotated)
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
    """Reorders rows of a query or key matrix from pairs (2i, 2i + 1) of each head to pairs (i, i + D / 2).

    Example:
        >>> paired_rows(np.arange(4)[:, None], heads=1)[:, 0].tolist()
        [0, 2, 1, 3]
    """
    halves = matrix.reshape(heads, -1, 2, matrix.shape[1])
    return halves.swapaxes(1, 2).reshape(matrix.shape)
