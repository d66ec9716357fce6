"""Tensors of a checkpoint directory: model.safetensors, or shards that model.safetensors.index.json names."""

import contextlib
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.extras import import_extra
from experiments.models.huggingface.files import MAX_SHOWN, read_object
from jaxlogp.errors import require

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16", "F64")
COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Buffers that older Llama checkpoints store; they follow from config.json."""


class SafetensorsDirectory:
    """A `TensorSource` of one directory. A file is opened for one tensor at a time: what has been read leaves memory.

    ValueError if there are no weights, a shard is missing or outside of the directory, a file is damaged or cut short, a
    tensor has another dtype, or the extra hf is not installed.
    """

    def __init__(self, path: Path) -> None:
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        indexed = _weight_map(path) if (path / INDEX).exists() else None
        for file in [path / SINGLE] if indexed is None else sorted({path / name for name in indexed.values()}):
            require(file.is_file(), "model weights", f"a directory with {file.name}", f"none in {path}")
            self._read_header(file)
        if indexed is not None:
            for name, file in indexed.items():
                seen = self._files[name].name if name in self._files else "no file"
                require(seen == file, f"{INDEX}, tensor {name}", f"to be in {seen}, which has it", file)

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor in the dtype in which it is stored."""
        with opened_safetensors(self._files[name], self._files[name].name) as tensors:
            return tensors.get_tensor(name)

    def drop_copy(self, name: str, original: str) -> None:
        """Omits a tensor that is stored a second time, such as a tied head, and raises ValueError if it differs."""
        if name in self.shapes and original in self.shapes:
            same = np.array_equal(self.read(name), self.read(original))
            expected = f"a copy of {original}, as tie_word_embeddings says"
            require(same, f"weights, tensor {name}", expected, "different values")
            del self.shapes[name]

    def _read_header(self, file: Path) -> None:
        with opened_safetensors(file, file.name) as tensors:
            for name in tensors.keys():
                if COMPUTED.fullmatch(name):
                    continue
                view = tensors.get_slice(name)
                dtype, place = view.get_dtype(), f"{file.name}, tensor {name}"
                require(dtype in DTYPES, place, f"one of {', '.join(DTYPES)}", dtype)
                require(name not in self._files, place, "a tensor that no other file has", "one of two")
                self._files[name], self.shapes[name] = file, tuple(view.get_shape())


def _weight_map(path: Path) -> dict[str, str]:
    """Returns tensor to file name, as the index says."""
    files = read_object(path / INDEX).object("weight_map").values
    require(bool(files), f"{INDEX}, weight_map", "a file for every tensor", "nothing")
    for name, file in files.items():
        # A plain name cannot lead out of the directory; links inside of it are how hubs store shards.
        inside = isinstance(file, str) and re.fullmatch(r"[\w-][\w.-]*\.safetensors", file) is not None
        # A name that no file system takes would end in the system's own error.
        inside = inside and len(file.encode()) <= 255
        expected = "the name of a safetensors file of this directory"
        require(inside, f"{INDEX}, tensor {name}", expected, repr(file)[:MAX_SHOWN])
    return dict(files)


@contextlib.contextmanager
def opened_safetensors(file: Path, place: str) -> Generator[Any, None, None]:
    """Opens a file for reading its tensors as NumPy arrays; ValueError, which calls it `place`, if it is damaged."""
    safetensors = import_extra("safetensors", place, "hf")
    try:
        with safetensors.safe_open(file, framework="numpy") as tensors:
            yield tensors
    except (safetensors.SafetensorError, OSError, OverflowError) as error:
        raise ValueError(f"{place}: expected a whole safetensors file, got {error}") from None
