"""A KL to the reference over the whole vocabulary as a part of the loss: no estimate from the tokens that were drawn."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float

from experiments.learner.head_placement import HeadPlacement
from jaxlogp import MicroBatch, PolicyMetricTerms, WeightedSum, linear_kl
from jaxlogp.head import HeadSpec
from jaxlogp.losses import PolicyLoss, reduce_losses

# Each document counts once, as in the metric of the estimators.
_MEAN_OF_DOCUMENTS = PolicyLoss("mean of documents", reduction="document_mean")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["hidden", "weight"], meta_fields=["spec"])
@dataclass(frozen=True)
class ReferenceHead:
    """Hidden states of the reference, its head's weight (on a rank its vocabulary of it), and that head's arithmetic."""

    hidden: Any
    weight: Any
    spec: HeadSpec


@dataclass(frozen=True)
class ExactKL:
    """coefficient · Σ_t w_t m_t D_t: the divergence D of a `kind` of `jaxlogp.linear_kl`, with the weights w of the loss."""

    kind: str
    coefficient: float

    @classmethod
    def in_place_of(cls, loss: PolicyLoss, kind: str) -> tuple[PolicyLoss, "ExactKL | None"]:
        """Returns the loss without its KL, and this one of the same coefficient; None where that is 0."""
        coefficient = loss.kl_coefficient
        return replace(loss, kl_coefficient=0.0), cls(kind, coefficient) if coefficient else None

    def terms(
        self,
        hidden: Float[Array, "R T H"],
        weight: Float[Array, "V H"],
        reference: ReferenceHead,
        batch: MicroBatch,
        head: HeadPlacement,
        loss: PolicyLoss,
        **documents: Any,
    ) -> tuple[WeightedSum, PolicyMetricTerms]:
        """Returns the sum, whose count is that of the loss, and the terms of ``kl_new_ref`` and ``loss_kl``."""
        weight = lax.stop_gradient(weight) if head.frozen else weight
        place = {"axis_name": head.axis_name, "vocab": head.vocab, "engine": head.engine}
        operands = hidden, weight, reference.hidden, reference.weight, batch.mask
        divergence = linear_kl(*operands, kind=self.kind, head=head.spec, ref_head=reference.spec, **place)
        part = reduce_losses(self.coefficient * divergence, batch.mask, loss=loss, **documents)
        mean = reduce_losses(divergence, batch.mask, loss=_MEAN_OF_DOCUMENTS, **documents)
        terms = {"kl_new_ref": mean.sum, "loss_kl": part.sum}
        return part, PolicyMetricTerms({name: lax.stop_gradient(value) for name, value in terms.items()})
