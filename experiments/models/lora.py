"""LoRA: some projections compute with W + scale · A · B, where A and B are trained and W is not.

B begins with zeros, so that the adapted model begins as the base. The parameters are those of Flax's `nnx.LoRA`, of type
`nnx.LoRAParam`, stacked over the layers like the kernels.
"""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from experiments.options import AtLeast, Positive

ADAPTABLE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Not the head: it is one matrix [V, H] for the products of trainer and sampler alike. Nor the embedding table."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of a model from disk. They alone are trained and saved, and kept in float32."""

    rank: Annotated[int, AtLeast(0)] = 0
    """Rank of the adapters. 0: none, the whole model is trained."""
    alpha: Annotated[float, Positive()] = 16.0
    """An adapter's product is multiplied by this over --lora.rank."""
    modules: tuple[str, ...] = ADAPTABLE
    """Projections with an adapter."""

    @property
    def scale(self) -> float:
        """Multiplier of an adapter's product."""
        return self.alpha / self.rank


def trained_part(params: nnx.State) -> nnx.State:
    """Returns the adapters of a model, or all of its parameters if it has none."""
    adapters = nnx.filter_state(params, nnx.LoRAParam)
    return adapters if jax.tree.leaves(adapters) else params


def merged(adapters: nnx.State, base: nnx.State, scale: float) -> nnx.State:
    """Returns the base with W + scale · A · B in the place of every adapted W, computed in fp32 and rounded once."""
    parts, whole = dict(nnx.to_flat_state(adapters)), dict(nnx.to_flat_state(base))
    for path, a in parts.items():
        if path[-1] == "lora_a":
            kernel, b = (*path[:-2], "kernel"), parts[*path[:-1], "lora_b"]
            whole[kernel] = whole[kernel].replace(_sum(whole[kernel][...], a[...], b[...], scale))
    return nnx.from_flat_state(whole)


@jax.jit
def _sum(
    kernel: Float[Array, "*kernel"], a: Float[Array, "L I R"], b: Float[Array, "L R O"], scale: float
) -> Float[Array, "*kernel"]:
    product = jnp.einsum("lir,lro->lio", a, b, precision=lax.Precision.HIGHEST).reshape(kernel.shape)
    return (kernel.astype(jnp.float32) + scale * product).astype(kernel.dtype)
