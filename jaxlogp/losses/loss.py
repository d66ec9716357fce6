"""Policy losses as objects, and their values as unreduced sums with the count that divides a whole step.

`policy_loss` is the loss of all tokens at once. `loss_tokens` and `weighted_losses` are its two halves, for callers
that see the log-probs of a few tokens at a time. The first prepares everything that does not depend on log-probs; the
second is a function of log-probs and entropies alone.
"""

import functools
import math
import operator
from dataclasses import dataclass
from functools import partial
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxlogp._arrays import AnyArray, compute_dtype, hold_python_numbers
from jaxlogp._reduce import WeightedSum
from jaxlogp.errors import describe, is_number, is_positive_integer, require
from jaxlogp.losses import reductions
from jaxlogp.losses.correction import Correction, normalized
from jaxlogp.losses.documents import DocumentLayout, document_layout, with_rows
from jaxlogp.losses.inputs import (
    advantages_of_tokens,
    check_labels,
    check_log_probs,
    check_number,
    constant,
    flat,
    labels_of,
    selected,
    shape_of,
)
from jaxlogp.losses.objectives import Clipped, Objective
from jaxlogp.losses.ratios import KL_ESTIMATORS, bounded
from jaxlogp.losses.rejection import Policies, Rejection

RATIOS = ("token", "sequence", "sequence_token", "product")
ENTROPY_WEIGHTS = ("reduction", "labels")
LOSS_PARTS = ("objective", "kl", "entropy", "z", "drift")
"""Names of the parts of a policy loss, in the order of the formula of `PolicyLoss`."""


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss made of parts that are chosen independently.

    With r_t = exp(log_probs_t - old_log_probs_t), the advantage A_t, labels m_t, and per-label weights w_t and the count
    of the reduction, the loss of a step is Σ / count with

        Σ = Σ_t w_t m_t (-c_t objective(r_t, A_t) + kl_coefficient KL_t - entropy_coefficient H_t
                         + z_loss_coefficient lse_t² + drift_coefficient p_t |log r_t|).

    With ratio "sequence" all N_d labels of document d share R_d = exp(Σ_t m_t (log_probs_t - old_log_probs_t) / N_d) and
    the mean A_d of their advantages in place of r_t and A_t. With "sequence_token" r_t has the value of R_d and the gradient
    of label t alone, and A_t stays the label's own; "product" is the same for the value Π_t r_t of the whole document. With
    `log_clip` (low, high) and ratio "sequence" each log r_t is at most high where A_t > 0, and at least -low where A_t < 0,
    before the mean. KL, entropy and lse_t, the log Σ_v e^z of the token's logits, are per token with every ratio, as is the
    drift |log_probs_t - old_log_probs_t| of `penalized` labels (p_t = 1). They belong to the same sum, so they have the
    weights and the denominator of the reduction.
    With `entropy_weights` "labels" the entropy bonus is instead entropy_coefficient times the mean entropy of all D labels
    of the step, as in TRL: its w_t is M / D. c_t is the weight of the `correction`, and 1 without one. A `rejection` takes
    labels out of m_t, D and N_d.

    `jaxlogp.losses` has the published losses as presets. Other combinations are built from them, as in
    `dataclasses.replace(grpo(), ratio="sequence")`. The object is hashable: it may be a static argument of `jax.jit`.

    Attributes:
        name: name for logs.
        ratio: "token", "sequence", "sequence_token" or "product".
        objective: `Clipped`, `StopGradientWeight`, `SoftGate`, `LogLikelihood` or your own (`Objective`).
        reduction: "labels" (w = 1, count = labels), "documents" (w = 1, count = documents), "document_mean"
            (w = 1 / N_d, count = documents) or "constant_length" (w = 1 / length, count = documents).
        length: divisor in tokens, for reduction "constant_length" alone.
        kl_coefficient: weight of the KL to `ref_log_probs`, at least 0 (`beta` in TRL).
        kl_estimator: "k1", "k2" or "k3", differentiated as written.
        kl_unbiased: whether KL_t is the estimate times π_t / μ_t, the token's ratio to the sampler (the old policy where no
            sampler is given), differentiated too. Its gradient estimates that of KL(π ‖ π_ref) without bias, under any
            sampler. For estimators "k1" and "k3".
        entropy_coefficient: weight of the entropy bonus.
        entropy_weights: "reduction" or "labels"; see above.
        z_loss_coefficient: weight of the penalty on lse², at least 0, which keeps logits from drifting.
        correction: importance weights for a sampler other than the old policy, or None.
        rejection: rules by which labels leave the mask, or None.
        grad_divisor: divisor of the gradient of the mean if it differs from that of the reported loss, or None.
        log_clip: (low, high), bounds in nats, above 0, of the log-ratio of each label in a document's mean, or None. For
            ratio "sequence" alone.
        drift_coefficient: weight of the drift of penalized labels, at least 0.

    Raises:
        ValueError: if a choice is unknown or a number out of range.

    Example:
        >>> loss = PolicyLoss("mine", ratio="token", objective=Clipped(0.1), reduction="documents", kl_coefficient=0.01)
        >>> loss.needs_documents, loss.kl_estimator
        (True, 'k3')
    """

    name: str
    ratio: str = "token"
    objective: Objective = Clipped()
    reduction: str = "labels"
    length: int | None = None
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    kl_unbiased: bool = False
    entropy_coefficient: float = 0.0
    entropy_weights: str = "reduction"
    z_loss_coefficient: float = 0.0
    correction: Correction | None = None
    rejection: Rejection | None = None
    grad_divisor: float | None = None
    log_clip: tuple[float, float] | None = None
    drift_coefficient: float = 0.0

    def __post_init__(self) -> None:
        require(isinstance(self.name, str) and self.name != "", "name", "a name", repr(self.name))
        require(self.ratio in RATIOS, "ratio", f"one of {RATIOS}", repr(self.ratio))
        good = isinstance(self.objective, Objective) and not isinstance(self.objective, type)
        require(good, "objective", "value(…) and clipped(…)", repr(self.objective))
        own = self.ratio == "token" or not getattr(self.objective, "needs_token_ratio", False)
        expected = f"'token' for {type(self.objective).__name__}, which reads the probabilities of each label"
        require(own, "ratio", expected, repr(self.ratio))
        known = reductions.REDUCTIONS
        require(self.reduction in known, "reduction", f"one of {known}", repr(self.reduction))
        self._check_length()
        estimators = tuple(KL_ESTIMATORS)
        require(self.kl_estimator in estimators, "kl_estimator", f"one of {estimators}", repr(self.kl_estimator))
        good = isinstance(self.kl_unbiased, bool) and not (self.kl_unbiased and self.kl_estimator == "k2")
        require(good, "kl_unbiased", "a bool, and False for kl_estimator 'k2'", repr(self.kl_unbiased))
        for name in ("kl_coefficient", "z_loss_coefficient", "drift_coefficient"):
            value = getattr(self, name)
            good = is_number(value) and 0.0 <= value < math.inf
            require(good, name, "a finite number of at least 0", repr(value))
        known = ENTROPY_WEIGHTS
        require(self.entropy_weights in known, "entropy_weights", f"one of {known}", repr(self.entropy_weights))
        good = is_number(self.entropy_coefficient) and math.isfinite(self.entropy_coefficient)
        require(good, "entropy_coefficient", "a finite number", repr(self.entropy_coefficient))
        good = self.correction is None or isinstance(self.correction, Correction)
        require(good, "correction", "a jaxlogp.losses.Correction or None", repr(self.correction))
        good = self.rejection is None or isinstance(self.rejection, Rejection)
        require(good, "rejection", "a jaxlogp.losses.Rejection or None", repr(self.rejection))
        self._check_log_clip()
        if self.grad_divisor is not None:
            good = is_number(self.grad_divisor) and 0 < self.grad_divisor < math.inf
            require(good, "grad_divisor", "a finite Python number above 0", repr(self.grad_divisor))
        hold_python_numbers(self)

    @property
    def needs_documents(self) -> bool:
        """Whether the loss reads documents: the rows of inputs [B, T], or those of `document_ids`."""
        parts = [part for part in (self.correction, self.rejection) if part is not None]
        by_document = self.ratio != "token" or reductions.needs_documents(self.reduction)
        return by_document or any(part.needs_documents for part in parts)

    @property
    def reads_sampler(self) -> bool:
        """Whether the loss reads the sampler's log-probs."""
        return self.correction is not None or self.rejection is not None or self.weighs_kl

    @property
    def weighs_kl(self) -> bool:
        """Whether the loss has a KL that is weighted by ratios to the sampler."""
        return self.kl_unbiased and self.kl_coefficient != 0.0

    @property
    def rejects_by_log_probs(self) -> bool:
        """Whether the mask depends on the policy in training."""
        return self.rejection is not None and self.rejection.needs_log_probs

    @property
    def vanishes_without_advantage(self) -> bool:
        """Whether documents whose advantages are all 0 add exactly 0 to the sum and its gradient, and to the count all that
        they have: they need not be computed then."""
        others = (self.kl_coefficient, self.entropy_coefficient, self.z_loss_coefficient, self.drift_coefficient)
        alone = self.rejection is None and not any(others)
        return alone and getattr(self.objective, "vanishes_without_advantage", False)

    def _check_log_clip(self) -> None:
        if self.log_clip is None:
            return
        require(self.ratio == "sequence", "log_clip", f"None for ratio {self.ratio!r}", repr(self.log_clip))
        good = isinstance(self.log_clip, tuple) and len(self.log_clip) == 2
        good = good and all(is_number(bound) and 0.0 < bound < math.inf for bound in self.log_clip)
        require(good, "log_clip", "a tuple of two finite numbers above 0, or None", repr(self.log_clip))

    def _check_length(self) -> None:
        if self.reduction == "constant_length":
            good = is_positive_integer(self.length)
            require(good, "length", "an integer above 0 for reduction 'constant_length'", repr(self.length))
        else:
            require(self.length is None, "length", f"None for reduction {self.reduction!r}", repr(self.length))


