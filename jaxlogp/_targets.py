"""Targets: checked ids of the whole vocabulary, and their columns in one shard."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxlogp._agreement import id_codes
from jaxlogp._arrays import AnyArray, as_int32, nan_where
from jaxlogp._stats import TokenLogProbs
from jaxlogp._vocab import LocalShard
from jaxlogp.errors import require, require_ids_in_range, require_integer, require_mask

OUT_OF_VOCAB = ("error", "zero")


class LocalTargets(NamedTuple):
    """Targets relative to one shard.

    Attributes:
        column: column of the local shard that holds the target; -1 if another shard, or none, owns it.
        mask: True where a token counts.
        invalid: True where an active target is outside the vocabulary and that is an error; None if it is not one.
        width: number of local columns that are real ids.
        codes: int32, :func:`jaxlogp._agreement.id_codes` of the active ids, which must agree on all shards; None if the
            vocabulary is not sharded.
    """

    column: Int[Array, "*tokens"]
    mask: Bool[Array, "*tokens"]
    invalid: Bool[Array, "*tokens"] | None
    width: Int[Array, ""]
    codes: Int[Array, "*tokens"] | None = None


def check_targets(
    targets: Integer[AnyArray, "*tokens"],
    mask: Bool[AnyArray, "*tokens"] | None,
    tokens: tuple[int, ...],
    vocab_size: int,
    out_of_vocab: str,
) -> Bool[AnyArray, "*tokens"]:
    """Checks shape and dtype, and with "error" known ids; returns the mask, all True for None.

    Raises:
        ValueError: if a shape or dtype is wrong, or an active id is outside [0, vocab_size); names the argument, the id and
            its position.
    """
    require_integer(targets, "targets")
    require(targets.shape == tokens, "targets", f"shape {tokens}", f"shape {targets.shape}")
    require(math.prod(tokens) > 0, "targets", "at least one token", f"an empty batch of shape {tokens}")
    if mask is None:
        # Of NumPy: under a trace one of JAX would be traced, and known ids would not be checked.
        mask = np.ones(tokens, bool)
    require_mask(mask, tokens)
    if out_of_vocab == "error":
        require_ids_in_range(targets, vocab_size, "targets", mask)
    return mask


def localise(
    targets: Integer[AnyArray, "*tokens"],
    mask: Bool[AnyArray, "*tokens"],
    shard: LocalShard,
    out_of_vocab: str = "error",
) -> LocalTargets:
    """Translates global target ids into columns of the local shard."""
    return _localise(as_int32(targets), mask, shard, out_of_vocab)


# One program also outside of jit.
@functools.partial(jax.jit, static_argnames="out_of_vocab", inline=True)
def _localise(targets: Array, mask: Array, shard: LocalShard, out_of_vocab: str) -> LocalTargets:
    inside = (targets >= 0) & (targets < shard.vocab_size)
    column = jnp.where(inside, targets, 0) - shard.start
    owned = mask & inside & (column >= 0) & (column < shard.width)
    invalid = mask & ~inside if out_of_vocab == "error" else None
    codes = id_codes(targets, mask) if shard.num_shards > 1 else None
    return LocalTargets(jnp.where(owned, column, -1), mask, invalid, jnp.asarray(shard.width, jnp.int32), codes)


def mask_cotangents(
    g: TokenLogProbs, targets: LocalTargets
) -> tuple[Float[Array, "*tokens"], Float[Array, "*tokens"] | None]:
    """Returns cotangents of (log_probs, entropy), exactly 0 where masked and NaN where the target is invalid."""
    g_log_probs = jnp.where(targets.mask, g.log_probs, 0.0)
    if targets.invalid is not None:
        g_log_probs = nan_where(targets.invalid, g_log_probs)
    return g_log_probs, None if g.entropy is None else jnp.where(targets.mask, g.entropy, 0.0)
