"""Metrics of a policy update, kept as reducible terms until the whole step is known.

A step is made of micro-batches and spread over ranks. Each part contributes terms; terms are added over micro-batches,
reduced over mesh axes, and divided once, by `finish`. `METRICS` says how each term is reduced and what divides it.
"""

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._arrays import AnyArray
from jaxlogp.errors import is_concrete, require
from jaxlogp.losses.policy import (
    DocumentLayout,
    PolicyTokens,
    bounded,
    check_arrays,
    check_finite,
    check_options,
    document_layout,
    document_ratios,
    k3,
    policy_tokens,
)

METRIC_LEVELS = ("none", "basic", "with_entropy")
LABELLED = "_labelled"


class Reduction(Enum):
    """How the terms of a metric combine over micro-batches and ranks."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


class Metric(NamedTuple):
    """How a term is reduced, and which other (summed) term divides it in the end."""

    reduction: Reduction
    divisor: str | None = None


METRICS: dict[str, Metric] = {
    "new_logprobs": Metric(Reduction.SUM, "num_documents"),
    "old_logprobs": Metric(Reduction.SUM, "num_documents"),
    "ratio_new_old": Metric(Reduction.SUM, "num_documents"),
    "ratio_new_old_sum": Metric(Reduction.SUM),
    "ratio_new_old_squared_sum": Metric(Reduction.SUM),
    "kl_new_old": Metric(Reduction.SUM, "num_documents"),
    "clipped_ratio_fraction": Metric(Reduction.SUM, "num_documents"),
    "advantage": Metric(Reduction.SUM, "num_documents"),
    "entropy": Metric(Reduction.SUM, "num_documents"),
    "max_advantage": Metric(Reduction.MAX),
    "min_advantage": Metric(Reduction.MIN),
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
"""Every term with its reduction and divisor. A metric divided by "num_documents" is reported a second time with the
suffix "_labelled", divided by the documents that have a label: without that bias a step with many fully masked
documents seems to have a smaller ratio, entropy and so on than it has."""


@partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=[])
@dataclass(frozen=True)
class PolicyMetricTerms:
    """Reducible parts of metrics: scalars by name, each combined the way `METRICS` says.

    Sums are fp32, counts are int32 and exact; an empty part holds the identities 0, -inf and inf.
    """

    values: dict[str, Array]

    def __add__(self, other: "PolicyMetricTerms") -> "PolicyMetricTerms":
        """Terms of two disjoint parts of a step together.

        Raises:
            ValueError: the two hold different metrics.
        """
        require(
            self.values.keys() == other.values.keys(), "other", f"terms {sorted(self.values)}", sorted(other.values)
        )
        combine = {Reduction.SUM: jnp.add, Reduction.MAX: jnp.maximum, Reduction.MIN: jnp.minimum}
        return PolicyMetricTerms(
            {name: combine[METRICS[name].reduction](value, other.values[name]) for name, value in self.values.items()}
        )

    def __or__(self, other: "PolicyMetricTerms") -> "PolicyMetricTerms":
        """Different metrics of the same part of a step together.

        Raises:
            ValueError: a metric is in both.
        """
        shared = sorted(self.values.keys() & other.values.keys())
        require(not shared, "other", "terms of other metrics", f"{shared} again")
        return PolicyMetricTerms({**self.values, **other.values})

    def psum(self, axis_name: str | tuple[str, ...]) -> "PolicyMetricTerms":
        """Terms of all ranks of the mesh axes together: psum, pmax or pmin."""
        reduce = {Reduction.SUM: lax.psum, Reduction.MAX: lax.pmax, Reduction.MIN: lax.pmin}
        return PolicyMetricTerms(
            {name: reduce[METRICS[name].reduction](value, axis_name) for name, value in self.values.items()}
        )

    def finish(self) -> dict[str, Array]:
        """Final values by name: the only place that divides. A metric without any document is 0.0."""
        metrics = {}
        for name, value in self.values.items():
            divisor = METRICS[name].divisor
            metrics[name] = value if divisor is None else _quotient(value, self.values[divisor])
            if divisor == "num_documents":
                metrics[name + LABELLED] = _quotient(value, self.values["num_documents_labelled"])
        return metrics


def policy_metrics(
    log_probs: Float[AnyArray, "*tokens"],
    old_log_probs: Float[AnyArray, "*tokens"],
    advantages: Float[AnyArray, "*tokens"],
    mask: Bool[AnyArray, "*tokens"],
    *,
    document_ids: Int[AnyArray, "*tokens"],
    num_documents: int | np.integer | Int[AnyArray, ""],
    kind: str = "grpo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    entropy: Float[AnyArray, "*tokens"] | None = None,
    level: str = "basic",
    document_axis_name: str | tuple[str, ...] | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> dict[str, Array]:
    """Final metrics of a step that is a single micro-batch: `policy_metric_terms`, reduced and divided.

    Args:
        log_probs: as in `policy_metric_terms`, like every argument that is not below.
        axis_name: mesh axes of an enclosing `shard_map` that the tokens are spread over, `document_axis_name` included.

    Returns:
        fp32 and int32 scalars by name.

    Raises:
        ValueError: as in `policy_metric_terms`.

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
        document_ids=document_ids,
        num_documents=num_documents,
        kind=kind,
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        entropy=entropy,
        level=level,
        document_axis_name=document_axis_name,
    )
    return (terms if axis_name is None else terms.psum(axis_name)).finish()


