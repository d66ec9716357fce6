"""What a step minimises: objects passed to the trainer; supervised cross-entropy is one of them.

An objective has two forms of the same loss, for the two kinds of sums: `from_hidden` where head and loss run together, and
`from_log_probs` where log-probs have been computed. Both return sums of one data rank, not reduced over the mesh.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from experiments.learner.exact_kl import ExactKL, ReferenceHead
from experiments.learner.head_placement import HeadPlacement
from experiments.learner.selection import PENALIZED_COLUMN, label_mask, padded_labels
from jaxlogp import (
    Document,
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
from jaxlogp.losses import Correction, PolicyLoss, correction_weight_sum
from jaxlogp.losses.reductions import needs_documents
from jaxlogp.policy.documents import SAMPLER_COLUMN


class LossTerms(NamedTuple):
    """Loss and metric terms of one data rank, and the largest |log-prob of the trainer - of the sampler| under the same
    parameters, in nats; -inf without a label that has both."""

    loss: WeightedSum
    terms: PolicyMetricTerms
    drift: Float[Array, ""]


class LossConstants(NamedTuple):
    """What all micro-batches of a step share, known before the first: arguments of their program.

    `mean_weight` is the mean of the correction's weights over all labels, for a correction that normalizes, and
    `entropy_scale` a factor of the entropy coefficient. `reference` are parameters of the reference for an objective that
    reads its head.
    """

    mean_weight: Float[np.ndarray, ""] | Array = np.ones((), np.float32)
    entropy_scale: Float[np.ndarray, ""] | Array = np.ones((), np.float32)
    reference: nnx.State | None = None


NO_CONSTANTS = LossConstants()
"""Those of a loss that reads none."""


class Objective(Protocol):
    """A loss that a step can minimise.

    `from_log_probs` reads entropies if `with_entropy`; documents bring log-probs of the reference if `needs_reference`.
    One that `reads_reference_head` has `from_hidden` alone, and gets it there.
    """

    @property
    def with_entropy(self) -> bool: ...
    @property
    def needs_reference(self) -> bool: ...
    @property
    def reads_reference_head(self) -> bool: ...

    def constants(self, documents: Sequence[Document]) -> LossConstants:
        """Returns the numbers that the loss of a step takes from all its documents."""

    def count(self, documents: Sequence[Document]) -> int:
        """Returns what documents add to the divisor of the loss."""

    def from_hidden(
        self,
        hidden: Array,
        weight: Array,
        batch: MicroBatch,
        version: Array,
        constants: LossConstants,
        head: HeadPlacement,
        reference: ReferenceHead | None = None,
    ) -> tuple[LossTerms, Float[Array, "R T"]]:
        """Computes the terms from hidden states and the head's weight, and the log-probs of the labels, 0 elsewhere."""

    def from_log_probs(
        self, values: TokenLogProbs, batch: MicroBatch, version: Array, constants: LossConstants
    ) -> LossTerms:
        """Computes the terms from log-probs and entropies, differentiable in both."""


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """-Σ_t m_t log π(target_t), divided by the number of labels: supervised learning."""

    with_entropy = False
    needs_reference = False
    reads_reference_head = False

    def constants(self, documents: Sequence[Document]) -> LossConstants:
        del documents
        return NO_CONSTANTS

    def count(self, documents: Sequence[Document]) -> int:
        return sum(document.num_labels for document in documents)

    def from_hidden(
        self,
        hidden: Float[Array, "R T H"],
        weight: Float[Array, "V H"],
        batch: MicroBatch,
        version: Int[Array, ""],
        constants: LossConstants,
        head: HeadPlacement,
        reference: ReferenceHead | None = None,
    ) -> tuple[LossTerms, Float[Array, "R T"]]:
        del reference
        values = linear_log_probs(hidden, weight, batch.targets, mask=batch.mask, **head.keywords())
        return self.from_log_probs(values, batch, version, constants), values.log_probs

    def from_log_probs(
        self, values: TokenLogProbs, batch: MicroBatch, version: Int[Array, ""], constants: LossConstants
    ) -> LossTerms:
        del version, constants
        loss = weighted_sum(-values.log_probs, batch.mask)
        # No label has log-probs of a sampler to differ from.
        no_drift = masked_max(jnp.zeros(batch.mask.shape, jnp.float32), batch.mask & False)
        return LossTerms(loss, PolicyMetricTerms({}), no_drift)