def require_loss(loss: object) -> None:
    """Raises ValueError unless `loss` is a PolicyLoss, and not, for one, a preset that was not called."""
    require(isinstance(loss, PolicyLoss), "loss", "a PolicyLoss, such as jaxlogp.losses.grpo()", describe(loss))


# JAX rebuilds it with leaves that are not arrays (sentinels, None), so functions check the fields that they use.
@no_type_check
@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "old_log_probs",
        "advantages",
        "ref_log_probs",
        "sampler_log_probs",
        "penalized",
        "mask",
        "weights",
        "entropy_weights",
        "corrections",
        "layout",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class LossTokens:
    """The inputs of a policy loss that do not depend on the policy: flat, constant, and zero where masked.

    Attributes:
        old_log_probs: [tokens], log-probs under the old policy in nats, also of rejected labels; None on policy, when they
            are those of the policy.
        advantages: [tokens], advantage of each token.
        ref_log_probs: [tokens], log-probs under the reference in nats, or None for a loss without KL.
        sampler_log_probs: [tokens], log-probs under the sampler in nats, for a loss with an unbiased KL; or None, when they
            are the old ones.
        penalized: bool [tokens], True for labels whose drift is penalized, or None for a loss without that.
        mask: bool [tokens], True where the target is a label that was not rejected.
        weights: [tokens], weight of each label in the sum; NaN for a label whose document id is out of range.
        entropy_weights: [tokens], weight of each entropy if it differs from `weights`, or None.
        corrections: [tokens], weight of each objective, or None for 1.
        layout: the documents, or None for ratio "token".
    """

    old_log_probs: Float[AnyArray, " tokens"] | None
    advantages: Float[AnyArray, " tokens"]
    ref_log_probs: Float[AnyArray, " tokens"] | None
    sampler_log_probs: Float[AnyArray, " tokens"] | None
    penalized: Bool[AnyArray, " tokens"] | None
    mask: Bool[AnyArray, " tokens"]
    weights: Float[AnyArray, " tokens"]
    entropy_weights: Float[AnyArray, " tokens"] | None
    corrections: Float[AnyArray, " tokens"] | None
    layout: DocumentLayout | None


