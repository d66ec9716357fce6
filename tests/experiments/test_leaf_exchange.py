"""Sums of leaves that ranks add up in shares: the bits of whole additions, and shares that are no larger for more ranks."""

import operator

import jax
import numpy as np
import pytest

from experiments.invariant.leaf_exchange import LeafExchange
from experiments.invariant.leaf_ranks import LeafRanks
from experiments.models.mesh import MeshSpec, make_mesh


def trees_of(count):
    """A tree for each rank, with sizes that ranks do not divide."""
    random = np.random.default_rng(0)
    numbers = [{"count": np.int32(rank), "loss": np.float32(0.1 * rank)} for rank in range(count)]
    return [{"matrix": random.normal(size=(5, 7)).astype(np.float32), **each} for each in numbers]


@pytest.mark.parametrize("spec", [MeshSpec(data=3, tensor=2), MeshSpec(data=2, fsdp=2), MeshSpec(tensor=2)], ids=str)
def test_what_ranks_add_up_in_shares_has_the_bits_of_a_sum_of_whole_leaves(spec):
    ranks = LeafRanks(make_mesh(spec))
    exchange, trees = LeafExchange(ranks), trees_of(ranks.count)
    wide = [jax.tree.map(lambda x: np.asarray(x)[None], tree) for tree in trees]
    leaves = [jax.device_put(tree, device) for tree, device in zip(wide, ranks.devices, strict=True)]
    shares = exchange.deal(leaves)
    part = -(-trees[0]["matrix"].size // ranks.count)
    assert {shard.data.size for share in shares for shard in share["matrix"].addressable_shards} == {part}
    total, wanted = shares[0], trees[0]
    for share, tree in zip(shares[1:], trees[1:], strict=True):
        total, wanted = jax.tree.map(operator.add, (total, wanted), (share, tree))
    found = exchange.whole(total)
    assert {leaf.device for leaf in jax.tree.leaves(found)} == {ranks.state_device}
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name, strict=True)
