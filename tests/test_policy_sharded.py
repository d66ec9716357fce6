"""GSPO over documents that are cut over the ranks of a sequence axis: the loss of whole documents, counted once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxlogp.losses.policy import policy_loss
from tests.policy_case import DOCUMENTS, ERROR, SHAPE, case, expected_gradient, expected_sum, scaled_error


def sequence_mesh():
    return Mesh(np.array(jax.devices()[:8]), ("sequence",))


def flat_case():
    new, old, advantages, mask, ids = (x.reshape(-1) for x in case(seed=2))
    return new, old, advantages, mask, ids


@functools.lru_cache
def sharded_loss(weighting, inside, with_axis=True):
    """Loss sum, count and gradient of documents cut over 8 devices, the gradient taken inside or outside."""
    axis = "sequence" if with_axis else None

    def local(new, old, advantages, mask, ids):
        return policy_loss(
            new,
            old,
            advantages,
            mask,
            kind="gspo",
            document_ids=ids,
            num_documents=jnp.int32(DOCUMENTS) if with_axis else DOCUMENTS,
            document_weighting=weighting,
            document_axis_name=axis,
        )

    def gradient_inside(new, *rest):
        (value, count), gradient = jax.value_and_grad(
            lambda x: (lambda result: (result.sum, result.count))(local(x, *rest)), has_aux=True
        )(new)
        return jax.lax.psum(value, "sequence"), jax.lax.psum(count, "sequence"), gradient

    def reduced(*arrays):
        result = local(*arrays).psum("sequence")
        return result.sum, result.count

    mapped = functools.partial(jax.shard_map, mesh=sequence_mesh(), in_specs=(P("sequence"),) * 5)
    if inside:
        return jax.jit(mapped(gradient_inside, out_specs=(P(), P(), P("sequence"))))

    def gradient_outside(new, *rest):
        (value, count), gradient = jax.value_and_grad(mapped(reduced, out_specs=(P(), P())), has_aux=True)(new, *rest)
        return value, count, gradient

    return jax.jit(gradient_outside)


@pytest.mark.parametrize("weighting", ["length", "document"])
@pytest.mark.parametrize("inside", [True, False], ids=["grad inside", "grad outside"])
def test_documents_cut_over_ranks_give_the_loss_of_whole_documents_once(weighting, inside):
    arrays = flat_case()
    value, count, gradient = sharded_loss(weighting, inside)(*arrays)
    shaped = [x.reshape(SHAPE) for x in arrays]
    assert scaled_error(value, expected_sum("gspo", weighting, *shaped)) < ERROR
    assert scaled_error(gradient, expected_gradient("gspo", weighting, *shaped).reshape(-1)) < ERROR
    assert int(count) == DOCUMENTS, "documents are counted once, not once per shard"


def test_without_the_document_axis_the_cut_is_noticed():
    """The control of the test above: shards that know only their own part of a document get another loss."""
    arrays = flat_case()
    value, count, _ = sharded_loss("length", True, with_axis=False)(*arrays)
    expected = expected_sum("gspo", "length", *[x.reshape(SHAPE) for x in arrays])
    assert scaled_error(value, expected) > 100 * ERROR
    assert int(count) == 8 * DOCUMENTS


def test_two_mesh_axes_of_which_one_cuts_documents():
    """Two data ranks with their own documents, each cut over two shards; the count is a plain int on every rank."""
    new, old, advantages, mask, ids = case(seed=3)
    ids = np.int32([[0, 0, 1, 1, 2, 2], [3, 3, 3, 3, 4, 4], [0, 0, 0, 0, 1, 1], [2, 3, 3, 3, 3, 3]])
    per_rank = 5  # of the second rank, one document is not here at all
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "sequence"))

    def local(new, old, advantages, mask, ids):
        return policy_loss(
            new,
            old,
            advantages,
            mask,
            kind="gspo",
            document_ids=ids,
            num_documents=per_rank,
            document_axis_name="sequence",
        ).psum(("data", "sequence"))

    specs = (P("data", "sequence"),) * 5
    result = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()))(new, old, advantages, mask, ids)
    global_ids = ids + np.repeat([0, per_rank], 2)[:, None]
    expected = expected_sum("gspo", "length", new, old, advantages, mask, global_ids)
    assert scaled_error(result.sum, expected) < ERROR
    assert int(result.count) == 2 * per_rank