def policy_loss(
    log_probs: Float[AnyArray, "*tokens"],
    old_log_probs: Float[AnyArray, "*tokens"] | None,
    advantages: Float[AnyArray, "*rows"],
    mask: Bool[AnyArray, "*tokens"] | None = None,
    *,
    sampler_log_probs: Float[AnyArray, "*tokens"] | None = None,
    loss: PolicyLoss = PolicyLoss("grpo"),
    entropy: Float[AnyArray, "*tokens"] | None = None,
    lse: Float[AnyArray, "*tokens"] | None = None,
    ref_log_probs: Float[AnyArray, "*tokens"] | None = None,
    penalized: Bool[AnyArray, "*tokens"] | None = None,
    document_ids: Integer[AnyArray, "*tokens"] | None = None,
    num_documents: int | np.integer | Integer[AnyArray, ""] | None = None,
    document_axis_name: str | tuple[str, ...] | None = None,
    labels_per_document: float | np.floating | Float[AnyArray, ""] | None = None,
    mean_weight: float | np.floating | Float[AnyArray, ""] | None = None,
    entropy_scale: float | np.floating | Float[AnyArray, ""] | None = None,
) -> WeightedSum:
    """Computes an unreduced policy loss: a sum, and the count that divides it over a whole optimizer step.

    The formula is that of :class:`jaxlogp.PolicyLoss`. Masked inputs are replaced before any arithmetic. Ratios
    above exp(`MAX_LOG_RATIO`) have zero gradient. Gradients flow to `log_probs`, `entropy` and `lse` alone.

    **The rows of inputs [B, T] are documents unless `document_ids` are given.** Rows that hold several documents need ids
    if the loss reads documents.

    Args:
        log_probs: [*tokens], log-probs of the targets under the policy in training, in nats.
        old_log_probs: [*tokens], log-probs of the same targets under the policy that ratios are taken to, in nats: the
            sampler's, or those of the trainer's own forward with the weights of the rollout. None if the sampler is the
            policy in training (strictly on policy): they are then log_probs without their gradient, and every ratio is 1.
        advantages: [*tokens], advantage of each token; or [B] or [B, 1], one per row of [B, T].
        mask: [*tokens], True where the target is a label; None makes every token a label.
        sampler_log_probs: [*tokens], log-probs of the same targets under whatever drew them, in nats; read by a
            correction, a rejection or an unbiased KL. None if they are old_log_probs: every weight is then 1.
        loss: the loss; by default GRPO as the token mean over the step.
        entropy: [*tokens], entropy of the distribution of each target, in nats; needed with an entropy coefficient.
        lse: [*tokens], log Σ_v e^z of the logits of each token, in nats, differentiable in them; needed with a z-loss
            coefficient. The lse of :func:`jaxlogp.linear_log_probs` is a constant and does not serve here; use
            :func:`jaxlogp.linear_policy_loss`, which needs none.
        ref_log_probs: [*tokens], log-probs of the targets under the reference, in nats; needed with a KL coefficient.
        penalized: bool [*tokens], True for labels whose drift is penalized, anything where masked; needed with a drift
            coefficient.
        document_ids: [*tokens], document index of each token, of any integer dtype; anything for tokens without a label.
            None for the rows of [B, T], including those without a label; inputs of other shapes need ids unless ratio is
            "token" and reduction "labels".
        num_documents: number of documents that `document_ids` counts, in this part of the step alone: a psum adds the counts
            of the ranks, so the number of all ranks would divide the loss by the number of ranks once more. An array that is
            the same on ranks whose tokens differ is therefore refused; a Python int is not, since every rank may have the
            same number. An array scalar must not exceed the number of tokens.
        document_axis_name: mesh axis (or axes) of an enclosing `shard_map` over which documents are split. `document_ids`
            and `num_documents` then describe whole documents and are the same on every shard, and a psum of the result over
            the axis gives the loss of the whole documents, once.
        labels_per_document: D / M of the whole step, all parts together; needed with entropy weights "labels" unless
            the reduction is "labels".
        mean_weight: mean of the correction's weights over all labels of the whole step, all parts together, such as the
            `mean` of the :func:`jaxlogp.losses.correction_weight_sum` of all; needed along with sampler_log_probs if the
            correction normalizes.
        entropy_scale: factor of the entropy coefficient; an array may change from step to step without recompiling. None
            for 1.

    Returns:
        The sum (fp32, or float64 for float64 log-probs, like every loss and metric) and the int32 count of this part of
        the step.

    Raises:
        ValueError: if a shape or dtype differs from the above, an input that `loss` needs is missing, a value at a label is
            not finite, an old, sampler's or reference log-prob is above 0, or a label has a document id outside
            [0, num_documents); under a JAX transformation, which hides values, non-finite values and such ids give NaN
            instead. Also if document sums over `document_axis_name` are differentiated under `shard_map(check_vma=False)`.

    Example:
        >>> import jax.numpy as jnp
        >>> new, old = jnp.log(jnp.array([0.5, 0.3, 0.9])), jnp.log(jnp.array([0.25, 0.3, 0.1]))
        >>> loss = policy_loss(new, old, jnp.array([1.0, -2.0, 5.0]), jnp.array([True, True, False]))
        >>> print(f"{float(loss.sum):.4f} over {int(loss.count)} labels")
        0.8000 over 2 labels

    References:
        Those of the presets in `jaxlogp.losses`.
    """
    mask = labels_of(mask, shape_of(log_probs, "log_probs"))
    read_by_rules = log_probs if isinstance(loss, PolicyLoss) and loss.rejects_by_log_probs else None
    values = {"entropy": entropy, "lse": lse}
    values = {name: value for name, value in values.items() if value is not None}
    check_labels({"log_probs": log_probs, **values}, mask)
    tokens, count = loss_tokens(
        loss,
        old_log_probs,
        advantages,
        mask,
        sampler_log_probs=sampler_log_probs,
        log_probs=read_by_rules,
        ref_log_probs=ref_log_probs,
        penalized=penalized,
        document_ids=document_ids,
        num_documents=num_documents,
        document_axis_name=document_axis_name,
        labels_per_document=labels_per_document,
        mean_weight=mean_weight,
        entropy_scale=entropy_scale,
    )
    losses = weighted_losses(loss, flat(log_probs), tokens, **jax.tree.map(flat, values))
    return WeightedSum(jnp.sum(losses), count, loss.grad_divisor)