@dataclass(frozen=True)
class PolicyObjective(Objective):
    """A policy loss of `jaxlogp.losses`, with its metrics at a level of `policy_metric_terms`.

    The mesh axis `document_axis` splits documents. With `scales_entropy` the entropy coefficient is multiplied by
    `LossConstants.entropy_scale`. `exact_kl` is added to a loss that has no KL itself.
    """

    loss: PolicyLoss
    metrics: str
    document_axis: str | None = None
    scales_entropy: bool = False
    exact_kl: ExactKL | None = None

    @property
    def with_entropy(self) -> bool:
        return self.metrics == "with_entropy" or self.loss.entropy_coefficient != 0.0

    @property
    def needs_reference(self) -> bool:
        return self.loss.kl_coefficient != 0.0

    @property
    def reads_reference_head(self) -> bool:
        return self.exact_kl is not None

    def constants(self, documents: Sequence[Document]) -> LossConstants:
        correction = self.loss.correction
        if correction is None or not correction.normalize:
            return NO_CONSTANTS
        return LossConstants(mean_weight(correction, documents))

    def count(self, documents: Sequence[Document]) -> int:
        by_document = needs_documents(self.loss.reduction)
        return len(documents) if by_document else sum(document.num_labels for document in documents)

    def from_hidden(
        self,
        hidden: Float[Array, "R T H"],
        weight: Float[Array, "V H"],
        batch: MicroBatch,
        version: Int[Array, ""],
        constants: LossConstants,
        head: HeadPlacement,
        reference: ReferenceHead | None = None,
    ) -> tuple[LossTerms, Float[Array, "R T"]]:
        columns, further = batch.per_token, self._further(batch, constants)
        loss, values = linear_policy_loss(
            hidden,
            weight,
            batch.targets,
            columns["old_log_probs"],
            columns["advantages"],
            batch.mask,
            **further,
            support=batch.support,
            with_entropy=self.with_entropy,
            **head.keywords(),
        )
        # Metrics reduce them by pmax, which JAX cannot differentiate.
        values = lax.stop_gradient(values)
        found = self._with_metrics(loss, values, batch, version, further)
        if self.exact_kl is not None:
            assert reference is not None, "it reads the reference's head"
            documents = {name: further[name] for name in ("document_ids", "num_documents", "document_axis_name")}
            operands = hidden, weight, reference, batch, head, self.loss
            part, terms = self.exact_kl.terms(*operands, **documents)
            terms = found.terms if self.metrics == "none" else found.terms | terms
            found = found._replace(loss=replace(loss, sum=loss.sum + part.sum), terms=terms)
        return found, values.log_probs

    def from_log_probs(
        self, values: TokenLogProbs, batch: MicroBatch, version: Int[Array, ""], constants: LossConstants
    ) -> LossTerms:
        columns, further = batch.per_token, self._further(batch, constants)
        inputs = (columns["old_log_probs"], columns["advantages"], batch.mask)
        loss = policy_loss(values.log_probs, *inputs, entropy=values.entropy, **further)
        return self._with_metrics(loss, lax.stop_gradient(values), batch, version, further)

    def _further(self, batch: MicroBatch, constants: LossConstants) -> dict[str, Any]:
        """Returns the keywords that losses and metrics share."""
        penalized = batch.per_token.get(PENALIZED_COLUMN)
        return {
            "loss": self.loss,
            "sampler_log_probs": batch.per_token.get(SAMPLER_COLUMN),
            "ref_log_probs": batch.per_token.get("ref_log_probs"),
            "penalized": None if penalized is None else penalized > 0.0,
            "document_ids": batch.document_ids,
            "num_documents": batch.num_documents[0],
            "document_axis_name": self.document_axis,
            "mean_weight": constants.mean_weight,
            "entropy_scale": constants.entropy_scale if self.scales_entropy else None,
        }

    def _with_metrics(
        self,
        loss: WeightedSum,
        values: TokenLogProbs,
        batch: MicroBatch,
        version: Array,
        further: dict[str, Any],
    ) -> LossTerms:
        columns = batch.per_token
        drift = _drift(values.log_probs, batch, version)
        if self.metrics == "none":
            return LossTerms(loss, PolicyMetricTerms({}), drift)
        inputs = (values.log_probs, columns["old_log_probs"], columns["advantages"], batch.mask)
        terms = policy_metric_terms(*inputs, entropy=values.entropy, level=self.metrics, **further)
        present = jnp.arange(batch.rewards.shape[0], dtype=jnp.int32) < batch.num_documents[0]
        if self.document_axis is not None:
            # Every rank along the axis knows all rewards; the first one counts them.
            present = present & (lax.axis_index(self.document_axis) == 0)
        terms = terms | reward_terms(batch.rewards, present)
        return LossTerms(loss, terms | staleness_terms(version, batch.model_versions, present), drift)


def mean_weight(correction: Correction, documents: Sequence[Document]) -> Float[np.ndarray, ""]:
    """Returns the mean of a correction's weights over all labels of a step; every process computes the same."""
    drawn = [each for each in documents if each.num_labels]
    sizes = [each.num_labels for each in drawn]
    mask = label_mask(sum(sizes))
    if not drawn:
        return NO_CONSTANTS.mean_weight
    columns = ([each.ratio_log_probs for each in drawn], [each.sampler_log_probs for each in drawn])
    old, sampler = (padded_labels(column, mask) for column in columns)
    ids = np.zeros(mask.shape, np.int32)
    ids[mask] = np.repeat(np.arange(len(drawn)), sizes)
    # An array: a Python number would compile the sums of documents for each number of them.
    documents_of = {"document_ids": ids, "num_documents": jnp.asarray(len(drawn), jnp.int32)}
    return np.asarray(correction_weight_sum(correction, old, sampler, mask, **documents_of).mean(), np.float32)


def _drift(log_probs: Float[Array, "R T"], batch: MicroBatch, version: Int[Array, ""]) -> Float[Array, ""]:
    """Returns the largest |trainer - sampler| where both are under the same parameters: later ones are another policy."""
    columns = batch.per_token
    if SAMPLER_COLUMN in columns:
        # The trainer's own are from the time of sampling, whatever has been updated since.
        return masked_max(jnp.abs(columns["old_log_probs"] - columns[SAMPLER_COLUMN]), batch.mask)
    current = batch.versions == version
    return masked_max(jnp.abs(log_probs - columns["old_log_probs"]), batch.mask & current)
