"""A decoder-only language model in Flax NNX that covers the Qwen3 and Llama-3 architectures.

The model ends at the final norm. Its head, `head()`, is applied by whoever needs it: the trainer through
`jaxlogp.linear_policy_loss`, the sampler through `jaxlogp.head_logits`. What trainer and sampler ask of any model:

    hidden = model.hidden_states(tokens, positions, segment_ids)
    spec, weight = model.head()

Parameters carry the names of Hugging Face checkpoints. Those of the layers are stacked, the layer first, and one layer
is traced and compiled for all. Matrices map the left index to the right one: `q_proj` is [layers, hidden, heads,
head_dim], the transpose of a checkpoint's.

Shapes: B rows, T tokens of a row, P slots of a prompt, S slots of the cache, H hidden features, V vocabulary entries.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from experiments.models.attention import (
    IMPLEMENTATIONS,
    AttentionCall,
    AttentionRun,
    KVCache,
    attend,
    attend_packed,
    choose_attention,
    first_keys,
    mask_bias,
    precision_of,
)
from experiments.models.mesh import DATA_AXIS, TENSOR_AXIS
from experiments.models.remat import POLICIES, named, rematerialised
from experiments.models.rope import RopeScaling, rope_frequencies, rope_tables, rotate
from jaxlogp import HeadSpec, embedding_lookup, sharded_embedding_lookup
from jaxlogp.errors import require

DTYPES = ("float32", "bfloat16")
MAX_UNROLLED_LAYERS = 4
"""Up to here the layers are compiled one by one: faster to run, and still a matter of seconds to compile."""
MAX_UNROLLED_LAYERS_ON_GPU = 64
"""The same of whole rows on a GPU. A loop copies all that it keeps for the backward pass into arrays of all layers, a sixth
of the time of a step."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a `Decoder`.

    Args:
        vocab_size: rows of the embedding and of the head.
        hidden_size: features of the residual stream.
        intermediate_size: features inside the SwiGLU.
        num_layers: number of layers.
        num_heads: query heads.
        num_kv_heads: key-value heads, a divisor of `num_heads`.
        head_dim: features of one head, even; need not be hidden_size / num_heads.
        rope_theta: base of the rotary frequencies.
        rope_scaling: Llama-3's stretch of the rotary frequencies, or None.
        rms_norm_eps: added to the mean square inside every RMSNorm.
        qk_norm: RMSNorm over each head's queries and keys before the rotation (Qwen3).
        attention_bias: biases on queries, keys and values, none on the output (Qwen2).
        tie_embeddings: the head is the embedding table.
        logit_scale: multiplier of the logits.
        logit_softcap: the head's soft cap, cap · tanh(logits / cap), or None.
        fp32_head: multiply hidden states and head as fp32 whatever their dtype.
        dtype: of the activations, "float32" or "bfloat16".
        param_dtype: of the stored parameters, likewise; each is cast to `dtype` where it is used.
        remat: what a layer keeps for the backward pass, a policy of `experiments.models.remat`.
        attention: how whole rows are attended to: "auto" or one of `experiments.models.attention.IMPLEMENTATIONS`.

    Raises:
        ValueError: names the field, what was expected and what was seen.

    Example:
        >>> config = DecoderConfig.qwen3(vocab_size=24, hidden_size=32, intermediate_size=64, num_layers=2,
        ...                              num_heads=4, num_kv_heads=2, head_dim=8)
        >>> config.qk_norm, config.tie_embeddings
        (True, True)
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    qk_norm: bool = False
    attention_bias: bool = False
    tie_embeddings: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    fp32_head: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 1
                require(is_size, field.name, "a positive integer", repr(value))
            elif field.type is bool:
                require(isinstance(value, bool), field.name, "True or False", repr(value))
        divides = self.num_heads % self.num_kv_heads == 0
        require(divides, "num_kv_heads", f"a divisor of {self.num_heads} query heads", self.num_kv_heads)
        require(self.head_dim % 2 == 0, "head_dim", "an even number", self.head_dim)
        require(1.0 < self.rope_theta < math.inf, "rope_theta", "a finite number above 1", self.rope_theta)
        require(0.0 < self.rms_norm_eps < 1.0, "rms_norm_eps", "a number between 0 and 1", self.rms_norm_eps)
        is_scaling = self.rope_scaling is None or isinstance(self.rope_scaling, RopeScaling)
        require(is_scaling, "rope_scaling", "a RopeScaling or None", repr(self.rope_scaling))
        # Made once, for its checks.
        _ = self.head_spec
        for name in ("dtype", "param_dtype"):
            require(getattr(self, name) in DTYPES, name, " or ".join(DTYPES), repr(getattr(self, name)))
        for name, choices in (("attention", ("auto", *IMPLEMENTATIONS)), ("remat", tuple(POLICIES))):
            value = getattr(self, name)
            require(value in choices, name, f"one of {', '.join(choices)}", repr(value))

    @property
    def head_spec(self) -> HeadSpec:
        """The head's arithmetic at temperature 1."""
        return HeadSpec(logit_scale=self.logit_scale, softcap=self.logit_softcap, fp32_head=self.fp32_head)

    @property
    def attention_scale(self) -> float:
        """Multiplier of the products of queries and keys."""
        return self.head_dim**-0.5

    def attention_run(self, rows: int, length: int, mesh: Mesh | None = None) -> AttentionRun:
        """Which implementation attends over packed rows of this shape here, and why.

        Raises:
            ValueError: the one that `attention` names cannot.
        """
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim)
        return choose_attention(self.attention, AttentionCall(rows, length, *sizes, dtype=self.dtype, mesh=mesh))

    @property
    def head_name(self) -> str:
        """Name of the parameter that is the head's weight."""
        return "embed_tokens" if self.tie_embeddings else "lm_head"

    @classmethod
    def qwen3(cls, **changes) -> "DecoderConfig":
        """Qwen3-0.6B, with any field replaced."""
        published = dict(
            vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, num_kv_heads=8,
            head_dim=128, rope_theta=1_000_000.0, rms_norm_eps=1e-6, qk_norm=True, tie_embeddings=True,
        )  # fmt: skip
        return cls(**(published | changes))

    @classmethod
    def llama3(cls, **changes) -> "DecoderConfig":
        """Llama-3.2-1B, with any field replaced."""
        published = dict(
            vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, num_kv_heads=8,
            head_dim=64, rope_theta=500_000.0, rope_scaling=RopeScaling(factor=32.0), rms_norm_eps=1e-5,
            tie_embeddings=True,
        )  # fmt: skip
        return cls(**(published | changes))


