"""Documents of tokens: sums and means over whole documents, also if a mesh axis splits the documents."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxlogp._arrays import INT32_MAX, AnyArray, as_int32
from jaxlogp._compat import axis_tuple, refuse_unchecked_gradient, union_of_varying_axes, vary_over, varying_axes
from jaxlogp.errors import describe, is_concrete, require, require_integer
from jaxlogp.losses.inputs import flat, is_array


# JAX rebuilds it with leaves that are not arrays (sentinels, None), so functions check the fields that they use.
@no_type_check
@partial(
    jax.tree_util.register_dataclass,
    data_fields=["document_ids", "outside", "labels", "num_documents"],
    meta_fields=["axis_name"],
)
@dataclass(frozen=True)
class DocumentLayout:
    """The documents of flat tokens.

    Attributes:
        document_ids: int32 [tokens], inside [0, documents); also for tokens without a label, where it means nothing.
        outside: bool [tokens], True for labels whose document id was out of range. They belong to no document and turn
            every sum that they enter into NaN.
        labels: int32 [documents], number of labels of each whole document.
        num_documents: int32 scalar, at most the static size of `labels`.
        axis_name: mesh axis (or axes) of an enclosing `shard_map` over which documents are split, or None.
    """

    document_ids: Int[AnyArray, " tokens"]
    outside: Bool[AnyArray, " tokens"]
    labels: Int[AnyArray, " documents"]
    num_documents: Int[AnyArray, ""]
    axis_name: str | tuple[str, ...] | None

    def sum_of(self, values: Float[AnyArray, " tokens"]) -> Float[Array, " documents"]:
        """Sums `values` over each whole document."""
        # Added, not selected, so that the gradient with respect to such a label is NaN as well.
        values = values + jnp.where(self.outside, jnp.nan, 0.0).astype(values.dtype)
        sums = jax.ops.segment_sum(values, self.document_ids, num_segments=self.labels.shape[0])
        axes = axis_tuple(self.axis_name)
        return lax.psum(refuse_unchecked_gradient(sums, axes), axes) if axes else sums

    def mean_of(self, values: Float[AnyArray, " tokens"]) -> Float[Array, " documents"]:
        """Averages `values`, which are 0 where masked, over the labels of each document; 0 without labels."""
        return self.sum_of(values) / jnp.maximum(self.labels, 1).astype(values.dtype)

    def with_labels(self, mask: Bool[AnyArray, " tokens"]) -> "DocumentLayout":
        """Returns the same documents with the labels of another mask."""
        counted = mask & ~self.outside
        labels = _count_labels(counted, self.document_ids, self.labels.shape[0], self.axis_name)
        return dataclasses.replace(self, labels=labels)

    def label_weights(self, mask: Bool[AnyArray, " tokens"], dtype: jnp.dtype) -> Float[Array, " tokens"]:
        """Returns 1 / N_d for the labels of document d, 0 where masked, NaN for a label of no document."""
        weights = 1.0 / jnp.maximum(self.labels, 1).astype(dtype)
        weights = jnp.where(mask, weights[self.document_ids], 0.0)
        return jnp.where(self.outside, jnp.nan, weights)

    def counted_once(self, count: Int[AnyArray, ""]) -> Int[Array, ""]:
        """Returns `count` on the first shard of the documents' axis and 0 on the others, so that a psum counts it once."""
        if self.axis_name is None:
            return count
        return jnp.where(lax.axis_index(self.axis_name) == 0, count, jnp.zeros_like(count))


