"""Which keys each query of a packed row may read: the slots first[b, t] ≤ s ≤ t.

One vector says it all: causality (s ≤ t), packed documents (the slot where the query's document begins), right-padded
prompts (padding is one more document), sliding windows (t + 1 - window), and windows that differ by layer.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from experiments.models.attention.hopper.bounds import Bounds


def first_keys(segment_ids: Int[Array, "B T"], window: int | Int[Array, ""] | None = None) -> Int[Array, "B T"]:
    """Returns the first key slot that each query may read: where its document begins, or window - 1 slots before the query.

    It is int32, in [0, t] for the query in slot t. A document is a run of equal ids, padding too: ids that touch and are
    equal are one document. A token always reads itself, so no query is left without a key, not even in a row of padding.
    `window` is how many keys a query reads at most, itself included, at least 1; it may be traced, such as the window of a
    layer inside of a scan. None for no bound.

    Example:
        >>> first_keys(jnp.array([[4, 4, 4, 7, 7, -1]])).tolist()
        [[0, 0, 0, 3, 3, 5]]
        >>> first_keys(jnp.array([[4, 4, 4, 7, 7, -1]]), window=2).tolist()
        [[0, 0, 1, 3, 3, 5]]
    """
    slots = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
    begins = jnp.concatenate(
        [jnp.ones_like(segment_ids[:, :1], jnp.bool_), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1
    )
    first = lax.cummax(jnp.where(begins, slots, 0), axis=1)
    return first if window is None else jnp.maximum(first, slots + 1 - window)


def packed_mask(first: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Returns True where the query of slot t may read the key of slot s: first[b, t] ≤ s ≤ t."""
    slots = jnp.arange(first.shape[1], dtype=jnp.int32)
    return (first[:, :, None] <= slots) & (slots <= slots[:, None])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AllowedKeys:
    """`first_keys`, what the implementation wants made of them once, and which implementation that is.

    `prepared` is the bias, fp32 [B, T, T], for "einsum", `Bounds` for "hopper", and None for others. Rows ("data", "fsdp")
    and heads ("tensor", "sequence") are split over the mesh.
    """

    first: Int[Array, "B T"]
    prepared: Float[Array, "B T T"] | Bounds | None
    implementation: str = field(metadata={"static": True})
    mesh: Mesh | None = field(metadata={"static": True})
