"""Key-value caches: the sampler's, with a prompt's keys and values once and the generated tokens of every row; and that of
rows that are read block by block."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from experiments.models.mesh import TENSOR_AXIS, axes_of_rows, rows_of_ranks, size_of


class LayerCache(NamedTuple):
    """Keys (already rotated) and values of one layer, in the activations' dtype."""

    prompt_keys: Float[Array, "Q K P D"]
    prompt_values: Float[Array, "Q K P D"]
    keys: Float[Array, "B K S D"]
    values: Float[Array, "B K S D"]


def cache_spec(shape: tuple[int, ...], mesh: Mesh) -> P:
    """Returns how rows and heads, the first two axes of this shape, are split: where the mesh divides them."""
    tensor = size_of(mesh, TENSOR_AXIS)
    return P(axes_of_rows(shape[0], mesh), TENSOR_AXIS if tensor > 1 and shape[1] % tensor == 0 else None)


RowCache = Float[Array, "B heads S D"]
"""Keys (already rotated) of K heads and then values of as many, of one layer, one slot a token of each row, in the
activations' dtype. Head by head, as products read them: no step turns the whole cache round. One array, as a program is
started for every token, and takes longer to be started with more of them."""


def put_block(cache: RowCache, keys: Array, values: Array, starts: Int[Array, " B"]) -> RowCache:
    """Returns a row cache with a block of keys and values [B, C, K, D] from each row's slot `starts` on."""
    block = jnp.concatenate([keys, values], axis=2).swapaxes(1, 2)
    return jax.vmap(lambda x, new, start: lax.dynamic_update_slice_in_dim(x, new, start, axis=1))(cache, block, starts)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """B rows that continue Q prompts of P slots, with S slots for generated tokens.

    Every layer has its own arrays: a loop that carries them overwrites a slot in place. A row's prompt has `prompt_lengths`
    tokens, and the slots after them are empty. `prompt_of_row`, where rows share prompts, is in [0, Q), counted on each
    device among those that it has; None: row b continues prompt b. `filled` of the slots for generated tokens hold one, of
    every row the same number or each its own. `implementation` is of `experiments.models.attention.cached.IMPLEMENTATIONS`.
    The rows of each run of `copies`, counted from a device's first row, are known to continue one prompt, all at one token.
    """

    layers: tuple[LayerCache, ...]
    prompt_lengths: Int[Array, " B"]
    prompt_of_row: Int[Array, " B"] | None
    filled: Int[Array, ""] | Int[Array, " B"]
    implementation: str = field(metadata={"static": True})
    copies: int = field(default=1, metadata={"static": True})

    def repeat_rows(self, copies: int) -> "KVCache":
        """Returns the cache with every row `copies` times, side by side."""
        return replace(self._of_rows(lambda x: jnp.repeat(x, copies, axis=0)), copies=copies * self.copies)

    def take_rows(self, kept: Int[Array, "ranks C"]) -> "KVCache":
        """Returns the rows of `rows_of_ranks`. Prompts that are shared stay where they are."""
        return replace(self._of_rows(lambda x: rows_of_ranks(x, kept)), copies=1)

    def _of_rows(self, moved: Callable[[Array], Array]) -> "KVCache":
        def of_layer(layer: LayerCache) -> LayerCache:
            if self.prompt_of_row is None:
                return LayerCache(*map(moved, layer))
            return layer._replace(keys=moved(layer.keys), values=moved(layer.values))

        return replace(
            self,
            layers=tuple(map(of_layer, self.layers)),
            prompt_lengths=moved(self.prompt_lengths),
            prompt_of_row=None if self.prompt_of_row is None else moved(self.prompt_of_row),
            filled=moved(self.filled) if self.filled.ndim else self.filled,
        )
