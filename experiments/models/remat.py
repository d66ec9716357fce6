"""What a layer keeps for the backward pass, and what it computes again there."""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

PRODUCTS = ("queries", "keys", "values", "attended", "after_attention", "gate", "up")
"""Results of a layer's products, and the residual stream between its halves. Norms, rotations, SwiGLU are made again."""
POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names("attended"),
    "products": jax.checkpoint_policies.save_only_these_names(*PRODUCTS),
}
"""none: the compiler keeps what it wants; full: the layer's input alone; attention: the results of attention too, so that
its forward pass is not run again (hopper and chunked; the others' gradients need more); products: those of every product."""


def named(name: str, x: Array) -> Array:
    """Returns `x`, kept for the backward pass by the policies that list the name."""
    return checkpoint_name(x, name)


def rematerialised(layer: Callable, policy: str, *, unrolled: bool) -> Callable:
    """Returns a layer, a function of arrays, under a policy of POLICIES.

    If layers are compiled one by one (`unrolled`), the compiler could find what is computed again to be what it has, and
    keep it, unless it is told not to look. In a loop it cannot.
    """
    return layer if policy == "none" else jax.checkpoint(layer, policy=POLICIES[policy], prevent_cse=unrolled)
