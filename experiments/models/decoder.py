"""A decoder-only language model in Flax NNX: Llama, Mistral, Qwen2, Qwen3, Gemma 2 and Gemma 3, by its configuration.

The model ends at the final norm. Its head, `head()`, is applied by whoever needs it: the trainer through
`jaxlogp.linear_policy_loss`, the sampler through `jaxlogp.head_logits`. What trainer and sampler ask of any model:

    hidden = model.hidden_states(tokens, positions, segment_ids)
    spec, weight = model.head()

Modules carry the names of Hugging Face checkpoints. The layers are one `DecoderLayer` whose parameters are stacked, the
layer first, so that one layer is traced and compiled for all. Kernels map the left index to the right one: that of
`q_proj` is [layers, embed, heads, head_dim], the transpose of a checkpoint's.

Shapes: B rows, T tokens of a row, P slots of a prompt, S slots of the cache, H hidden features, V vocabulary entries.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from experiments.models.attention import AllowedKeys, KVCache, first_keys, mask_bias
from experiments.models.decoder_config import DecoderConfig
from experiments.models.decoder_layer import DecoderLayer, View
from experiments.models.layers import Head, RMSNorm, matrix_init, named_axes
from experiments.models.mesh import DATA_AXIS, TENSOR_AXIS
from experiments.models.remat import rematerialised
from experiments.models.rope import rope_frequencies, rope_tables
from jaxlogp import HeadSpec, embedding_lookup, sharded_embedding_lookup
from jaxlogp.errors import require

MAX_UNROLLED_LAYERS = 4
"""Up to here the layers are compiled one by one: faster to run, and still a matter of seconds to compile."""
MAX_UNROLLED_LAYERS_ON_GPU = 64
"""The same of whole rows on a GPU. A loop copies all that it keeps for the backward pass into arrays of all layers, a sixth
of the time of a step."""


class Decoder(nnx.Module):
    """The model body: token ids to final hidden states, for packed rows and with a key-value cache.

    Args:
        config: sizes and options.
        rngs: stream `params` draws the initial weights.
        mesh: device mesh; with a "tensor" axis that divides the vocabulary the embedding lookup runs sharded over it.

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
        stack = nnx.vmap(
            lambda key: DecoderLayer(config, rngs=nnx.Rngs(params=key)),
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )
        self.layers = stack(jax.random.split(rngs.params(), config.num_layers))
        self.norm = RMSNorm("embed", config.hidden_size, config)
        if not config.tie_embeddings:
            self.lm_head = Head(config, rngs)

    def hidden_states(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
    ) -> Float[Array, "B T H"]:
        """Hidden states after the final norm, each token reading its own document up to itself.

        Args:
            tokens: int32 [B, T], all in [0, V), padding too.
            positions: int32 [B, T], counted from the start of each document.
            segment_ids: int32 [B, T]; a run of equal ids is one document. Padding has an id of its own or the last
                document's.

        Returns:
            [B, T, H] in the activations' dtype, finite everywhere.

        Raises:
            ValueError: the shapes differ, or a token id is outside the vocabulary (where the values are known).
        """
        require(tokens.ndim == 2, "tokens", "shape [B, T]", tokens.shape)
        require(positions.shape == tokens.shape, "positions", f"shape {tokens.shape}", positions.shape)
        require(segment_ids.shape == tokens.shape, "segment_ids", f"shape {tokens.shape}", segment_ids.shape)
        hidden, _, _ = self._forward(tokens, positions, segment_ids, keep_keys_values=False)
        return hidden

    def head(self) -> tuple[HeadSpec, Float[Array, "V H"]]:
        """The head's arithmetic at temperature 1, and its weight [V, H] in the activations' dtype.

        With tied embeddings the weight is the embedding table.
        """
        config = self.config
        weight = self.embed_tokens.embedding if config.tie_embeddings else self.lm_head.weight
        return config.head_spec, weight[...].astype(config.dtype)

    def empty_cache(self, rows: int, slots: int) -> KVCache:
        """A cache for `rows` sequences of up to `slots` tokens, prompt padding included."""
        config = self.config
        dtype = jnp.dtype(config.dtype)
        return KVCache.empty(config.num_layers, rows, slots, config.num_kv_heads, config.head_dim, dtype)

    def prefill(
        self, tokens: Int[Array, "B P"], lengths: Int[Array, " B"], cache: KVCache
    ) -> tuple[Float[Array, "B P H"], KVCache]:
        """Reads right-padded prompts into slots [0, P) of the cache.

        Args:
            tokens: int32 [B, P], all in [0, V), padding too.
            lengths: int32 [B], tokens of each prompt, in [1, P].
            cache: of B rows and at least P slots; what it held is dropped.

        Returns:
            hidden [B, P, H] after the final norm (meaningful at [b, :lengths[b]]), and the filled cache.

        Raises:
            ValueError: the cache is too small for the prompts.
        """
        rows, width = tokens.shape
        fits = cache.valid.shape[0] == rows and cache.valid.shape[1] >= width
        require(fits, "cache", f"{rows} rows of at least {width} slots", f"{cache.valid.shape}")
        slots = jnp.arange(width, dtype=jnp.int32)
        within = slots < lengths[:, None]
        positions = jnp.broadcast_to(slots, (rows, width))
        hidden, keys, values = self._forward(tokens, positions, within.astype(jnp.int32), keep_keys_values=True)
        valid = jnp.zeros_like(cache.valid).at[:, :width].set(within)
        return hidden, KVCache(cache.keys.at[:, :, :width].set(keys), cache.values.at[:, :, :width].set(values), valid)

    def decode_step(
        self, tokens: Int[Array, " B"], positions: Int[Array, " B"], cache: KVCache, slot: Int[Array, ""] | int
    ) -> tuple[Float[Array, "B H"], KVCache]:
        """Appends one token to every row.

        Args:
            tokens: int32 [B], in [0, V).
            positions: int32 [B], distance of each token from the start of its sequence (padding not counted).
            cache: what `prefill` and earlier steps returned.
            slot: int32 scalar, where the tokens' keys and values go, the same for all rows.

        Returns:
            hidden [B, H] after the final norm, and the cache with the new slot.
        """
        valid = cache.valid.at[:, slot].set(True)
        # Slots between a short prompt and the first new token are empty: slots are counted by the tokens that they hold.
        slot_positions = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1

        def reads(window: int | None) -> Array:
            mask = valid if window is None else valid & (slot_positions > positions[:, None] - window)
            return mask_bias(mask[:, None])

        views = self._views(positions[:, None], reads)
        graph, stacked = nnx.split(self.layers)

        def step(carry, layer_input):
            x, all_keys, all_values = carry
            state, is_sliding, index = layer_input
            layer, view = nnx.merge(graph, state), _view_of(views, is_sliding)
            queries, keys, values = layer.queries_keys_values(x, view.tables)
            # The whole cache travels in the carry, where one slot is overwritten in place.
            all_keys = lax.dynamic_update_slice(all_keys, keys[None], (index, 0, slot, 0, 0))
            all_values = lax.dynamic_update_slice(all_values, values[None], (index, 0, slot, 0, 0))
            layer_keys = lax.dynamic_index_in_dim(all_keys, index, keepdims=False)
            layer_values = lax.dynamic_index_in_dim(all_values, index, keepdims=False)
            x = layer.finish(x, layer.attend(queries, layer_keys, layer_values, view))
            return (x, all_keys, all_values), None

        carry = (self._embed(tokens[:, None]), cache.keys, cache.values)
        layer_inputs = (stacked, self._is_sliding(), jnp.arange(self.config.num_layers))
        (x, keys, values), _ = lax.scan(step, carry, layer_inputs, unroll=self._unroll())
        return self._final_norm(x)[:, 0], KVCache(keys, values, valid)

    def _forward(self, tokens, positions, segment_ids, *, keep_keys_values):
        attention = self.config.attention_run(*segment_ids.shape, mesh=self.mesh)
        views = self._views(positions, lambda window: attention.allow(first_keys(segment_ids, window)))
        graph, stacked = nnx.split(self.layers)

        def step(x, layer_input):
            state, is_sliding = layer_input
            layer, view = nnx.merge(graph, state), _view_of(views, is_sliding)
            queries, keys, values = layer.queries_keys_values(x, view.tables)
            x = layer.finish(x, layer.attend(queries, keys, values, view))
            return x, (keys, values) if keep_keys_values else (None, None)

        unrolled = self._unroll(MAX_UNROLLED_LAYERS_ON_GPU)
        body = rematerialised(step, self.config.remat, unrolled=unrolled)
        layer_inputs = (stacked, self._is_sliding())
        x, (keys, values) = lax.scan(body, self._embed(tokens), layer_inputs, unroll=unrolled)
        return self._final_norm(x), keys, values

    def _views(self, positions: Array, reads: Callable[[int | None], AllowedKeys | Array]) -> tuple[View, ...]:
        """One view where all layers are alike; else that of the full layers and that of the sliding ones.

        Args:
            positions: int [B, T] of the queries.
            reads: what the queries read in a window, or without one.
        """
        config, sliding = self.config, self.config.sliding
        full = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        views = []
        if sliding is None or not all(sliding.layers):
            views.append(View(rope_tables(positions, full), reads(None)))
        if sliding is not None:
            own = full if sliding.rope_theta is None else rope_frequencies(config.head_dim, sliding.rope_theta)
            views.append(View(rope_tables(positions, own), reads(sliding.window)))
        return tuple(views)

    def _is_sliding(self) -> Array | None:
        """Which layers are sliding, where there are both kinds."""
        sliding = self.config.sliding
        return None if sliding is None or all(sliding.layers) else jnp.asarray(sliding.layers)

    def _embed(self, tokens):
        table = self.embed_tokens.embedding[...]
        tensor = self.mesh.shape.get(TENSOR_AXIS, 1) if self.mesh is not None else 1
        if tensor > 1 and self.config.vocab_size % tensor == 0:
            token_axes = tuple(axis for axis in (DATA_AXIS,) if axis in self.mesh.shape)
            embedded = sharded_embedding_lookup(table, tokens, mesh=self.mesh, token_axes=token_axes)
        else:
            embedded = embedding_lookup(table, tokens)
        embedded = embedded.astype(self.config.dtype)
        # In the embeddings' dtype, as the models were trained: √hidden_size is rounded to it.
        scale = self.config.embed_scale
        return embedded if scale == 1.0 else embedded * jnp.asarray(scale, embedded.dtype)

    def _final_norm(self, x):
        return self.norm(x)

    def _unroll(self, on_gpu: int | None = None) -> bool:
        most = on_gpu if on_gpu is not None and jax.default_backend() == "gpu" else MAX_UNROLLED_LAYERS
        return self.config.num_layers <= most


def _view_of(views: tuple[View, ...], is_sliding: Array | None) -> View:
    """The view of one layer of a scan."""
    if is_sliding is None:
        (view,) = views
        return view
    return jax.tree.map(lambda full, sliding: jnp.where(is_sliding, sliding, full), *views)
