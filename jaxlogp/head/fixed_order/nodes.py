"""Tree over the granules of all shards: each rank's share of it, and the checks of engines of a fixed order."""

import jax.numpy as jnp
from jaxtyping import Array

from jaxlogp._compat import varying_axes
from jaxlogp._vocab import VocabShards
from jaxlogp.errors import require
from jaxlogp.head.call import HeadCall
from jaxlogp.invariance.exact import no_negative_zero
from jaxlogp.invariance.order import ReductionOrder, fold_tree, in_mesh_order, tree_sum_over


def why_not_shards(order: ReductionOrder, call: HeadCall) -> str | None:
    """Why an order cannot take a call's vocabulary shards, or None."""
    try:
        wanted = order.shards(call.vocab_size, call.num_shards)
    except ValueError as refusal:
        return f"its order does not fit: {refusal}"
    shards = call.shards or VocabShards.even(call.vocab_size, call.num_shards)
    if shards == wanted:
        return None
    return f"it needs shards on granule boundaries, {wanted.ranges} of ReductionOrder.shards, got {shards.ranges}"


def require_same_on_all_shards(call: HeadCall) -> None:
    """Raises ``ValueError`` for hidden states or a mask typed as varying over the vocabulary axis: a float psum would sum
    the gradient."""
    if call.num_shards == 1:
        return
    seen = f"a type that varies over {call.axis_name!r}: its gradient would be summed by a float all-reduce"
    for argument, x in (("hidden", call.hidden), ("mask", call.targets.mask)):
        same = call.axis_name not in varying_axes(x)
        require(same, argument, "an array that is the same on all vocabulary shards by its type", seen)


def node_size(granules: int) -> int:
    """The largest power of two that divides the number of local granules: the subtree that a rank may add up alone."""
    return granules & -granules


def missing_axes(x: Array | None, axes: frozenset) -> frozenset:
    """The mesh axes over which the gradient of x has to be summed."""
    return frozenset() if x is None else axes - varying_axes(x)


def sum_nodes(nodes: Array, axes: frozenset, vocab_axis: object) -> Array:
    """Folds local nodes, over the vocabulary axis first if it is among ``axes``, then over the other axes."""
    if vocab_axis in axes:
        total = tree_sum_over(nodes, vocab_axis)
    else:
        total = fold_tree(nodes, jnp.add)
    for name in reversed(in_mesh_order(axes - {vocab_axis})):
        total = tree_sum_over(no_negative_zero(total)[None], name)
    return total
