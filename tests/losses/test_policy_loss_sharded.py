"""Documents that are split over the ranks of a sequence axis: the loss of whole documents, counted once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlogp.losses import gmpo, grpo, grpo_paper, gspo, gspo_token, policy_loss, reduce_losses, vespo
from jaxlogp.policy.metrics import policy_metrics
from tests.losses.policy_case import DOCUMENTS, ERROR, case, expected_count, expected_gradient, scaled_error, sum_error

LOSSES = {"gspo by length": gspo(weighting="length"), "gspo": gspo(epsilon=0.2), "grpo_paper": grpo_paper()}
LOSSES |= {"gmpo": gmpo(), "vespo": vespo()}
LOSSES["gspo_token"] = gspo_token(epsilon=0.2, epsilon_high=0.2)


def sequence_mesh():
    return Mesh(np.array(jax.devices()[:8]), ("sequence",))


def flat(given):
    return tuple(x.reshape(-1) for x in given[:5])


@functools.lru_cache
def sharded_loss(name, inside, with_axis=True, check_vma=True):
    """Loss sum, count and gradient of documents cut over 8 devices, the gradient taken inside or outside."""
    axis = "sequence" if with_axis else None

    def local(new, old, advantages, mask, ids):
        number = jnp.int32(DOCUMENTS) if with_axis else DOCUMENTS
        options = {"document_ids": ids, "num_documents": number, "document_axis_name": axis}
        return policy_loss(new, old, advantages, mask, loss=LOSSES[name], **options)

    def gradient_inside(new, *rest):
        (value, count), gradient = jax.value_and_grad(
            lambda x: (lambda result: (result.sum, result.count))(local(x, *rest)), has_aux=True
        )(new)
        return jax.lax.psum(value, "sequence"), jax.lax.psum(count, "sequence"), gradient

    def reduced(*arrays):
        result = local(*arrays).psum("sequence")
        return result.sum, result.count

    mesh, specs = sequence_mesh(), (P("sequence"),) * 5
    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, check_vma=check_vma)
    if inside is None:
        return jax.jit(mapped(reduced, out_specs=(P(), P())))
    if inside:
        return jax.jit(mapped(gradient_inside, out_specs=(P(), P(), P("sequence"))))

    def gradient_outside(new, *rest):
        (value, count), gradient = jax.value_and_grad(mapped(reduced, out_specs=(P(), P())), has_aux=True)(new, *rest)
        return value, count, gradient

    return jax.jit(gradient_outside)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("inside", [True, False], ids=["grad inside", "grad outside"])
def test_documents_cut_over_ranks_give_the_loss_of_whole_documents_once(name, inside):
    given = case(seed=2)
    value, count, gradient = sharded_loss(name, inside)(*flat(given))
    assert sum_error(value, LOSSES[name], given) < ERROR
    assert scaled_error(gradient, expected_gradient(LOSSES[name], given).reshape(-1)) < ERROR
    assert int(count) == expected_count(LOSSES[name], given), "documents are counted once, not once per shard"


def test_without_the_document_axis_the_cut_is_noticed():
    """The control of the test above: shards that know only their own part of a document get another loss."""
    given = case(seed=2)
    value, count, _ = sharded_loss("gspo by length", True, with_axis=False)(*flat(given))
    assert sum_error(value, LOSSES["gspo by length"], given) > 100 * ERROR
    assert int(count) == 8 * DOCUMENTS


@pytest.mark.parametrize("inside", [True, False], ids=["grad inside", "grad outside"])
@pytest.mark.parametrize("name", ["gspo by length", "gspo"])
@pytest.mark.bad_input
def test_document_sums_without_replication_types_are_not_differentiated(name, inside):
    """check_vma=False makes a psum its own transpose: the gradient would be too large by the number of shards."""
    given = case(seed=2)
    with pytest.raises(ValueError, match=r"^axis_name: expected shard_map\(check_vma=True\) .*'sequence', got"):
        sharded_loss(name, inside, check_vma=False)(*flat(given))
    value, count = sharded_loss(name, None, check_vma=False)(*flat(given))
    assert sum_error(value, LOSSES[name], given) < ERROR, "values need no replication types"
    assert int(count) == DOCUMENTS


def test_metrics_of_cut_documents_may_stand_beside_a_gradient_without_replication_types():
    """Nothing is differentiated through them."""
    given = case(seed=2)

    def local(new, old, advantages, mask, ids):
        options = {"document_ids": ids, "num_documents": jnp.int32(DOCUMENTS), "document_axis_name": "sequence"}

        def total(x):
            metrics = policy_metrics(x, old, advantages, mask, loss=gspo(), axis_name="sequence", **options)
            return jnp.sum(jnp.where(mask, x, 0.0)), metrics["ratio_new_old"]

        gradient, metric = jax.grad(total, has_aux=True)(new)
        return gradient, metric

    specs = (P("sequence"),) * 5
    mapped = jax.shard_map(local, mesh=sequence_mesh(), in_specs=specs, out_specs=(P("sequence"), P()), check_vma=False)
    gradient, metric = jax.jit(mapped)(*flat(given))
    np.testing.assert_array_equal(gradient, given.mask.reshape(-1).astype(np.float32))
    assert np.isfinite(metric)


def test_two_mesh_axes_of_which_one_cuts_documents():
    """Two data ranks with their own documents, each cut over two shards; the count is a plain int on every rank."""
    given = case(seed=3)
    ids = np.int32([[0, 0, 1, 1, 2, 2], [3, 3, 3, 3, 4, 4], [0, 0, 0, 0, 1, 1], [2, 3, 3, 3, 3, 3]])
    per_rank = 5  # of the second rank, one document is not here at all
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "sequence"))
    loss = gspo(weighting="length")

    def local(new, old, advantages, mask, ids):
        options = {"document_ids": ids, "num_documents": per_rank, "document_axis_name": "sequence"}
        result = policy_loss(new, old, advantages, mask, loss=loss, **options)
        reduced = reduce_losses(new, mask, loss=grpo_paper(), **options)
        return tuple(each.psum(("data", "sequence")) for each in (result, reduced))

    specs = (P("data", "sequence"),) * 5
    arrays = (*given[:4], ids)
    result, reduced = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()))(*arrays)
    global_ids = ids + np.repeat([0, per_rank], 2)[:, None]
    # Your own losses, here the log-probs, are those of whole documents too.
    new, of_labels = np.float64(given.new[given.mask]), global_ids[given.mask]
    means = [new[of_labels == document].mean() for document in np.unique(of_labels)]
    assert abs(float(reduced.sum) - sum(means)) < ERROR * np.abs(new).max() and int(reduced.count) == 2 * per_rank
    assert sum_error(result.sum, loss, given._replace(ids=global_ids)) < ERROR
    assert int(result.count) == 2 * per_rank


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("spec", [P("data"), P("data", "tensor"), P(None, "tensor")])
def test_arrays_that_a_mesh_splits_need_no_shard_map(axis_type, spec):
    given = case(seed=5)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)
    arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x in given[:5]]
    for loss in (grpo(), grpo_paper(), gspo(epsilon=0.2), LOSSES["gspo_token"]):

        def total(new, rest, loss=loss):
            old, advantages, mask, ids = rest
            options = {"document_ids": ids, "num_documents": DOCUMENTS}
            metrics = policy_metrics(new, old, advantages, mask, loss=loss, **options)
            return policy_loss(new, old, advantages, mask, loss=loss, **options).sum, metrics["num_tokens"]

        (value, labels), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(arrays[0], arrays[1:])
        assert sum_error(value, loss, given) < ERROR and int(labels) == given.mask.sum()
        assert scaled_error(gradient, expected_gradient(loss, given)) < ERROR