def reduce_losses(
    losses: Float[AnyArray, "*tokens"],
    mask: Bool[AnyArray, "*tokens"] | None = None,
    *,
    loss: PolicyLoss,
    document_ids: Integer[AnyArray, "*tokens"] | None = None,
    num_documents: int | np.integer | Integer[AnyArray, ""] | None = None,
    document_axis_name: str | tuple[str, ...] | None = None,
) -> WeightedSum:
    """Reduces your own per-token losses as `loss` reduces its own: to Σ_t w_t m_t losses_t and its count.

    Only the reduction, its length and the grad_divisor of `loss` are read.

    Args:
        losses: [*tokens], the loss of each token; anything at masked tokens.
        mask: [*tokens], True where the loss counts; None for all tokens.
        loss: the loss whose reduction is wanted.
        document_ids: [*tokens], document index of each token, as in `policy_loss`; without effect with reduction "labels".
        num_documents: number of documents, as in `policy_loss`.
        document_axis_name: mesh axis (or axes) over which documents are split, as in `policy_loss`.

    Returns:
        The sum (fp32, or float64 for float64 losses), differentiable in `losses`, and the int32 count of this part of the
        step.

    Raises:
        ValueError: if an argument is refused as in `policy_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> mask = jnp.array([[True, True], [True, False]])
        >>> loss = PolicyLoss("mean of rows", reduction="document_mean")
        >>> float(reduce_losses(jnp.array([[1.0, 3.0], [4.0, 9.0]]), mask, loss=loss).mean())
        3.0
    """
    require_loss(loss)
    mask = labels_of(mask, shape_of(losses, "losses"))
    check_labels({"losses": losses}, mask)
    needed = reductions.needs_documents(loss.reduction)
    layout = loss_layout(loss, mask, document_ids, num_documents, document_axis_name, needed=needed)
    mask, dtype = flat(mask), compute_dtype(losses)
    weights = reductions.label_weights(loss.reduction, loss.length, mask, layout, dtype)
    total = jnp.sum(weights * selected(flat(losses), mask, dtype))
    return WeightedSum(total, reductions.count(loss.reduction, mask, layout), loss.grad_divisor)


