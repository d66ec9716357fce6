"""Policy losses of linear log-probs whose gradient is computed in the forward pass: ``linear_policy_loss``."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._arrays import AnyArray, as_int32, refuse_gradient
from jaxlogp._compat import AnyMesh, AxisName, automatic_axes, leading_spec
from jaxlogp._reduce import WeightedSum
from jaxlogp._stats import TokenLogProbs
from jaxlogp._targets import check_targets
from jaxlogp._vocab import VocabShards
from jaxlogp.errors import describe, require, require_flags
from jaxlogp.head.call import HeadCall, HeadWeight, check_kinds, check_operands, head_call
from jaxlogp.head.loss_sum import loss_and_values
from jaxlogp.head.over_mesh import (
    Layout,
    known_layout,
    layout_of,
    run_over_mesh,
    support_arrays,
    warn_of_unknown_layout,
)
from jaxlogp.head.projection import HeadSpec
from jaxlogp.head.registry import EngineChoice
from jaxlogp.head.support.ids import Support, mask_by_support
from jaxlogp.losses import LossTokens, PolicyLoss, grpo
from jaxlogp.losses import loss_tokens as make_loss_tokens
from jaxlogp.losses.inputs import labels_of
from jaxlogp.losses.loss import check_of_step, require_loss
from jaxlogp.losses.options import suggest_options


@suggest_options()
def linear_policy_loss(
    hidden: Float[Array, "*hidden_tokens hidden"],
    weight: HeadWeight,
    targets: Int[AnyArray, "*tokens"],
    old_log_probs: Float[AnyArray, "*tokens"] | None,
    advantages: Float[AnyArray, "*rows"],
    mask: Bool[AnyArray, "*tokens"] | None = None,
    *,
    sampler_log_probs: Float[AnyArray, "*tokens"] | None = None,
    loss: PolicyLoss | None = None,
    ref_log_probs: Float[AnyArray, "*tokens"] | None = None,
    penalized: Bool[AnyArray, "*tokens"] | None = None,
    document_ids: Int[AnyArray, "*tokens"] | None = None,
    num_documents: int | np.integer | Int[AnyArray, ""] | None = None,
    document_axis_name: AxisName | tuple[AxisName, ...] | None = None,
    labels_per_document: float | np.floating | Float[AnyArray, ""] | None = None,
    mean_weight: float | np.floating | Float[AnyArray, ""] | None = None,
    entropy_scale: float | np.floating | Float[AnyArray, ""] | None = None,
    lse: Float[AnyArray, "*tokens"] | None = None,
    with_entropy: bool = False,
    with_lse: bool = False,
    bias: Float[Array, " vocab"] | None = None,
    support: Support | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    axis_name: AxisName | None = None,
    vocab: VocabShards | None = None,
    sequence_dim: int | None = None,
    out_of_vocab: str = "error",
    fp32_head: bool = False,
    weight_layout: str = "vh",
    frozen_head: bool = False,
    engine: EngineChoice = "auto",
) -> tuple[WeightedSum, TokenLogProbs]:
    """Computes a policy loss of linear log-probs without [tokens, V] logits, and its gradient in the same pass.

    loss.sum = policy_loss(linear_log_probs(hidden, weight, targets, ...), old_log_probs, ...).sum, differentiable in hidden,
    weight and bias. The forward pass computes the gradient and the backward multiplies it by the cotangent of the sum:
    three products instead of four. A loss or an engine that does not allow that takes two steps; a document's ratio, for
    example, needs the log-probs of all its tokens first. :func:`jaxlogp.head.record_head_runs` reports the reason. Without
    differentiation only values are computed.

    Inside ``shard_map`` everything is as in :func:`jaxlogp.linear_log_probs`; the caller psums the WeightedSum over the
    axes that shard its tokens. Over ``document_axis_name`` the sum must have the same cotangent on all ranks, as a psum of
    it does. Reverse mode only, and no second derivatives.

    Args:
        hidden: [*tokens, H], bf16, fp16 or fp32.
        weight: [V, H], or the local shard [V_local, H].
        targets: [*tokens], integer ids of the whole vocabulary.
        old_log_probs: [*tokens], log-probs of the targets under the old policy, in nats, as in :func:`jaxlogp.policy_loss`.
            None if the sampler is this head on these hidden states (strictly on policy): every ratio is 1, and the call
            still takes one pass.
        advantages: [*tokens]; or [B] or [B, 1], one per row of [B, T].
        mask: [*tokens], True where the target is a label; the other tokens cost nothing and get exact zeros. None makes
            every token a label.
        sampler_log_probs: [*tokens], log-probs of the targets under the sampler, in nats, or None for old_log_probs; read
            by a correction or a rejection.
        loss: the loss; None for ``jaxlogp.losses.grpo()``.
        ref_log_probs: [*tokens], log-probs of the targets under the reference, in nats, or None.
        penalized: bool [*tokens], True for labels whose drift is penalized, or None; as in :func:`jaxlogp.policy_loss`.
        document_ids: [*tokens], integer document index of each token; None for the rows of [B, T].
        num_documents: number of documents; None along with document_ids. See :func:`jaxlogp.policy_loss`.
        document_axis_name: mesh axis (or axes) over which documents are split.
        labels_per_document: labels of the whole step divided by its documents, for a token mean of the entropy.
        mean_weight: mean of the correction's weights over the whole step, for a correction that normalizes.
        entropy_scale: factor of the entropy coefficient, as in :func:`jaxlogp.policy_loss`.
        lse: [*tokens], log Σ_v e^z of exactly the logits that this call would compute, in nats
            (:func:`jaxlogp.linear_log_probs` with ``with_lse``), for a step strictly on policy. old_log_probs, of the same
            call, are then taken as the log-probs, every ratio is 1, and only the gradients are computed. Excludes entropy.
            The probabilities' relative error is that of lse.
        with_entropy: whether to return the entropy; a loss with an entropy coefficient always returns it.
        with_lse: whether to return log Σ e^z.
        bias: [V] or [V_local], added to the product; None for no bias.
        support: ids that each token was drawn from, as in :func:`jaxlogp.linear_log_probs`, or None; old_log_probs and all
            others are then log-probs on this support. A token without ids is no label. Takes two steps.
        temperature: T, as in :func:`jaxlogp.linear_log_probs`.
        logit_scale: multiplier of the logits, a finite Python number other than 0.
        softcap: cap, as in :func:`jaxlogp.linear_log_probs`, or None.
        axis_name: mesh axis over which the vocabulary is sharded.
        vocab: the shards; None for equal ones.
        sequence_dim: dimension of the tokens along which ``axis_name`` splits hidden, or None.
        out_of_vocab: treatment of active targets outside [0, V): "error" or "zero".
        fp32_head: whether to multiply in fp32 regardless of the dtypes.
        weight_layout: "vh" or "hv", as in :func:`jaxlogp.linear_log_probs`.
        frozen_head: whether to treat weight and bias as constants.
        engine: a name, an engine object, or a sequence of these, as in :func:`jaxlogp.linear_log_probs`.

    Returns:
        (WeightedSum of this part of the step, TokenLogProbs [*tokens] in nats). The values are for reports, such as the
        auxiliary output of ``jax.value_and_grad``. With ``lse`` the log-probs are old_log_probs, 0 where masked.

    Raises:
        ValueError: if linear_log_probs or policy_loss refuses an argument; if entropy or a second derivative is asked for
            along with ``lse``; or if a gradient through the values is asked for, such as that of an entropy bonus on
            ``values.entropy`` (``jax.lax.stop_gradient`` makes them plain constants).

    Example:
        >>> hidden, weight = jnp.ones((2, 4)), jnp.zeros((8, 4))
        >>> old, ones = jnp.full(2, -jnp.log(8.0)), jnp.ones(2)
        >>> def mean(hidden):
        ...     return linear_policy_loss(hidden, weight, jnp.array([1, 2]), old, ones, ones > 0)[0].mean()
        >>> value, gradient = jax.value_and_grad(mean)(hidden)
        >>> round(float(value), 4), gradient.shape
        (-1.0, (2, 4))

    References:
        Hsu et al., Liger Kernel, 2024 (gradients in the forward pass); the presets of ``jaxlogp.losses``.
    """
    loss = grpo() if loss is None else loss
    require_loss(loss)
    spec = HeadSpec(temperature, logit_scale, softcap, fp32_head)
    layout = {"axis_name": axis_name, "vocab": vocab, "weight_layout": weight_layout, "out_of_vocab": out_of_vocab}
    layout |= {"sequence_dim": sequence_dim, "frozen": frozen_head}

    def run(hidden, weight, bias, targets, mask, support, lse, given):
        # A token without ids is no label, in the denominators too.
        mask = mask if support is None else mask_by_support(support, mask, targets.shape)
        labels = labels_of(mask, targets.shape)

        def tokens_of(log_probs: Array | None) -> tuple[LossTokens, Array]:
            log_probs = None if log_probs is None else log_probs.reshape(targets.shape)
            further = {"log_probs": log_probs, "document_axis_name": document_axis_name}
            return loss_tokens(loss, mask=labels, **further, **given)

        wants_entropy = with_entropy or loss.entropy_coefficient != 0.0
        call = head_call(
            hidden, weight, bias, targets, mask, spec, with_entropy=wants_entropy, support=support, **layout
        )
        total, count, values = loss_and_values(loss, call, tokens_of, _checked_lse(lse, call, targets.shape), engine)
        values = values if with_lse else values._replace(lse=None)
        values = TokenLogProbs(*map(_constant_value, TokenLogProbs._fields, values))
        values = jax.tree.map(lambda x: x.reshape(targets.shape), values)
        return WeightedSum(total, count, loss.grad_divisor), values

    check_operands(hidden, weight, bias, weight_layout)
    require_flags(with_entropy=with_entropy, with_lse=with_lse, frozen_head=frozen_head)
    check_kinds(targets, mask, support)
    missing = lse is not None and old_log_probs is None
    require(not missing, "old_log_probs", "the log-probs that lse belongs to", None)
    of_step = {"labels_per_document": labels_per_document, "mean_weight": mean_weight, "entropy_scale": entropy_scale}
    check_of_step(**of_step)
    unsharded = (axis_name, vocab, sequence_dim, document_axis_name) == (None,) * 4
    mesh = known_layout(hidden, weight, weight_layout, engine) if unsharded else None
    if mesh is not None:
        options = {"with_entropy": with_entropy, "with_lse": with_lse, "out_of_vocab": out_of_vocab, "engine": engine}
        options |= {"weight_layout": weight_layout, "frozen_head": frozen_head, **spec.keywords(), **mesh}
        options |= {"sampler_log_probs": sampler_log_probs, "ref_log_probs": ref_log_probs, "penalized": penalized}
        options |= {"document_ids": document_ids, "num_documents": num_documents}
        options |= {"support": support, **of_step}
        arguments = hidden, weight, targets, old_log_probs, advantages, mask
        return sharded_linear_policy_loss(*arguments, loss=loss, lse=lse, bias=bias, **options)
    if unsharded:
        # The caller's frame lies beyond that of the decorator.
        warn_of_unknown_layout("linear_policy_loss", hidden, weight, stacklevel=4)
    given = {"old_log_probs": old_log_probs, "advantages": advantages, "ref_log_probs": ref_log_probs}
    given |= {"sampler_log_probs": sampler_log_probs, "penalized": penalized}
    if isinstance(num_documents, int | np.integer):
        # A static upper bound of the number of documents.
        loss_tokens = functools.partial(make_loss_tokens, num_documents=num_documents)
    else:
        loss_tokens, given = make_loss_tokens, given | {"num_documents": num_documents}
    given |= {"document_ids": document_ids, **of_step}
    specs = PartitionSpec(), leading_spec(hidden, hidden.ndim - 1)
    return automatic_axes(run, hidden, weight, bias, targets, mask, support, lse, given, out_specs=specs)


def sharded_linear_policy_loss(
    hidden: Float[Array, "*tokens hidden"],
    weight: HeadWeight,
    targets: Int[AnyArray, "*tokens"],
    old_log_probs: Float[AnyArray, "*tokens"] | None,
    advantages: Float[AnyArray, "*rows"],
    mask: Bool[AnyArray, "*tokens"] | None = None,
    *,
    mesh: AnyMesh,
    vocab_axis: str = "tensor",
    token_axes: tuple[str, ...] = ("data",),
    weight_axis: str | None = None,
    vocab: VocabShards | None = None,
    sampler_log_probs: Float[AnyArray, "*tokens"] | None = None,
    loss: PolicyLoss | None = None,
    ref_log_probs: Float[AnyArray, "*tokens"] | None = None,
    penalized: Bool[AnyArray, "*tokens"] | None = None,
    document_ids: Int[AnyArray, "*tokens"] | None = None,
    num_documents: int | np.integer | Int[AnyArray, ""] | None = None,
    labels_per_document: float | np.floating | Float[AnyArray, ""] | None = None,
    mean_weight: float | np.floating | Float[AnyArray, ""] | None = None,
    entropy_scale: float | np.floating | Float[AnyArray, ""] | None = None,
    lse: Float[AnyArray, "*tokens"] | None = None,
    bias: Float[Array, " vocab"] | None = None,
    support: Support | None = None,
    **options: Any,
) -> tuple[WeightedSum, TokenLogProbs]:
    """Runs :func:`linear_policy_loss` on global arrays, in a ``shard_map`` over ``mesh``, as one program.

    The result is that of ``linear_policy_loss`` on one device: the sum over all tokens, psums done. Documents may be
    split over the mesh anywhere.

    Args:
        hidden: [*tokens, H], split as in :func:`sharded_linear_log_probs`.
        weight: [V, H] or [H, V], split as in :func:`sharded_linear_log_probs`.
        targets: [*tokens], integer token ids.
        old_log_probs: [*tokens], log-probs of the targets under the old policy, in nats; None on policy.
        advantages: [*tokens]; or [B] or [B, 1], one per row of [B, T].
        mask: [*tokens], True where the target is a label; None makes every token a label.
        mesh: the device mesh; Explicit and Auto axes both work.
        vocab_axis: mesh axis that shards the vocabulary.
        token_axes: mesh axes that shard the first token dimension; () for none.
        weight_axis: one of token_axes, over which H is split, or None.
        vocab: the shards, or None, as in :func:`sharded_linear_log_probs`.
        sampler_log_probs: [*tokens], log-probs of the targets under the sampler, in nats, or None for old_log_probs.
        loss: the loss; None for ``jaxlogp.losses.grpo()``.
        ref_log_probs: [*tokens], log-probs of the targets under the reference, in nats, or None.
        penalized: bool [*tokens], True for labels whose drift is penalized, or None.
        document_ids: [*tokens], ids of documents of the whole arrays; None for the rows of [B, T].
        num_documents: number of documents of the whole arrays; None along with document_ids.
        labels_per_document: labels of the whole step divided by its documents, as in :func:`jaxlogp.policy_loss`.
        mean_weight: mean of the correction's weights over the whole step, as in :func:`jaxlogp.policy_loss`.
        entropy_scale: factor of the entropy coefficient, as in :func:`jaxlogp.policy_loss`.
        lse: [*tokens] or None, as in :func:`linear_policy_loss`.
        bias: [V] or None.
        support: the ids that each token was drawn from, of all tokens, or None.
        **options: further keyword arguments of :func:`linear_policy_loss`, except ``axis_name`` and ``document_axis_name``.

    Returns:
        (WeightedSum of all tokens, TokenLogProbs of global arrays [*tokens]).

    Raises:
        ValueError: if ``mesh`` lacks an axis or does not divide a size, or linear_policy_loss refuses an argument.

    Example:
        >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"))
        >>> hidden, weight, ones = jax.numpy.ones((2, 4)), jax.numpy.zeros((8, 4)), jax.numpy.ones(2)
        >>> given = jax.numpy.array([1, 2]), ones * -2.0794415, ones, ones > 0
        >>> round(float(sharded_linear_policy_loss(hidden, weight, *given, mesh=mesh)[0].mean()), 4)
        -1.0
    """
    loss = grpo() if loss is None else loss
    require_loss(loss)
    layout = layout_of(hidden, weight, bias, mesh, vocab_axis, token_axes, weight_axis, options)
    out_of_vocab = options.get("out_of_vocab", "error")
    check_targets(targets, mask, hidden.shape[:-1], weight.shape[layout.vocab_dim], out_of_vocab)
    documents = {"sampler_log_probs": sampler_log_probs, "ref_log_probs": ref_log_probs, "document_ids": document_ids}
    documents["penalized"] = penalized
    of_support = support_arrays(support, targets, mask, weight.shape[layout.vocab_dim])
    # Its checks of values, which the program cannot make; nothing is computed.
    labels = labels_of(mask, targets.shape) if support is None else mask_by_support(support, mask, targets.shape)
    of_step = {"labels_per_document": labels_per_document, "mean_weight": mean_weight, "entropy_scale": entropy_scale}
    further = documents | of_step
    # Rules that read log-probs get theirs in the program.
    further["log_probs"] = np.zeros(targets.shape, np.float32)
    checked = functools.partial(make_loss_tokens, loss, old_log_probs, advantages, labels, **further)
    jax.eval_shape(lambda: checked(num_documents=num_documents)[1])
    documents["document_ids"] = None if document_ids is None else as_int32(document_ids)
    arrays: dict[str, Any] = {"targets": as_int32(targets), "mask": mask, "old_log_probs": old_log_probs}
    arrays |= documents | {"advantages": advantages, "lse": lse} | of_support
    arrays |= {name: None if value is None else jnp.asarray(value) for name, value in of_step.items()}
    options = options | {"loss": loss}
    static = num_documents is None or isinstance(num_documents, int | np.integer)
    given, value = (options, num_documents) if static else (arrays, as_int32(num_documents))
    given["num_documents"] = value
    return run_over_mesh(
        _of_rank, (PartitionSpec(), layout.tokens), layout, {"": (hidden, weight, bias)}, arrays, vocab, options
    )


def _of_rank(layout: Layout, hidden: Array, weight: Array, **given: Any) -> tuple[WeightedSum, TokenLogProbs]:
    # Without ids documents are rows, which no axis splits.
    axes = layout.token_axes if layout.token_axes and given["document_ids"] is not None else None
    total, values = linear_policy_loss(hidden, weight, document_axis_name=axes, **given)
    return total.psum(layout.token_axes), values


def _constant_value(name: str, value: Array | None) -> Array | None:
    """Returns the value as a constant whose gradient raises: a gradient of 0 would go unnoticed."""
    instead = {
        "log_probs": "use linear_log_probs and policy_loss",
        "entropy": "set the loss's entropy_coefficient",
        "lse": "set the loss's z_loss_coefficient",
    }
    expected = "no gradient through it, for the values of linear_policy_loss are constant"
    return None if value is None else refuse_gradient(value, f"values.{name}", expected, f"one ({instead[name]})")


def _checked_lse(lse: Any, call: HeadCall, shape: tuple[int, ...]) -> Array | None:
    if lse is None:
        return None
    require(not call.with_entropy, "lse", "None along with entropy (its gradient needs Σ p z)", describe(lse))
    ok = getattr(lse, "shape", None) == shape and jnp.issubdtype(lse.dtype, jnp.floating)
    require(ok, "lse", f"a floating-point array of shape {shape}", describe(lse))
    lse = jax.lax.stop_gradient(jnp.asarray(lse)).reshape(-1).astype(jnp.float32)
    return jnp.where(call.targets.mask, lse, 0.0)
