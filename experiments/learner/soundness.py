"""Which leaves of a tree can be trained on: finite ones, and second moments that are not negative.

One NaN in Adam's first moment is invisible to a guard that looks at loss and gradient, and is all of the parameters
one step later; so is a second moment below zero. An infinite one stops the learning of its parameter without a word.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

SECOND_MOMENTS = {"nu", "v", "v_row", "v_col"}
"""What optax calls means of squares: adam's, and adafactor's."""
OPTIMIZER_STATE = "optimizer state negative or"
"""What a phrase calls the state of an optimizer, before "not finite"."""
NAMED = 3
"""Leaves that a sentence names; the others are counted."""


class FiniteReport(NamedTuple):
    """Of a step, what is sound; trees by leaf, in their order."""

    loss: Bool[Array, ""]
    norm: Bool[Array, ""]
    gradients: Bool[Array, " leaves"]
    params: Bool[Array, " leaves"]
    opt_state: Bool[Array, " leaves"]

    def all(self) -> Bool[Array, ""]:
        return jnp.stack([jnp.all(part) for part in self]).all()


def finite_leaves(tree: PyTree) -> Bool[Array, " leaves"]:
    return jnp.stack([_is_sound(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)])


def _is_sound(path: tuple, leaf: Array) -> Bool[Array, ""]:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.bool_(True)
    sound = jnp.isfinite(leaf)
    if any(getattr(key, "name", None) in SECOND_MOMENTS for key in path):
        sound &= leaf >= 0
    return jnp.all(sound)


def name_non_finite(what: str, tree: PyTree, sound: Any) -> str | None:
    """Returns a phrase that names the leaves of `tree` which are not sound; None if all are.

    Example:
        >>> import numpy as np
        >>> name_non_finite("gradient", {"a": 0, "b": {"c": 0}}, np.array([True, False]))
        'gradient not finite in b/c'
    """
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    found = [name for name, good in zip(names, sound.tolist(), strict=True) if not good]
    if not found:
        return None
    more = len(found) - NAMED
    return f"{what} not finite in {', '.join(found[:NAMED])}" + (f" and {more} more leaves" if more > 0 else "")


def path_name(path: tuple) -> str:
    """Returns the path of a leaf, with or without a node for a Flax variable above its value."""
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