def loss_tokens(
    loss: PolicyLoss,
    old_log_probs: Float[AnyArray, "*tokens"] | None,
    advantages: Float[AnyArray, "*rows"],
    mask: Bool[AnyArray, "*tokens"],
    *,
    sampler_log_probs: Float[AnyArray, "*tokens"] | None = None,
    log_probs: Float[AnyArray, "*tokens"] | None = None,
    ref_log_probs: Float[AnyArray, "*tokens"] | None = None,
    penalized: Bool[AnyArray, "*tokens"] | None = None,
    document_ids: Integer[AnyArray, "*tokens"] | None = None,
    num_documents: int | np.integer | Integer[AnyArray, ""] | None = None,
    document_axis_name: str | tuple[str, ...] | None = None,
    labels_per_document: float | np.floating | Float[AnyArray, ""] | None = None,
    mean_weight: float | np.floating | Float[AnyArray, ""] | None = None,
    entropy_scale: float | np.floating | Float[AnyArray, ""] | None = None,
) -> tuple[LossTokens, Int[Array, ""]]:
    """Prepares the inputs of a policy loss that do not depend on the policy: checked, flat, masked, weighted.

    Args:
        loss: the loss.
        old_log_probs: [*tokens], log-probs under the old policy, in nats, as in :func:`jaxlogp.policy_loss`; or None.
        advantages: [*tokens], advantage of each token; or [B] or [B, 1], one per row of [B, T].
        mask: [*tokens], bool, True where the target is a label; required, because it gives the shape.
        sampler_log_probs: [*tokens], log-probs under the sampler, in nats; ignored by a loss without correction,
            rejection and unbiased KL.
        log_probs: [*tokens], log-probs under the policy in training, in nats, for a rejection that reads them; constants.
        ref_log_probs: [*tokens], log-probs under the reference, in nats; ignored by a loss without KL.
        penalized: bool [*tokens], labels whose drift is penalized; ignored by a loss without drift coefficient.
        document_ids: [*tokens], document index of each token, as in :func:`jaxlogp.policy_loss`.
        num_documents: number of documents, as in :func:`jaxlogp.policy_loss`.
        document_axis_name: mesh axis (or axes) over which documents are split.
        labels_per_document: D / M of the whole step, as in :func:`jaxlogp.policy_loss`.
        mean_weight: mean of the correction's weights over the whole step, as in :func:`jaxlogp.policy_loss`.
        entropy_scale: factor of the entropy coefficient, as in :func:`jaxlogp.policy_loss`.

    Returns:
        The tokens for `weighted_losses`, and the int32 count of this part of the step.

    Raises:
        ValueError: if an argument is refused as in :func:`jaxlogp.policy_loss`.
    """
    require_loss(loss)
    check_of_step(labels_per_document, mean_weight, entropy_scale)
    given = {"old_log_probs": old_log_probs, "ref_log_probs": ref_log_probs, "sampler_log_probs": sampler_log_probs}
    given = {name: values for name, values in given.items() if values is not None}
    check_log_probs(given, mask)
    if not loss.reads_sampler:
        given.pop("sampler_log_probs", None)
    if loss.rejects_by_log_probs:
        read = {} if log_probs is None else {"log_probs": log_probs}
        require(len(read) > 0, "log_probs", f"log-probs of the policy for {loss.rejection}", None)
        check_labels(read, mask)
        given |= read
    advantages = given["advantages"] = advantages_of_tokens(advantages, mask)
    check_labels({"advantages": advantages}, mask)
    with_kl = loss.kl_coefficient != 0.0
    why = f"log-probs under the reference for kl_coefficient {loss.kl_coefficient}"
    require(not with_kl or ref_log_probs is not None, "ref_log_probs", why, None)
    drifts = loss.drift_coefficient != 0.0
    if drifts:
        expected = (
            f"labels to penalize, a bool array of shape {mask.shape}, for drift_coefficient {loss.drift_coefficient}"
        )
        good = getattr(penalized, "dtype", None) == np.bool_ and penalized.shape == mask.shape
        require(good, "penalized", expected, describe(penalized))
    if sampler_log_probs is not None:
        expected = (
            "log-probs of the old policy along with sampler_log_probs (on policy, jax.lax.stop_gradient(log_probs))"
        )
        require(old_log_probs is not None, "old_log_probs", expected, None)
    needed = loss.needs_documents
    layout = loss_layout(loss, mask, document_ids, num_documents, document_axis_name, needed=needed)

    mask = flat(mask)
    dtype = compute_dtype(*given.values())
    constants = {name: constant(values, mask, compute_dtype(values)) for name, values in given.items()}
    policies = policies_of(constants)
    kept, kept_layout = mask, layout
    if loss.rejection is not None:
        kept = mask & ~loss.rejection.rejected(policies, mask, layout)
        kept_layout = None if layout is None else layout.with_labels(kept)
    # Those that the denominators count.
    counted, counted_layout = kept, kept_layout
    if loss.rejection is not None and loss.rejection.keep_denominator:
        counted, counted_layout = mask, layout
    weights = reductions.label_weights(loss.reduction, loss.length, counted, counted_layout, dtype)
    corrections = None
    if "sampler_log_probs" in constants:
        logs = policies.log_weights(mask)
        weights = jnp.where(jnp.isnan(logs), jnp.nan, weights)
        corrections = _corrections(loss, logs, mask, layout, mean_weight)
    tokens = LossTokens(
        constants.get("old_log_probs"),
        constants["advantages"],
        constants["ref_log_probs"] if with_kl else None,
        constants.get("sampler_log_probs") if loss.weighs_kl else None,
        flat(penalized) if drifts else None,
        kept,
        weights,
        _entropy_weights(loss, weights, labels_per_document, entropy_scale),
        corrections,
        kept_layout if loss.ratio != "token" else None,
    )
    return tokens, reductions.count(loss.reduction, counted, counted_layout)


