"""Metrics of a policy update, kept as reducible terms until the step is complete.

A step consists of micro-batches on several ranks. Each part contributes terms; terms are added over micro-batches,
reduced over mesh axes, and divided once, by `finish`. `METRICS` holds the reduction and the divisor of each term.
"""

import dataclasses
import functools
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxlogp._arrays import AnyArray, compute_dtype
from jaxlogp.errors import describe, is_concrete, require
from jaxlogp.losses.correction import bounded_weight
from jaxlogp.losses.documents import DocumentLayout, with_rows
from jaxlogp.losses.inputs import (
    advantages_of_tokens,
    check_arrays,
    check_labels,
    constant,
    flat,
    is_array,
    labels_of,
    shape_of,
)
from jaxlogp.losses.loss import (
    LOSS_PARTS,
    PolicyLoss,
    document_log_ratio,
    loss_layout,
    loss_parts,
    loss_tokens,
    policies_of,
    require_loss,
    stopped_labels,
)
from jaxlogp.losses.presets import grpo
from jaxlogp.losses.ratios import MAX_LOG_RATIO, bounded, k1, k3

METRIC_LEVELS = ("none", "basic", "with_entropy")
LABELLED = "_labelled"
LIMITS = ("truncated", "weight_masked", "rejected")
"""What a correction of kind "truncate", one of kind "mask", and a rejection do to labels."""


class Reduction(Enum):
    """The way in which the terms of a metric combine over micro-batches and ranks."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


class Metric(NamedTuple):
    """The reduction of a term, and the name of the (summed) term that divides it in the end."""

    reduction: Reduction
    divisor: str | None = None


METRICS: dict[str, Metric] = {
    "new_logprobs": Metric(Reduction.SUM, "num_documents"),
    "old_logprobs": Metric(Reduction.SUM, "num_documents"),
    "ratio_new_old": Metric(Reduction.SUM, "num_documents"),
    "ratio_new_old_sum": Metric(Reduction.SUM),
    "ratio_new_old_squared_sum": Metric(Reduction.SUM),
    "kl_new_old": Metric(Reduction.SUM, "num_documents"),
    "kl_new_ref": Metric(Reduction.SUM, "num_documents"),
    "max_ratio_new_old": Metric(Reduction.MAX),
    "min_ratio_new_old": Metric(Reduction.MIN),
    "clipped_ratio_fraction": Metric(Reduction.SUM, "num_documents"),
    "stopped_low_fraction": Metric(Reduction.SUM, "num_documents"),
    "stopped_high_fraction": Metric(Reduction.SUM, "num_documents"),
    "advantage": Metric(Reduction.SUM, "num_documents"),
    "entropy": Metric(Reduction.SUM, "num_documents"),
    "max_advantage": Metric(Reduction.MAX),
    "min_advantage": Metric(Reduction.MIN),
    **{f"loss_{part}": Metric(Reduction.SUM, "loss_count") for part in LOSS_PARTS},
    "loss_count": Metric(Reduction.SUM),
    "mismatch_k1": Metric(Reduction.SUM, "num_tokens"),
    "mismatch_k3": Metric(Reduction.SUM, "num_tokens"),
    "correction_weight": Metric(Reduction.SUM, "num_tokens"),
    "correction_weight_squared": Metric(Reduction.SUM, "num_tokens"),
    "max_correction_weight": Metric(Reduction.MAX),
    **{f"{what}_fraction": Metric(Reduction.SUM, "num_tokens") for what in LIMITS},
    **{f"{what}_document_fraction": Metric(Reduction.SUM, "num_documents") for what in LIMITS},
    "num_tokens": Metric(Reduction.SUM),
    "num_segments": Metric(Reduction.SUM),
    "num_documents": Metric(Reduction.SUM),
    "num_documents_labelled": Metric(Reduction.SUM),
    "reward_mean": Metric(Reduction.SUM, "num_rewards"),
    "reward_max": Metric(Reduction.MAX),
    "reward_min": Metric(Reduction.MIN),
    "num_rewards": Metric(Reduction.SUM),
    "staleness_mean": Metric(Reduction.SUM, "num_stalenesses"),
    "staleness_max": Metric(Reduction.MAX),
    "staleness_min": Metric(Reduction.MIN),
    "num_stalenesses": Metric(Reduction.SUM),
}
"""Every term with its reduction and divisor.

