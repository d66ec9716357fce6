"""Which implementation of attention runs over packed rows, and why.

A named one is used or an error is raised; "auto" takes the first that can and is not slower here, and says why.
"repeatable" does so among those whose gradients have the same bits in every run.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from experiments.models.attention import cudnn, tokamax
from experiments.models.attention.allowed import AllowedKeys, packed_mask
from experiments.models.attention.call import AttentionCall, over_heads
from experiments.models.attention.chunked import attend_chunked
from experiments.models.attention.einsum import attend, mask_bias
from experiments.models.attention.hopper import attend as hopper
from experiments.models.attention.hopper.bounds import Bounds
from experiments.models.attention.hopper.settings import Settings
from jaxlogp.errors import require

WHY_NOT: dict[str, Callable[[AttentionCall], str | None]] = {
    "einsum": lambda call: None,
    "chunked": lambda call: None,
    "hopper": hopper.why_not,
    "tokamax": tokamax.why_not,
    "cudnn": cudnn.why_not,
}
IMPLEMENTATIONS = tuple(WHY_NOT)
NAMES = ("auto", "repeatable", *IMPLEMENTATIONS)
"""What may be asked for."""
FASTEST_FIRST = ("hopper", "tokamax", "cudnn")
SHORT = 128
"""Up to this many tokens a row the einsum is the fastest form; at 256 the blocks are 4 times faster on a CPU."""


@dataclass(frozen=True)
class AttentionRun:
    """The implementation that a traced forward pass calls, and why this one."""

    implementation: str
    reason: str
    mesh: Mesh | None = None

    def allow(self, first: Int[Array, "B T"]) -> AllowedKeys:
        """Returns what `attend_packed` wants to know of the keys: make it once for all layers that read the same keys."""
        prepared = None
        if self.implementation == "einsum":
            prepared = mask_bias(packed_mask(first))
        elif self.implementation == "hopper":
            prepared = Bounds.of(first)
        return AllowedKeys(first, prepared, self.implementation, self.mesh)


def choose_attention(name: str, call: AttentionCall) -> AttentionRun:
    """Returns the implementation to run and the reason; ValueError for an unknown name or one that cannot run here."""
    require(name in NAMES, "attention", f"one of {', '.join(NAMES)}", repr(name))
    if name == "auto" and call.length <= SHORT:
        return AttentionRun("einsum", f"auto; rows of {call.length} tokens, no more than {SHORT}", call.mesh)
    if name == "auto":
        return _first_that_can(name, FASTEST_FIRST if jax.default_backend() == "gpu" else (), "chunked", call)
    if name == "repeatable":
        # Its kernels share no sum between blocks that run at the same time; those of tokamax and cudnn may.
        return _first_that_can(name, ("hopper",), "einsum", call)
    refusal = WHY_NOT[name](call)
    require(refusal is None, "attention", f"a call that {name!r} takes", refusal)
    return AttentionRun(name, "named by the caller", call.mesh)


def _first_that_can(asked: str, names: Sequence[str], otherwise: str, call: AttentionCall) -> AttentionRun:
    reasons = [asked]
    for name in names:
        refusal = WHY_NOT[name](call)
        if refusal is None:
            return AttentionRun(name, "; ".join(reasons), call.mesh)
        reasons.append(f"{name} not used: {refusal}")
    return AttentionRun(otherwise, "; ".join(reasons), call.mesh)


@jax.named_scope("attention")
def attend_packed(
    queries: Float[Array, "B T N D"],
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K D"],
    allowed: AllowedKeys,
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B T N D"]:
    """Computes softmax(cap(scale · q·k)) · v over the allowed keys; query head n reads key-value head n // G.

    cap(x) = softcap · tanh(x / softcap), and `scale` is D^-½ in most models. Queries and keys are rotated where the model
    rotates. Scores and softmax are fp32 whatever the dtype; the result is in the values' dtype.
    """
    options = {"scale": scale, "softcap": softcap}
    return over_heads(functools.partial(_attend_whole, allowed=allowed, **options), allowed.mesh, queries, keys, values)


def _attend_whole(*operands: Array, allowed: AllowedKeys, scale: float, softcap: float | None) -> Array:
    if allowed.implementation == "einsum":
        return attend(*operands, allowed.prepared, scale=scale, softcap=softcap)
    if allowed.implementation == "chunked":
        return attend_chunked(*operands, allowed.first, scale=scale, softcap=softcap)
    if allowed.implementation == "hopper":
        return hopper.attend_hopper(*operands, allowed.prepared, Settings(scale, softcap), allowed.mesh)
    if allowed.implementation == "cudnn":
        return cudnn.attend_cudnn(*operands, allowed.first, scale=scale)
    return tokamax.attend_tokamax(*operands, allowed.first, scale=scale, softcap=softcap, mesh=allowed.mesh)
