"""What a step minimises: objects passed to the trainer; supervised cross-entropy is one of them.

An objective has two forms of the same loss, for the two kinds of sums: `of_head` where head and loss run together, and
`of_values` where log-probs have been computed. Both return sums of one data rank, not reduced over the mesh.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxlogp import (
    MicroBatch,
    PolicyMetricTerms,
    TokenLogProbs,
    WeightedSum,
    linear_log_probs,
    linear_policy_loss,
    masked_max,
    policy_loss,
    policy_metric_terms,
    reward_terms,
    staleness_terms,
    weighted_sum,
)
from jaxlogp.losses import PolicyLoss


class LossParts(NamedTuple):
    """Loss and metric terms of one data rank, and the largest |log-prob of the trainer - of the sampler| under the same
    parameters, in nats; -inf without a label that has both."""

    loss: WeightedSum
    terms: PolicyMetricTerms
    drift: Float[Array, ""]


class Objective(Protocol):
    """A loss that a step can minimise. `with_entropy` says whether `of_values` reads entropies."""

    @property
    def with_entropy(self) -> bool: ...

    def of_head(
        self, hidden: Array, weight: Array, batch: MicroBatch, documents_seen: Array, head: dict[str, Any]
    ) -> LossParts:
        """From hidden states and head; `head` holds further keywords of `jaxlogp.linear_log_probs`."""

    def of_values(self, values: TokenLogProbs, batch: MicroBatch, documents_seen: Array) -> LossParts:
        """From log-probs and entropies, differentiable in both."""


@dataclass(frozen=True)
class CrossEntropy:
    """-Σ_t m_t log π(target_t), divided by the number of labels; for the warm start."""

    with_entropy = False

    def of_head(
        self,
        hidden: Float[Array, "R T H"],
        weight: Float[Array, "V H"],
        batch: MicroBatch,
        documents_seen: Int[Array, ""],
        head: dict[str, Any],
    ) -> LossParts:
        """See `Objective`."""
        values = linear_log_probs(hidden, weight, batch.targets, mask=batch.mask, **head)
        return self.of_values(values, batch, documents_seen)

    def of_values(self, values: TokenLogProbs, batch: MicroBatch, documents_seen: Int[Array, ""]) -> LossParts:
        """See `Objective`."""
        del documents_seen
        loss = weighted_sum(-values.log_probs, batch.mask)
        no_drift = masked_max(jnp.zeros(batch.mask.shape, jnp.float32), batch.mask)
        return LossParts(loss, PolicyMetricTerms({}), no_drift)


@dataclass(frozen=True)
class PolicyObjective:
    """A policy loss of `jaxlogp.losses`, with its metrics."""

    loss: PolicyLoss
    metrics: str
    document_axis: str | None = None

    @property
    def with_entropy(self) -> bool:
        """See `Objective`."""
        return self.metrics == "with_entropy" or self.loss.entropy_coefficient != 0.0

    @property
    def takes_lse(self) -> bool:
        """Whether a known log-sum-exp can replace the head's forward pass: not if the entropy has a gradient."""
        return self.loss.entropy_coefficient == 0.0

    def of_head(
        self,
        hidden: Float[Array, "R T H"],
        weight: Float[Array, "V H"],
        batch: MicroBatch,
        documents_seen: Int[Array, ""],
        head: dict[str, Any],
    ) -> LossParts:
        """See `Objective`; a column "lse" means that the step is strictly on policy; the entropies are then a column too."""
        columns = batch.per_token
        lse = columns.get("lse")
        loss, values = linear_policy_loss(
            hidden,
            weight,
            batch.targets,
            columns["old_log_probs"],
            columns["advantages"],
            batch.mask,
            **self._documents(batch),
            lse=lse,
            with_entropy=self.with_entropy and lse is None,
            **head,
        )
        # Metrics reduce them by pmax, which JAX cannot differentiate.
        values = lax.stop_gradient(values)
        entropy = values.entropy if lse is None else columns.get("entropy")
        return self._with_metrics(loss, values.log_probs, entropy, batch, documents_seen)

    def of_values(self, values: TokenLogProbs, batch: MicroBatch, documents_seen: Int[Array, ""]) -> LossParts:
        """See `Objective`."""
        columns = batch.per_token
        inputs = (columns["old_log_probs"], columns["advantages"], batch.mask)
        loss = policy_loss(values.log_probs, *inputs, entropy=values.entropy, **self._documents(batch))
        constant = lax.stop_gradient(values)
        return self._with_metrics(loss, constant.log_probs, constant.entropy, batch, documents_seen)

    def _documents(self, batch: MicroBatch) -> dict[str, Any]:
        return {
            "loss": self.loss,
            "ref_log_probs": batch.per_token.get("ref_log_probs"),
            "document_ids": batch.document_ids,
            "num_documents": batch.num_documents[0],
            "document_axis_name": self.document_axis,
        }

    def _with_metrics(
        self, loss: WeightedSum, log_probs: Array, entropy: Array | None, batch: MicroBatch, documents_seen: Array
    ) -> LossParts:
        columns = batch.per_token
        drift = _drift(log_probs, batch, documents_seen)
        if self.metrics == "none":
            return LossParts(loss, PolicyMetricTerms({}), drift)
        inputs = (log_probs, columns["old_log_probs"], columns["advantages"], batch.mask)
        terms = policy_metric_terms(*inputs, entropy=entropy, level=self.metrics, **self._documents(batch))
        present = jnp.arange(batch.rewards.shape[0], dtype=jnp.int32) < batch.num_documents[0]
        if self.document_axis is not None:
            # Every rank along the axis knows all rewards; the first one counts them.
            present = present & (lax.axis_index(self.document_axis) == 0)
        terms = terms | reward_terms(batch.rewards, present)
        return LossParts(loss, terms | staleness_terms(documents_seen, batch.model_versions, present), drift)


def _drift(log_probs: Float[Array, "R T"], batch: MicroBatch, documents_seen: Int[Array, ""]) -> Float[Array, ""]:
    """Largest |trainer - sampler| where both are known under the same parameters: later ones are another policy."""
    columns = batch.per_token
    if "sampler_log_probs" in columns:
        # The trainer's own are from the time of sampling, whatever has been updated since.
        return masked_max(jnp.abs(columns["old_log_probs"] - columns["sampler_log_probs"]), batch.mask)
    current = batch.versions == documents_seen
    return masked_max(jnp.abs(log_probs - columns["old_log_probs"]), batch.mask & current)
