"""The parameters of a `Decoder` in files: their names in each format, their layout, and how they reach a mesh.

Checkpoints store one tensor a layer, outputs first; here layers are stacked and inputs come first. Reading goes parameter
by parameter, a few layers at a time: in addition to the parameters themselves the host holds one stacked parameter and
these.

Shapes: L layers, in and out the inputs and outputs of a matrix.
"""

import functools
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from jaxlogp.errors import require

HUGGING_FACE, GGUF = 0, 1
"""Columns of `NAMES`."""
_LAYER, _BLOCK = "model.layers.{layer}.", "blk.{layer}."
NAMES: dict[str, tuple[str, str | None]] = {
    "embed_tokens.embedding": ("model.embed_tokens.weight", "token_embd.weight"),
    "norm.scale": ("model.norm.weight", "output_norm.weight"),
    "lm_head.weight": ("lm_head.weight", "output.weight"),
    "input_layernorm.scale": (_LAYER + "input_layernorm.weight", _BLOCK + "attn_norm.weight"),
    "q_proj.kernel": (_LAYER + "self_attn.q_proj.weight", _BLOCK + "attn_q.weight"),
    "k_proj.kernel": (_LAYER + "self_attn.k_proj.weight", _BLOCK + "attn_k.weight"),
    "v_proj.kernel": (_LAYER + "self_attn.v_proj.weight", _BLOCK + "attn_v.weight"),
    "o_proj.kernel": (_LAYER + "self_attn.o_proj.weight", _BLOCK + "attn_output.weight"),
    "q_proj.bias": (_LAYER + "self_attn.q_proj.bias", None),
    "k_proj.bias": (_LAYER + "self_attn.k_proj.bias", None),
    "v_proj.bias": (_LAYER + "self_attn.v_proj.bias", None),
    "q_norm.scale": (_LAYER + "self_attn.q_norm.weight", None),
    "k_norm.scale": (_LAYER + "self_attn.k_norm.weight", None),
    "post_attention_layernorm.scale": (_LAYER + "post_attention_layernorm.weight", _BLOCK + "ffn_norm.weight"),
    "pre_feedforward_layernorm.scale": (_LAYER + "pre_feedforward_layernorm.weight", None),
    "post_feedforward_layernorm.scale": (_LAYER + "post_feedforward_layernorm.weight", None),
    "gate_proj.kernel": (_LAYER + "mlp.gate_proj.weight", _BLOCK + "ffn_gate.weight"),
    "up_proj.kernel": (_LAYER + "mlp.up_proj.weight", _BLOCK + "ffn_up.weight"),
    "down_proj.kernel": (_LAYER + "mlp.down_proj.weight", _BLOCK + "ffn_down.weight"),
}
"""Path in `Decoder` or `DecoderLayer` to the names in a Hugging Face directory and in a GGUF file of Llama's family."""
BFLOAT16 = np.dtype(jnp.bfloat16)
LAYERS_AT_A_TIME = 8
"""That are read by threads side by side: most of the time goes to pages of memory and to transposing."""
_MATRICES = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
INPUT_AXES = {"o_proj.kernel": 2, **dict.fromkeys((f"{name}.kernel" for name in _MATRICES), 1)}
"""How many leading axes of a matrix are inputs. What is not here is stored as it is, its heads flattened."""


class TensorSource(Protocol):
    """Where tensors are read from."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name, outputs first."""

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor of a floating-point dtype, and raises ValueError if it cannot be read."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a decoder.

    `name` is its path in `Decoder` or `DecoderLayer`, a key of `NAMES`, and `path` that in the parameters' tree; `shape` is
    of one layer; `layers` is L where the tree has all layers stacked.
    """

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    layers: int | None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one tensor in a file."""
        if self.name in INPUT_AXES:
            inputs = INPUT_AXES[self.name]
            return math.prod(self.shape[inputs:]), math.prod(self.shape[:inputs])
        return self.shape if self.layers is None else (math.prod(self.shape),)

    def tensors(self, column: int) -> list[str]:
        """Returns the names of its tensors in a file, one per layer."""
        name = NAMES[self.name][column]
        require(name is not None, "model file", "a GGUF file of Llama's family", f"a model with {self.name}")
        return [name] if self.layers is None else [name.format(layer=layer) for layer in range(self.layers)]

    def from_stored(self, tensor: np.ndarray) -> np.ndarray:
        """Returns a layer as it is here."""
        return (tensor.T if self.name in INPUT_AXES else tensor).reshape(self.shape)

    def to_stored(self, layer: np.ndarray) -> np.ndarray:
        """Returns a layer as it is in a file; a view where there is one."""
        out, *inputs = self.stored_shape
        return layer.reshape(*inputs, out).T if self.name in INPUT_AXES else layer.reshape(self.stored_shape)