def policy_metric_terms(
    log_probs: Float[AnyArray, "*tokens"],
    old_log_probs: Float[AnyArray, "*tokens"],
    advantages: Float[AnyArray, "*tokens"],
    mask: Bool[AnyArray, "*tokens"],
    *,
    document_ids: Int[AnyArray, "*tokens"],
    num_documents: int | np.integer | Int[AnyArray, ""],
    kind: str = "grpo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    entropy: Float[AnyArray, "*tokens"] | None = None,
    level: str = "basic",
    document_axis_name: str | tuple[str, ...] | None = None,
) -> PolicyMetricTerms:
    """Reducible terms of the policy metrics of one part of a step.

    With w_t = m_t / N_d, M documents, and r, A the ratio and advantage of the token ("grpo") or of its document
    ("gspo"), the finished metrics are

    - new_logprobs, old_logprobs, advantage, entropy: Σ_t w_t x_t / M for the value they are named after;
    - ratio_new_old: Σ_t w_t r / M; kl_new_old: Σ_t w_t (r - log r - 1) / M;
    - clipped_ratio_fraction: Σ_t w_t [r < 1 - epsilon or r > 1 + epsilon_high] / M;
    - ratio_new_old_sum, ratio_new_old_squared_sum: Σ_t m_t r and Σ_t m_t r² over labels ("grpo"), Σ_d R_d and Σ_d R_d²
      over documents with a label ("gspo");
    - max_advantage, min_advantage: over labels, before any averaging; -inf and inf without labels;
    - num_tokens: labels; num_documents: M; num_documents_labelled, and for "gspo" num_segments: documents with a label.

    Those with M also come with the suffix "_labelled", divided by num_documents_labelled. No gradient flows.

    Args:
        log_probs: [*tokens], log-probs of the targets under the policy in training, in nats.
        old_log_probs: [*tokens], log-probs of the same targets under the sampler, in nats.
        advantages: [*tokens], advantage of each token.
        mask: [*tokens], true where the target is a label.
        document_ids: int [*tokens], document index of each token; tokens without a label may hold anything.
        num_documents: number of documents, as in `policy_loss`.
        kind: "grpo" or "gspo".
        epsilon: distance of the lower bound from 1, in (0, 1).
        epsilon_high: distance of the upper bound from 1, at least 0; `epsilon` when None.
        entropy: [*tokens], entropy of the distribution of each target in nats; needed at level "with_entropy".
        level: "none" (no term at all), "basic" or "with_entropy".
        document_axis_name: mesh axis over which documents are cut, as in `policy_loss`.

    Returns:
        The terms of this part.

    Raises:
        ValueError: as in `policy_loss`; also an unknown level, or no entropy at level "with_entropy".
    """
    require(level in METRIC_LEVELS, "level", f"one of {METRIC_LEVELS}", repr(level))
    if level == "none":
        return PolicyMetricTerms({})
    bounds = check_options(kind, epsilon, epsilon_high)
    require(document_ids is not None, "document_ids", "the document index of each token", None)
    tokens = policy_tokens(log_probs, old_log_probs, advantages, mask)
    layout = document_layout(mask, document_ids, num_documents, document_axis_name)
    weights = _token_weights(tokens, layout)
    ratio, advantage, log_ratio, ratio_weights = _token_values(kind, tokens, layout, weights)
    clipped = (ratio < bounds.low) | (ratio > bounds.high)
    values = {
        "new_logprobs": _weighted(weights, log_probs),
        "old_logprobs": _weighted(weights, old_log_probs),
        "ratio_new_old": _weighted(weights, ratio),
        "ratio_new_old_sum": _weighted(ratio_weights, ratio),
        "ratio_new_old_squared_sum": _weighted(ratio_weights, jnp.square(ratio)),
        "kl_new_old": _weighted(weights, k3(log_ratio)),
        "clipped_ratio_fraction": _weighted(weights, clipped.astype(ratio.dtype)),
        "advantage": _weighted(weights, advantage),
        "max_advantage": jnp.max(jnp.where(tokens.mask, tokens.advantages, -jnp.inf)).astype(jnp.float32),
        "min_advantage": jnp.min(jnp.where(tokens.mask, tokens.advantages, jnp.inf)).astype(jnp.float32),
        "num_tokens": jnp.sum(tokens.mask, dtype=jnp.int32),
        "num_documents": layout.counted_once(layout.num_documents),
        "num_documents_labelled": layout.counted_once(jnp.sum(layout.labels > 0, dtype=jnp.int32)),
    }
    if kind == "gspo":
        values["num_segments"] = values["num_documents_labelled"]
    if level == "with_entropy":
        require(entropy is not None, "entropy", "the entropy of each token at level 'with_entropy'", None)
        check_arrays({"entropy": entropy}, mask)
        check_finite("entropy", entropy, mask)
        values["entropy"] = _weighted(weights, entropy)
    return PolicyMetricTerms(values)


