"""What decides which implementation of attention runs, and what those that are kernels share."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from experiments.models.dtype_choice import capability_of
from experiments.models.mesh import HEAD_AXES, SEQUENCE_AXIS, TENSOR_AXIS, num_ranks, row_axes, size_of
from experiments.models.sharding import resharded


@dataclass(frozen=True)
class AttentionCall:
    """Shapes and options of the attention over whole rows: B `rows` of T tokens, N `heads`, K `kv_heads`, a divisor of N."""

    rows: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    softcap: float | None = None
    mesh: Mesh | None = None


NARROW_DTYPES = ("bfloat16", "float16")


def why_not_by_head(call: AttentionCall) -> str | None:
    """Returns why kernels that are not split by the compiler cannot take the call, or None.

    Each device is given its rows and its heads, and features in halves of 64.
    """
    if call.dtype not in NARROW_DTYPES:
        return f"it takes bfloat16 and float16, not {call.dtype}"
    if call.head_dim not in (64, 128):
        return f"it takes head sizes of 64 and 128, not {call.head_dim}"
    if call.mesh is None:
        return None
    ranks, heads = num_ranks(call.mesh), size_of(call.mesh, *HEAD_AXES)
    if call.rows % ranks:
        return f"{ranks} ranks do not divide {call.rows} rows"
    if call.kv_heads % heads:
        return f"{heads} ranks along tensor and sequence do not divide {call.kv_heads} key-value heads"
    return None


def over_heads(attend: Callable[..., Array], mesh: Mesh | None, *operands: Array) -> Array:
    """Computes `attend` on a mesh whose "sequence" ranks hold different tokens: each gets all tokens of some heads.

    Attention reads other tokens and no other heads, so the ranks exchange one split for the other, and back (Jacobs et
    al., DeepSpeed Ulysses, 2023).
    """
    if mesh is None or size_of(mesh, SEQUENCE_AXIS) == 1:
        return attend(*operands)
    rows = row_axes(mesh)
    by_token = NamedSharding(mesh, P(rows, SEQUENCE_AXIS, TENSOR_AXIS))
    by_head = NamedSharding(mesh, P(rows, None, HEAD_AXES))

    # The constraints keep the compiler from making queries by head right away, for which it would gather all tokens.
    def exchanged(x):
        return resharded(lax.with_sharding_constraint(x, by_token), by_head, by_token)

    out = resharded(attend(*map(exchanged, operands)), by_token, by_head)
    return lax.with_sharding_constraint(out, by_token)


def by_head(attend: Callable[..., Array], mesh: Mesh | None, queries, keys, values, per_row) -> Array:
    """Computes `attend(queries, keys, values, per_row)` on each device's own rows and heads."""
    if mesh is None or mesh.size == 1:
        return attend(queries, keys, values, per_row)
    rows = row_axes(mesh)
    heads = P(rows, None, tuple(axis for axis in HEAD_AXES if axis in mesh.shape))
    split = jax.shard_map(attend, mesh=mesh, in_specs=(heads, heads, heads, P(rows)), out_specs=heads, check_vma=False)
    return split(queries, keys, values, per_row)


def needs_nvidia_gpu(generation: int) -> str | None:
    """Returns why there is no NVIDIA GPU of at least this compute capability (its first number), or None."""
    capability = capability_of(jax.devices()[0])
    if jax.default_backend() != "gpu" or capability is None:
        return "it needs an NVIDIA GPU"
    if capability[0] < generation:
        seen = ".".join(map(str, capability))
        return f"it needs an NVIDIA GPU of compute capability {generation} or more, not {seen}"
    return None


def padded_first(first: Int[Array, "B T"], multiple: int) -> Int[Array, "B padded"]:
    """Returns first keys of rows whose length is rounded up to a multiple; a query of the padding reads itself."""
    rows, length = first.shape
    padding = -length % multiple
    slots = jnp.broadcast_to(jnp.arange(length, length + padding, dtype=jnp.int32), (rows, padding))
    return jnp.concatenate([first.astype(jnp.int32), slots], axis=1)
