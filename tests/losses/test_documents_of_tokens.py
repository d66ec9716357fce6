"""Document ids of every integer dtype, traced ids out of range, and the label counts of documents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp.losses import Rejection, grpo, grpo_paper, gspo, policy_loss, reinforce, sapo
from jaxlogp.losses.documents import as_int32, document_layout
from jaxlogp.policy.metrics import policy_metrics
from tests import oracle
from tests.losses.policy_case import DOCUMENTS, case

pytestmark = pytest.mark.costly

DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
LOSSES = {"grpo": grpo(), "grpo_paper": grpo_paper(), "gspo": gspo(), "reinforce": reinforce()}


@functools.partial(jax.jit, static_argnames="loss")
def traced(given, ids, num_documents, *, loss):
    def total(new):
        options = {"loss": loss, "document_ids": ids, "num_documents": num_documents}
        metrics = policy_metrics(new, given.old, given.advantages, given.mask, **options)
        return policy_loss(new, given.old, given.advantages, given.mask, **options).sum, metrics

    (value, metrics), gradient = jax.value_and_grad(total, has_aux=True)(given.new)
    return value, gradient, metrics


def many_documents(dtype):
    """300 documents of two tokens, those in the middle without labels; ids up to what `dtype` holds, at most 299."""
    rng = np.random.default_rng(0)
    last = min(np.iinfo(dtype).max, 299)
    ids = np.concatenate([np.repeat(np.arange(60), 2), np.repeat(np.arange(last - 59, last + 1), 2)])
    new, old, advantages = rng.normal(size=(3, 240)).astype(np.float32)
    return (new - 9, old - 9, advantages, rng.random(240) < 0.8), ids


@pytest.mark.parametrize("dtype", DTYPES)
def test_ids_of_any_integer_dtype_give_the_same_loss_whatever_the_number_of_documents(dtype):
    """300 documents do not fit int8 and uint8: neither the number nor an id may wrap."""
    tokens, ids = many_documents(dtype)
    options = {"loss": gspo(), "num_documents": 300}
    expected = policy_loss(*tokens, document_ids=ids.astype(np.int32), **options)
    with jax.enable_x64(dtype.endswith("64")):
        for narrow in (ids.astype(dtype), jnp.asarray(ids.astype(dtype))):
            result = policy_loss(*tokens, document_ids=narrow, **options)
            assert float(result.sum) == float(expected.sum) and int(result.count) == 300
        run = jax.jit(lambda ids: policy_loss(*tokens, document_ids=ids, **options).sum)
        # 120 documents of ratios below exp of their larger log-ratio, or clipped, times the larger advantage: Σ|x| < 560.
        bound = oracle.fp32_bound(560.0, 120)
        assert float(run(ids.astype(dtype))) == pytest.approx(float(expected.sum), abs=bound)
        metrics = policy_metrics(*tokens, document_ids=ids.astype(dtype), **options)
        assert int(metrics["num_documents"]) == 300 and int(metrics["num_tokens"]) == tokens[3].sum()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
def test_the_number_of_documents_may_have_any_integer_dtype(dtype):
    given = case()
    with jax.enable_x64(dtype.endswith("64")):
        value, _, metrics = traced(given, given.ids, np.asarray(DOCUMENTS, dtype), loss=gspo())
    expected, *_ = traced(given, given.ids, np.int32(DOCUMENTS), loss=gspo())
    assert float(value) == float(expected) and int(metrics["num_documents"]) == DOCUMENTS


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("bad_id", "count"), [(-1, DOCUMENTS), (DOCUMENTS, DOCUMENTS), (2, 0), (30, 40)])
def test_a_traced_label_outside_all_documents_is_not_silently_dropped(name, bad_id, count):
    """Values of traced ids cannot be checked, so the loss says it: NaN (40 documents do not fit 24 tokens either)."""
    given = case()
    ids = given.ids.copy()
    ids[0, 0] = bad_id
    value, gradient, metrics = traced(given, ids, np.int32(count), loss=LOSSES[name])
    assert np.isnan(value) and np.isnan(gradient[0, 0]) and np.isnan(metrics["new_logprobs"])


@pytest.mark.parametrize("rejection", [None, Rejection(token=(0.0, 2.0))], ids=["", "with a rejection"])
def test_a_label_outside_leaves_the_weights_of_other_documents_alone(rejection):
    """It is counted with none of them, so their gradients stay right. Without a sampler no label is rejected."""
    given, loss = case(), sapo(rejection=rejection)
    ids = given.ids.copy()
    ids[0, 0] = DOCUMENTS + 3
    _, gradient, _ = traced(given, ids, np.int32(DOCUMENTS), loss=loss)
    mask = given.mask.copy()
    mask[0, 0] = False
    _, expected, _ = traced(given._replace(mask=mask), given.ids, np.int32(DOCUMENTS), loss=loss)
    assert np.isnan(gradient[0, 0])
    np.testing.assert_array_equal(np.delete(gradient, 0), np.delete(expected, 0))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("dtype", "bad_id"), [("int64", 2**32 + 3), ("int64", -(2**32) + 1), ("uint32", 2**32 - 1)])
def test_an_id_beyond_32_bits_is_not_read_as_a_small_one(name, dtype, bad_id):
    given = case()
    ids = given.ids.astype(dtype)
    ids[0, 0] = bad_id
    with jax.enable_x64(True):
        value, *_ = traced(given, ids, np.int32(DOCUMENTS), loss=LOSSES[name])
    assert np.isnan(value)
    # NumPy's 64 bits without x64: the ids are known, the number of documents is not.
    run = jax.jit(lambda number: traced(given, as_int32(ids), number, loss=LOSSES[name])[0])
    assert np.isnan(run(np.int32(DOCUMENTS)))
    with pytest.raises(ValueError, match=rf"^document_ids: expected ids in \[0, 5\) .* {bad_id} at position \(0, 0\)$"):
        policy_loss(*given[:4], loss=LOSSES[name], document_ids=ids, num_documents=DOCUMENTS)


def test_labels_of_documents_are_counted_exactly():
    mask = np.array([[True, False, True], [True, True, False]])
    ids = np.array([[0, 0, 2], [2, 2, 9]])
    layout = document_layout(mask, ids, 4, None)
    assert layout.labels.tolist() == [1, 0, 3, 0] and layout.labels.dtype == jnp.int32
    assert layout.label_weights(mask.reshape(-1), jnp.dtype(jnp.float32)).tolist() == [1.0, 0.0] + [
        float(np.float32(1 / 3))
    ] * 3 + [0.0]
    assert layout.mean_of(jnp.float32([5, 0, 1, 2, 6, 0])).tolist() == [5.0, 0.0, 3.0, 0.0]
    assert layout.axis_name is None and int(layout.counted_once(layout.num_documents)) == 4


def test_ids_that_int32_cannot_hold_become_minus_one():
    values = [-(2**63), -(2**31), -1, 0, 2**31 - 1, 2**31, 2**32 + 3]
    wanted = [-1, -1, -1, 0, 2**31 - 1, -1, -1]
    assert as_int32(np.array(values, np.int64)).tolist() == wanted
    assert as_int32(np.array([0, 2**31, 2**64 - 1], np.uint64)).tolist() == [0, -1, -1]
    with jax.enable_x64(True):
        assert as_int32(jnp.array(values, jnp.int64)).tolist() == wanted
    assert as_int32(7).tolist() == 7 and as_int32(2**40).tolist() == -1
