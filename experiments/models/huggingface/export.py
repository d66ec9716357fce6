"""A decoder written as a checkpoint directory that transformers loads: config.json, safetensors, tokenizer."""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.models.decoder_config import DecoderConfig
from experiments.models.huggingface.config import config_json
from experiments.models.huggingface.tokenizer import PretrainedTokenizer
from experiments.models.huggingface.weights import INDEX, SINGLE
from experiments.models.parameters import HUGGING_FACE, Parameter, parameters_of
from jaxlogp.errors import require

SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja",
)  # fmt: skip
"""What is in a directory in addition to the weights."""
MAX_SHARD_BYTES = 2 * 2**30
"""Of one file of weights, which is made in memory."""


def made_files(config: DecoderConfig, tokenizer: PretrainedTokenizer) -> dict[str, bytes]:
    """Makes all files but the weights for a model from elsewhere; ValueError if transformers lacks its architecture."""
    text_of = tokenizer.inner.id_to_token
    ends = {"eos_token_id": list(tokenizer.eos_ids), "pad_token_id": tokenizer.pad_id}
    options: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": text_of(tokenizer.eos_ids[0]),
        "pad_token": text_of(tokenizer.pad_id),
    }
    if tokenizer.template is not None:
        options |= {"chat_template": tokenizer.template.source, **tokenizer.template.tokens}
    return {
        "config.json": _json(config_json(config) | ends),
        "generation_config.json": _json(ends),
        "tokenizer.json": tokenizer.inner.to_str().encode(),
        "tokenizer_config.json": _json(options),
    }


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def export(params: nnx.State, config: DecoderConfig, files: Mapping[str, bytes], out: Path, dtype: str) -> None:
    """Writes a decoder as a new checkpoint directory, its weights in `dtype`; under its name there is the whole one or none.

    `files` are those other than the weights, with a config.json of the same model. ValueError if the directory exists.
    """
    require(not out.exists(), "export", "a directory that does not exist yet", out)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f"{out.name}.unfinished-{os.getpid()}")
    described = json.loads(files["config.json"])
    described.pop("torch_dtype", None)
    try:
        write_files(unfinished, {**files, "config.json": _json({**described, "dtype": dtype})})
        _write_weights(params, config, unfinished, np.dtype(jnp.dtype(dtype)))
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_weights(params: nnx.State, config: DecoderConfig, folder: Path, dtype: np.dtype) -> None:
    from safetensors.numpy import save_file

    parameters = parameters_of(config)
    sizes: dict[str, int] = {}
    for parameter in parameters:
        size = math.prod(parameter.stored_shape) * dtype.itemsize
        sizes |= dict.fromkeys(parameter.tensors(HUGGING_FACE), size)
    shards = _shards(sizes)
    tensors = _tensors(params, parameters, dtype)
    files: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # The format is what transformers asks for before it reads a file.
        save_file(dict(next(tensors) for _ in names), folder / file, metadata={"format": "pt"})
        # The package makes files that nobody else may read.
        (folder / file).chmod((folder / "config.json").stat().st_mode)
        files |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
        (folder / INDEX).write_bytes(_json(index))


def _shards(sizes: Mapping[str, int]) -> list[list[str]]:
    """Returns names of tensors, file by file, each of at most MAX_SHARD_BYTES or one tensor."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room:
            shards.append([])
            room = MAX_SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def _tensors(params: nnx.State, parameters: Sequence[Parameter], dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every tensor, one parameter on the host at a time."""
    tree = nnx.to_pure_dict(params)
    for parameter in parameters:
        values: Any = tree
        for key in parameter.path:
            values = values[key]
        host = np.asarray(values)
        layers = [host] if parameter.layers is None else host
        for name, layer in zip(parameter.tensors(HUGGING_FACE), layers, strict=True):
            yield name, np.ascontiguousarray(parameter.to_stored(layer).astype(dtype, copy=False))


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
