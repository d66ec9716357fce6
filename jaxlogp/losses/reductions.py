"""Reductions of label losses to one number: a weight for each label, and the count that divides a whole step.

- "labels": weight 1, count = labels. The mean over all labels of the step.
- "documents": weight 1, count = documents. The sum over each document, averaged.
- "document_mean": weight 1 / N_d, count = documents. The mean over each document's N_d labels, averaged.
- "constant_length": weight 1 / length, count = documents. The sum over each document divided by a constant, averaged.

A document without labels adds nothing to the sum and one to the count.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._arrays import AnyArray
from jaxlogp.losses.documents import DocumentLayout

REDUCTIONS = ("labels", "documents", "document_mean", "constant_length")


def needs_documents(reduction: str) -> bool:
    """Returns True if the reduction counts documents."""
    return reduction != "labels"


def label_weights(
    reduction: str,
    length: int | None,
    mask: Bool[AnyArray, " tokens"],
    layout: DocumentLayout | None,
    dtype: jnp.dtype,
) -> Float[Array, " tokens"]:
    """Returns the weight of each label; 0 where masked, NaN for a label whose document id is out of range."""
    if reduction == "document_mean":
        return layout.label_weights(mask, dtype)
    weight = 1.0 / length if reduction == "constant_length" else 1.0
    weights = jnp.where(mask, jnp.asarray(weight, dtype), 0.0)
    return weights if layout is None else jnp.where(layout.outside, jnp.nan, weights)


def count(reduction: str, mask: Bool[AnyArray, " tokens"], layout: DocumentLayout | None) -> Int[Array, ""]:
    """Returns the count for the sum over this part of a step: its labels, or its documents."""
    if needs_documents(reduction):
        return layout.counted_once(layout.num_documents)
    return jnp.sum(mask, dtype=jnp.int32)
