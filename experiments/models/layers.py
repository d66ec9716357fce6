"""The modules that a decoder's layers are made of: projections, norms, the head. Every parameter names its axes.

The names are Flax's `out_sharding` metadata: `vocab`, `layers`, `embed` (features of the residual stream), `heads`,
`kv_heads`, `head_dim`, `mlp` (features inside the gated products). What a mesh does with them is said in one place,
`experiments.models.sharding`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int8

from experiments.models.attention import precision_of
from experiments.models.decoder_config import DecoderConfig


def named_axes(*names: str) -> dict[str, Any]:
    """Returns metadata of a parameter with these axes. Flax places nothing by it: parameters are placed together later."""
    return {"out_sharding": names, "eager_sharding": False}


def matrix_init(fan_in: int, scale: float = 1.0) -> Callable[..., Array]:
    """Returns a truncated normal of variance scale² / fan_in, so that every product keeps the scale of its input."""
    return nnx.initializers.truncated_normal(stddev=scale / math.sqrt(fan_in))


class Projection(nnx.Module):
    """x · kernel + bias, a sum over several axes where there are several inputs.

    Example:
        >>> out = Projection({"heads": 4, "head_dim": 8, "embed": 32}, "float32", nnx.Rngs(0), inputs=2)
        >>> out(jnp.ones((1, 5, 4, 8))).shape
        (1, 5, 32)
    """

    def __init__(
        self,
        sizes: dict[str, int],
        dtype: str,
        rngs: nnx.Rngs,
        *,
        inputs: int = 1,
        bias: bool = False,
        scale: float = 1.0,
        split_tokens: bool = False,
    ) -> None:
        names, shape = tuple(sizes), tuple(sizes.values())
        self.inputs, self.out_shape, self.split_tokens = inputs, shape[inputs:], split_tokens
        init = matrix_init(math.prod(shape[:inputs]), scale)
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.dtype(dtype)), **named_axes(*names))
        if bias:
            self.bias = nnx.Param(jnp.zeros(shape[inputs:], jnp.dtype(dtype)), **named_axes(*names[inputs:]))

    def adapt(self, rank: int, scale: float, rngs: nnx.Rngs) -> None:
        """Adds scale · x · A · B to the product, with fp32 parameters: A drawn from stream `params`, B zeros (LoRA)."""
        shape = self.kernel.shape
        self.lora = nnx.LoRA(math.prod(shape[: self.inputs]), rank, math.prod(shape[self.inputs :]), rngs=rngs)
        self.lora_scale = scale

    def to_int8(self) -> None:
        """Rounds the kernel to 8 bits; what adapters and the bias add stays as it is."""
        self.rounded = Int8Matrix.of(self.matrix).as_parameters()
        del self.kernel

    def __call__(self, x: Float[Array, "*tokens_and_inputs"]) -> Float[Array, "*tokens_and_outputs"]:
        # Merged into one axis with their rows, tokens that a mesh splits would have to be gathered. One product of two
        # matrices has much the faster gradient on a CPU.
        leading = x.shape[: -self.inputs] if self.split_tokens else (-1,)
        rows = x.reshape(*leading, math.prod(x.shape[-self.inputs :]))
        product = _product_in_8_bits(rows, self.rounded) if hasattr(self, "rounded") else _product(rows, self.matrix)
        flat = self.with_adapters(product, rows)
        return flat.reshape(*x.shape[: -self.inputs], *self.out_shape)

    @property
    def matrix(self) -> Float[Array, "I O"]:
        """The kernel, inputs and outputs merged into one axis each."""
        return self.kernel[...].reshape(-1, math.prod(self.out_shape))

    def with_adapters(self, product: Float[Array, "*N O"], rows: Float[Array, "*N I"]) -> Float[Array, "*N O"]:
        """Adds what LoRA and the bias add to a product of rows and kernel."""
        if hasattr(self, "lora"):
            product = product + self.lora_scale * _product(_product(rows, self.lora.lora_a[...]), self.lora.lora_b[...])
        return product + self.bias[...].reshape(-1).astype(rows.dtype) if hasattr(self, "bias") else product


class JoinedProjections(nnx.Module):
    """Projections of the same features as one product, their kernels side by side, and removed from the modules.

    Made before a loop: a GPU's compiler joins such products, but puts the kernels side by side again in every step.

    Example:
        >>> joined = JoinedProjections([Projection({"embed": 32, "mlp": 8}, "float32", nnx.Rngs(0)) for _ in range(2)])
        >>> [part.shape for part in joined(jnp.ones((5, 32)))]
        [(5, 8), (5, 8)]
    """

    def __init__(self, modules: Sequence[Projection], shards: int = 1) -> None:
        self.modules, self.shards = nnx.List(modules), shards
        self.kernel = nnx.Param(self._side_by_side([module.matrix for module in modules]))
        for module in modules:
            del module.kernel

    def __call__(self, x: Float[Array, "*tokens I"]) -> tuple[Float[Array, "*tokens_and_outputs"], ...]:
        leading = x.shape[:-1]
        return tuple(
            part.reshape(*leading, *module.out_shape) for part, module in zip(self._parts(x), self.modules, strict=True)
        )

    def concatenated(self, x: Float[Array, "*tokens I"]) -> Float[Array, "*tokens shards O"]:
        """Returns the same, each rank's outputs of all modules along one axis."""
        # A compiler may cut a product and concatenate its parts again.
        plain = not any(hasattr(module, name) for module in self.modules for name in ("lora", "bias"))
        return self._joint(x) if plain else self._side_by_side(self._parts(x))

    def _side_by_side(self, parts: Sequence[Array]) -> Float[Array, "*tokens shards O"]:
        return jnp.concatenate([part.reshape(*part.shape[:-1], self.shards, -1) for part in parts], axis=-1)

    def to_int8(self) -> None:
        """Rounds the joint kernel to 8 bits."""
        self.rounded = Int8Matrix.of(self.kernel[...]).as_parameters()
        del self.kernel

    def _joint(self, x: Float[Array, "*tokens I"]) -> Float[Array, "*tokens shards O"]:
        return _product_in_8_bits(x, self.rounded) if hasattr(self, "rounded") else _product(x, self.kernel[...])

    def _parts(self, x):
        edges = np.cumsum([math.prod(module.out_shape) // self.shards for module in self.modules])[:-1]
        parts = jnp.split(self._joint(x), edges, axis=-1)
        parts = [part.reshape(*x.shape[:-1], -1) for part in parts]
        return [module.with_adapters(part, x) for module, part in zip(self.modules, parts, strict=True)]


class Int8Matrix(NamedTuple):
    """A matrix in 8 bits, scales · values, outputs first, with one scale for every output, whose largest value is ±127.

    A matrix with a value that is not finite has a scale that is not, so that its products are not either. Inputs come last,
    since a GPU's compiler widens 8-bit values faster along the sum (benchmarks/results/int8_weights.md).
    """

    values: Int8[Array, "... I"]
    scales: Float[Array, "..."]

    @classmethod
    def of(cls, matrix: Float[Array, "I ..."]) -> "Int8Matrix":
        """Rounds each value to the nearest, by at most half a scale.

        Example:
            >>> Int8Matrix.of(jnp.array([[127.0, 0.0], [-12.6, 0.0]])).values.tolist()
            [[127, -13], [0, 0]]
        """
        wide = jnp.moveaxis(matrix.astype(jnp.float32), 0, -1)
        largest = jnp.max(jnp.abs(wide), axis=-1)
        scales = jnp.where(largest == 0.0, 1.0, largest / 127.0)
        return cls(jnp.round(wide / scales[..., None]).astype(jnp.int8), scales)

    def as_parameters(self) -> nnx.Dict:
        return nnx.Dict(values=nnx.Param(self.values), scales=nnx.Param(self.scales))


def _product(rows: Float[Array, "*tokens inputs"], kernel: Float[Array, "inputs ..."]) -> Float[Array, "..."]:
    return jnp.tensordot(rows, kernel.astype(rows.dtype), 1, precision=precision_of(rows.dtype))


def _product_in_8_bits(rows: Float[Array, "*tokens inputs"], rounded: nnx.Dict) -> Float[Array, "..."]:
    """Returns rows · values, which are exact in every dtype, summed in fp32, times the scales."""
    values, axes = rounded["values"][...].astype(rows.dtype), ((-1,), (-1,))
    options = {"precision": precision_of(rows.dtype), "preferred_element_type": jnp.float32}
    return (jnp.tensordot(rows, values, axes, **options) * rounded["scales"][...]).astype(rows.dtype)


class RMSNorm(nnx.Module):
    """x / √(mean(x²) + eps) · scale, or · (1 + scale), over the last axis; fp32 inside, the activations' dtype outside."""

    def __init__(self, axis: str, features: int, config: DecoderConfig) -> None:
        self.epsilon, self.plus_one = config.rms_norm_eps, config.norm_plus_one
        self.dtype = config.dtype
        neutral = jnp.full(features, 0.0 if self.plus_one else 1.0, jnp.dtype(config.param_dtype))
        self.scale = nnx.Param(neutral, **named_axes(axis))

    def __call__(self, x: Float[Array, "*tokens F"]) -> Float[Array, "*tokens F"]:
        wide = x.astype(jnp.float32)
        normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return (normed * self.multiplier).astype(self.dtype)

    @property
    def multiplier(self) -> Float[Array, " F"]:
        """What multiplies features of mean square 1, in fp32."""
        scale = self.scale[...].astype(jnp.float32)
        return 1.0 + scale if self.plus_one else scale


class Head(nnx.Module):
    """A head of its own: a weight [V, H], outputs first, as `jaxlogp.linear_log_probs` takes it."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs) -> None:
        shape, dtype = (config.vocab_size, config.hidden_size), jnp.dtype(config.param_dtype)
        init = matrix_init(config.hidden_size)
        self.weight = nnx.Param(init(rngs.params(), shape, dtype), **named_axes("vocab", "embed"))