def document_layout(
    mask: Bool[AnyArray, "*tokens"],
    document_ids: Integer[AnyArray, "*tokens"] | None,
    num_documents: int | np.integer | Integer[AnyArray, ""] | None,
    axis_name: str | tuple[str, ...] | None,
) -> DocumentLayout | None:
    """Returns the checked `DocumentLayout` of flat tokens, or None without `document_ids`.

    Raises:
        ValueError: if one of `document_ids` and `num_documents` is given without the other, a shape or dtype is wrong, the
            number of documents is negative, or a label has a document id outside [0, num_documents).
    """
    if document_ids is None:
        require(num_documents is None, "document_ids", "document ids along with num_documents", None)
        return None
    require(num_documents is not None, "num_documents", "the number of documents along with document_ids", None)
    require(is_array(document_ids), "document_ids", "an array of an integer dtype", describe(document_ids))
    require_integer(document_ids, "document_ids")
    require(document_ids.shape == mask.shape, "document_ids", f"shape {mask.shape} of mask", document_ids.shape)
    static = isinstance(num_documents, int | np.integer) and not isinstance(num_documents, bool)
    if not static:
        require(is_array(num_documents), "num_documents", "an integer or an integer array", describe(num_documents))
        require_integer(num_documents, "num_documents")
        require(num_documents.shape == (), "num_documents", "a scalar", f"shape {num_documents.shape}")
    if not static:
        # A count of this rank varies over the axes that its tokens vary over, and a psum adds the counts up.
        same = union_of_varying_axes(mask, document_ids) - set(axis_tuple(axis_name)) - varying_axes(num_documents)
        axes = sorted(map(str, same))
        expected = f"the documents of this rank (an int where all have as many), or document_axis_name={axes}"
        require(not same, "num_documents", expected, "an array that is the same on all of them")
    shards = 1 if axis_name is None else lax.psum(1, axis_name)
    capacity = max(int(num_documents), 1) if static else mask.size * shards
    _check_document_values(mask, document_ids, num_documents, capacity)

    total = as_int32(num_documents)
    mask, ids = flat(mask), flat(as_int32(document_ids))
    # JAX silently drops segment ids that are too large and wraps negative ones; clamped ids do neither.
    clamped = jnp.clip(ids, 0, jnp.maximum(jnp.minimum(total, capacity) - 1, 0))
    outside = mask & ((clamped != ids) | (total < 1))
    labels = _count_labels(mask & ~outside, clamped, capacity, axis_name)
    # A count must vary over the axes of the tokens for a psum over them to add it up.
    total = vary_over(total, union_of_varying_axes(mask, ids))
    return DocumentLayout(clamped, outside, labels, total, axis_name)


def _count_labels(
    mask: Bool[AnyArray, " tokens"],
    document_ids: Int[AnyArray, " tokens"],
    capacity: int,
    axis_name: str | tuple[str, ...] | None,
) -> Int[Array, " documents"]:
    labels = jax.ops.segment_sum(mask.astype(jnp.int32), document_ids, num_segments=capacity)
    return labels if axis_name is None else lax.psum(labels, axis_name)


def with_rows(
    mask: Bool[AnyArray, "*tokens"],
    document_ids: Integer[AnyArray, "*tokens"] | None,
    num_documents: int | np.integer | Integer[AnyArray, ""] | None,
) -> tuple[Integer[AnyArray, "*tokens"] | None, int | np.integer | Integer[AnyArray, ""] | None]:
    """Returns document ids and their number: those given, otherwise the rows of a two-dimensional mask."""
    if document_ids is not None or num_documents is not None or mask.ndim != 2:
        return document_ids, num_documents
    return np.broadcast_to(np.arange(mask.shape[0], dtype=np.int32)[:, None], mask.shape), mask.shape[0]


def _check_document_values(
    mask: Bool[AnyArray, "*tokens"],
    document_ids: Integer[AnyArray, "*tokens"],
    num_documents: int | np.integer | Integer[AnyArray, ""],
    capacity: int,
) -> None:
    if not is_concrete(num_documents):
        return
    total = int(num_documents)
    require(0 <= total <= capacity, "num_documents", f"a number in [0, {capacity}]", total)
    require(total <= INT32_MAX, "num_documents", f"at most {INT32_MAX}, for an int32 count", total)
    if not is_concrete(mask, document_ids):
        return
    labels, ids = np.asarray(mask), np.asarray(document_ids)
    require(total > 0 or not labels.any(), "num_documents", "at least 1 where there are labels", total)
    bad = labels & ((ids < 0) | (ids >= total))
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        require(False, "document_ids", f"ids in [0, {total}) at every label", f"{ids[first]} at position {first}")
