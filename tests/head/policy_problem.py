"""Tokens of a policy loss on a linear head, for linear_policy_loss and the two steps that it replaces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxlogp import linear_log_probs, linear_policy_loss, policy_loss
from tests import oracle
from tests.head import cases

ROWS, LENGTH, HIDDEN, VOCAB = 4, 12, 16, 41
# The third document begins in the second row and ends in the third; the last has no label.
DOCUMENTS = (9, 3, 20, 4, 5, 7)
OPTIONS = {"temperature": 0.7, "logit_scale": 1.3, "softcap": 5.0}
HEAD = ("hidden", "weight", "bias")
LABELS = ("targets", "old", "advantages", "mask", "ref", "ids", "penalized")


def problem(
    tokens=(ROWS, LENGTH), hidden_size=HIDDEN, vocab=VOCAB, *, options=OPTIONS, bias=True, dtype=jnp.float32, seed=0
):
    """A case with old and reference log-probs near the policy's own, documents, and garbage where masked."""
    data = cases.case(tokens, hidden_size, vocab, dtypes=dtype, bias=jnp.float32 if bias else None, seed=seed)
    rng = np.random.default_rng(seed + 100)
    count = int(np.prod(tokens))
    ids = np.resize(np.repeat(np.arange(len(DOCUMENTS), dtype=np.int32), DOCUMENTS), count).reshape(tokens)
    mask = (rng.random(tokens) < 0.6) & (ids != len(DOCUMENTS) - 1)
    mask.flat[:2] = True
    head = oracle.Head(**options)
    log_probs, _ = oracle.head_log_probs(data["hidden"], data["weight"], data["targets"], mask, data["bias"], head)

    def garbage_where_masked(values):
        return jnp.asarray(np.where(mask, values, rng.choice([np.nan, np.inf, -1e30], tokens)), jnp.float32)

    return {
        **{name: data[name] for name in ("weight", "bias", "targets")},
        "hidden": jnp.where(mask[..., None], data["hidden"], np.nan),
        "mask": jnp.asarray(mask),
        "old": garbage_where_masked(log_probs + rng.normal(0.0, 0.3, tokens)),
        "ref": garbage_where_masked(log_probs + rng.normal(0.0, 0.3, tokens)),
        "advantages": garbage_where_masked(rng.normal(size=tokens)),
        "ids": jnp.asarray(ids),
        "penalized": jnp.asarray(rng.random(tokens) < 0.5),
    }


def of_the_loss(data, loss):
    """Those arguments by keyword that the loss needs."""
    arguments = {"ref_log_probs": data["ref"]} if loss.kl_coefficient else {}
    if loss.drift_coefficient:
        arguments["penalized"] = data["penalized"]
    if loss.entropy_weights == "labels":
        arguments["labels_per_document"] = jnp.sum(data["mask"]).astype(jnp.float32) / len(DOCUMENTS)
    return arguments | ({"document_ids": data["ids"], "num_documents": len(DOCUMENTS)} if loss.needs_documents else {})


def one_call(data, loss, engine="chunked", **options):
    """(WeightedSum, values) of linear_policy_loss."""
    operands = (data[name] for name in ("hidden", "weight", "targets", "old", "advantages", "mask"))
    arguments = {"loss": loss, "bias": data["bias"], "engine": engine, **of_the_loss(data, loss), **options}
    return linear_policy_loss(*operands, **arguments)


def two_calls(data, loss, engine="reference", **options):
    """The same by linear_log_probs and policy_loss."""
    document_axis = options.pop("document_axis_name", None)
    options = {"with_entropy": loss.entropy_coefficient != 0.0, **options, "engine": engine}
    operands = data["hidden"], data["weight"], data["targets"]
    values = linear_log_probs(*operands, mask=data["mask"], bias=data["bias"], **options)
    arguments = {"loss": loss, "document_axis_name": document_axis, **of_the_loss(data, loss)}
    old, advantages, mask = (data[name] for name in ("old", "advantages", "mask"))
    return policy_loss(values.log_probs, old, advantages, mask, entropy=values.entropy, **arguments), values


def differentiated(data, function):
    """(loss, values, gradients of 3 mean) where ``function`` takes a problem."""

    def objective(*operands):
        loss, values = function({**data, **dict(zip(HEAD, operands, strict=True))})
        return 3.0 * loss.mean(), (loss, values)

    gradients, (loss, values) = jax.grad(objective, (0, 1, 2), has_aux=True)(*(data[name] for name in HEAD))
    return loss, values, oracle.HeadGradients(*gradients)


@functools.partial(jax.jit, static_argnames=("function", "loss", "options"))
def _program(data, *, function, loss, options):
    return differentiated(data, lambda problem: function(problem, loss, **dict(options)))


def run(function, data, loss, **options):
    """:func:`differentiated`, compiled once for a loss and its options."""
    return _program(data, function=function, loss=loss, options=tuple(options.items()))


def compare(actual, wanted, value_error=1e-5, gradient_error=1e-5):
    """The loss, log-probs, entropies where both have them, and gradients are the same."""
    loss, values, gradients = actual
    wanted_loss, wanted_values, wanted_gradients = wanted
    assert oracle.scaled_error(loss.sum, wanted_loss.sum) < 10 * value_error
    np.testing.assert_array_equal(loss.count, wanted_loss.count)
    for name in ("log_probs", "entropy"):
        one, other = getattr(values, name), getattr(wanted_values, name)
        if one is not None and other is not None:
            assert oracle.scaled_error(one, oracle.f64(other)) < value_error, name
    for name, gradient in gradients._asdict().items():
        want = getattr(wanted_gradients, name)
        if gradient is not None:
            assert gradient.dtype == want.dtype
            error = oracle.relative_error(gradient, oracle.f64(want))
            assert error < gradient_error, f"{name}: {error}"
