"""A reference that follows the policy: what a KL is measured from, moved every so many updates."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlogp.errors import is_number, is_positive_integer, require


@dataclass(frozen=True)
class MovingReference:
    """Rule by which the reference becomes ``share · policy + (1 - share) · reference`` after every `every` updates.

    With a share of 1 it is a copy of the policy. ValueError if a number is out of range.

    References:
        Learn Your Reference Model for Real Good Alignment, arXiv:2404.09656. DeepSeek-R1, arXiv:2501.12948, replaces the
        reference every 400 steps.
    """

    every: int
    share: float = 1.0

    def __post_init__(self) -> None:
        # Named as the options of the loss.
        require(is_positive_integer(self.every), "reference_every", "a number of updates >= 1", self.every)
        good = is_number(self.share) and math.isfinite(self.share) and 0.0 < self.share <= 1.0
        require(good, "reference_share", "a number in (0, 1]", self.share)

    def after(self, updates: int, reference: nnx.State, params: nnx.State) -> tuple[int, nnx.State]:
        """Returns the updates since the reference moved, and the reference, whose memory is taken over where it moves."""
        if updates < self.every:
            return updates, reference
        return 0, _mixed(reference, params, self.share)


def _mix(reference: nnx.State, params: nnx.State, share: float) -> nnx.State:
    def leaf(old: jax.Array, new: jax.Array) -> jax.Array:
        # Narrow parameters would lose most of a small share.
        mixed = share * new.astype(jnp.float32) + (1.0 - share) * old.astype(jnp.float32)
        return mixed.astype(old.dtype)

    return jax.tree.map(leaf, reference, params)


_mixed = jax.jit(_mix, static_argnames="share", donate_argnames="reference")
