"""Values and gradients in one pass over chunks of tokens, on any device: the logits of a chunk are there when its loss is.

By chunks: one product gives the logits, these the log-probs and, over the vocabulary shards, one pmax and one psum of
token-sized vectors; the loss gives its cotangents; then dH = dz · W and dW += dzᵀ · H. Three products instead of four.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxlogp._compat import union_of_varying_axes, vary_over
from jaxlogp.head.live_rows import live_rows
from jaxlogp.head.projection import HeadOptions, dot, finish_logits, product_gradient
from jaxlogp.stats import TokenLogProbs, all_reduce, finish, logit_gradient, tile_stats
from jaxlogp.targets import LocalTargets, mask_cotangents

# fp32 numbers of the logits of one chunk of tokens, 256 MiB.
CHUNK_ELEMENTS = 2**26


def values_and_gradients(
    cotangents: Callable[[TokenLogProbs, Any], TokenLogProbs],
    hidden: Float[Array, "tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    bias: Float[Array, " vocab"] | None,
    targets: LocalTargets,
    per_token: Any,
    options: HeadOptions,
    row_length: int | None = None,
) -> tuple[TokenLogProbs, tuple[Array, Array, Array | None]]:
    """Log-probs and entropy, and this shard's gradients of hidden, weight and bias.

    Args:
      cotangents: (values of a chunk of tokens, per_token's chunk) -> the loss's cotangents of these values.
      hidden: [tokens, H], zeros where masked; typed as varying over every axis in play, like weight and bias.
      weight: [V_local, H].
      bias: [V_local] or None.
      targets: targets as this shard sees them; chunks without a label are left out.
      per_token: pytree of arrays [tokens, ...] that ``cotangents`` needs; zeros fill it up.
      options: static options of the call.
      row_length: tokens that a chunk must not part, because their cotangents depend on one another; None parts any.

    Returns:
      (TokenLogProbs of fp32 [tokens], the same on all vocabulary shards; gradients in the dtypes of their operands).
    """
    tokens, vocab, dtype = hidden.shape[0], weight.shape[0], options.operand_dtype(weight)
    axes = union_of_varying_axes(hidden, weight)
    unit = 1 if row_length is None else row_length
    chunks = -(-tokens // (max(CHUNK_ELEMENTS // (vocab * unit), 1) * unit))
    size = -(-tokens // (chunks * unit)) * unit
    # Tokens that belong together stay where they are; others move, so that those without a label share few chunks.
    rows = live_rows(targets.mask if row_length is None else jnp.ones_like(targets.mask), chunks * size)
    alive = rows.pack(targets.mask, False)
    invalid = None if targets.invalid is None else rows.pack(targets.invalid, False)
    codes = None if targets.codes is None else rows.pack(targets.codes, 0)
    column, extra = rows.pack(targets.column, -1), jax.tree.map(lambda x: rows.pack(x, 0), per_token)
    packed, operand = rows.pack(hidden.astype(dtype), 0), weight.astype(dtype)
    valid = jnp.arange(vocab, dtype=jnp.int32) < targets.width

    def chunk_step(index, carry):
        values, d_hidden, d_weight, d_bias = carry
        start = index * size

        def part(x):
            return lax.dynamic_slice_in_dim(x, start, size)

        here = part(packed)
        chunk = LocalTargets(part(column), part(alive), None if invalid is None else part(invalid), targets.width)
        logits = finish_logits(dot(here, operand, contract=(1, 1)), bias, options)
        local = tile_stats(logits, chunk.column, valid, options.with_entropy)
        stats = all_reduce(local, options.axis_name, None if codes is None else part(codes))
        new, normaliser = finish(stats, chunk.mask, options.vocab_size, chunk.invalid)
        g_log_probs, g_entropy = mask_cotangents(cotangents(new, jax.tree.map(part, extra)), chunk)
        gradient = logit_gradient(logits, chunk.column, valid, normaliser, g_log_probs, g_entropy)
        gradient = product_gradient(gradient, logits, options)
        rounded = gradient.astype(dtype)

        def put(x, new):
            return lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), start, axis=0)

        d_weight = d_weight + dot(rounded, here, contract=(0, 0))
        d_bias = None if bias is None else d_bias + jnp.sum(gradient, axis=0)
        return (
            jax.tree.map(put, values, new),
            put(d_hidden, dot(rounded, operand, contract=(1, 0))),
            d_weight,
            d_bias,
        )

    zeros = jnp.zeros(chunks * size, jnp.float32)
    values = TokenLogProbs(zeros, zeros if options.with_entropy else None)
    gradients = (
        jnp.zeros((chunks * size, hidden.shape[1]), hidden.dtype),
        jnp.zeros(weight.shape, jnp.float32),
        None if bias is None else jnp.zeros(bias.shape, jnp.float32),
    )
    # The all-reduces make values the same on all vocabulary shards; what a shard's columns give is not.
    values = jax.tree.map(lambda x: vary_over(x, axes - {options.axis_name}), values)
    start = values, *jax.tree.map(lambda x: vary_over(x, axes), gradients)
    values, d_hidden, d_weight, d_bias = lax.fori_loop(0, -(-rows.count // size), chunk_step, start)
    values = jax.tree.map(rows.unpack, values)
    d_bias = None if bias is None else d_bias.astype(bias.dtype)
    return values, (rows.unpack(d_hidden), d_weight.astype(weight.dtype), d_bias)