A metric divided by "num_documents" is reported a second time with the suffix "_labelled", divided by the number of
documents that have a label, because in a step with many fully masked documents the first form understates the ratio,
the entropy and so on. Without documents (neither ids nor rows [B, T]) the divisor is "num_tokens" instead, and there is
no second form.
"""


# JAX rebuilds it with leaves that are not arrays, such as those of jax.eval_shape.
@no_type_check
@partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=[])
@dataclass(frozen=True)
class PolicyMetricTerms:
    """Reducible parts of metrics: scalars by name, each with its reduction in `METRICS`.

    Sums are fp32 (float64 for float64 log-probs or rewards), counts are int32 and exact; an empty part holds the
    identities 0, -inf and inf.
    """

    values: dict[str, Array]

    @classmethod
    def zeros_like(cls, shapes: "PolicyMetricTerms") -> "PolicyMetricTerms":
        """Returns the terms of no label and no document, for terms or their shapes (`jax.eval_shape`)."""
        empty = {Reduction.SUM: 0, Reduction.MAX: -jnp.inf, Reduction.MIN: jnp.inf}
        return cls({name: jnp.full_like(x, empty[METRICS[name].reduction]) for name, x in shapes.values.items()})

    def __radd__(self, other: int) -> "PolicyMetricTerms":
        """Lets `sum` start from its 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __add__(self, other: "PolicyMetricTerms") -> "PolicyMetricTerms":
        """Combines the terms of two disjoint parts of a step.

        Raises:
            ValueError: if the two hold different metrics.
        """
        if not isinstance(other, PolicyMetricTerms):
            return NotImplemented
        require(
            self.values.keys() == other.values.keys(), "other", f"terms {sorted(self.values)}", sorted(other.values)
        )
        combine = {Reduction.SUM: jnp.add, Reduction.MAX: jnp.maximum, Reduction.MIN: jnp.minimum}
        return PolicyMetricTerms(
            {name: combine[METRICS[name].reduction](value, other.values[name]) for name, value in self.values.items()}
        )

    def __or__(self, other: "PolicyMetricTerms") -> "PolicyMetricTerms":
        """Combines different metrics of the same part of a step.

        Raises:
            ValueError: if a metric is in both.
        """
        if not isinstance(other, PolicyMetricTerms):
            return NotImplemented
        shared = sorted(self.values.keys() & other.values.keys())
        require(not shared, "other", "terms of other metrics", f"{shared} again")
        return PolicyMetricTerms({**self.values, **other.values})

    def psum(self, axis_name: str | tuple[str, ...]) -> "PolicyMetricTerms":
        """Combines the terms over all ranks of the mesh axes, by psum, pmax or pmin."""
        reduce = {Reduction.SUM: lax.psum, Reduction.MAX: lax.pmax, Reduction.MIN: lax.pmin}
        return PolicyMetricTerms(
            {name: reduce[METRICS[name].reduction](value, axis_name) for name, value in self.values.items()}
        )

    def finish(self) -> dict[str, Array]:
        """Computes the final values by name, with the only division; a metric without any document is 0.0."""
        metrics = {}
        for name, value in self.values.items():
            divisor = METRICS[name].divisor
            if divisor == "num_documents" and divisor not in self.values:
                divisor = "num_tokens"
            metrics[name] = value if divisor is None else _quotient(value, self.values[divisor])
            if divisor == "num_documents":
                metrics[name + LABELLED] = _quotient(value, self.values["num_documents_labelled"])
        if "correction_weight" in metrics:
            squares = metrics["correction_weight_squared"]
            # (Σ w)² / (n Σ w²); without any weight 0.
            share = jnp.square(metrics["correction_weight"]) / jnp.where(squares == 0, 1.0, squares)
            metrics["effective_sample_size"] = share
        return metrics