def check_of_step(
    labels_per_document: float | np.floating | Float[AnyArray, ""] | None,
    mean_weight: float | np.floating | Float[AnyArray, ""] | None,
    entropy_scale: float | np.floating | Float[AnyArray, ""] | None,
) -> None:
    """Raises ValueError unless the numbers that are those of a whole step are None or numbers in their range."""
    check_number(labels_per_document, "labels_per_document", least=0.0)
    check_number(mean_weight, "mean_weight", least=0.0)
    check_number(entropy_scale, "entropy_scale")


def loss_layout(
    loss: PolicyLoss,
    mask: Bool[AnyArray, "*tokens"],
    document_ids: Integer[AnyArray, "*tokens"] | None,
    num_documents: int | np.integer | Integer[AnyArray, ""] | None,
    axis_name: str | tuple[str, ...] | None,
    needed: bool,
) -> DocumentLayout | None:
    """Returns the documents, by default the rows if the loss needs them; None if there are none, which is then refused."""
    if needed:
        document_ids, num_documents = with_rows(mask, document_ids, num_documents)
    layout = document_layout(mask, document_ids, num_documents, axis_name)
    expected = f"the document index of each token, or rows [B, T], for loss {loss.name!r}"
    require(layout is not None or not needed, "document_ids", expected, None)
    return layout


