"""Bad input of a policy loss: a ValueError that names the argument, what was expected and what was seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    "num_documents a vector": ({"num_documents": np.array([5])}, "num_documents", "(1,)"),
    "num_documents a float": ({"num_documents": 5.0}, "num_documents", "float"),
    "num_documents a bool": ({"num_documents": True}, "num_documents", "bool True"),
    "num_documents a list": ({"num_documents": [5]}, "num_documents", "list [5]"),
    "num_documents missing": ({"num_documents": None}, "num_documents", "None"),
    "document_ids missing": ({"document_ids": None}, "document_ids", "None"),
    "both missing": ({"document_ids": None, "num_documents": None}, "document_ids", "None"),
    "entropy missing": ({"entropy": None}, "entropy", "None"),
    "lse missing": ({"loss": gspo(z_loss_coefficient=0.1)}, "lse", "None"),
    "labels_per_document missing": (
        {"loss": gspo(entropy_coefficient=0.1, entropy_weights="labels")},
        "labels_per_document",
        "None",
    ),
    "ref_log_probs missing": ({"ref_log_probs": None}, "ref_log_probs", "None"),
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
        loss_tokens(gspo(), **given)
