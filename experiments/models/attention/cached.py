"""Attention of one new token a row over the sampler's cache: the row's prompt, and what it has generated.

`triton` is a kernel that reads only slots that hold tokens, once for all query heads that share a key-value head, and
prompts where they are, shared by the rows that continue them. `einsum` runs everywhere; each row has its own copy of its
prompt, and every slot is read.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from experiments.models.attention.cache import KVCache, LayerCache, cache_spec
from experiments.models.attention.call import NARROW_DTYPES, needs_nvidia_gpu
from experiments.models.attention.choice import AttentionRun
from experiments.models.attention.einsum import capped, mask_bias, precision_of
from experiments.models.attention.triton_cached import BLOCK
from experiments.models.mesh import TENSOR_AXIS, axes_of_rows, rows_of_ranks, size_of

IMPLEMENTATIONS = ("einsum", "triton")


def choose_cached(packed: str, kv_heads: int, head_dim: int, dtype: str, mesh: Mesh | None = None) -> AttentionRun:
    refusal = _why_not_triton(packed, kv_heads, head_dim, dtype, mesh)
    if refusal is None:
        return AttentionRun("triton", "the kernel for caches can run here")
    return AttentionRun("einsum", f"triton not used: {refusal}")


def _why_not_triton(packed: str, kv_heads: int, head_dim: int, dtype: str, mesh: Mesh | None) -> str | None:
    if packed in ("einsum", "chunked"):
        return f"attention {packed} was asked for"
    if dtype not in NARROW_DTYPES:
        return f"it takes bfloat16 and float16, not {dtype}"
    if head_dim not in (64, 128, 256):
        return f"it takes head sizes of 64, 128 and 256, not {head_dim}"
    if kv_heads % size_of(mesh, TENSOR_AXIS):
        return f"{size_of(mesh, TENSOR_AXIS)} tensor ranks do not divide {kv_heads} key-value heads"
    return needs_nvidia_gpu(8)


def empty_cache(
    keys: Float[Array, "L Q P K D"],
    values: Float[Array, "L Q P K D"],
    lengths: Int[Array, " Q"],
    slots: int,
    implementation: str,
    mesh: Mesh | None = None,
) -> KVCache:
    """Returns a cache of Q rows, each with its prompt and room for `slots` generated tokens.

    The keys are rotated. Without slots, `continued` makes rows of it. Rows and heads are split over the mesh where it
    divides them.
    """
    kernel = implementation == "triton"
    num_layers, prompts, width, kv_heads, head_dim = keys.shape
    ranks = size_of(mesh, *axes_of_rows(prompts, mesh))

    def prompt(x: Array) -> Array:
        more = -width % BLOCK if kernel else 0
        return _split(jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, more), (0, 0))), mesh)

    empty = _no_tokens((prompts, kv_heads, slots, head_dim), keys.dtype, implementation, mesh)
    layers = tuple(LayerCache(prompt(keys[layer]), prompt(values[layer]), empty, empty) for layer in range(num_layers))
    # Each rank counts the prompts that it has.
    rows = jnp.arange(prompts, dtype=jnp.int32) % (prompts // ranks) if kernel else None
    return KVCache(layers, lengths.astype(jnp.int32), rows, jnp.zeros((), jnp.int32), implementation)


def continued(cache: KVCache, prompts: Int[Array, "ranks C"], slots: int, mesh: Mesh | None = None) -> KVCache:
    """Returns a cache of rows that continue these prompts, counted among those of each rank, and read them where they are.

    Each row has room for `slots` generated tokens, and counts its own.
    """
    _, kv_heads, _, head_dim = cache.layers[0].prompt_keys.shape
    shape = prompts.size, kv_heads, slots, head_dim
    empty = _no_tokens(shape, cache.layers[0].prompt_keys.dtype, cache.implementation, mesh)
    return replace(
        cache,
        layers=tuple(held._replace(keys=empty, values=empty) for held in cache.layers),
        prompt_lengths=rows_of_ranks(cache.prompt_lengths, prompts),
        prompt_of_row=prompts.ravel(),
        filled=jnp.zeros(prompts.size, jnp.int32),
    )


def _no_tokens(shape: tuple[int, int, int, int], dtype, implementation: str, mesh: Mesh | None) -> Array:
    """Returns room for generated tokens: zeros, never a source of NaN. The kernel gets whole blocks of slots."""
    rows, kv_heads, slots, head_dim = shape
    slots += -slots % BLOCK if implementation == "triton" else 0
    return _split(jnp.zeros((rows, kv_heads, slots, head_dim), dtype), mesh)


def _split(x: Array, mesh: Mesh | None) -> Array:
    return x if mesh is None else lax.with_sharding_constraint(x, NamedSharding(mesh, cache_spec(x.shape, mesh)))


def first_readable(cache: KVCache, window: int | None) -> Int[Array, " B"]:
    """Returns the first position that the new token of each row reads; a window counts the token itself."""
    positions = cache.prompt_lengths + cache.filled
    return jnp.zeros_like(positions) if window is None else jnp.maximum(positions + 1 - window, 0)


@jax.named_scope("cached_attention")
def attend_cached(
    queries: Float[Array, "B N D"],
    new_keys: Float[Array, "B K D"],
    new_values: Float[Array, "B K D"],
    cache: KVCache,
    *,
    window: int | None = None,
    mesh: Mesh | None = None,
    scale: float,
    softcap: float | None = None,
) -> tuple[Float[Array, "B N D"], LayerCache]:
    """Computes softmax(cap(scale · q·k)) · v over prompt, generated tokens and the new one; returns it, and the new cache.

    The cache is that of one layer.

    By einsum. The kernel, `attend_triton`, begins with what is not yet normed or rotated. Queries and keys are rotated, and
    query head n reads key-value head n // (N / K). `window` is how many tokens a query reads at most, itself included;
    cap(x) = softcap · tanh(x / softcap).
    """
    (held,) = cache.layers
    put = functools.partial(lax.dynamic_update_slice_in_dim, axis=2)
    if cache.filled.ndim:
        put = jax.vmap(functools.partial(lax.dynamic_update_slice_in_dim, axis=1))
    keys, values = (
        put(x, new[:, :, None], cache.filled) for x, new in ((held.keys, new_keys), (held.values, new_values))
    )
    # Else XLA for CPUs, with one key-value head on a device, puts the token in once for the products and once for the loop,
    # and copies the whole cache for that, twice. (That of JAX 0.10 takes the barrier out too early, and copies.)
    keys, values = lax.optimization_barrier((keys, values))
    held = held._replace(keys=keys, values=values)
    read = held
    if cache.prompt_of_row is not None:
        prompts = len(held.prompt_keys)
        rows = cache.prompt_of_row.reshape(size_of(mesh, *axes_of_rows(prompts, mesh)), -1)
        read = LayerCache(*(rows_of_ranks(x, rows) for x in held[:2]), *held[2:])
    return _attend_einsum(queries, read, _biases(cache, held, first_readable(cache, window)), scale, softcap), held


def _biases(cache: KVCache, held: LayerCache, first: Int[Array, " B"]) -> tuple[Array, Array]:
    """Returns what to add to the scores of the prompt's slots [B, P], and to those of generated tokens [B, S]."""
    prompt, own = (jnp.arange(x.shape[2], dtype=jnp.int32) for x in (held.prompt_keys, held.keys))
    lengths = cache.prompt_lengths[:, None]
    in_prompt = (prompt < lengths) & (prompt >= first[:, None])
    generated = (own <= jnp.expand_dims(cache.filled, -1)) & (lengths + own >= first[:, None])
    return mask_bias(in_prompt), mask_bias(generated)


def _attend_einsum(queries, held: LayerCache, biases, scale, softcap):
    rows, heads, head_dim = queries.shape
    kv_heads = held.keys.shape[1]
    grouped = queries.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    precision = precision_of(queries.dtype)

    def scores(keys, bias):
        products = jnp.einsum("bkgd,bksd->bkgs", grouped, keys, precision=precision, preferred_element_type=jnp.float32)
        return capped(products * scale, softcap) + bias[:, None, None]

    both = [scores(keys, bias) for keys, bias in zip((held.prompt_keys, held.keys), biases, strict=True)]
    probabilities = jax.nn.softmax(jnp.concatenate(both, axis=-1), axis=-1).astype(held.values.dtype)
    of_prompt, of_own = jnp.split(probabilities, [held.prompt_keys.shape[2]], axis=-1)
    mixed = sum(
        jnp.einsum("bkgs,bksd->bkgd", part, values, precision=precision, preferred_element_type=jnp.float32)
        for part, values in ((of_prompt, held.prompt_values), (of_own, held.values))
    )
    return mixed.astype(held.values.dtype).reshape(rows, heads, head_dim)
