"""Bad input of a policy loss: a ValueError that names the argument, what was expected and what was seen."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import Document, linear_policy_loss
from jaxlogp.head.projection import HeadSpec
from jaxlogp.losses import grpo, gspo, loss_tokens, policy_loss, weighted_losses
from tests.losses.policy_case import DOCUMENTS, SHAPE, case

GOOD = {
    "log_probs": np.zeros(SHAPE, np.float32),
    "old_log_probs": np.zeros(SHAPE, np.float32),
    "advantages": np.ones(SHAPE, np.float32),
    "mask": np.ones(SHAPE, bool),
    "loss": gspo(kl_coefficient=0.1, entropy_coefficient=0.1),
    "entropy": np.ones(SHAPE, np.float32),
    "ref_log_probs": np.zeros(SHAPE, np.float32),
    "document_ids": case().ids,
    "num_documents": DOCUMENTS,
}
ARRAYS = ("log_probs", "old_log_probs", "advantages", "mask", "entropy", "ref_log_probs", "document_ids")
FLOATS = tuple(name for name in ARRAYS if name not in ("mask", "document_ids"))


def with_value(name, value):
    changed = GOOD[name].copy()
    changed[1, 2] = value
    return {name: changed}


EMPTY = {name: GOOD[name][:0] for name in ARRAYS}
BAD = {
    "mask of ints": ({"mask": np.ones(SHAPE, np.int32)}, "mask", "int32"),
    "document_ids of floats": ({"document_ids": np.zeros(SHAPE, np.float32)}, "document_ids", "float32"),
    "document_ids of bools": ({"document_ids": np.zeros(SHAPE, bool)}, "document_ids", "bool"),
    "no token": (EMPTY, "mask", "(0, 6)"),
    "a name in place of the loss": ({"loss": "grpo"}, "loss", "'grpo'"),
    "a preset that was not called": ({"loss": grpo}, "loss", "function grpo"),
    "num_documents negative": ({"num_documents": -1}, "num_documents", "-1"),
    "num_documents 0 with labels": ({"num_documents": 0}, "num_documents", "0"),
    "num_documents above the tokens": ({"num_documents": np.array(25)}, "num_documents", "25"),
    "num_documents beyond int32": ({"num_documents": 2**31}, "num_documents", "2147483648"),
    "a sampler without an old policy": (
        {"old_log_probs": None, "sampler_log_probs": GOOD["old_log_probs"]},
        "old_log_probs",
        "None",
    ),
    "num_documents a vector": ({"num_documents": np.array([5])}, "num_documents", "(1,)"),
    "num_documents a float": ({"num_documents": 5.0}, "num_documents", "float"),
    "num_documents a bool": ({"num_documents": True}, "num_documents", "bool True"),
    "num_documents a list": ({"num_documents": [5]}, "num_documents", "list [5]"),
    "num_documents missing": ({"num_documents": None}, "num_documents", "None"),
    "document_ids missing": ({"document_ids": None}, "document_ids", "None"),
    "entropy missing": ({"entropy": None}, "entropy", "None"),
    "lse missing": ({"loss": gspo(z_loss_coefficient=0.1)}, "lse", "None"),
    "labels_per_document missing": (
        {"loss": gspo(entropy_coefficient=0.1, entropy_weights="labels")},
        "labels_per_document",
        "None",
    ),
    **{
        f"{name} {value!r}": ({name: value}, name, seen)
        for name in ("labels_per_document", "mean_weight", "entropy_scale")
        for value, seen in ((np.nan, "nan"), (np.float32(np.inf), "inf"), ("1", "'1'"), (True, "True"), ([1.0], "[1"))
    },
    "labels_per_document negative": ({"labels_per_document": -1.0}, "labels_per_document", "-1.0"),
    "mean_weight negative": ({"mean_weight": np.float32(-1.0)}, "mean_weight", "-1.0"),
    "ref_log_probs missing": ({"ref_log_probs": None}, "ref_log_probs", "None"),
    "a positive old log-prob": (with_value("old_log_probs", 0.3), "old_log_probs", "0.3"),
    "a positive reference": (with_value("ref_log_probs", 0.3), "ref_log_probs", "0.3"),
    "label with id -1": (with_value("document_ids", -1), "document_ids", "-1 at position (1, 2)"),
    "label with id M": (with_value("document_ids", DOCUMENTS), "document_ids", "5 at position (1, 2)"),
    **{f"{name} a list": ({name: GOOD[name].tolist()}, name, "list [[") for name in ARRAYS},
    **{f"{name} of another shape": ({name: GOOD[name][:, :5]}, name, "(4, 5)") for name in ARRAYS if name != "mask"},
    **{f"{name} of ints": ({name: np.zeros(SHAPE, np.int32)}, name, "int32") for name in FLOATS},
    **{f"{name} NaN": (with_value(name, np.nan), name, "nan at position (1, 2)") for name in FLOATS},
    **{f"{name} infinite": (with_value(name, -np.inf), name, "-inf at position (1, 2)") for name in FLOATS},
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.bad_input
def test_bad_input_names_the_argument_and_what_was_seen(name):
    changes, argument, seen = BAD[name]
    with pytest.raises(ValueError) as raised:
        policy_loss(**{**GOOD, **changes})
    message = str(raised.value)
    assert message.startswith(f"{argument}: expected ") and seen in message.partition(", got ")[2], message


def test_log_probs_above_0_by_the_rounding_of_their_dtype_are_good():
    for dtype, value in ((jnp.bfloat16, 0.25), (jnp.float32, 7e-6)):
        policy_loss(**GOOD | {"old_log_probs": np.full(SHAPE, value, dtype)})
    # The mean of a step in which every weight is 0.
    policy_loss(**GOOD | {"mean_weight": 0.0, "labels_per_document": 0.0})


def test_the_good_arguments_are_good():
    """The control: nothing else is wrong with the arguments above."""
    assert int(policy_loss(**GOOD).count) == DOCUMENTS


@pytest.mark.bad_input
def test_shapes_are_checked_under_jit():
    with pytest.raises(ValueError, match="^advantages: expected shape"):
        jax.jit(lambda a: policy_loss(**{**GOOD, "advantages": a}).sum)(np.zeros(6, np.float32))


@pytest.mark.bad_input
def test_the_two_halves_refuse_what_the_whole_refuses():
    given = {name: GOOD[name] for name in ("old_log_probs", "advantages", "mask")}
    loss = grpo(entropy_coefficient=0.1)
    tokens, _ = loss_tokens(loss, **given)
    with pytest.raises(ValueError, match="^entropy: expected entropies for entropy_coefficient 0.1, got None"):
        weighted_losses(loss, jnp.zeros(24), tokens)
    for changes, argument in (({"advantages": [1.0]}, "advantages"), ({"mask": [True]}, "mask")):
        with pytest.raises(ValueError, match=f"^{argument}: expected"):
            loss_tokens(loss, **{**given, **changes})
    with pytest.raises(ValueError, match="^document_ids: expected .* for loss 'gspo', got None"):
        loss_tokens(gspo(), **{name: values.ravel() for name, values in given.items()})


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: grpo(beta=0.04),
            "beta: expected an option of grpo, got an unknown name: did you mean kl_coefficient?",
        ),
        (lambda: gspo(epsilom=0.1), "epsilom: expected an option of gspo, got an unknown name: did you mean epsilon?"),
        (
            lambda: linear_policy_loss(entropy_coefficient=0.1),
            "entropy_coefficient: expected an option of linear_policy_loss, got an option of the loss: did you mean "
            "loss=grpo(entropy_coefficient=0.1)?",
        ),
        (
            lambda: Document.of_completion([1], [1], [0.0], advantages=np.ones(2)),
            "advantages: expected shape (1,) of the labels, got (2,)",
        ),
        (
            lambda: Document.of_completion([1], [1], [1.0]),
            "sampler_log_probs: expected log-probs of at most 0, got 1.0",
        ),
    ],
)
def test_a_likely_mistake_is_named(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


@pytest.mark.bad_input
def test_the_number_of_documents_of_all_ranks_is_refused_where_types_tell():
    """Each rank has one of two documents: the psum of the count 2 would be 4, and the loss half of what it should be."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    tokens = np.full((2, 3), -1.0, np.float32), np.arange(2, dtype=np.int32)[:, None].repeat(3, 1)

    def mean(counts, values, ids):
        options = {"loss": gspo(), "document_ids": ids, "num_documents": counts}
        return policy_loss(values, values, values, values < 0, **options).psum("data").mean()

    def run(spec, function, counts):
        specs = spec, jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec("data")
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=jax.sharding.PartitionSpec())(
            counts, *tokens
        )

    with pytest.raises(ValueError, match="^num_documents: expected the documents of this rank .*'data'"):
        run(jax.sharding.PartitionSpec(), mean, np.int32(2))
    of_ranks = jax.jit(lambda counts: run(specs_of_ranks, lambda x, v, i: mean(x[0], v, jnp.zeros_like(i)), counts))
    specs_of_ranks = jax.sharding.PartitionSpec("data")
    assert float(of_ranks(np.ones(2, np.int32))) == 1.0


# Annotations say float, and shape checkers take them at their word.
@pytest.mark.bad_input
def test_a_numpy_scalar_is_a_temperature():
    spec = HeadSpec(temperature=np.float32(0.5), logit_scale=np.int64(2))
    assert spec == HeadSpec(0.5, 2) and type(spec.temperature) is float
