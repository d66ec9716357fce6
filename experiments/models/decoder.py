"""A decoder-only language model in Flax NNX: Llama, Mistral, Qwen2, Qwen3, Gemma 2 and Gemma 3, by its configuration.

It is a `Model` of `experiments.models.protocol` and ends at the final norm. Its head, `head()`, is applied by whoever needs
it: the trainer through `jaxlogp.linear_policy_loss`, the sampler through `jaxlogp.head_logits`.

Modules carry the names of Hugging Face checkpoints. The layers are one `DecoderLayer` whose parameters are stacked, the
layer first, so that one layer is traced and compiled for all. Kernels map the left index to the right one: that of
`q_proj` is [layers, embed, heads, head_dim], the transpose of a checkpoint's.

Shapes: B rows, T tokens of a row, Q prompts of P slots, H hidden features, V vocabulary entries.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from experiments.models.attention import (
    AllowedKeys,
    KVCache,
    RowCache,
    attend_packed,
    empty_cache,
    first_keys,
    mask_bias,
)
from experiments.models.decoder_config import DecoderConfig
from experiments.models.decoder_layer import DecoderLayer, View
from experiments.models.layers import Head, Int8Matrix, RMSNorm, matrix_init, named_axes
from experiments.models.mesh import SEQUENCE_AXIS, TENSOR_AXIS, axes_of_rows, document_axis, row_axes, size_of
from experiments.models.remat import rematerialised
from experiments.models.rope import rope_frequencies, rope_tables
from experiments.models.sharding import gathered
from jaxlogp import embedding_lookup, sharded_embedding_lookup
from jaxlogp.errors import require
from jaxlogp.head import HeadSpec

MAX_UNROLLED_LAYERS = 4
"""Up to here the layers are compiled one by one: faster to run, and still a matter of seconds to compile."""
MAX_UNROLLED_LAYERS_ON_GPU = 64
"""The same of whole rows on a GPU, but for prompts, and for layers that keep their inputs alone. A loop copies all that it
keeps for the backward pass into arrays of all layers, a sixth of the time of a step; without one, the gradients of all
layers are there twice when they are put together."""


class Decoder(nnx.Module):
    """The model body: token ids to final hidden states, for packed rows and with a key-value cache.

    Stream `params` of `rngs` draws the initial weights. Over the mesh's "tensor" axis the embedding lookup is sharded, by
    rows or by features.

    Example:
        >>> model = Decoder(DecoderConfig.qwen3(vocab_size=24, hidden_size=32, intermediate_size=64, num_layers=2,
        ...                                     num_heads=4, num_kv_heads=2, head_dim=8), rngs=nnx.Rngs(0))
        >>> tokens = jnp.zeros((1, 5), jnp.int32)
        >>> model.hidden_states(tokens, jnp.arange(5)[None], tokens).shape
        (1, 5, 32)
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, mesh: Mesh | None = None) -> None:
        self.config = config
        self.mesh = mesh
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            param_dtype=jnp.dtype(config.param_dtype),
            embedding_init=matrix_init(config.hidden_size),
            embedding_metadata=named_axes("vocab", "embed"),
            rngs=rngs,
        )
        split_tokens = size_of(mesh, SEQUENCE_AXIS) > 1
        stack = nnx.vmap(
            lambda key: DecoderLayer(config, rngs=nnx.Rngs(params=key), split_tokens=split_tokens),
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )
        self.layers = stack(jax.random.split(rngs.params(), config.num_layers))
        self.norm = RMSNorm("embed", config.hidden_size, config)
        if not config.tie_embeddings:
            self.lm_head = Head(config, rngs)

    def hidden_states(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
    ) -> Float[Array, "B T H"]:
        """Computes the hidden states after the final norm, each token reading its own document up to itself.

        They are in the activations' dtype, and finite everywhere. Token ids are in [0, V), padding too. Positions count from
        the start of each document, a run of equal segment ids; padding has an id of its own or the last document's.
        ValueError if the shapes differ, or a known token id is outside the vocabulary.
        """
        require(tokens.ndim == 2, "tokens", "shape [B, T]", tokens.shape)
        require(positions.shape == tokens.shape, "positions", f"shape {tokens.shape}", positions.shape)
        require(segment_ids.shape == tokens.shape, "segment_ids", f"shape {tokens.shape}", segment_ids.shape)
        hidden, _, _ = self._forward(tokens, positions, segment_ids, keep_keys_values=False)
        return hidden

    def head(self) -> tuple[HeadSpec, Float[Array, "V H"]]:
        """Returns the head's arithmetic at temperature 1, and its weight or tied table in the activations' dtype."""
        config = self.config
        weight = self.embed_tokens.embedding if config.tie_embeddings else self.lm_head.weight
        return config.head_spec, weight[...].astype(config.dtype)

    def prefill(
        self, tokens: Int[Array, "Q P"], lengths: Int[Array, " Q"], slots: int
    ) -> tuple[Float[Array, "Q P H"], KVCache]:
        """Reads right-padded prompts of `lengths` tokens, in [1, P], into a new cache of one row per prompt.

        The cache has room for `slots` generated tokens; without any, `continued` makes rows of it. The hidden states after
        the final norm are meaningful at [q, :lengths[q]]; ids are in [0, V), padding too.
        """
        rows, width = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
        within = positions < lengths[:, None]
        hidden, keys, values = self._forward(tokens, positions, within.astype(jnp.int32), keep_keys_values=True)
        implementation = self.config.cached_attention_run(self.mesh).implementation
        return hidden, empty_cache(keys, values, lengths, slots, implementation, self.mesh)

    def layers_apart(self, *, int8: bool = False) -> tuple[DecoderLayer, ...]:
        """Returns the layers one by one, to be called once before a loop of steps.

        Their matrices are in the activations' dtype, or rounded from it to 8 bits. On GPUs, products of the same features
        are joined. On a CPU nothing is gained.
        """
        graph, stacked = nnx.split(self.layers)

        def narrowed(leaf: Array) -> Array:
            # Vectors (the weights of norms) enter fp32 arithmetic as they are.
            return leaf if leaf.ndim == 1 else leaf.astype(self.config.dtype)

        def layer(index: int) -> DecoderLayer:
            return gathered(nnx.merge(graph, jax.tree.map(lambda x: narrowed(x[index]), stacked)), self.mesh)

        layers = tuple(layer(index) for index in range(self.config.num_layers))
        if jax.default_backend() == "gpu":
            for each in layers:
                each.join_projections(size_of(self.mesh, TENSOR_AXIS))
        if int8:
            for each in layers:
                each.to_int8()
        return layers

    def head_apart(self, *, int8: bool = False) -> tuple[HeadSpec, Shaped[Array, "V H"], Float[Array, " V"] | None]:
        """Returns the head for a loop of `decode_step`, and the scales of its weight if that is rounded to 8 bits.

        A table that tensor ranks split by features is gathered once.
        """
        spec, weight = self.head()
        if self.config.vocab_size % size_of(self.mesh, TENSOR_AXIS):
            weight = lax.with_sharding_constraint(weight, NamedSharding(self.mesh, P()))
        if not int8:
            return spec, weight, None
        rounded = Int8Matrix.of(weight.T)
        return spec, rounded.values, rounded.scales

    def decode_step(
        self, tokens: Int[Array, " B"], cache: KVCache, layers: tuple[DecoderLayer, ...] | None = None
    ) -> tuple[Float[Array, "B H"], KVCache]:
        """Appends one token to every row of a cache that has a free slot.

        Returns hidden states after the final norm, and the cache with these tokens. `layers` are those of `layers_apart`,
        which is called here if it is None.
        """
        positions = cache.prompt_lengths + cache.filled
        full, sliding = self._rotations(positions[:, None])
        x, held = self._embed(tokens[:, None]), []
        for index, layer in enumerate(self.layers_apart() if layers is None else layers):
            window = self.config.window_of(index)
            own = replace(cache, layers=cache.layers[index : index + 1])
            graph, state = nnx.split(layer)
            x, after = _read_new(graph, window, self.mesh, state, x, full if window is None else sliding, own)
            held.append(after)
        return self._final_norm(x)[:, 0], replace(cache, layers=tuple(held), filled=cache.filled + 1)

    def read_block(
        self,
        tokens: Int[Array, "B C"],
        starts: Int[Array, " B"],
        cache: tuple[RowCache, ...],
        layers: Sequence[DecoderLayer],
    ) -> tuple[Float[Array, "B C H"], tuple[RowCache, ...]]:
        """Computes hidden states of a block of every row, each token reading its row up to itself.

        Each row's block begins at its slot `starts`. `cache` has the tokens before, one item per layer; what it holds in
        later slots is not read. `layers` are those of `layers_apart`. Returns the cache with this block as well.
        """
        positions = starts[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        full, sliding = self._rotations(positions)
        windows = [self.config.window_of(index) for index in range(len(layers))]
        slots = jnp.arange(cache[0].shape[2], dtype=jnp.int32)

        def bias(window: int | None) -> Array:
            allowed = slots <= positions[:, :, None]
            return mask_bias(allowed if window is None else allowed & (slots > positions[:, :, None] - window))

        by_kernel = self.config.cached_attention_run(self.mesh).implementation == "triton"
        biases = {window: None if by_kernel else bias(window) for window in set(windows)}
        x, held = self._embed(tokens), []
        for layer, window, before in zip(layers, windows, cache, strict=True):
            graph, state = nnx.split(layer)
            of_block = full if window is None else sliding, starts, biases[window]
            x, after = _read_block(graph, window, state, x, before, *of_block)
            held.append(after)
        return self._final_norm(x), tuple(held)

    def _forward(self, tokens, positions, segment_ids, *, keep_keys_values):
        attention = self.config.attention_run(*segment_ids.shape, mesh=self.mesh)
        own_rows = segment_ids
        if size_of(self.mesh, SEQUENCE_AXIS) > 1:
            # Which keys a query reads is known of whole rows.
            own_rows = lax.with_sharding_constraint(segment_ids, NamedSharding(self.mesh, P(row_axes(self.mesh))))
        views = self._views(positions, lambda window: attention.allow(first_keys(own_rows, window)))
        graph, stacked = nnx.split(self.layers)

        def step(x, layer_input):
            state, is_sliding = layer_input
            # Within what is rematerialised: the backward pass gathers again instead of keeping whole parameters.
            layer, view = gathered(nnx.merge(graph, state), self.mesh), _view_of(views, is_sliding)
            queries, keys, values = layer.queries_keys_values(x, view.tables)
            x = layer.finish(x, attend_packed(queries, keys, values, view.keys, **layer.attention_options))
            return x, (keys, values) if keep_keys_values else (None, None)

        on_gpu = jax.default_backend() == "gpu" and not keep_keys_values
        most = MAX_UNROLLED_LAYERS_ON_GPU if on_gpu and self.config.remat != "full" else MAX_UNROLLED_LAYERS
        unrolled = self.config.num_layers <= most
        body = rematerialised(step, self.config.remat, unrolled=unrolled)
        layer_inputs = (stacked, self._is_sliding())
        x, (keys, values) = lax.scan(body, self._embed(tokens), layer_inputs, unroll=unrolled)
        return self._final_norm(x), keys, values

    def _views(self, positions: Array, reads: Callable[[int | None], AllowedKeys]) -> tuple[View, ...]:
        """Returns one view if all layers are alike; otherwise that of the full layers and that of the sliding ones."""
        full, own = self._rotations(positions)
        sliding = self.config.sliding
        views = []
        if sliding is None or not all(sliding.layers):
            views.append(View(full, reads(None)))
        if sliding is not None:
            views.append(View(own, reads(sliding.window)))
        return tuple(views)

    def _rotations(self, positions: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Returns rotary tables of the full layers, and those of the sliding ones."""
        config, sliding = self.config, self.config.sliding
        full = rope_tables(positions, rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))
        if sliding is None or sliding.rope_theta is None:
            return full, full
        return full, rope_tables(positions, rope_frequencies(config.head_dim, sliding.rope_theta))

    def _is_sliding(self) -> Array | None:
        """Returns which layers are sliding, if there are both kinds."""
        sliding = self.config.sliding
        return None if sliding is None or all(sliding.layers) else jnp.asarray(sliding.layers)

    def _embed(self, tokens):
        table = gathered(self.embed_tokens, self.mesh).embedding[...]
        embedded = self._lookup(table, tokens).astype(self.config.dtype)
        # In the embeddings' dtype, as the models were trained: √hidden_size is rounded to it.
        scale = self.config.embed_scale
        embedded = embedded if scale == 1.0 else embedded * jnp.asarray(scale, embedded.dtype)
        return embedded.astype(self.config.stream_dtype)

    def _lookup(self, table, tokens):
        tensor = size_of(self.mesh, TENSOR_AXIS)
        if tensor == 1:
            return embedding_lookup(table, tokens)
        if self.config.vocab_size % tensor == 0:
            axes = {"token_axes": axes_of_rows(len(tokens), self.mesh), "sequence_axis": document_axis(self.mesh)}
            return sharded_embedding_lookup(table, tokens, mesh=self.mesh, **axes)
        # Each rank looks its features up; what follows reads all of them, and is not to be split as the table is.
        whole = P(P.UNCONSTRAINED, P.UNCONSTRAINED, None)
        return lax.with_sharding_constraint(embedding_lookup(table, tokens), NamedSharding(self.mesh, whole))

    def _final_norm(self, x):
        return gathered(self.norm, self.mesh)(x)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _read_new(graph, window: int | None, mesh: Mesh | None, state, x: Array, tables, cache: KVCache):
    """Returns the residual stream of a new token of each row after a layer, and the layer's cache with it.

    Traced once for all layers that are alike, so that JAX makes their kernel once.
    """
    layer = nnx.merge(graph, state)
    attended, held = layer.attend_new(x, tables, cache, window, mesh)
    return layer.finish(x, attended), held


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _read_block(graph, window: int | None, state, x: Array, cache: RowCache, tables, starts: Array, bias: Array | None):
    """Returns the residual stream of a block of tokens of each row after a layer, and the layer's cache with them.

    Traced once for all layers that are alike, as `_read_new` is.
    """
    layer = nnx.merge(graph, state)
    attended, held = layer.attend_block(x, tables, cache, starts, window, bias)
    return layer.finish(x, attended), held


def _view_of(views: tuple[View, ...], is_sliding: Array | None) -> View:
    if is_sliding is None:
        (view,) = views
        return view
    return jax.tree.map(lambda full, sliding: jnp.where(is_sliding, sliding, full), *views)