def parameters_of(config: DecoderConfig) -> list[Parameter]:
    """Returns all parameters of a decoder, in the order of their tree."""
    _, shapes = abstract_decoder(config)
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(shapes)):
        keys = tuple(entry.key for entry in path)
        if keys[0] == "layers":
            found.append(Parameter(".".join(keys[1:]), keys, leaf.shape[1:], leaf.shape[0]))
        else:
            found.append(Parameter(".".join(keys), keys, leaf.shape, None))
    return found


def abstract_decoder(config: DecoderConfig, mesh: jax.sharding.Mesh | None = None) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns the graph of a decoder, and its parameters' shapes and dtypes; no number is drawn."""
    graph, state = _traced_decoder(config, mesh)
    # A new state for every caller: states are filled in place.
    return graph, jax.tree.map(lambda leaf: leaf, state)


@functools.lru_cache(maxsize=8)
def _traced_decoder(config: DecoderConfig, mesh: jax.sharding.Mesh | None) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), mesh=mesh)))


@dataclass(frozen=True)
class WeightReader:
    """Tensors that are a decoder's parameters; raises ValueError if one is missing, has another shape, or is left over."""

    config: DecoderConfig
    source: TensorSource
    column: int

    def __post_init__(self) -> None:
        shapes = self.source.shapes
        wanted: dict[str, tuple[int, ...]] = {}
        for parameter in parameters_of(self.config):
            wanted |= dict.fromkeys(parameter.tensors(self.column), parameter.stored_shape)
        missing = [name for name in wanted if name not in shapes]
        require(not missing, "model weights", "every tensor of the model", f"no {_some(missing)}")
        for name, shape in wanted.items():
            seen = tuple(shapes[name])
            require(seen == shape, f"weights, tensor {name}", f"shape {list(shape)}", list(seen))
        left_over = sorted(set(shapes) - set(wanted))
        require(not left_over, "model weights", "no other tensors than the model's", _some(left_over))

    def load(self, config: DecoderConfig, shardings: Callable[[nnx.State], Any]) -> nnx.State:
        """Reads all parameters straight into their shardings, in the dtype of `config`, which is this one but for dtypes.

        ValueError if a tensor cannot be read, or holds NaN or an infinity.
        """
        _, state = abstract_decoder(config)
        places = nnx.to_pure_dict(shardings(state))
        dtype = np.dtype(jnp.dtype(config.param_dtype))
        loaded: dict[str, Any] = {}
        for parameter in parameters_of(config):
            sharding, target = places, loaded
            for key in parameter.path[:-1]:
                sharding, target = sharding[key], target.setdefault(key, {})
            target[parameter.path[-1]] = self._placed(parameter, dtype, sharding[parameter.path[-1]])
        nnx.replace_by_pure_dict(state, loaded)
        return state

    def _placed(self, parameter: Parameter, dtype: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
        """Reads a parameter to its devices; each distinct shard is filled once, whoever holds copies of it."""
        shape = parameter.shape if parameter.layers is None else (parameter.layers, *parameter.shape)
        devices: dict[tuple, list[jax.Device]] = {}
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            bounds = tuple(part.indices(size) for part, size in zip(index, shape, strict=True))
            devices.setdefault(bounds, []).append(device)
        buffers = {bounds: np.empty([stop - start for start, stop, _ in bounds], dtype) for bounds in devices}

        def fill(place: int, name: str) -> None:
            layer = parameter.from_stored(_finite(name, self.source.read(name), dtype))
            for bounds, buffer in buffers.items():
                if parameter.layers is not None:
                    # The tensor axis splits features; layers are never split.
                    bounds, buffer = bounds[1:], buffer[place]
                _bits(buffer)[...] = _bits(layer)[tuple(slice(*each) for each in bounds)]

        names = parameter.tensors(self.column)
        with ThreadPoolExecutor(LAYERS_AT_A_TIME) as pool:
            # The first that cannot be read is told of.
            list(pool.map(fill, range(len(names)), names))
        shards = [jax.device_put(buffers[bounds], device) for bounds, group in devices.items() for device in group]
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _finite(name: str, tensor: np.ndarray, dtype: np.dtype) -> np.ndarray:
    # Overflow is looked for after the conversion, and reported below rather than by a warning.
    with np.errstate(over="ignore"):
        tensor = tensor.astype(dtype, copy=False)
    if not _all_finite(tensor):
        place = tuple(int(each) for each in np.argwhere(~np.isfinite(tensor))[0])
        require(False, f"weights, tensor {name}", f"finite numbers in {dtype}", f"{tensor[place]} at {list(place)}")
    return tensor


def _all_finite(tensor: np.ndarray) -> bool:
    if tensor.dtype != BFLOAT16:
        return bool(np.isfinite(tensor).all())
    # All bits of the exponent are set in NaN and infinities alone.
    exponents = np.bitwise_and(_bits(tensor), 0x7F80)
    return exponents.max(initial=0) < 0x7F80


def _bits(x: np.ndarray) -> np.ndarray:
    """Returns bf16 as integers, which threads copy side by side: functions of its own dtype wait for each other."""
    return x.view(np.uint16) if x.dtype == BFLOAT16 else x
