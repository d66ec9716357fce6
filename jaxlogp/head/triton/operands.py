"""Operands of the Triton kernels, and their launch options."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlogp.head.call import HeadCall, HeadWeight
from jaxlogp.head.projection import HeadSpec
from jaxlogp.head.triton.tiles import TileConfig


class Operands(NamedTuple):
    """hidden · weightᵀ + bias, as the kernels read it.

    Attributes:
        hidden: [tokens, H] in the weight's dtype, tokens a multiple of the tile's rows.
        weight: bf16 or fp16 [V, H], or [H, V] where ``vocab_dim`` is 1.
        bias: fp32 [V] or None.
        spec: scale, soft cap and temperature.
        vocab_dim: the dimension of the weight that counts vocabulary columns.
    """

    hidden: Float[Array, "tokens hidden"]
    weight: HeadWeight
    bias: Float[Array, " vocab"] | None
    spec: HeadSpec = HeadSpec()
    vocab_dim: int = 0

    @classmethod
    def of(cls, call: HeadCall, hidden: Float[Array, "tokens hidden"]) -> "Operands":
        """Those of a call, with its hidden states packed."""
        bias = None if call.bias is None else call.bias.astype(jnp.float32)
        return cls(hidden, call.weight, bias, call.spec, call.vocab_dim)

    @property
    def num_columns(self) -> int:
        """V."""
        return self.weight.shape[self.vocab_dim]


class Launch(NamedTuple):
    """How a kernel is launched.

    Attributes:
        config: tile shapes.
        capability: compute capability times ten to compile for; None asks the device.
    """

    config: TileConfig
    capability: int | None = None
