"""Sums of leaves of all ranks, for a tree whose additions are shared between the ranks.

Every rank gets the same part of the elements of every leaf's sums, adds the parts in the tree's order, and in the end all
get the whole:

    parts_k = all_to_all(leaf_k)      for every rank k
    total   = all_gather(tree over parts)

One rank has all leaves itself: nothing is dealt or copied.

As each element is added on its own, the bits are those of a tree over whole leaves. A device holds no more than before for
more ranks, or more processes: what it receives of all leaves together is as large as one.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from experiments.invariant.leaf_ranks import LeafRanks
from experiments.models.mesh import wait_if_simulated


class LeafExchange:
    """Deals trees of one structure out, and puts what was made of them together."""

    def __init__(self, ranks: LeafRanks) -> None:
        self._ranks = ranks
        self._shapes: list[tuple[int, ...]] = []
        self._only = jax.jit(lambda tree: jax.tree.map(lambda x: x[0], tree))
        self._deal = jax.jit(self._dealt)
        self._gather = jax.jit(self._gathered, out_shardings=NamedSharding(ranks.mesh, P()))

    def deal(self, trees: Sequence[Any]) -> list[Any]:
        """Returns the trees of all ranks in order, each with its part of the elements, from this process's own [1, ...]."""
        if self._ranks.count == 1:
            return list(trees)
        columns = zip(*map(jax.tree.leaves, trees), strict=True)
        arrays = [self._ranks.to_global(column) for column in columns]
        self._shapes = [array.shape[1:] for array in arrays]
        dealt = wait_if_simulated(self._deal(arrays), self._ranks.mesh)
        return [jax.tree.unflatten(jax.tree.structure(trees[0]), each) for each in dealt]

    def whole(self, tree: Any) -> Any:
        """Returns the tree that was made of dealt ones, whole, on the state's device of every process."""
        if self._ranks.count == 1:
            return self._only(tree)
        arrays = wait_if_simulated(self._gather(jax.tree.leaves(tree)), self._ranks.mesh)
        arrived = [
            next(part.data for part in x.addressable_shards if part.device == self._ranks.state_device) for x in arrays
        ]
        return jax.tree.unflatten(jax.tree.structure(tree), arrived)

    def _dealt(self, arrays: list[Array]) -> list[list[Array]]:
        axes = self._ranks.axes
        mapped = jax.shard_map(self._parts, mesh=self._ranks.mesh, in_specs=P(axes), out_specs=P(axes))
        return mapped(arrays)

    def _parts(self, arrays: list[Shaped[Array, "1 ..."]]) -> list[list[Shaped[Array, " part"]]]:
        """Returns this rank's part of every rank's arrays."""
        count = self._ranks.count

        def received(x: Array) -> Array:
            flat = jnp.pad(x.reshape(-1), (0, -x.size % count))
            return lax.all_to_all(flat.reshape(count, -1), self._ranks.axes, split_axis=0, concat_axis=0, tiled=True)

        columns = [received(x) for x in arrays]
        return [[column[rank] for column in columns] for rank in range(count)]

    def _gathered(self, arrays: list[Array]) -> list[Array]:
        whole = lax.with_sharding_constraint(arrays, NamedSharding(self._ranks.mesh, P()))
        return [x[: math.prod(shape)].reshape(shape) for x, shape in zip(whole, self._shapes, strict=True)]