def reward_terms(rewards: Float[AnyArray, " documents"], mask: Bool[AnyArray, " documents"]) -> PolicyMetricTerms:
    """Terms of reward_mean, reward_max and reward_min over documents.

    Args:
        rewards: [documents], one reward a document.
        mask: bool [documents], false for entries that are no document of this part; each document belongs to one part.

    Returns:
        The terms, with num_rewards, the divisor of the mean.

    Raises:
        ValueError: wrong shapes or dtypes, or a reward that is not finite.
    """
    check_arrays({"rewards": rewards}, mask)
    check_finite("rewards", rewards, mask)
    return _statistics("reward", "num_rewards", jnp.asarray(rewards).astype(jnp.float32), jnp.asarray(mask))


def staleness_terms(
    documents_seen: int | np.integer | Int[AnyArray, ""],
    model_versions: Int[AnyArray, " documents"],
    mask: Bool[AnyArray, " documents"],
) -> PolicyMetricTerms:
    """Terms of staleness_mean, staleness_max and staleness_min: documents seen since the sampler's weights were taken.

    Subtracted as integers, before anything becomes a float, so that counters beyond 2^24 lose nothing.

    Args:
        documents_seen: documents the trainer has seen before this step.
        model_versions: int [documents], documents the trainer had seen when the sampler's weights were taken.
        mask: bool [documents], false for entries that are no document of this part.

    Returns:
        The terms, with num_stalenesses, the divisor of the mean.

    Raises:
        ValueError: wrong shapes or dtypes, or a model version above `documents_seen`.
    """
    shape, versions_dtype = jnp.shape(mask), jnp.result_type(model_versions)
    require(jnp.result_type(mask) == jnp.bool_, "mask", "dtype bool", jnp.result_type(mask))
    require(jnp.size(mask) > 0, "mask", "at least one document", f"shape {shape}")
    require(jnp.shape(model_versions) == shape, "model_versions", f"shape {shape} of mask", jnp.shape(model_versions))
    signed = jnp.signedinteger
    require(jnp.issubdtype(versions_dtype, signed), "model_versions", "a signed integer dtype", versions_dtype)
    python_int = isinstance(documents_seen, int)
    seen_dtype = versions_dtype if python_int else jnp.result_type(documents_seen)
    require(jnp.issubdtype(seen_dtype, signed), "documents_seen", "a signed integer", seen_dtype)
    if is_concrete(documents_seen, model_versions, mask):
        staleness = np.int64(documents_seen) - np.asarray(model_versions, dtype=np.int64)
        bad = np.asarray(mask) & (staleness < 0)
        newest = int(np.asarray(model_versions)[bad].max()) if bad.any() else 0
        require(not bad.any(), "model_versions", f"at most documents_seen = {documents_seen}", newest)
        staleness = jnp.asarray(staleness.astype(np.float32))
    else:
        dtype = jnp.promote_types(seen_dtype, versions_dtype)
        staleness = jnp.asarray(documents_seen, dtype) - jnp.asarray(model_versions, dtype)
        staleness = staleness.astype(jnp.float32)
    return _statistics("staleness", "num_stalenesses", staleness, jnp.asarray(mask))


