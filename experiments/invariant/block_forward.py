"""Hidden states of `--invariant`, a block of tokens at a time, with a key-value cache.

Trainer and sampler call one compiled program, always with as many rows and as many tokens a row: the trainer block after
block, the sampler the block of each row's newest token, again for every token of the block. A token's hidden state then has
the same bits in both. It depends on no later token, because a masked key has a probability of exactly 0, and a product's
rows do not depend on each other.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, Int

from experiments.models.attention import RowCache
from experiments.models.attention.triton_block import SLOTS as SLOTS_OF_KERNEL
from experiments.models.compiled_program import LIBRARY_ALONE, CompiledProgram, lower_program, shapes_on
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig

BodyWeights = tuple[Array, ...]
"""What the program reads of the parameters, matrices in the activations' dtype; flat, as it is passed for every token."""


class BlockForward:
    """One compiled program for the hidden states of `block` tokens in each of a few rows."""

    def __init__(
        self, graph: nnx.GraphDef[Decoder], config: DecoderConfig, block: int, compiler_options: dict[str, Any] | None
    ) -> None:
        self.block, self._graph, self._config = block, graph, config
        self._graphs: Any = None
        self._tree: Any = None
        self._load = jax.jit(self._taken_apart)
        # 7 % faster: the library adds the residual stream to its products.
        options = None if compiler_options is None else {**compiler_options, **LIBRARY_ALONE}
        self._step = jax.jit(self._read, donate_argnums=3, compiler_options=options)
        self._put = jax.jit(self._with_block, donate_argnums=0)

    def load(self, params: nnx.State) -> BodyWeights:
        return self._load(params)

    def empty_cache(self, rows: int, length: int, device: jax.Device) -> tuple[RowCache, ...]:
        """Returns a cache for rows of `length` tokens; zeros, never a source of NaN."""
        config, slots = self._config, self.slots(length)
        if config.cached_attention_run().implementation == "triton":
            slots += -slots % SLOTS_OF_KERNEL
        shape = (rows, 2 * config.num_kv_heads, slots, config.head_dim)
        return _zeros(shape, config.dtype, config.num_layers, SingleDeviceSharding(device))()

    def slots(self, length: int) -> int:
        """Returns `length`, rounded up to whole blocks."""
        return length + -length % self.block

    def step(
        self, weights: BodyWeights, tokens: Int[Array, "B S"], starts: Int[Array, " B"], cache: tuple[RowCache, ...]
    ) -> tuple[Float[Array, "B C H"], tuple[RowCache, ...]]:
        """Computes hidden states of one block of every row; the memory of `cache` goes to the updated one.

        `tokens` are whole rows, S slots. `starts` is the first slot of each row's block, a multiple of the block, and
        earlier blocks of the row have been read.
        """
        return self._step(weights, tokens, starts, cache)

    def lower(
        self, weights: BodyWeights, rows: int, length: int, device: jax.Device
    ) -> tuple[Callable[[], CompiledProgram], tuple[RowCache, ...]]:
        """Lowers the program for rows of `length` tokens; shapes are enough, and those of its cache are returned too."""
        cache = shapes_on(device, jax.eval_shape(lambda: self.empty_cache(rows, length, device)))
        tokens = jax.ShapeDtypeStruct((rows, self.slots(length)), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32)
        return lower_program(self._step, weights, *shapes_on(device, tokens), cache), cache

    def rows(self, weights: BodyWeights, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        rows, length = tokens.shape
        (device,), slots = tokens.devices(), self.slots(length)
        cache = self.empty_cache(rows, length, device)
        tokens = jnp.pad(tokens, [(0, 0), (0, slots - length)])
        # Written at once: where all blocks were kept until the end, a block took 1.1 to 1.4 times as long on a GPU.
        hidden = jnp.zeros((rows, slots, self._config.hidden_size), self._config.dtype, device=device)
        starts = jnp.zeros(rows, jnp.int32, device=device)
        for _ in range(0, length, self.block):
            block, cache = self.step(weights, tokens, starts, cache)
            hidden, starts = self._put(hidden, block, starts)
        return hidden[:, :length]

    def _taken_apart(self, params: nnx.State) -> BodyWeights:
        model = nnx.merge(self._graph, params)
        layers = model.layers_apart()
        table = model.embed_tokens.embedding[...]
        model.embed_tokens.embedding = nnx.Param(table.astype(self._config.dtype))
        # What is left is embedding and norm; the head is no part of this program.
        for name in ("layers", "lm_head"):
            if hasattr(model, name):
                delattr(model, name)
        graphs, states = zip(*map(nnx.split, (model, *layers)), strict=True)
        leaves, tree = jax.tree.flatten(states)
        self._graphs, self._tree = graphs, tree
        return tuple(leaves)

    def _with_block(self, hidden, block, starts):
        """Returns hidden states with those of a block that begins at one slot in all rows, and where the next one does."""
        return lax.dynamic_update_slice_in_dim(hidden, block, starts[0], axis=1), starts + self.block

    def _read(self, weights, tokens, starts, cache):
        states = jax.tree.unflatten(self._tree, weights)
        model, *layers = map(nnx.merge, self._graphs, states)
        block = jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, self.block))(tokens, starts)
        return model.read_block(block, starts, cache, layers)


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: str, layers: int, place: jax.sharding.Sharding) -> Callable[[], Any]:
    """A program that makes a whole cache: the device waited for the host where every array had its own."""
    return jax.jit(lambda: tuple(jnp.zeros(shape, dtype) for _ in range(layers)), out_shardings=place)