def policy_metrics(
    log_probs: Float[AnyArray, "*tokens"],
    old_log_probs: Float[AnyArray, "*tokens"] | None,
    advantages: Float[AnyArray, "*rows"],
    mask: Bool[AnyArray, "*tokens"] | None = None,
    *,
    sampler_log_probs: Float[AnyArray, "*tokens"] | None = None,
    document_ids: Integer[AnyArray, "*tokens"] | None = None,
    num_documents: int | np.integer | Integer[AnyArray, ""] | None = None,
    loss: PolicyLoss = grpo(),
    entropy: Float[AnyArray, "*tokens"] | None = None,
    ref_log_probs: Float[AnyArray, "*tokens"] | None = None,
    penalized: Bool[AnyArray, "*tokens"] | None = None,
    lse: Float[AnyArray, "*tokens"] | None = None,
    labels_per_document: float | np.floating | Float[AnyArray, ""] | None = None,
    mean_weight: float | np.floating | Float[AnyArray, ""] | None = None,
    entropy_scale: float | np.floating | Float[AnyArray, ""] | None = None,
    level: str = "basic",
    document_axis_name: str | tuple[str, ...] | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> dict[str, Array]:
    """Computes the final metrics of a step with a single micro-batch: `policy_metric_terms`, reduced and divided.

    Args:
        log_probs: as in `policy_metric_terms`, like every argument not listed here.
        axis_name: mesh axes of an enclosing `shard_map` that shard the tokens, `document_axis_name` included.

    Returns:
        fp32 and int32 scalars by name.

    Raises:
        ValueError: if an argument is refused as in `policy_metric_terms`.

    Example:
        >>> import jax.numpy as jnp
        >>> new, old = jnp.log(jnp.array([0.5, 0.3, 0.2])), jnp.log(jnp.array([0.25, 0.3, 0.2]))
        >>> metrics = policy_metrics(
        ...     new,
        ...     old,
        ...     advantages=jnp.ones(3),
        ...     mask=jnp.array([True, True, False]),
        ...     document_ids=jnp.array([0, 0, 1]),
        ...     num_documents=2,
        ... )
        >>> print(f"{metrics['ratio_new_old']:.2f} {metrics['ratio_new_old_labelled']:.2f} {metrics['num_tokens']}")
        0.75 1.50 2
    """
    terms = policy_metric_terms(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        sampler_log_probs=sampler_log_probs,
        document_ids=document_ids,
        num_documents=num_documents,
        loss=loss,
        entropy=entropy,
        ref_log_probs=ref_log_probs,
        penalized=penalized,
        lse=lse,
        labels_per_document=labels_per_document,
        mean_weight=mean_weight,
        entropy_scale=entropy_scale,
        level=level,
        document_axis_name=document_axis_name,
    )
    return (terms if axis_name is None else terms.psum(axis_name)).finish()


def policy_metric_terms(
    log_probs: Float[AnyArray, "*tokens"],
    old_log_probs: Float[AnyArray, "*tokens"] | None,
    advantages: Float[AnyArray, "*rows"],
    mask: Bool[AnyArray, "*tokens"] | None = None,
    *,
    sampler_log_probs: Float[AnyArray, "*tokens"] | None = None,
    document_ids: Integer[AnyArray, "*tokens"] | None = None,
    num_documents: int | np.integer | Integer[AnyArray, ""] | None = None,
    loss: PolicyLoss = grpo(),
    entropy: Float[AnyArray, "*tokens"] | None = None,
    ref_log_probs: Float[AnyArray, "*tokens"] | None = None,
    penalized: Bool[AnyArray, "*tokens"] | None = None,
    lse: Float[AnyArray, "*tokens"] | None = None,
    labels_per_document: float | np.floating | Float[AnyArray, ""] | None = None,
    mean_weight: float | np.floating | Float[AnyArray, ""] | None = None,
    entropy_scale: float | np.floating | Float[AnyArray, ""] | None = None,
    level: str = "basic",
    document_axis_name: str | tuple[str, ...] | None = None,
) -> PolicyMetricTerms:
    """Computes the reducible terms of the policy metrics of one part of a step.

    With w_t = m_t / N_d, M documents, and r, A the ratio and advantage of the token or of its document, according
    to `loss.ratio`, the finished metrics are

    - new_logprobs, old_logprobs, advantage, entropy: Σ_t w_t x_t / M for the value they are named after;
    - ratio_new_old: Σ_t w_t r / M; kl_new_old: Σ_t w_t (r - log r - 1) / M; with `ref_log_probs` kl_new_ref, the same
      (k3) of each token's reference over new;
    - clipped_ratio_fraction: Σ_t w_t [the objective clips r] / M; for `Clipped`, r is then outside the bounds;
    - stopped_low_fraction, stopped_high_fraction: Σ_t w_t [A ≠ 0, the objective has no gradient, and r < 1 or r ≥ 1] / M;
      for `Clipped`, r is below its bounds and A < 0, or above them and A > 0 (or above `delta` and A < 0);
      With `log_clip` these three are about the log-ratios and advantages of single labels;
    - ratio_new_old_sum, ratio_new_old_squared_sum: Σ_t m_t r and Σ_t m_t r² over labels ("token"), Σ_d R_d and Σ_d R_d²
      over documents with a label ("sequence");
    - max_ratio_new_old, min_ratio_new_old, max_advantage, min_advantage: over labels, r as above and A before any
      averaging; -inf and inf where there are no labels;
    - loss_objective, loss_kl, loss_entropy, loss_z, loss_drift: the parts that add up to the loss, coefficients and signs
      included, with the weights of its reduction and divided by loss_count, its count; a part is omitted if its coefficient
      is 0 or its input is not read;
    - mismatch_k1, mismatch_k3: Σ_t m_t of the estimates -x and exp(x) - x - 1 of KL(μ ‖ π_old) for x = log π_old - log μ,
      divided by the labels; x is bounded by ±`MAX_LOG_WEIGHT` in both;
    - correction_weight, correction_weight_squared, max_correction_weight: mean, mean square and maximum over labels of the
      weight c of the loss's correction, before it is normalized, without one of π_old / μ; effective_sample_size:
      (Σ c)² / (n Σ c²) over n labels;
    - truncated_fraction, weight_masked_fraction, rejected_fraction: share of labels whose weight is limited by a correction
      of kind "truncate" or "mask", or that a rejection takes out; truncated_document_fraction and
      weight_masked_document_fraction: share of documents with such a label, rejected_document_fraction: share of documents
      that lose every label;
    - num_tokens: labels; num_documents: M; num_documents_labelled, and for "sequence" num_segments: documents with a
      label.

    **Means are over documents, whatever the reduction of the loss:** each document counts once, long or short, even for
    a loss that is a mean over tokens. Metrics divided by M are also reported with the suffix "_labelled", divided by
    num_documents_labelled. Documents are the rows of inputs [B, T] unless `document_ids` are given; without ids and rows,
    means are over labels instead: w_t = m_t, divided by num_tokens. No gradient flows.

    Metrics of sampler and old policy are there with `sampler_log_probs` or a loss with a correction or rejection, and those
    of limits with the part of the loss that limits. **All but the parts of the loss and loss_count take in the labels that a
    rejection takes out.**

    Args:
        log_probs: [*tokens], log-probs of the targets under the policy in training, in nats.
        old_log_probs: [*tokens], log-probs of the same targets under the old policy, in nats; None for log_probs.
        advantages: [*tokens], advantage of each token; or [B] or [B, 1], one per row of [B, T].
        mask: [*tokens], True where the target is a label; None makes every token a label.
        sampler_log_probs: [*tokens], log-probs of the same targets under the sampler, in nats; None for old_log_probs.
        document_ids: int [*tokens], document index of each token, as in `policy_loss`; None for the rows of [B, T].
        num_documents: number of documents, as in `policy_loss`.
        loss: the loss of the step.
        entropy: [*tokens], entropy of the distribution of each target, in nats; needed at level "with_entropy", and
            read at no other.
        ref_log_probs: [*tokens], log-probs of the targets under the reference, in nats, or None.
        penalized: bool [*tokens], labels whose drift is penalized, for loss_drift; or None.
        lse: [*tokens], log Σ e^z of each token, for loss_z; or None.
        labels_per_document: labels of the whole step divided by its documents, as in `policy_loss`.
        mean_weight: mean of the correction's weights over the whole step, as in `policy_loss`.
        entropy_scale: factor of the entropy coefficient, as in `policy_loss`.
        level: "none" (no term at all), "basic" or "with_entropy".
        document_axis_name: mesh axis over which documents are split, as in `policy_loss`.

    Returns:
        The terms of this part.

    Raises:
        ValueError: if an argument is refused as in `policy_loss`, the level is unknown, or entropy is missing at level
            "with_entropy".
    """
    require(level in METRIC_LEVELS, "level", f"one of {METRIC_LEVELS}", repr(level))
    if level == "none":
        return PolicyMetricTerms({})
    require_loss(loss)
    mask = labels_of(mask, shape_of(log_probs, "log_probs"))
    old_log_probs = log_probs if old_log_probs is None else old_log_probs
    advantages = advantages_of_tokens(advantages, mask)
    given = {"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages}
    with_entropy = level == "with_entropy"
    missing = with_entropy and entropy is None
    require(not missing, "entropy", "the entropy of each token at level 'with_entropy'", None)
    further = {"entropy": entropy if with_entropy else None, "ref_log_probs": ref_log_probs, "lse": lse}
    further["sampler_log_probs"] = sampler_log_probs
    given |= {name: values for name, values in further.items() if values is not None}
    check_labels(given, mask)
    document_ids, num_documents = with_rows(mask, document_ids, num_documents)
    layout = loss_layout(loss, mask, document_ids, num_documents, document_axis_name, needed=loss.needs_documents)
    options = {"document_ids": document_ids, "num_documents": num_documents, "document_axis_name": document_axis_name}
    options |= {"labels_per_document": labels_per_document, "mean_weight": mean_weight, "entropy_scale": entropy_scale}
    flat_mask, dtype = flat(mask), compute_dtype(log_probs)
    tokens = {name: constant(values, flat_mask, dtype) for name, values in given.items()}
    of_sampler = sampler_log_probs is not None or loss.correction is not None or loss.rejection is not None
    return PolicyMetricTerms(
        _averages(loss, tokens, layout, flat_mask)
        | (_sampler_terms(loss, tokens, layout, flat_mask) if of_sampler else {})
        | _extremes("advantage", tokens["advantages"], flat_mask)
        | _loss_terms(loss, given | ({} if penalized is None else {"penalized": penalized}), mask, options)
        | _counts(loss, layout, flat_mask)
    )


def reward_terms(
    rewards: Float[AnyArray, " documents"], mask: Bool[AnyArray, " documents"] | None = None
) -> PolicyMetricTerms:
    """Computes the terms of reward_mean, reward_max and reward_min over documents.

    Args:
        rewards: [documents], one reward per document.
        mask: bool [documents], False for entries without a document of this part; None if each entry has one. Each document
            belongs to one part.

    Returns:
        The terms, with num_rewards, the divisor of the mean.

    Raises:
        ValueError: if a shape or dtype is wrong, or a reward is not finite.
    """
    mask = labels_of(mask, shape_of(rewards, "rewards"))
    check_labels({"rewards": rewards}, mask)
    return _statistics("reward", "num_rewards", jnp.asarray(rewards).astype(compute_dtype(rewards)), jnp.asarray(mask))


def staleness_terms(
    documents_seen: int | np.integer | Int[AnyArray, ""],
    model_versions: Int[AnyArray, "*entries"],
    mask: Bool[AnyArray, "*entries"] | None = None,
) -> PolicyMetricTerms:
    """Computes the terms of staleness_mean, staleness_max and staleness_min, the age of the sampler's weights in documents.

    The staleness of an entry is `documents_seen` minus its model version. Each entry of the mask counts once: a document, or
    a label if the weights changed within documents. Subtracted as integers, before any conversion to float, so that counters
    beyond 2^24 stay exact.

    Args:
        documents_seen: number of documents that the trainer has seen before this step.
        model_versions: int [documents] or [*tokens], number of documents that the trainer had seen when the weights were
            taken that sampled the document, or the label.
        mask: bool of the same shape, True for the documents, or the labels, of this part; None for all entries. The same
            kind in all parts.

    Returns:
        The terms, with num_stalenesses, the divisor of the mean.

    Raises:
        ValueError: if a shape or dtype is wrong, or a model version is above `documents_seen`.
    """
    signed = jnp.signedinteger
    good = is_array(model_versions) and jnp.issubdtype(model_versions.dtype, signed)
    require(good, "model_versions", "an array of a signed integer dtype", describe(model_versions))
    mask = labels_of(mask, model_versions.shape)
    check_arrays({}, mask)
    require(model_versions.shape == mask.shape, "model_versions", f"shape {mask.shape} of mask", model_versions.shape)
    good = isinstance(documents_seen, int) or is_array(documents_seen) and jnp.issubdtype(documents_seen.dtype, signed)
    good = good and not isinstance(documents_seen, bool)
    require(good, "documents_seen", "a signed integer", describe(documents_seen))
    require(np.ndim(documents_seen) == 0, "documents_seen", "one number", describe(documents_seen))
    if is_concrete(documents_seen, model_versions, mask):
        staleness = np.int64(documents_seen) - np.asarray(model_versions, dtype=np.int64)
        bad = np.asarray(mask) & (staleness < 0)
        newest = int(np.asarray(model_versions)[bad].max()) if bad.any() else 0
        require(not bad.any(), "model_versions", f"at most documents_seen = {documents_seen}", newest)
        staleness = jnp.asarray(staleness.astype(np.float32))
    else:
        # At least int32, so that versions of a narrow dtype do not wrap; int64 only with x64.
        widest = np.result_type(np.int32, model_versions.dtype, getattr(documents_seen, "dtype", np.int64))
        dtype = jax.dtypes.canonicalize_dtype(widest)
        seen = int(documents_seen) if is_concrete(documents_seen) else documents_seen
        staleness = jnp.asarray(seen, dtype) - jnp.asarray(model_versions, dtype)
        staleness = staleness.astype(jnp.float32)
    return _statistics("staleness", "num_stalenesses", staleness, jnp.asarray(mask))


class _Seen(NamedTuple):
    """The inputs of the objective for each token: its own values, or those of its document repeated at each token."""

    log_ratio: Float[Array, " tokens"]
    log_prob: Float[Array, " tokens"]
    advantages: Float[Array, " tokens"]

    @property
    def ratio(self) -> Float[Array, " tokens"]:
        return jnp.exp(self.log_ratio)


def _seen(loss: PolicyLoss, tokens: dict[str, Array], layout: DocumentLayout | None) -> _Seen:
    new, old, advantages = (tokens[name] for name in ("log_probs", "old_log_probs", "advantages"))
    if loss.ratio == "token":
        return _Seen(bounded(new - old), new, advantages)
    if loss.ratio in ("sequence_token", "product"):
        return _Seen(bounded(document_log_ratio(loss, new - old, layout)), new, advantages)
    means = (layout.mean_of(values) for values in (new - old, new, advantages))
    log_ratio, log_prob, advantages = (values[layout.document_ids] for values in means)
    return _Seen(bounded(log_ratio), log_prob, advantages)


def _averages(
    loss: PolicyLoss, tokens: dict[str, Array], layout: DocumentLayout | None, mask: Bool[AnyArray, " tokens"]
) -> dict[str, Array]:
    """Computes every weighted sum over labels, and the extremes of the ratio."""
    new, old = tokens["log_probs"], tokens["old_log_probs"]
    dtype, seen = new.dtype, _seen(loss, tokens, layout)
    weights = mask.astype(dtype) if layout is None else layout.label_weights(mask, dtype)
    # Weights that add up to 1 over a document turn sums over labels into sums over documents, also where it is split.
    ratio_weights = weights if loss.ratio != "token" else mask.astype(dtype)
    low, high = _stopped(loss, seen)
    clipped = loss.objective.clipped(seen.ratio)
    if loss.log_clip is not None:
        clipped, low, high = _limited_labels(loss.log_clip, new - old, tokens["advantages"])
    averages = {
        "new_logprobs": _weighted(weights, new),
        "old_logprobs": _weighted(weights, old),
        "ratio_new_old": _weighted(weights, seen.ratio),
        "ratio_new_old_sum": _weighted(ratio_weights, seen.ratio),
        "ratio_new_old_squared_sum": _weighted(ratio_weights, jnp.square(seen.ratio)),
        "kl_new_old": _weighted(weights, k3(seen.log_ratio)),
        "clipped_ratio_fraction": _weighted(weights, clipped.astype(dtype)),
        "stopped_low_fraction": _weighted(weights, low.astype(dtype)),
        "stopped_high_fraction": _weighted(weights, high.astype(dtype)),
        "advantage": _weighted(weights, seen.advantages),
    }
    if "entropy" in tokens:
        averages["entropy"] = _weighted(weights, tokens["entropy"])
    if "ref_log_probs" in tokens:
        averages["kl_new_ref"] = _weighted(weights, k3(tokens["ref_log_probs"] - new))
    return averages | _extremes("ratio_new_old", seen.ratio, mask)


def _stopped(loss: PolicyLoss, seen: _Seen) -> tuple[Bool[Array, " tokens"], Bool[Array, " tokens"]]:
    """Returns where the objective has an advantage but no gradient, at ratios below 1 and at others."""
    slope, other = _slopes(loss, seen.log_ratio, seen.log_prob, seen.advantages)
    no_slope = (slope == 0) | (seen.log_ratio >= MAX_LOG_RATIO)
    stopped = no_slope & (other == 0) & (seen.advantages != 0)
    return stopped & (seen.log_ratio < 0), stopped & (seen.log_ratio >= 0)


def _limited_labels(
    log_clip: tuple[float, float], log_ratio: Float[Array, " tokens"], advantages: Float[Array, " tokens"]
) -> tuple[Bool[Array, " tokens"], Bool[Array, " tokens"], Bool[Array, " tokens"]]:
    """Returns the labels outside the bounds of `log_clip`, those that it stops from below, and those from above."""
    low, high = log_clip
    stopped = stopped_labels(log_clip, log_ratio, advantages)
    return (log_ratio < -low) | (log_ratio > high), stopped & (log_ratio < 0), stopped & (log_ratio >= 0)


# Outside of jit the gradient of a sum over Explicit mesh axes would need jax.set_mesh.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _slopes(loss: PolicyLoss, log_ratio: Array, log_prob: Array, advantages: Array) -> tuple[Array, Array]:
    def total(log_ratio, log_prob):
        return jnp.sum(loss.objective.value(log_ratio, log_prob, advantages))

    return jax.grad(total, argnums=(0, 1))(log_ratio, log_prob)


def _loss_terms(
    loss: PolicyLoss, given: dict[str, AnyArray], mask: Bool[AnyArray, "*tokens"], options: dict[str, Any]
) -> dict[str, Array]:
    """Computes the sum of each part of the loss whose inputs are given, and the loss's count."""
    inputs = {"kl": "ref_log_probs", "entropy": "entropy", "z_loss": "lse", "drift": "penalized"}
    absent = {f"{part}_coefficient": 0.0 for part, name in inputs.items() if name not in given}
    loss = dataclasses.replace(loss, **absent)
    values = {name: flat(lax.stop_gradient(given[name])) for name in ("log_probs", "entropy", "lse") if name in given}
    names = ("old_log_probs", "advantages", "ref_log_probs", "penalized", "sampler_log_probs", "log_probs")
    rest = {name: given[name] for name in names if name in given}
    tokens, count = loss_tokens(loss, mask=mask, **rest, **options)
    parts = loss_parts(loss, values.pop("log_probs"), tokens, **values)
    sums = {f"loss_{name}": jnp.sum(part) for name, part in parts.items()}
    return sums | {"loss_count": count}


def _sampler_terms(
    loss: PolicyLoss, tokens: dict[str, Array], layout: DocumentLayout | None, mask: Bool[AnyArray, " tokens"]
) -> dict[str, Array]:
    """Computes sums of the mismatch of sampler and old policy, and of what correction and rejection make of it."""
    policies = policies_of(tokens)
    logs = policies.log_weights(mask)
    bounded_logs = bounded_weight(logs)
    weights, terms = jnp.exp(bounded_logs), {}
    if loss.correction is not None:
        ratios = loss.correction.ratios(logs, layout)
        weights = loss.correction.weights(ratios)
        limited = mask & loss.correction.limited(ratios)
        terms |= _shares("truncated" if loss.correction.kind == "truncate" else "weight_masked", limited, layout, 1)
    if loss.rejection is not None:
        rejected = loss.rejection.rejected(policies, mask, layout)
        terms |= _shares("rejected", rejected, layout, None if layout is None else jnp.maximum(layout.labels, 1))
    weights = jnp.where(mask, weights, 0.0)
    return terms | {
        "mismatch_k1": jnp.sum(k1(bounded_logs)),
        "mismatch_k3": jnp.sum(k3(bounded_logs)),
        "correction_weight": jnp.sum(weights),
        "correction_weight_squared": jnp.sum(jnp.square(weights)),
        "max_correction_weight": jnp.max(jnp.where(mask, weights, -jnp.inf)),
    }


def _shares(
    name: str,
    labels: Bool[Array, " tokens"],
    layout: DocumentLayout | None,
    at_least: int | Int[AnyArray, " documents"] | None,
) -> dict[str, Array]:
    """Counts labels, and documents with at least so many of them."""
    terms = {f"{name}_fraction": jnp.sum(labels, dtype=jnp.int32)}
    if layout is not None:
        documents = jnp.sum(layout.with_labels(labels).labels >= at_least, dtype=jnp.int32)
        terms[f"{name}_document_fraction"] = layout.counted_once(documents)
    return terms


def _extremes(name: str, values: Float[AnyArray, " tokens"], mask: Bool[AnyArray, " tokens"]) -> dict[str, Array]:
    return {
        f"max_{name}": jnp.max(jnp.where(mask, values, -jnp.inf)),
        f"min_{name}": jnp.min(jnp.where(mask, values, jnp.inf)),
    }


def _counts(loss: PolicyLoss, layout: DocumentLayout | None, mask: Bool[AnyArray, " tokens"]) -> dict[str, Array]:
    counts = {"num_tokens": jnp.sum(mask, dtype=jnp.int32)}
    if layout is None:
        return counts
    labelled = layout.counted_once(jnp.sum(layout.labels > 0, dtype=jnp.int32))
    counts |= {
        "num_documents": layout.counted_once(layout.num_documents),
        "num_documents_labelled": labelled,
    }
    return counts | ({"num_segments": labelled} if loss.ratio != "token" else {})


def _weighted(weights: Float[AnyArray, " tokens"], values: Float[AnyArray, " tokens"]) -> Float[Array, ""]:
    return jnp.sum(jnp.where(weights != 0, weights * values, 0.0))


def _statistics(
    name: str, count_name: str, values: Float[AnyArray, "*shape"], mask: Bool[AnyArray, "*shape"]
) -> PolicyMetricTerms:
    return PolicyMetricTerms(
        {
            f"{name}_mean": jnp.sum(jnp.where(mask, values, 0.0)),
            f"{name}_max": jnp.max(jnp.where(mask, values, -jnp.inf)),
            f"{name}_min": jnp.min(jnp.where(mask, values, jnp.inf)),
            count_name: jnp.sum(mask, dtype=jnp.int32),
        }
    )


def _quotient(total: Float[AnyArray, ""] | Int[AnyArray, ""], count: Int[AnyArray, ""]) -> Float[Array, ""]:
    # With a count of 0 the total is 0, or NaN from labels without a document. The NaN has to show.
    total = total.astype(compute_dtype(total) if jnp.issubdtype(total.dtype, jnp.floating) else jnp.float32)
    return total / jnp.maximum(count, 1).astype(total.dtype)