def _corrections(
    loss: PolicyLoss,
    log_weights: Float[Array, " tokens"],
    mask: Bool[AnyArray, " tokens"],
    layout: DocumentLayout | None,
    mean_weight: float | np.floating | Float[AnyArray, ""] | None,
) -> Float[Array, " tokens"] | None:
    """Returns the weight of each objective, 0 where masked; None if all are 1."""
    if loss.correction is None:
        return None
    weights = loss.correction.weights(loss.correction.ratios(log_weights, layout))
    if loss.correction.normalize:
        weights = normalized(weights, mean_weight)
    return jnp.where(mask, weights, 0.0)


def policies_of(constants: dict[str, Array]) -> Policies:
    """Returns the three policies: the sampler's log-probs are by default the old ones, these those of the new policy."""
    advantages, new = constants["advantages"], constants.get("log_probs")
    old = constants.get("old_log_probs", jnp.zeros_like(advantages) if new is None else new)
    return Policies(constants.get("sampler_log_probs", old), old, new, advantages)


def _entropy_weights(
    loss: PolicyLoss,
    weights: Float[Array, " tokens"],
    labels_per_document: float | np.floating | Float[AnyArray, ""] | None,
    scale: float | np.floating | Float[AnyArray, ""] | None,
) -> Float[Array, " tokens"] | None:
    """Returns the weights of the entropies in the sum, `scale` included; None if those of the loss serve."""
    if loss.entropy_coefficient == 0.0:
        return None
    if loss.entropy_weights == "labels" and loss.reduction != "labels":
        weights = _token_mean_weights(weights, labels_per_document)
    elif scale is None:
        return None
    if scale is None:
        return weights
    return jnp.asarray(scale, weights.dtype) * weights


def _token_mean_weights(
    weights: Float[Array, " tokens"], labels_per_document: float | np.floating | Float[AnyArray, ""] | None
) -> Float[Array, " tokens"]:
    """Returns the weights of a token mean in a sum that is divided by documents."""
    why = "the labels of the whole step divided by its documents, for entropy_weights 'labels'"
    require(labels_per_document is not None, "labels_per_document", why, describe(labels_per_document))
    weight = 1.0 / jnp.maximum(jnp.asarray(labels_per_document, weights.dtype), jnp.finfo(weights.dtype).tiny)
    # A NaN marks a label of no document.
    return jnp.where(weights == 0, 0.0, weight + 0.0 * weights)


def weighted_losses(
    loss: PolicyLoss,
    log_probs: Float[AnyArray, " tokens"],
    tokens: LossTokens,
    *,
    entropy: Float[AnyArray, " tokens"] | None = None,
    lse: Float[AnyArray, " tokens"] | None = None,
) -> Float[Array, " tokens"]:
    """Computes the loss of each label times its weight, 0 where masked; these add up to the loss sum.

    For ratio "token" it is elementwise: a slice of the tokens gives the slice of the result. Otherwise it needs all labels
    of a document, except those on other shards of the document axis.

    Args:
        loss: the loss for which `loss_tokens` made `tokens`.
        log_probs: [tokens], log-probs under the policy in training, in nats.
        tokens: the result of `loss_tokens`, or a slice of it.
        entropy: [tokens], in nats; read with an entropy coefficient only.
        lse: [tokens], in nats; read with a z-loss coefficient only.

    Returns:
        [tokens], fp32 (float64 for float64 log-probs); gradients flow into `log_probs`, `entropy` and `lse` alone.

    Raises:
        ValueError: if entropy is missing for a loss with an entropy coefficient, or lse for one with a z-loss coefficient.
    """
    parts = _parts(loss, log_probs, tokens, entropy, lse)
    weights = tokens.weights.astype(compute_dtype(log_probs))
    apart = None if tokens.entropy_weights is None else parts.pop("entropy")
    losses = weights * functools.reduce(operator.add, parts.values())
    if apart is not None:
        losses = losses + tokens.entropy_weights.astype(weights.dtype) * apart
    return jnp.where(tokens.mask, losses, 0.0)


def loss_parts(
    loss: PolicyLoss,
    log_probs: Float[AnyArray, " tokens"],
    tokens: LossTokens,
    *,
    entropy: Float[AnyArray, " tokens"] | None = None,
    lse: Float[AnyArray, " tokens"] | None = None,
) -> dict[str, Float[Array, " tokens"]]:
    """Computes the parts that add up to `weighted_losses`, by names of `LOSS_PARTS`, without those of coefficient 0."""
    weights = {"entropy": tokens.weights if tokens.entropy_weights is None else tokens.entropy_weights}
    parts = _parts(loss, log_probs, tokens, entropy, lse)
    weighted = {name: weights.get(name, tokens.weights).astype(part.dtype) * part for name, part in parts.items()}
    return {name: jnp.where(tokens.mask, part, 0.0) for name, part in weighted.items()}