def matrix_init(fan_in: int, depth_scale: float = 1.0) -> Callable[..., Array]:
    """Truncated normal of variance depth_scale² / fan_in, so that every product keeps the scale of its input."""
    return nnx.initializers.truncated_normal(stddev=depth_scale / math.sqrt(fan_in))


def rms_norm(x: Float[Array, "*tokens F"], scale: Float[Array, " F"], eps: float) -> Float[Array, "*tokens F"]:
    """x / √(mean(x²) + eps) · scale over the last axis, fp32 inside, in x's dtype outside."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


class DecoderLayer(nnx.Module):
    """Attention and SwiGLU, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        hidden, inner, heads, kv_heads, head_dim = (
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        dtype = jnp.dtype(config.param_dtype)
        # Two sums a layer enter the residual stream; this keeps its variance near 1 at any depth.
        depth_scale = (2 * config.num_layers) ** -0.5

        def matrix(*shape: int, fan_in: int, scale: float = 1.0) -> nnx.Param:
            return nnx.Param(matrix_init(fan_in, scale)(rngs.params(), shape, dtype))

        self.input_layernorm = nnx.Param(jnp.ones(hidden, dtype))
        self.q_proj = matrix(hidden, heads, head_dim, fan_in=hidden)
        self.k_proj = matrix(hidden, kv_heads, head_dim, fan_in=hidden)
        self.v_proj = matrix(hidden, kv_heads, head_dim, fan_in=hidden)
        self.o_proj = matrix(heads, head_dim, hidden, fan_in=heads * head_dim, scale=depth_scale)
        if config.attention_bias:
            self.q_bias = nnx.Param(jnp.zeros((heads, head_dim), dtype))
            self.k_bias = nnx.Param(jnp.zeros((kv_heads, head_dim), dtype))
            self.v_bias = nnx.Param(jnp.zeros((kv_heads, head_dim), dtype))
        if config.qk_norm:
            self.q_norm = nnx.Param(jnp.ones(head_dim, dtype))
            self.k_norm = nnx.Param(jnp.ones(head_dim, dtype))
        self.post_attention_layernorm = nnx.Param(jnp.ones(hidden, dtype))
        self.gate_proj = matrix(hidden, inner, fan_in=hidden)
        self.up_proj = matrix(hidden, inner, fan_in=hidden)
        self.down_proj = matrix(inner, hidden, fan_in=inner, scale=depth_scale)

    def _product(self, x: Float[Array, "B T *features"], weight: nnx.Param, out_axes: int = 1) -> Array:
        """x [B, T, *in] · weight [*in, *out], as one product of two matrices: much the fastest form on a CPU."""
        matrix = weight[...].astype(x.dtype)
        out_shape = matrix.shape[-out_axes:]
        flat_weight = matrix.reshape(-1, math.prod(out_shape))
        flat = jnp.dot(x.reshape(-1, flat_weight.shape[0]), flat_weight, precision=precision_of(x.dtype))
        return flat.reshape(*x.shape[:2], *out_shape)

    @jax.named_scope("projections")
    def queries_keys_values(self, x: Float[Array, "B T H"], tables: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Rotated queries [B, T, N, D], rotated keys and values [B, T, K, D] of the normed residual stream."""
        config = self.config
        x = rms_norm(x, self.input_layernorm[...], config.rms_norm_eps)
        queries = named("queries", self._product(x, self.q_proj, out_axes=2))
        keys = named("keys", self._product(x, self.k_proj, out_axes=2))
        values = named("values", self._product(x, self.v_proj, out_axes=2))
        if config.attention_bias:
            queries = queries + self.q_bias[...].astype(x.dtype)
            keys = keys + self.k_bias[...].astype(x.dtype)
            values = values + self.v_bias[...].astype(x.dtype)
        if config.qk_norm:
            queries = rms_norm(queries, self.q_norm[...], config.rms_norm_eps)
            keys = rms_norm(keys, self.k_norm[...], config.rms_norm_eps)
        return rotate(queries, tables), rotate(keys, tables), values

    @jax.named_scope("feed_forward")
    def finish(self, x: Float[Array, "B T H"], attended: Float[Array, "B T N D"]) -> Float[Array, "B T H"]:
        """The residual stream after the attention's output projection and the SwiGLU."""
        x = named("after_attention", x + self._product(attended, self.o_proj))
        normed = rms_norm(x, self.post_attention_layernorm[...], self.config.rms_norm_eps)
        gate = named("gate", self._product(normed, self.gate_proj))
        up = named("up", self._product(normed, self.up_proj))
        return x + self._product(jax.nn.silu(gate) * up, self.down_proj)


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
        dtype = jnp.dtype(config.param_dtype)
        table_shape = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nnx.Param(matrix_init(config.hidden_size)(rngs.params(), table_shape, dtype))
        make_layer = nnx.vmap(lambda key: DecoderLayer(config, rngs=nnx.Rngs(params=key)))
        self.layers = make_layer(jax.random.split(rngs.params(), config.num_layers))
        self.norm = nnx.Param(jnp.ones(config.hidden_size, dtype))
        if not config.tie_embeddings:
            self.lm_head = nnx.Param(matrix_init(config.hidden_size)(rngs.params(), table_shape, dtype))

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
        return config.head_spec, getattr(self, config.head_name)[...].astype(config.dtype)

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
        tables = self._rope_tables(positions[:, None])
        valid = cache.valid.at[:, slot].set(True)
        bias = mask_bias(valid[:, None])
        graph, stacked = nnx.split(self.layers)

        def step(carry, layer_input):
            x, all_keys, all_values = carry
            state, index = layer_input
            layer = nnx.merge(graph, state)
            queries, keys, values = layer.queries_keys_values(x, tables)
            # The whole cache travels in the carry, where one slot is overwritten in place.
            all_keys = lax.dynamic_update_slice(all_keys, keys[None], (index, 0, slot, 0, 0))
            all_values = lax.dynamic_update_slice(all_values, values[None], (index, 0, slot, 0, 0))
            layer_keys = lax.dynamic_index_in_dim(all_keys, index, keepdims=False)
            layer_values = lax.dynamic_index_in_dim(all_values, index, keepdims=False)
            attended = attend(queries, layer_keys, layer_values, bias, scale=self.config.attention_scale)
            x = layer.finish(x, attended)
            return (x, all_keys, all_values), None

        carry = (self._embed(tokens[:, None]), cache.keys, cache.values)
        layer_inputs = (stacked, jnp.arange(self.config.num_layers))
        (x, keys, values), _ = lax.scan(step, carry, layer_inputs, unroll=self._unroll())
        return self._final_norm(x)[:, 0], KVCache(keys, values, valid)

    def _forward(self, tokens, positions, segment_ids, *, keep_keys_values):
        tables = self._rope_tables(positions)
        allowed = self.config.attention_run(*segment_ids.shape, mesh=self.mesh).allow(first_keys(segment_ids))
        graph, stacked = nnx.split(self.layers)

        def step(x, state):
            layer = nnx.merge(graph, state)
            queries, keys, values = layer.queries_keys_values(x, tables)
            x = layer.finish(x, attend_packed(queries, keys, values, allowed, scale=self.config.attention_scale))
            return x, (keys, values) if keep_keys_values else (None, None)

        unrolled = self._unroll(MAX_UNROLLED_LAYERS_ON_GPU)
        body = rematerialised(step, self.config.remat, unrolled=unrolled)
        x, (keys, values) = lax.scan(body, self._embed(tokens), stacked, unroll=unrolled)
        return self._final_norm(x), keys, values

    def _embed(self, tokens):
        table = self.embed_tokens[...]
        tensor = self.mesh.shape.get(TENSOR_AXIS, 1) if self.mesh is not None else 1
        if tensor > 1 and self.config.vocab_size % tensor == 0:
            token_axes = tuple(axis for axis in (DATA_AXIS,) if axis in self.mesh.shape)
            embedded = sharded_embedding_lookup(table, tokens, mesh=self.mesh, token_axes=token_axes)
        else:
            embedded = embedding_lookup(table, tokens)
        return embedded.astype(self.config.dtype)

    def _rope_tables(self, positions):
        config = self.config
        return rope_tables(positions, rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))

    def _final_norm(self, x):
        return rms_norm(x, self.norm[...], self.config.rms_norm_eps)

    def _unroll(self, on_gpu: int | None = None) -> bool:
        most = on_gpu if on_gpu is not None and jax.default_backend() == "gpu" else MAX_UNROLLED_LAYERS
        return self.config.num_layers <= most
