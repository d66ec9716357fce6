"""The inputs of a model's head on real text, in one file: hidden states, targets and the head's weight, all in bf16.

A file of arrays (npz, never pickled) carries them from a machine with the model to one with another accelerator. A
weight quantised to 8 bits is stored as integers and scales, half the size of bf16, and gives the same bf16 values when
loaded.

Shapes: N tokens, H hidden features, V vocabulary entries, G blocks of a row that share a scale.
"""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxlogp.errors import describe, require

FORMAT = 1
"""Changes with the layout of the file."""


@dataclass(frozen=True)
class TokenSet:
    """Tokens of one source.

    Attributes:
        name: name of the source.
        hidden: bf16 [N, H], what the head reads to predict each target.
        targets: int32 [N], ids in [0, V).
        sampler_log_probs: fp32 [N], the sampler's log-prob of each target when it was drawn, or None for given text.
    """

    name: str
    hidden: Float[np.ndarray, "N H"]
    targets: Int[np.ndarray, " N"]
    sampler_log_probs: Float[np.ndarray, " N"] | None = None


@dataclass(frozen=True)
class StoredWeight:
    """A head weight as it is stored.

    Attributes:
        values: bf16 [V, H], or int8 [V, H] with scales.
        scales: fp16 [V, G], each for H / G adjacent integers of a row, or None.
    """

    values: Float[np.ndarray, "V H"] | Int[np.ndarray, "V H"]
    scales: Float[np.ndarray, "V G"] | None = None

    def bfloat16(self) -> Float[np.ndarray, "V H"]:
        """The weight, each value rounded once."""
        if self.scales is None:
            return self.values
        grouped = self.values.reshape(*self.scales.shape, -1).astype(np.float32)
        exact = grouped * self.scales[..., None].astype(np.float32)
        return exact.reshape(self.values.shape).astype(jnp.bfloat16)


@dataclass(frozen=True)
class HeadStates:
    """The input of the analysis.

    Attributes:
        sets: the token sets, of one model.
        weight: weight of its head.
        facts: their origin and how well the model predicts the text; JSON values.
    """

    sets: tuple[TokenSet, ...]
    weight: StoredWeight
    facts: dict[str, Any]


def save_states(states: HeadStates, path: Path) -> None:
    """Writes the file; bf16 as uint16, which every NumPy can read."""
    arrays = {"format": np.int64(FORMAT), "facts": np.array(json.dumps(states.facts))}
    arrays["sets"] = np.array([one.name for one in states.sets])
    for one in states.sets:
        arrays[f"{one.name}.hidden"] = one.hidden.view(np.uint16)
        arrays[f"{one.name}.targets"] = one.targets
        if one.sampler_log_probs is not None:
            arrays[f"{one.name}.sampler_log_probs"] = one.sampler_log_probs
    if states.weight.scales is None:
        arrays["weight"] = states.weight.values.view(np.uint16)
    else:
        arrays["weight.values"], arrays["weight.scales"] = states.weight.values, states.weight.scales
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        np.savez(stream, **arrays)


def load_states(path: Path) -> HeadStates:
    """Reads what `save_states` wrote.

    Raises:
        ValueError: no such file, no npz file, an array is missing or has a wrong dtype or shape.
    """
    require(path.is_file(), "--states", "a file", f"{path.name}, which is not a file")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, AttributeError, zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"--states: expected an npz file without pickles, got {path.name}: {error}") from None
    seen = int(_array(arrays, "format", np.int64, 0))
    require(seen == FORMAT, "--states", f"a file of format {FORMAT}", f"format {seen}")
    weight = _stored_weight(arrays)
    names = [str(name) for name in _array(arrays, "sets", np.str_, 1)]
    sets = tuple(_token_set(arrays, name, *weight.values.shape) for name in names)
    require(len(sets) > 0, "--states", "at least one set of tokens", "none")
    return HeadStates(sets, weight, json.loads(str(_array(arrays, "facts", np.str_, 0))))


def _array(arrays: dict[str, np.ndarray], name: str, dtype: type, ndim: int) -> np.ndarray:
    require(name in arrays, "--states", f"a file with the array {name}", f"only {', '.join(sorted(arrays))}")
    array = arrays[name]
    ok = np.issubdtype(array.dtype, dtype) and array.ndim == ndim
    require(ok, f"--states, array {name}", f"{np.dtype(dtype).name} with {ndim} dimensions", describe(array))
    return array


def _stored_weight(arrays: dict[str, np.ndarray]) -> StoredWeight:
    if "weight.values" not in arrays:
        return StoredWeight(_array(arrays, "weight", np.uint16, 2).view(jnp.bfloat16))
    values = _array(arrays, "weight.values", np.int8, 2)
    scales = _array(arrays, "weight.scales", np.float16, 2)
    fits = scales.shape[0] == values.shape[0] and scales.shape[1] > 0 and values.shape[1] % scales.shape[1] == 0
    require(fits, "--states, array weight.scales", f"equal blocks of the rows of {values.shape}", scales.shape)
    return StoredWeight(values, scales)


def _token_set(arrays: dict[str, np.ndarray], name: str, vocab_size: int, hidden_size: int) -> TokenSet:
    hidden = _array(arrays, f"{name}.hidden", np.uint16, 2).view(jnp.bfloat16)
    targets = _array(arrays, f"{name}.targets", np.int32, 1)
    expected = targets.size, hidden_size
    require(hidden.shape == expected and targets.size > 0, f"--states, array {name}.hidden", expected, hidden.shape)
    inside = (targets >= 0) & (targets < vocab_size)
    require(inside.all(), f"--states, array {name}.targets", f"ids in [0, {vocab_size})", targets[~inside][:1].tolist())
    sampled = None
    if f"{name}.sampler_log_probs" in arrays:
        sampled = _array(arrays, f"{name}.sampler_log_probs", np.float32, 1)
        require(
            sampled.shape == targets.shape, f"--states, array {name}.sampler_log_probs", targets.shape, sampled.shape
        )
    return TokenSet(name, hidden, targets, sampled)