def _token_weights(tokens: PolicyTokens, layout: DocumentLayout) -> Float[Array, " tokens"]:
    labels = jnp.maximum(layout.labels, 1).astype(tokens.log_ratio.dtype)
    weights = jnp.where(tokens.mask, 1.0 / labels[layout.document_ids], 0.0)
    return jnp.where(layout.outside, jnp.nan, weights)


def _token_values(
    kind: str, tokens: PolicyTokens, layout: DocumentLayout, weights: Float[AnyArray, " tokens"]
) -> tuple[Float[Array, " tokens"], ...]:
    """Ratio, advantage and log-ratio of each token, and the weights of the two ratio sums.

    For "gspo" a token carries the values of its document: with weights that add up to 1 over a document, sums over
    tokens are then sums over documents, also where a document is cut over ranks.
    """
    if kind == "grpo":
        log_ratio = bounded(tokens.log_ratio)
        return jnp.exp(log_ratio), tokens.advantages, log_ratio, tokens.mask.astype(log_ratio.dtype)
    log_ratio, ratio, advantages = (values[layout.document_ids] for values in document_ratios(tokens, layout))
    return ratio, advantages, log_ratio, weights


def _weighted(weights: Float[AnyArray, " tokens"], values: Float[AnyArray, "*tokens"]) -> Float[Array, ""]:
    values = lax.stop_gradient(jnp.ravel(jnp.asarray(values))).astype(weights.dtype)
    return jnp.sum(jnp.where(weights != 0, weights * values, 0.0)).astype(jnp.float32)


def _statistics(
    name: str, count_name: str, values: Float[AnyArray, " documents"], mask: Bool[AnyArray, " documents"]
) -> PolicyMetricTerms:
    return PolicyMetricTerms(
        {
            f"{name}_mean": jnp.sum(jnp.where(mask, values, 0.0)),
            f"{name}_max": jnp.max(jnp.where(mask, values, -jnp.inf)),
            f"{name}_min": jnp.min(jnp.where(mask, values, jnp.inf)),
            count_name: jnp.sum(mask, dtype=jnp.int32),
        }
    )


def _quotient(total: Float[AnyArray, ""], count: Int[AnyArray, ""]) -> Float[Array, ""]:
    return jnp.where(count > 0, total / jnp.maximum(count, 1).astype(total.dtype), 0.0)