def _parts(
    loss: PolicyLoss,
    log_probs: Float[AnyArray, " tokens"],
    tokens: LossTokens,
    entropy: Float[AnyArray, " tokens"] | None,
    lse: Float[AnyArray, " tokens"] | None,
) -> dict[str, Float[Array, " tokens"]]:
    """Computes each part of the loss of each label, with its coefficient, before weights."""
    dtype = compute_dtype(log_probs)
    new = selected(log_probs, tokens.mask, dtype)
    # Selected once more: what was rejected is a label of `loss_tokens`, but none of the loss.
    old = lax.stop_gradient(new) if tokens.old_log_probs is None else selected(tokens.old_log_probs, tokens.mask, dtype)
    advantages = selected(tokens.advantages, tokens.mask, dtype)
    objective = -_objective(loss, new, new - old, advantages, tokens.layout)
    if tokens.corrections is not None:
        objective = tokens.corrections.astype(dtype) * objective
    parts = {"objective": objective}
    if loss.kl_coefficient != 0.0:
        parts["kl"] = loss.kl_coefficient * _kl(loss, new, old, tokens)
    if loss.entropy_coefficient != 0.0:
        why = f"entropies for entropy_coefficient {loss.entropy_coefficient}"
        require(entropy is not None, "entropy", why, None)
        parts["entropy"] = -loss.entropy_coefficient * selected(entropy, tokens.mask, dtype)
    if loss.z_loss_coefficient != 0.0:
        require(lse is not None, "lse", f"log-sum-exps for z_loss_coefficient {loss.z_loss_coefficient}", None)
        parts["z"] = loss.z_loss_coefficient * jnp.square(selected(lse, tokens.mask, dtype))
    if loss.drift_coefficient != 0.0:
        drift = new - old
        # Not jnp.abs, whose gradient at 0 is 1: on policy it would push every penalized label down.
        drift = jnp.sign(lax.stop_gradient(drift)) * drift
        parts["drift"] = jnp.where(tokens.penalized, loss.drift_coefficient * drift, 0.0)
    return parts


def _kl(
    loss: PolicyLoss, new: Float[Array, " tokens"], old: Float[Array, " tokens"], tokens: LossTokens
) -> Float[Array, " tokens"]:
    """Computes the estimate of KL(π ‖ π_ref) of each token, times π / μ if it is to be unbiased."""
    kl = KL_ESTIMATORS[loss.kl_estimator](tokens.ref_log_probs.astype(new.dtype) - new)
    if not loss.kl_unbiased:
        return kl
    sampler = old
    if tokens.sampler_log_probs is not None:
        sampler = selected(tokens.sampler_log_probs, tokens.mask, new.dtype)
    return jnp.exp(bounded(new - sampler)) * kl


def _objective(
    loss: PolicyLoss,
    new: Float[AnyArray, " tokens"],
    log_ratio: Float[AnyArray, " tokens"],
    advantages: Float[AnyArray, " tokens"],
    layout: DocumentLayout | None,
) -> Float[Array, " tokens"]:
    """Computes the objective of each token, or of its document."""
    if layout is None:
        return loss.objective.value(bounded(log_ratio), new, advantages)
    if loss.ratio in ("sequence_token", "product"):
        # The value of the document's ratio, and the gradient of the token's.
        document = lax.stop_gradient(document_log_ratio(loss, log_ratio, layout))
        return loss.objective.value(bounded(document + (new - lax.stop_gradient(new))), new, advantages)
    if loss.log_clip is not None:
        low, high = loss.log_clip
        limited = lax.stop_gradient(jnp.clip(log_ratio, -low, high))
        log_ratio = jnp.where(stopped_labels(loss.log_clip, log_ratio, advantages), limited, log_ratio)
    means = (layout.mean_of(values) for values in (log_ratio, new, advantages))
    log_ratio, new, advantages = means
    return loss.objective.value(bounded(log_ratio), new, advantages)[layout.document_ids]


def document_log_ratio(
    loss: PolicyLoss, log_ratio: Float[AnyArray, " tokens"], layout: DocumentLayout
) -> Float[Array, " tokens"]:
    """Computes the log-ratio of the document of each token: the sum of those of its labels for "product", or their mean."""
    whole = layout.sum_of if loss.ratio == "product" else layout.mean_of
    return whole(log_ratio)[layout.document_ids]


def stopped_labels(
    log_clip: tuple[float, float], log_ratio: Float[AnyArray, "*shape"], advantages: Float[AnyArray, "*shape"]
) -> Bool[Array, "*shape"]:
    """Returns True for labels whose log-ratio `log_clip` limits: beyond the bound that their advantage moves them to."""
    low, high = log_clip
    return ((advantages > 0) & (log_ratio > high)) | ((advantages < 0) & (log_ratio < -low))
