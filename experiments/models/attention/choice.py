"""Which implementation of attention runs over packed rows, and a record of what ran.

A named one is used or an error is raised; "auto" takes the first that can and is not slower here, and says why.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from experiments.models.attention.allowed import AllowedKeys
from experiments.models.attention.einsum import attend
from jaxlogp.errors import require

IMPLEMENTATIONS = ("einsum",)


@dataclass(frozen=True)
class AttentionCall:
    """What decides which implementation runs.

    Attributes:
        rows: B.
        length: T.
        heads: N.
        kv_heads: K, a divisor of `heads`.
        head_dim: D.
        dtype: of queries, keys and values.
        softcap: bound of the scaled products, or None.
        mesh: the mesh that rows ("data") and heads ("tensor") are split over, or None.
    """

    rows: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    softcap: float | None = None
    mesh: Mesh | None = None


@dataclass(frozen=True)
class AttentionRun:
    """The implementation that a traced forward pass calls, and why this one."""

    implementation: str
    reason: str
    mesh: Mesh | None = None

    def allow(self, first: Int[Array, "B T"]) -> AllowedKeys:
        """What `attend_packed` wants to know of the keys: make it once for all layers that read the same keys.

        Args:
            first: int32 [B, T] from `first_keys`.
        """
        return AllowedKeys.of(first, self.implementation, self.mesh)


_records: contextvars.ContextVar[tuple[list[AttentionRun], ...]] = contextvars.ContextVar("attention_runs", default=())


def choose_attention(name: str, call: AttentionCall) -> AttentionRun:
    """The implementation to run and the reason, added to every open `record_attention_runs`.

    Args:
        name: "auto" or one of IMPLEMENTATIONS.
        call: shapes and dtype.

    Raises:
        ValueError: an unknown name, or one that cannot take the call here; the sentence says why not.
    """
    require(name in ("auto", *IMPLEMENTATIONS), "attention", f"auto or one of {', '.join(IMPLEMENTATIONS)}", repr(name))
    reason = "auto" if name == "auto" else "named by the caller"
    run = AttentionRun("einsum", reason, call.mesh)
    for record in _records.get():
        record.append(run)
    return run


def attend_packed(
    queries: Float[Array, "B T N D"],
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K D"],
    allowed: AllowedKeys,
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B T N D"]:
    """softmax over the allowed keys of cap(scale · q·k), times v; query head n reads key-value head n // G.

    cap(x) = softcap · tanh(x / softcap). Scores and softmax are fp32 whatever the dtype.

    Args:
        queries: [B, T, N, D], rotated where the model rotates.
        keys: [B, T, K, D] with K a divisor of N.
        values: [B, T, K, D].
        allowed: from `AttentionRun.allow`.
        scale: multiplier of the products, D^-½ in most models.
        softcap: bound of the scaled products, or None.

    Returns:
        [B, T, N, D] in the values' dtype.
    """
    return attend(queries, keys, values, allowed.bias, scale=scale, softcap=softcap)


@contextlib.contextmanager
def record_attention_runs() -> Iterator[list[AttentionRun]]:
    """Collects an `AttentionRun` for every forward pass over rows that is traced inside of the ``with`` block."""
    record: list[AttentionRun] = []
    token = _records.set((*_records.get(), record))
    try:
        yield record
    finally:
        _records.reset(token)
