"""Clipped policy-gradient losses over tokens (GRPO) and over documents (GSPO), as unreduced sums.

Every function is safe at masked places: the inputs are selected away before any arithmetic, so NaN, infinity or a huge
value there changes neither a value nor a gradient. Log-ratios are bounded from above before `exp` (`MAX_LOG_RATIO`).

Checks of values (finite inputs, document ids in range) run where the values are known. Under a JAX transformation only
shapes and dtypes can be checked; a NaN at a label then reaches the loss, and a label with a document id out of range
turns the loss of its document into NaN.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._arrays import AnyArray
from jaxlogp.errors import is_concrete, require
from jaxlogp.policy.documents import clamp_document_ids, labels_per_document
from jaxlogp.reduce import WeightedSum

MAX_LOG_RATIO = 30.0
"""Log-ratios above this are treated as this constant, with zero gradient.

exp(30) is about 1e13: the ratio, its square (1e26) and a sum of 1e12 such squares stay finite in fp32. A clipped loss
meets the bound only for negative advantages, where nothing else limits the ratio.
"""

POLICY_KINDS = ("grpo", "gspo")
DOCUMENT_WEIGHTINGS = ("length", "document")


class PolicyTokens(NamedTuple):
    """Per-token inputs of a policy loss, flat, in the compute dtype, and zero where masked.

    `advantages` and the old log-probs inside `log_ratio` are constants: no gradient flows into them.
    """

    log_ratio: Float[AnyArray, " tokens"]
    advantages: Float[AnyArray, " tokens"]
    mask: Bool[AnyArray, " tokens"]


class DocumentLayout(NamedTuple):
    """Which document each token belongs to, with the label counts of the documents.

    `labels` counts the labels of whole documents, `local_labels` those on this shard of the sequence axis; without such
    an axis they are the same. The leading size of both is a static capacity of at least `num_documents`. `outside`
    marks labels whose document id was out of range; they turn their sums and weights into NaN.
    """

    document_ids: Int[AnyArray, " tokens"]
    outside: Bool[AnyArray, " tokens"]
    labels: Int[AnyArray, " documents"]
    local_labels: Int[AnyArray, " documents"]
    num_documents: Int[AnyArray, ""]
    axis_name: str | tuple[str, ...] | None

    def sum_of(self, values: Float[AnyArray, " tokens"]) -> Float[Array, " documents"]:
        """Sum of `values` over each whole document."""
        values = jnp.where(self.outside, jnp.nan, values)
        sums = jax.ops.segment_sum(values, self.document_ids, num_segments=self.labels.shape[0])
        return sums if self.axis_name is None else lax.psum(sums, self.axis_name)

    def counted_once(self, count: Int[AnyArray, ""]) -> Int[Array, ""]:
        """`count` on the first shard of the sequence axis and 0 on the others, so that a psum counts it once."""
        if self.axis_name is None:
            return count
        return jnp.where(lax.axis_index(self.axis_name) == 0, count, jnp.zeros_like(count))


class DocumentRatios(NamedTuple):
    """Mean log-ratio of each document (bounded), its exponential R_d, and the mean advantage A_d.

    A document without labels has R_d = 1 and A_d = 0.
    """

    log_ratio: Float[AnyArray, " documents"]
    ratio: Float[AnyArray, " documents"]
    advantages: Float[AnyArray, " documents"]


class ClipRange(NamedTuple):
    """Bounds of the importance ratio, both included."""

    low: float
    high: float


def policy_loss(
    log_probs: Float[AnyArray, "*tokens"],
    old_log_probs: Float[AnyArray, "*tokens"],
    advantages: Float[AnyArray, "*tokens"],
    mask: Bool[AnyArray, "*tokens"],
    *,
    kind: str = "grpo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    document_ids: Int[AnyArray, "*tokens"] | None = None,
    num_documents: int | np.integer | Int[AnyArray, ""] | None = None,
    document_weighting: str = "length",
    grad_divisor: float | Array | None = None,
    document_axis_name: str | tuple[str, ...] | None = None,
) -> WeightedSum:
    """Unreduced clipped policy loss: a sum and the count that a whole optimizer step divides it by.

    With r_t = exp(log_probs_t - old_log_probs_t) and clip(r) = min(max(r, 1 - epsilon), 1 + epsilon_high):

    - "grpo": sum = -Σ_t m_t min(r_t A_t, clip(r_t) A_t), count = number of labels;
    - "gspo": R_d = exp(Σ_t m_t (log_probs_t - old_log_probs_t) / N_d), A_d = mean of A over the N_d labels of d,
      sum = -Σ_d w_d min(R_d A_d, clip(R_d) A_d) with w_d = N_d ("length") or 1 ("document"), count = num_documents.
      A document without labels adds nothing to the sum and one to the count.

    The gradient passes where A > 0 and r ≤ 1 + epsilon_high, or A < 0 and r ≥ 1 - epsilon, bounds included (R_d and A_d
    in place of r and A for "gspo"); beyond `MAX_LOG_RATIO` it is zero. It reaches `log_probs` alone.

    Args:
        log_probs: [*tokens], log-probs of the targets under the policy in training, in nats.
        old_log_probs: [*tokens], log-probs of the same targets under the sampler, in nats.
        advantages: [*tokens], advantage of each token.
        mask: [*tokens], true where the target is a label.
        kind: "grpo" or "gspo".
        epsilon: distance of the lower bound from 1, in (0, 1).
        epsilon_high: distance of the upper bound from 1, at least 0; `epsilon` when None.
        document_ids: int [*tokens], document index of each token; needed by "gspo". Tokens without a label may hold
            anything.
        num_documents: number of documents that `document_ids` counts. A Python int, or an integer array scalar; an
            array scalar must not exceed the number of tokens.
        document_weighting: "length" or "document", for "gspo".
        grad_divisor: divisor of the gradient of the mean where it differs from that of the reported loss.
        document_axis_name: mesh axis (or axes) of an enclosing `shard_map` over which documents are cut. Then
            `document_ids` and `num_documents` describe whole documents and are the same on every shard, and a psum of
            the result over the axis gives the loss of the whole documents, once.

    Returns:
        The sum (fp32, or float64 for float64 log-probs) and the int32 count of this part of the step.

    Raises:
        ValueError: shapes or dtypes differ from the above, an option is unknown or out of range, a value at a label is
            not finite, or a label has a document id outside [0, num_documents).

    Example:
        >>> import jax.numpy as jnp
        >>> new, old = jnp.log(jnp.array([0.5, 0.3, 0.9])), jnp.log(jnp.array([0.25, 0.3, 0.1]))
        >>> loss = policy_loss(new, old, jnp.array([1.0, -2.0, 5.0]), jnp.array([True, True, False]))
        >>> print(f"{float(loss.sum):.4f} over {int(loss.count)} labels")
        0.8000 over 2 labels

    References:
        DeepSeekMath (GRPO), arXiv:2402.03300; Group Sequence Policy Optimization, arXiv:2507.18071.
    """
    bounds = check_options(kind, epsilon, epsilon_high)
    weightings = DOCUMENT_WEIGHTINGS
    require(document_weighting in weightings, "document_weighting", f"one of {weightings}", repr(document_weighting))
    if grad_divisor is not None and is_concrete(grad_divisor):
        divisor = float(grad_divisor)
        require(math.isfinite(divisor) and divisor > 0, "grad_divisor", "a finite number above 0", divisor)
    tokens = policy_tokens(log_probs, old_log_probs, advantages, mask)
    layout = document_layout(mask, document_ids, num_documents, document_axis_name)
    if kind == "grpo":
        objective = clipped_objective(jnp.exp(bounded(tokens.log_ratio)), tokens.advantages, bounds)
        count = jnp.sum(tokens.mask, dtype=jnp.int32)
        return WeightedSum(-jnp.sum(jnp.where(tokens.mask, objective, 0.0)), count, grad_divisor)

    require(layout is not None, "document_ids", "the document index of each token for kind 'gspo'", None)
    documents = document_ratios(tokens, layout)
    weights = layout.local_labels.astype(documents.ratio.dtype)
    if document_weighting == "document":
        weights = weights / jnp.maximum(layout.labels, 1).astype(weights.dtype)
    objective = clipped_objective(documents.ratio, documents.advantages, bounds)
    total = -jnp.sum(jnp.where(layout.local_labels > 0, weights * objective, 0.0))
    return WeightedSum(total, layout.counted_once(layout.num_documents), grad_divisor)


def log_ratio(
    new: Float[AnyArray, "*tokens"], old: Float[AnyArray, "*tokens"], mask: Bool[AnyArray, "*tokens"]
) -> Float[Array, "*tokens"]:
    """Difference of two log-probs, new - old, in nats; exactly 0 with zero gradient where masked.

    Args:
        new: [*tokens], log-probs in nats.
        old: [*tokens], log-probs in nats.
        mask: [*tokens], true where the result is wanted.

    Returns:
        [*tokens], fp32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes or dtypes differ from the above.
    """
    check_arrays({"new": new, "old": old}, mask)
    dtype = compute_dtype(new, old)
    return _selected(new, mask, dtype) - _selected(old, mask, dtype)


def ratio(
    new: Float[AnyArray, "*tokens"], old: Float[AnyArray, "*tokens"], mask: Bool[AnyArray, "*tokens"]
) -> Float[Array, "*tokens"]:
    """Importance ratio exp(new - old), exactly 0 with zero gradient where masked.

    The log-ratio is bounded by `MAX_LOG_RATIO`, with zero gradient beyond.

    Args:
        new: [*tokens], log-probs in nats.
        old: [*tokens], log-probs in nats.
        mask: [*tokens], true where the result is wanted.

    Returns:
        [*tokens], fp32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes or dtypes differ from the above.
    """
    return jnp.where(mask, jnp.exp(bounded(log_ratio(new, old, mask))), 0.0)


def kl_k3(
    new: Float[AnyArray, "*tokens"], ref: Float[AnyArray, "*tokens"], mask: Bool[AnyArray, "*tokens"]
) -> Float[Array, "*tokens"]:
    """Per-token k3 estimate of KL(new ‖ ref), exp(ref - new) - (ref - new) - 1, in nats.

    Never negative; exactly 0 with zero gradient where masked. ref - new is bounded by `MAX_LOG_RATIO`, with zero
    gradient beyond.

    Args:
        new: [*tokens], log-probs of the sampled tokens under the policy, in nats.
        ref: [*tokens], log-probs of the same tokens under the reference, in nats.
        mask: [*tokens], true where the result is wanted.

    Returns:
        [*tokens], fp32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes or dtypes differ from the above.

    References:
        J. Schulman, "Approximating KL divergence", 2020.
    """
    return k3(bounded(log_ratio(ref, new, mask)))


def k3(log_ratio: Float[AnyArray, "*shape"]) -> Float[Array, "*shape"]:
    """exp(x) - x - 1, without the cancellation of the naive form near 0."""
    return jnp.expm1(log_ratio) - log_ratio


def bounded(log_ratio: Float[AnyArray, "*shape"]) -> Float[Array, "*shape"]:
    """`log_ratio` with values above `MAX_LOG_RATIO` replaced by it; a select, so their gradient is zero."""
    return jnp.where(log_ratio > MAX_LOG_RATIO, MAX_LOG_RATIO, log_ratio)


def clipped_objective(
    ratio: Float[AnyArray, "*shape"], advantages: Float[AnyArray, "*shape"], bounds: ClipRange
) -> Float[Array, "*shape"]:
    """min(r A, clip(r) A), whose gradient passes at the bounds themselves.

    The two branches of a minimum tie inside the bounds, and JAX splits the gradient of a tie; the select does not.
    """
    blocked = ((advantages > 0) & (ratio > bounds.high)) | ((advantages < 0) & (ratio < bounds.low))
    clipped = lax.stop_gradient(jnp.clip(ratio, bounds.low, bounds.high))
    return jnp.where(blocked, clipped, ratio) * advantages


def document_ratios(tokens: PolicyTokens, layout: DocumentLayout) -> DocumentRatios:
    """The ratio and the advantage of whole documents."""
    labels = jnp.maximum(layout.labels, 1).astype(tokens.log_ratio.dtype)
    log_ratio = bounded(layout.sum_of(tokens.log_ratio) / labels)
    return DocumentRatios(log_ratio, jnp.exp(log_ratio), layout.sum_of(tokens.advantages) / labels)


def policy_tokens(
    log_probs: Float[AnyArray, "*tokens"],
    old_log_probs: Float[AnyArray, "*tokens"],
    advantages: Float[AnyArray, "*tokens"],
    mask: Bool[AnyArray, "*tokens"],
) -> PolicyTokens:
    """Checks the per-token inputs and selects the masked places away.

    Raises:
        ValueError: shapes or dtypes differ, no token at all, or a value at a label that is not finite.
    """
    named = {"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages}
    check_arrays(named, mask)
    for name, values in named.items():
        check_finite(name, values, mask)
    new, old, constant = (_selected(values, mask, compute_dtype(log_probs)) for values in named.values())
    log_ratios = new - lax.stop_gradient(old)
    return PolicyTokens(jnp.ravel(log_ratios), lax.stop_gradient(jnp.ravel(constant)), jnp.ravel(jnp.asarray(mask)))


def document_layout(
    mask: Bool[AnyArray, "*tokens"],
    document_ids: Int[AnyArray, "*tokens"] | None,
    num_documents: int | np.integer | Int[AnyArray, ""] | None,
    axis_name: str | tuple[str, ...] | None,
) -> DocumentLayout | None:
    """The checked `DocumentLayout` of flat tokens, or None without `document_ids`.

    Raises:
        ValueError: one of `document_ids` and `num_documents` without the other, a wrong shape or dtype, a negative
            number of documents, or a label with a document id outside [0, num_documents).
    """
    if document_ids is None:
        require(num_documents is None, "document_ids", "document ids along with num_documents", None)
        return None
    require(num_documents is not None, "num_documents", "the number of documents along with document_ids", None)
    mask, document_ids = jnp.asarray(mask), jnp.asarray(document_ids)
    require(document_ids.shape == mask.shape, "document_ids", f"shape {mask.shape} of mask", document_ids.shape)
    require(jnp.issubdtype(document_ids.dtype, jnp.integer), "document_ids", "an integer dtype", document_ids.dtype)
    total = jnp.asarray(num_documents)
    require(total.shape == (), "num_documents", "a scalar", f"shape {total.shape}")
    require(jnp.issubdtype(total.dtype, jnp.integer), "num_documents", "an integer", total.dtype)
    shards = 1 if axis_name is None else lax.psum(1, axis_name)
    static = isinstance(num_documents, int | np.integer)
    capacity = max(int(num_documents), 1) if static else mask.size * shards
    _check_document_values(mask, document_ids, num_documents, capacity)
    total = total.astype(jnp.int32)
    mask, document_ids = jnp.ravel(mask), jnp.ravel(document_ids)
    clamped = clamp_document_ids(document_ids, jnp.minimum(total, capacity))
    local = labels_per_document(mask, clamped, capacity)
    labels = local if axis_name is None else lax.psum(local, axis_name)
    outside = mask & ((clamped != document_ids.astype(jnp.int32)) | (total < 1))
    # Both branches are the same: it makes the count vary over the mesh axes of the tokens, as a psum over them needs.
    total = jnp.where(mask[0] & (document_ids[0] == 0), total, total)
    return DocumentLayout(clamped, outside, labels, local, total, axis_name)


def check_options(kind: str, epsilon: float, epsilon_high: float | None) -> ClipRange:
    """Checks the choice of the loss and gives its clip bounds.

    Raises:
        ValueError: an unknown kind, or an epsilon out of range.
    """
    require(kind in POLICY_KINDS, "kind", f"one of {POLICY_KINDS}", repr(kind))
    require(0.0 < epsilon < 1.0, "epsilon", "a number in (0, 1)", epsilon)
    high = epsilon if epsilon_high is None else epsilon_high
    require(high >= 0.0, "epsilon_high", "a number of at least 0", epsilon_high)
    return ClipRange(1.0 - epsilon, 1.0 + high)


def check_arrays(named: dict[str, AnyArray], mask: Bool[AnyArray, "*tokens"]) -> None:
    """Raises ValueError unless the arrays are floating, the mask boolean, all of one shape with at least one token."""
    require(jnp.result_type(mask) == jnp.bool_, "mask", "dtype bool", jnp.result_type(mask))
    require(jnp.size(mask) > 0, "mask", "at least one token", f"shape {jnp.shape(mask)}")
    for name, values in named.items():
        require(jnp.shape(values) == jnp.shape(mask), name, f"shape {jnp.shape(mask)} of mask", jnp.shape(values))
        dtype = jnp.result_type(values)
        require(jnp.issubdtype(dtype, jnp.floating), name, "a floating dtype", dtype)


def check_finite(name: str, values: Float[AnyArray, "*tokens"], mask: Bool[AnyArray, "*tokens"]) -> None:
    """Raises ValueError that names the first label with a non-finite value, where values and mask are known."""
    if not is_concrete(values, mask):
        return
    host = np.asarray(values, dtype=np.float64)
    bad = np.asarray(mask) & ~np.isfinite(host)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        require(False, name, "a finite value at every label", f"{host[first]} at position {first}")


def compute_dtype(*values: Float[AnyArray, "*shape"]) -> jnp.dtype:
    """float64 if any of the values is, otherwise float32: sums and exponentials never run in 16 bits."""
    return jnp.dtype(jnp.float64 if any(jnp.result_type(x) == jnp.float64 for x in values) else jnp.float32)


def _check_document_values(
    mask: Bool[AnyArray, "*tokens"],
    document_ids: Int[AnyArray, "*tokens"],
    num_documents: int | np.integer | Int[AnyArray, ""],
    capacity: int,
) -> None:
    if not is_concrete(num_documents):
        return
    total = int(num_documents)
    require(0 <= total <= capacity, "num_documents", f"a number in [0, {capacity}]", total)
    if not is_concrete(mask, document_ids):
        return
    labels, ids = np.asarray(mask), np.asarray(document_ids)
    require(total > 0 or not labels.any(), "num_documents", "at least 1 where there are labels", total)
    bad = labels & ((ids < 0) | (ids >= total))
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        require(False, "document_ids", f"ids in [0, {total}) at every label", f"{ids[first]} at position {first}")


def _selected(
    values: Float[AnyArray, "*tokens"], mask: Bool[AnyArray, "*tokens"], dtype: jnp.dtype
) -> Float[Array, "*tokens"]:
    return jnp.where(mask, jnp.asarray(values).astype(dtype), jnp.zeros((), dtype))
