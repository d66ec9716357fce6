"""Importance weights of labels that correct for a sampler other than the old policy.

Three log-probs of a label are told apart: the sampler's μ, under whatever drew the token; the old policy's π_old, which
ratios are taken to; and the new policy's π_θ. A `Correction` turns π_old / μ into a constant weight of each label.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxlogp._arrays import AnyArray, compute_dtype, hold_python_numbers
from jaxlogp._reduce import WeightedSum
from jaxlogp.errors import describe, is_number, require
from jaxlogp.losses.documents import DocumentLayout, document_layout, with_rows
from jaxlogp.losses.inputs import check_log_probs, constant, flat, labels_of, shape_of

LEVELS = ("token", "sequence", "geometric")
KINDS = ("truncate", "mask")
MAX_LOG_WEIGHT = 20.0
"""Bound of the absolute logarithm of a weight π_old / μ, in nats: weights lie between 2e-9 and 5e8."""


@dataclass(frozen=True)
class Correction:
    """Truncated or masked importance weights, constants that multiply the objective of each label.

    With w_t = π_old,t / μ_t, the weight of a label of document d is, by level,

        token: w_t        sequence: W_d = Π_t w_t        geometric: G_d = (Π_t w_t)^(1 / N_d)

    with the products over the N_d labels of d, and its logarithm bounded by ±`MAX_LOG_WEIGHT`. Kind "truncate" replaces w by
    min(w, high), kind "mask" by 0 unless low ≤ w ≤ high. KL, entropy and z-loss are not weighted: they are no expectations
    of the objective under the sampler.

    With `normalize` the weights are then divided by their mean over all labels of the step (self-normalized importance
    sampling), so that truncation does not shrink the gradient. The mean is an argument of the losses, `mean_weight`,
    because a part of the step does not know it: `correction_weight_sum` adds up over micro-batches and ranks. It counts
    labels that a rejection takes out.

    Attributes:
        level: "token", "sequence" or "geometric".
        kind: "truncate" or "mask".
        low: smallest weight that is kept, in [0, 1]; 0 for kind "truncate".
        high: largest weight, at least 1; `math.inf` for no bound.
        normalize: whether the weights have mean 1 over the labels of the step.

    Raises:
        ValueError: if a choice is unknown or a number out of range.

    Example:
        >>> from jaxlogp.losses import grpo, policy_loss
        >>> old, sampler = jnp.log(jnp.array([0.5, 0.3])), jnp.log(jnp.array([0.4, 0.1]))
        >>> loss = grpo(correction=Correction(high=2.0))
        >>> total = policy_loss(old, old, jnp.ones(2), sampler_log_probs=sampler, loss=loss)
        >>> f"{float(total.sum):.2f}"  # weights 1.25 and 3, truncated to 2
        '-3.25'

    References:
        Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (TIS), F. Yao et al., 2025; Every Step
        Evolves (IcePop, the masked form), arXiv:2510.18855.
    """

    level: str = "token"
    kind: str = "truncate"
    low: float = 0.0
    high: float = 2.0
    normalize: bool = False

    def __post_init__(self) -> None:
        require(self.level in LEVELS, "level", f"one of {LEVELS}", repr(self.level))
        require(self.kind in KINDS, "kind", f"one of {KINDS}", repr(self.kind))
        check_bounds(self.low, self.high, "low", "high")
        ok = self.kind == "mask" or self.low == 0.0
        require(ok, "low", "0 for kind 'truncate', which has no lower bound", self.low)
        require(isinstance(self.normalize, bool), "normalize", "a bool", repr(self.normalize))
        hold_python_numbers(self)

    @property
    def needs_documents(self) -> bool:
        """Whether weights are those of documents."""
        return self.level != "token"

    def ratios(self, log_weights: Float[AnyArray, " tokens"], layout: DocumentLayout | None) -> Float[Array, " tokens"]:
        """Computes π_old / μ of each label at the level, without bounds; anything where masked."""
        return ratios_at(self.level, log_weights, layout)

    def limited(self, ratios: Float[AnyArray, " tokens"]) -> Bool[Array, " tokens"]:
        """Returns True where a ratio is truncated or masked."""
        return (ratios < self.low) | (ratios > self.high)

    def weights(self, ratios: Float[AnyArray, " tokens"]) -> Float[Array, " tokens"]:
        """Computes the weights from `ratios`, before they are normalized; NaN where these are."""
        if self.kind == "truncate":
            return jnp.minimum(ratios, jnp.asarray(self.high, ratios.dtype))
        return jnp.where(self.limited(ratios), 0.0, ratios)


def correction_weight_sum(
    correction: Correction,
    old_log_probs: Float[AnyArray, "*tokens"],
    sampler_log_probs: Float[AnyArray, "*tokens"],
    mask: Bool[AnyArray, "*tokens"] | None = None,
    *,
    document_ids: Integer[AnyArray, "*tokens"] | None = None,
    num_documents: int | np.integer | Int[AnyArray, ""] | None = None,
    document_axis_name: str | tuple[str, ...] | None = None,
) -> WeightedSum:
    """Computes the sum of a correction's weights over the labels of a part of a step, and their number.

    The sums of all micro-batches, added, and of all ranks, by `WeightedSum.psum`, have the mean that the losses take as
    `mean_weight`. It reads no policy in training, so it is known before the first micro-batch.

    Args:
        correction: the correction; whether it normalizes is not read.
        old_log_probs: [*tokens], log-probs of the targets under the old policy, in nats.
        sampler_log_probs: [*tokens], log-probs of the targets under the sampler, in nats.
        mask: [*tokens], True where the target is a label; None for all tokens.
        document_ids: [*tokens], document index of each token, as in `policy_loss`; not read at level "token".
        num_documents: number of documents, as in `policy_loss`.
        document_axis_name: mesh axis (or axes) over which documents are split, as in `policy_loss`.

    Returns:
        The sum (fp32, or float64 for float64 log-probs) and the int32 count; NaN where a label has no document.

    Raises:
        ValueError: if a shape or dtype is wrong, or a known value at a label is not finite.

    Example:
        >>> old, sampler = jnp.log(jnp.array([0.5, 0.3])), jnp.log(jnp.array([0.4, 0.1]))
        >>> f"{float(correction_weight_sum(Correction(high=2.0), old, sampler).mean()):.3f}"
        '1.625'
    """
    require(isinstance(correction, Correction), "correction", "a jaxlogp.losses.Correction", repr(correction))
    mask = labels_of(mask, shape_of(old_log_probs, "old_log_probs"))
    given = {"old_log_probs": old_log_probs, "sampler_log_probs": sampler_log_probs}
    check_log_probs(given, mask)
    layout = None
    if correction.needs_documents:
        document_ids, num_documents = with_rows(mask, document_ids, num_documents)
        layout = document_layout(mask, document_ids, num_documents, document_axis_name)
        expected = f"the document index of each token, or rows [B, T], for level {correction.level!r}"
        require(layout is not None, "document_ids", expected, None)
    labels, dtype = flat(mask), compute_dtype(*given.values())
    old, sampler = (constant(values, labels, dtype) for values in given.values())
    weights = correction.weights(correction.ratios(jnp.where(labels, old - sampler, 0.0), layout))
    return WeightedSum(jnp.sum(jnp.where(labels, weights, 0.0)), jnp.sum(labels, dtype=jnp.int32))


def normalized(
    weights: Float[Array, " tokens"], mean_weight: float | np.floating | Float[AnyArray, ""] | None
) -> Float[Array, " tokens"]:
    """Divides weights by their mean over the step; those of a step in which all are 0 stay 0."""
    expected = "the mean of the weights over all labels of the step, for a correction that normalizes"
    require(mean_weight is not None, "mean_weight", expected, describe(mean_weight))
    mean = jnp.asarray(mean_weight, weights.dtype)
    # Not `mean > 0`, which would hide a NaN.
    return jnp.where(mean == 0.0, weights, weights / jnp.where(mean == 0.0, 1.0, mean))


def check_bounds(low: float, high: float, low_name: str, high_name: str) -> None:
    """Raises ValueError unless 0 ≤ low ≤ 1 ≤ high, so that equal policies have the weight 1."""
    require(is_number(low) and 0.0 <= low <= 1.0, low_name, "a number in [0, 1]", low)
    require(is_number(high) and 1.0 <= high <= math.inf, high_name, "a number of at least 1", high)


def ratios_at(
    level: str, log_weights: Float[AnyArray, " tokens"], layout: DocumentLayout | None
) -> Float[Array, " tokens"]:
    """Computes π_old / μ at a level of `LEVELS`, one number for each token."""
    if level == "sequence":
        log_weights = layout.sum_of(log_weights)[layout.document_ids]
    elif level == "geometric":
        log_weights = layout.mean_of(log_weights)[layout.document_ids]
    return jnp.exp(bounded_weight(log_weights))


def bounded_weight(log_weights: Float[AnyArray, "*shape"]) -> Float[Array, "*shape"]:
    """Bounds logarithms of weights by ±`MAX_LOG_WEIGHT`."""
    return jnp.clip(log_weights, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
