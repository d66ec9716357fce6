"""Engine ``hopper_fixed_order``: the kernels of ``hopper``, with every gradient summed in the order of the granules.

``hopper`` does not fix the order of the hidden gradient over shards: it adds chunk after chunk to one sum, and a float psum
adds the shards. Here a chunk of the backward is a granule of the :class:`~jaxlogp.invariance.ReductionOrder`, whatever
the mesh; its hidden gradient is kept separate, and one binary tree adds the granules. Log-probs, entropies and the
weight's gradient are those of ``hopper``, to the last bit.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlogp._stats import TokenLogProbs
from jaxlogp._vocab import VocabShards
from jaxlogp.errors import require
from jaxlogp.head.call import HeadCall, HeadGradients
from jaxlogp.head.fixed_order.nodes import (
    missing_axes,
    node_size,
    require_same_on_all_shards,
    sum_nodes,
    why_not_shards,
)
from jaxlogp.head.fixed_order.on_support import OnSupport
from jaxlogp.head.hopper.engine import HopperEngine
from jaxlogp.head.hopper.gradients import head_gradients
from jaxlogp.head.hopper.values import head_values
from jaxlogp.head.row_scalars import row_scalars
from jaxlogp.invariance.exact import no_negative_zero
from jaxlogp.invariance.order import ReductionOrder, fold_tree


@dataclasses.dataclass(frozen=True)
class FixedOrderHopperEngine(HopperEngine):
    """Runs the kernels of :class:`HopperEngine` with sums in the order that ``order`` fixes; see docs/invariance.md.

    Attributes:
        order: the numeric identity, made by :meth:`ReductionOrder.for_hopper`. The tiles belong to it as well; they follow
            from hidden size and device.
    """

    order: ReductionOrder = dataclasses.field(default_factory=ReductionOrder.for_hopper)
    name = "hopper_fixed_order"
    reduces_gradients = True
    takes_support = True

    def why_not(self, call: HeadCall) -> str | None:
        """Refuses what ``hopper`` refuses, a filter, a given chunk, and shards that do not match the order."""
        if self.order.engine != "hopper":
            return f"its order is of engine {self.order.engine}"
        if self.gradient_filter is not None or self.chunk is not None:
            return "it takes no gradient filter and no chunk: its chunks are the granules"
        return super().why_not(call) or why_not_shards(self.order, call)

    def shards(self, vocab_size: int, num_shards: int) -> VocabShards:
        """Returns shards that own whole granules."""
        return self.order.shards(vocab_size, num_shards)

    def forward(self, call: HeadCall) -> tuple[TokenLogProbs, Any]:
        """Runs the forward of ``hopper``; on a support, that of ``fixed_order``."""
        if call.support is not None:
            return OnSupport(call).forward()
        return head_values(call.typed(), self)

    def backward(self, call: HeadCall, kept: Any, g: TokenLogProbs) -> HeadGradients:
        """Computes gradients, with those of the hidden states summed over granules and ranks in the fixed order.

        Raises:
            ValueError: if hidden states or a mask are typed as varying over the vocabulary axis, or a weight is typed as the
                same on ranks that hold other tokens; a float psum would sum the gradient.
        """
        if call.support is not None:
            return OnSupport(call).backward(kept, g)
        require_same_on_all_shards(call)
        axes = call.axes
        same = missing_axes(call.weight, axes)
        expected = "an array that varies by its type over every axis of the mesh that splits the tokens"
        require(not same, "weight", expected, f"one that is the same over {sorted(map(str, same))}")
        scalars = row_scalars(kept.normaliser, g.log_probs, g.entropy, call.targets.column, call.spec)
        engine = dataclasses.replace(self, chunk=self.order.granule_columns(call.vocab_size))
        typed, with_slope = call.typed(), g.entropy is not None
        gradients = head_gradients(typed, engine, scalars, with_slope, chunks_apart=True)
        nodes = _subtrees(no_negative_zero(gradients.hidden), self.order.granules // call.num_shards)
        hidden = sum_nodes(nodes, missing_axes(call.hidden, axes), call.axis_name)
        return gradients._replace(hidden=hidden.astype(call.hidden_gradient_dtype))

    def why_not_known_lse(self, call: HeadCall) -> str | None:
        """Refuses: its gradients are those of log-probs whose lse it has computed itself."""
        del call
        return "its numbers are the same in every program only where it computes them all"

    def why_not_one_pass(self, call: HeadCall, entropy_cotangent: bool) -> str | None:
        """Refuses: one pass sums in the order of the tokens."""
        del call, entropy_cotangent
        return "it sums gradients over mesh axes in its own order"


def _subtrees(granules: Float[Array, "chunks tokens hidden"], count: int) -> Float[Array, "nodes tokens hidden"]:
    """The nodes of the tree that a rank may add up alone: of ``count`` granules, those after the last chunk are zeros."""
    size = node_size(count)
    granules = jnp.pad(granules, [(0, count - granules.shape[0]), (0, 0), (0, 0)])
    groups = granules.reshape(-1, size, *granules.shape[1:])
    return jax.vmap(functools.partial(fold_tree, combine=jnp.add))(groups)
