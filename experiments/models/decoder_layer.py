"""One layer of a `Decoder`: attention and gated products on the residual stream.

Shapes: B rows, T tokens of a row or C of a block, S keys, H features of the residual stream, N query heads, K key-value
heads of D features.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from experiments.models.attention import (
    AllowedKeys,
    KVCache,
    LayerCache,
    NormAndRotation,
    RowCache,
    attend,
    attend_block_triton,
    attend_cached,
    attend_triton,
    first_readable,
    put_block,
)
from experiments.models.decoder_config import DecoderConfig
from experiments.models.layers import JoinedProjections, Projection, RMSNorm
from experiments.models.lora import ADAPTABLE
from experiments.models.remat import named
from experiments.models.rope import rotate

JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Projections that read the same features, and the name of their joint product."""


class View(NamedTuple):
    """What a layer's attention is told of its tokens."""

    tables: tuple[Array, Array]
    keys: AllowedKeys


class DecoderLayer(nnx.Module):
    """Attention and gated products, each preceded by a norm and added to the residual stream."""

    qkv_proj: JoinedProjections
    gate_up_proj: JoinedProjections

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, split_tokens: bool = False) -> None:
        self.config = config
        # Two sums a layer enter the residual stream; this keeps its variance near 1 at any depth.
        depth_scale = (2 * config.num_layers) ** -0.5
        embed, mlp = {"embed": config.hidden_size}, {"mlp": config.intermediate_size}
        queries = {"heads": config.num_heads, "head_dim": config.head_dim}
        keys = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
        bias = config.attention_bias
        projection = functools.partial(Projection, dtype=config.param_dtype, rngs=rngs, split_tokens=split_tokens)

        self.input_layernorm = RMSNorm("embed", config.hidden_size, config)
        self.q_proj = projection({**embed, **queries}, bias=bias)
        self.k_proj = projection({**embed, **keys}, bias=bias)
        self.v_proj = projection({**embed, **keys}, bias=bias)
        self.o_proj = projection({**queries, **embed}, inputs=2, scale=depth_scale)
        if config.qk_norm:
            self.q_norm = RMSNorm("head_dim", config.head_dim, config)
            self.k_norm = RMSNorm("head_dim", config.head_dim, config)
        self.post_attention_layernorm = RMSNorm("embed", config.hidden_size, config)
        if config.post_norms:
            self.pre_feedforward_layernorm = RMSNorm("embed", config.hidden_size, config)
            self.post_feedforward_layernorm = RMSNorm("embed", config.hidden_size, config)
        self.gate_proj = projection({**embed, **mlp})
        self.up_proj = projection({**embed, **mlp})
        self.down_proj = projection({**mlp, **embed}, scale=depth_scale)
        for name in config.lora.modules if config.lora.rank else ():
            getattr(self, name).adapt(config.lora.rank, config.lora.scale, rngs)

    def join_projections(self, shards: int = 1) -> None:
        """Computes products of the same features as one from now on, where so many tensor ranks divide them."""
        for name, parts in JOINED.items():
            modules = [getattr(self, part) for part in parts]
            if all(module.out_shape[0] % shards == 0 for module in modules):
                setattr(self, name, JoinedProjections(modules, shards))
                for part in parts:
                    delattr(self, part)

    def to_int8(self) -> None:
        """Rounds the matrices of all projections to 8 bits; they cannot be joined after that."""
        for name in (*JOINED, *ADAPTABLE):
            if hasattr(self, name):
                getattr(self, name).to_int8()

    def products(self, name: str, x: Float[Array, "B T H"]) -> tuple[Array, ...]:
        """Returns those of the projections that `name` joins."""
        if hasattr(self, name):
            return getattr(self, name)(x)
        return tuple(getattr(self, part)(x) for part in JOINED[name])

    @jax.named_scope("projections")
    def queries_keys_values(self, x: Float[Array, "B T H"], tables: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Returns rotated queries [B, T, N, D], rotated keys and values [B, T, K, D] of the normed residual stream."""
        x = self.input_layernorm(x)
        queries, keys, values = map(named, ("queries", "keys", "values"), self.products("qkv_proj", x))
        if self.config.qk_norm:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        return rotate(queries, tables), rotate(keys, tables), values

    def attend_new(
        self,
        x: Float[Array, "B 1 H"],
        tables: tuple[Array, Array],
        cache: KVCache,
        window: int | None,
        mesh: Mesh | None = None,
    ) -> tuple[Float[Array, "B 1 N D"], LayerCache]:
        """Attends from each row's new token to the layer's cache and itself; returns the result and the updated cache.

        The kernel takes joined projections and norms and rotates them itself, without `queries_keys_values`.
        """
        if cache.implementation == "triton":
            projections = self._projections(self.input_layernorm(x)[:, 0])
            preparation = self._preparation(table[:, 0, 0] for table in tables)
            options = {"mesh": mesh, **self.attention_options}
            attended, held = attend_triton(projections, preparation, cache, first_readable(cache, window), **options)
        else:
            new = (each[:, 0] for each in self.queries_keys_values(x, tables))
            attended, held = attend_cached(*new, cache, window=window, mesh=mesh, **self.attention_options)
        return attended[:, None], held

    def attend_block(
        self,
        x: Float[Array, "B C H"],
        tables: tuple[Array, Array],
        cache: RowCache,
        starts: Int[Array, " B"],
        window: int | None,
        bias: Float[Array, "B C S"] | None,
    ) -> tuple[Float[Array, "B C N D"], RowCache]:
        """Attends from a block of each row's tokens, which begins at its slot `starts`, to its row up to each.

        Returns the result, and the cache with the block. `bias` is that of `mask_bias`; None for the kernel.
        """
        if bias is None:
            projections = self._projections(self.input_layernorm(x))[:, :, 0]
            preparation = self._preparation(table[:, :, 0] for table in tables)
            options = {"window": window, **self.attention_options}
            return attend_block_triton(projections, preparation, cache, starts, **options)
        queries, keys, values = self.queries_keys_values(x, tables)
        held = put_block(cache, keys, values, starts)
        both = jnp.split(held, 2, axis=1)
        return attend(queries, *both, bias, **self.attention_options, by_head=True), held

    @jax.named_scope("projections")
    def _projections(self, normed: Float[Array, "*tokens H"]) -> Float[Array, "*tokens shards heads D"]:
        """Returns each tensor rank's queries, keys and values of the normed residual stream; neither normed nor rotated."""
        joined = self.qkv_proj.concatenated(normed)
        return joined.reshape(*joined.shape[:-1], -1, self.config.head_dim)

    def _preparation(self, tables: Iterable[Array]) -> NormAndRotation:
        cos, sin = tables
        if not self.config.qk_norm:
            return NormAndRotation(cos, sin)
        return NormAndRotation(cos, sin, self.q_norm.multiplier, self.k_norm.multiplier, self.config.rms_norm_eps)

    @property
    def attention_options(self) -> dict[str, float | None]:
        return {"scale": self.config.attention_scale, "softcap": self.config.attention_softcap}

    @jax.named_scope("feed_forward")
    def finish(self, x: Float[Array, "B T H"], attended: Float[Array, "B T N D"]) -> Float[Array, "B T H"]:
        """Returns the residual stream, in its own dtype, after the attention's output projection and the gated products."""
        added = self.o_proj(attended)
        # Checkpoints give one name to two norms: the one before the gated products, or the one after the attention.
        before = self.post_attention_layernorm
        if self.config.post_norms:
            added, before = self.post_attention_layernorm(added), self.pre_feedforward_layernorm
        x = named("after_attention", x + added.astype(x.dtype))
        normed = before(x)
        gate, up = map(named, ("gate", "up"), self.products("gate_up_proj", normed))
        gate = jax.nn.gelu(gate, approximate=True) if self.config.activation == "gelu_tanh" else jax.nn.silu(gate)
        added = self.down_proj(gate * up)
        added = self.post_feedforward_layernorm(added) if self.config.post_norms else added
        return x + added.astype(x.dtype)
