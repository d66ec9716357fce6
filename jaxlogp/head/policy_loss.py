"""Policy gradients of hidden states and head weight in one pass: three products of [tokens, V] instead of four.

The two-step path, ``policy_loss(linear_log_probs(...))`` differentiated, computes the logits twice, because the loss's
cotangents arrive after the forward pass has dropped them. A loss that is a sum over tokens (or over documents that a chunk
of tokens holds whole) has cotangents that are known as soon as a chunk's log-probs are, so the chunk's logits are turned
into their gradient while they are there. And where the step is strictly on policy the cotangents are known beforehand: with
the sampler's log-sum-exp no forward pass is needed at all.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._compat import AxisName, union_of_varying_axes, vary_over
from jaxlogp.errors import describe, is_concrete, require, require_ids_in_range
from jaxlogp.head.api import check_operands, check_options
from jaxlogp.head.chunked import engine as chunked
from jaxlogp.head.chunked import one_pass as chunked_loss_aware
from jaxlogp.head.chunked.engine import ChunkedEngine
from jaxlogp.head.hopper import HopperEngine
from jaxlogp.head.hopper import engine as hopper
from jaxlogp.head.hopper import one_pass as hopper_loss_aware
from jaxlogp.head.projection import HeadOptions
from jaxlogp.head.registry import Engine, HeadRun, choose_engine, mask_hidden, named_engine, report
from jaxlogp.head.row_scalars import row_scalars
from jaxlogp.losses.inputs import check_arrays, check_finite
from jaxlogp.losses.loss import PolicyLoss, policy_loss
from jaxlogp.losses.presets import grpo, gspo
from jaxlogp.reduce import WeightedSum
from jaxlogp.stats import Normaliser, TokenLogProbs
from jaxlogp.targets import LocalTargets, check_targets, localise, mask_cotangents
from jaxlogp.vocab import VocabShards, local_shard


class PolicyGradients(NamedTuple):
    """What :func:`linear_policy_gradients` returns.

    Attributes:
      loss: sum and count of :func:`jaxlogp.policy_loss`, less the entropy bonus.
      values: log-probs, and entropy where it was asked for; no gradient flows through them.
      hidden: gradient of loss.sum / denominator with respect to hidden, in its shape and dtype.
      weight: the same with respect to the weight.
      bias: the same with respect to the bias, or None.
    """

    loss: WeightedSum
    values: TokenLogProbs
    hidden: Float[Array, "*tokens hidden"]
    weight: Float[Array, "vocab hidden"]
    bias: Float[Array, " vocab"] | None


def linear_policy_gradients(
    hidden: Float[Array, "*tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    targets: Int[Array, "*tokens"],
    old_log_probs: Float[Array, "*tokens"],
    advantages: Float[Array, "*tokens"],
    mask: Bool[Array, "*tokens"],
    *,
    denominator: float | Float[Array, ""] | Int[Array, ""] = 1.0,
    kind: str = "grpo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    document_ids: Int[Array, "*tokens"] | None = None,
    num_documents: int | Int[Array, ""] | None = None,
    document_weighting: str = "length",
    entropy_coefficient: float = 0.0,
    with_entropy: bool = False,
    lse: Float[Array, "*tokens"] | None = None,
    bias: Float[Array, " vocab"] | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    axis_name: AxisName | None = None,
    vocab: VocabShards | None = None,
    out_of_vocab: str = "error",
    fp32_head: bool = False,
    engine: str | Engine = "auto",
) -> PolicyGradients:
    """A policy loss of linear log-probs with its gradients, [tokens, V] logits computed once and never stored whole.

    loss.sum = policy_loss(linear_log_probs(hidden, weight, targets, ...), ...).sum - entropy_coefficient Σ_t m_t H_t, and
    the gradients are those of loss.sum / denominator: as if the two functions were differentiated one through the other,
    with one product fewer.

    Inside ``shard_map`` with ``axis_name`` the weight is the local block of the vocabulary. The gradient of hidden is then
    the psum over the shards, the same on all of them; that of the weight is the shard's own. This function differentiates
    nothing by replication types, so ``check_vma`` does not matter, and over data axes the caller sums the gradient of the
    weight.

    Args:
      hidden: [*tokens, H], any float dtype, the same on all vocabulary shards.
      weight: [V, H], or the local block [V_local, H].
      targets: [*tokens], integer ids of the whole vocabulary.
      old_log_probs: [*tokens], log-probs of the targets under the sampler, in nats. Without an entropy bonus they also tell
        the Hopper kernels about where log Σ e^z lies, which spares them a pass over [tokens, V].
      advantages: [*tokens].
      mask: [*tokens], True where the target is a label; others cost nothing and get exact zeros.
      denominator: what the step divides the sum by, a number or a scalar array (the label count of the whole step).
      kind: "grpo" or "gspo".
      epsilon: as in :func:`jaxlogp.policy_loss`.
      epsilon_high: as in :func:`jaxlogp.policy_loss`.
      document_ids: [*tokens], as in :func:`jaxlogp.policy_loss`; needed by "gspo". No document may lie in two entries of
        the first dimension of [rows, length, H]; [tokens, H] is one row.
      num_documents: as in :func:`jaxlogp.policy_loss`.
      document_weighting: as in :func:`jaxlogp.policy_loss`.
      entropy_coefficient: weight of the entropy bonus, a Python number.
      with_entropy: also return the entropy (always computed where the coefficient is not 0).
      lse: [*tokens], log Σ_v e^z of the very logits that this call would compute, in nats: the step is strictly on policy.
        Then old_log_probs are taken as the log-probs, every ratio is 1, and nothing is computed but the gradients, with the
        memory of :func:`jaxlogp.linear_log_probs`. Excludes entropy. The probabilities' relative error is that of lse.
      bias: [V], [V_local] or None.
      temperature: as in :func:`jaxlogp.linear_log_probs`.
      logit_scale: as in :func:`jaxlogp.linear_log_probs`.
      softcap: as in :func:`jaxlogp.linear_log_probs`.
      axis_name: mesh axis over which the vocabulary is sharded.
      vocab: the shards; None means equal ones.
      out_of_vocab: as in :func:`jaxlogp.linear_log_probs`.
      fp32_head: as in :func:`jaxlogp.linear_log_probs`.
      engine: "auto", "chunked" (any device), "hopper", or an engine object.

    Returns:
      PolicyGradients. With ``lse`` its log-probs are old_log_probs, 0 where masked.

    Raises:
      ValueError: wrong shapes, dtypes or options, a document in two rows, entropy along with ``lse``, or operands that a
        named engine does not take.

    Example:
      >>> hidden, weight = jnp.ones((2, 4)), jnp.zeros((8, 4))
      >>> old = jnp.full(2, -jnp.log(8.0))
      >>> out = linear_policy_gradients(hidden, weight, jnp.array([1, 2]), old, jnp.ones(2), jnp.ones(2, bool))
      >>> float(out.loss.sum), int(out.loss.count), out.weight.shape
      (-2.0, 2, (8, 4))

    References:
      Hsu et al., Liger Kernel, 2024 (gradients in the forward pass); DeepSeekMath, 2024; Group Sequence Policy
      Optimization, 2025.
    """
    check_operands(hidden, weight, bias)
    check_options(temperature, logit_scale, softcap, out_of_vocab)
    shard = local_shard(weight.shape[0], axis_name, vocab, "weight")
    tokens = hidden.shape[:-1]
    mask = check_targets(targets, mask, tokens, shard.vocab_size)
    if out_of_vocab == "error":
        require_ids_in_range(targets, shard.vocab_size, "targets", mask)
    hidden, weight, targets, mask = (jnp.asarray(x) for x in (hidden, weight, targets, mask))
    given = old_log_probs, advantages, mask, document_ids
    per_token = _PerToken(*(None if x is None else jnp.asarray(x) for x in given))
    with_entropy = with_entropy or entropy_coefficient != 0.0
    loss = _Loss(kind, epsilon, epsilon_high, num_documents, document_weighting, entropy_coefficient, denominator)
    row_length = loss.check(per_token)
    per_token = jax.tree.map(jnp.ravel, per_token)
    if lse is not None:
        require(not with_entropy, "lse", "None along with entropy (its gradient needs Σ p z)", describe(lse))
        check_arrays({"lse": lse}, mask)
        check_finite("lse", lse, mask)
    options = HeadOptions(
        temperature, logit_scale, softcap, with_entropy, fp32_head, axis_name, shard.vocab_size, vocab
    )
    operand = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype if axis_name is None else jnp.float32)
    chosen, reason = _choose(engine, operand, weight, bias, options, lse is not None, row_length is not None)
    num_shards = 1 if axis_name is None else lax.axis_size(axis_name)
    report(HeadRun("linear_policy_gradients", chosen.name, reason, num_shards))

    local = localise(targets.reshape(-1), mask.reshape(-1), shard, out_of_vocab)
    flat = hidden.reshape(-1, hidden.shape[-1]).astype(operand.dtype)
    flat = mask_hidden(chosen, flat, mask.reshape(-1))
    # Gradients stay local to each rank: the operands are typed as varying over every axis in play.
    axes = union_of_varying_axes(flat, weight, bias, *local, *jax.tree.leaves(per_token))
    axes |= set() if axis_name is None else {axis_name}
    operands = tuple(None if x is None else vary_over(x, axes) for x in (flat, weight, bias))
    if lse is not None:
        values = TokenLogProbs(jnp.where(per_token.mask, per_token.old_log_probs.astype(jnp.float32), 0.0), None)
        g_log_probs, _ = mask_cotangents(loss.cotangents(values, per_token), local)
        gradients = _on_policy(operands, local, jnp.asarray(lse).reshape(-1), g_log_probs, options, chosen)
    elif isinstance(chosen, HopperEngine):
        run = hopper_loss_aware.values_and_gradients
        # Without an entropy bonus the sampler's log-probs spare a pass over the exponentials.
        old = per_token.old_log_probs if entropy_coefficient == 0.0 else None
        values, gradients = run(loss.cotangents, *operands, local, per_token, options, chosen, old)
    else:
        run = chunked_loss_aware.values_and_gradients
        values, gradients = run(loss.cotangents, *operands, local, per_token, options, row_length)
    d_hidden, *rest = gradients
    if axis_name is not None:
        # The one psum of the hidden gradient, in fp32; rounded after it.
        d_hidden = lax.psum(d_hidden, axis_name)
    total = loss.total(values, per_token)
    values = jax.tree.map(lambda x: x.reshape(tokens), values)
    return PolicyGradients(total, values, d_hidden.astype(hidden.dtype).reshape(hidden.shape), *rest)


class _PerToken(NamedTuple):
    """What the loss reads of each token, flat."""

    old_log_probs: Array
    advantages: Array
    mask: Array
    document_ids: Array | None


@dataclasses.dataclass(frozen=True)
class _Loss:
    """policy_loss, less the entropy bonus, of tokens or of chunks that hold whole documents."""

    kind: str
    epsilon: float
    epsilon_high: float | None
    num_documents: Any
    document_weighting: str
    entropy_coefficient: float
    denominator: Any

    def check(self, per_token: _PerToken) -> int | None:
        """Refuses what policy_loss refuses, and documents in two rows; tokens that a chunk must keep together, or None."""
        jax.eval_shape(lambda x: self._loss(x, per_token).sum, jnp.zeros(per_token.mask.shape))
        if self.kind != "gspo":
            return None
        tokens = per_token.mask.shape
        length = int(np.prod(tokens[1:])) if len(tokens) > 1 else tokens[0]
        if is_concrete(per_token.document_ids, per_token.mask):
            _check_rows(np.where(per_token.mask, per_token.document_ids, -1).reshape(-1, length))
        return length

    def _loss(self, log_probs: Array, per_token: _PerToken, num_documents: Any = None) -> WeightedSum:
        given = self.num_documents if num_documents is None else num_documents
        return policy_loss(
            log_probs,
            *per_token[:3],
            loss=self._object(),
            document_ids=per_token.document_ids,
            num_documents=given,
        )

    def _object(self) -> PolicyLoss:
        require(self.kind in ("grpo", "gspo"), "kind", "'grpo' or 'gspo'", repr(self.kind))
        bounds = {"epsilon": self.epsilon, "epsilon_high": self.epsilon_high}
        return grpo(**bounds) if self.kind == "grpo" else gspo(weighting=self.document_weighting, **bounds)

    def cotangents(self, values: TokenLogProbs, chunk: _PerToken) -> TokenLogProbs:
        """Gradient of the step's loss with respect to the values of a chunk."""
        scale = 1.0 / jnp.asarray(self.denominator, jnp.float32)
        count, outside = None, None
        if chunk.document_ids is not None:
            ids = chunk.document_ids
            outside = chunk.mask & ((ids < 0) | (ids >= self.num_documents))
            # A chunk may have fewer tokens than the step has documents, and sums per document need a static number.
            chunk = chunk._replace(document_ids=_dense(ids, chunk.mask))
            count = jnp.asarray(ids.shape[0], jnp.int32)
        gradient = jax.grad(lambda x: self._loss(x, chunk, count).sum)(values.log_probs) * scale
        if outside is not None:
            gradient = jnp.where(outside, jnp.nan, gradient)
        if self.entropy_coefficient == 0.0:
            return TokenLogProbs(gradient, None)
        return TokenLogProbs(gradient, jnp.where(chunk.mask, -self.entropy_coefficient * scale, 0.0))

    def total(self, values: TokenLogProbs, per_token: _PerToken) -> WeightedSum:
        """The loss of all tokens."""
        loss = self._loss(values.log_probs, per_token)
        if self.entropy_coefficient == 0.0:
            return loss
        return WeightedSum(loss.sum - self.entropy_coefficient * jnp.sum(values.entropy), loss.count)


def _check_rows(ids: np.ndarray) -> None:
    """Raises ValueError for a document, other than -1, in two rows."""
    first_row: dict[int, int] = {}
    for number, row in enumerate(ids):
        for document in sorted(set(row.tolist()) - {-1}):
            first = first_row.setdefault(document, number)
            found = f"document {document} in rows {first} and {number}"
            require(first == number, "document_ids", "every document in one row of the first dimension", found)


def _dense(ids: Int[Array, " tokens"], mask: Bool[Array, " tokens"]) -> Int[Array, " tokens"]:
    """Ids renamed to 0, 1, … in their order: equal where they were equal; those without a label share the last."""
    ids = jnp.where(mask, ids, jnp.iinfo(ids.dtype).max)
    order = jnp.argsort(ids, stable=True)
    in_order = ids[order]
    rank = jnp.cumsum(jnp.concatenate([jnp.zeros(1, jnp.int32), (in_order[1:] != in_order[:-1]).astype(jnp.int32)]))
    return jnp.zeros_like(rank).at[order].set(rank)


def _choose(
    engine: str | Engine,
    hidden: Any,
    weight: Array,
    bias: Array | None,
    options: HeadOptions,
    on_policy: bool,
    rows: bool,
) -> tuple[Engine, str]:
    """The engine and the reason; "auto" turns to ``chunked`` where the kernels lack something that this pass needs."""
    automatic = isinstance(engine, str) and engine == "auto"
    chosen, reason = choose_engine(engine, hidden, weight, bias, options)
    known = isinstance(chosen, (ChunkedEngine, HopperEngine))
    if automatic and not known:
        return named_engine("chunked"), f"auto: {chosen.name} not used: it has no pass that gives gradients at once"
    require(known, "engine", "'auto', 'chunked' or 'hopper': no other engine has this pass", repr(chosen.name))
    unfiltered = getattr(chosen, "gradient_filter", None) is None
    require(unfiltered, "engine", "an engine without a gradient_filter: this pass has none", repr(chosen))
    if isinstance(chosen, ChunkedEngine):
        return chosen, reason
    refusal = chosen.why_not(hidden, weight, bias, options, check_device=False)
    if refusal is None and not on_policy:
        if options.softcap is not None:
            refusal = "it keeps exponentials instead of logits, from which the slope of a soft cap is too coarse"
        elif options.axis_name is not None:
            refusal = "its pass over exponentials takes no vocabulary shards"
        elif rows:
            refusal = "its chunks of tokens may part a document"
    if refusal is None:
        return chosen, reason
    require(automatic, "engine", "operands that 'hopper' takes", refusal)
    return named_engine("chunked"), f"auto: hopper not used: {refusal}"


def _on_policy(
    operands: tuple, targets: LocalTargets, lse: Array, g_log_probs: Array, options: HeadOptions, engine: Engine
) -> tuple[Array, Array, Array | None]:
    """This shard's gradients where log Σ e^z is known: the backward pass of the engine alone."""
    lse = jnp.where(targets.mask, lse.astype(jnp.float32), 0.0)
    normaliser = Normaliser(lse, jnp.zeros_like(lse), None)
    if isinstance(engine, HopperEngine):
        scalars = row_scalars(normaliser, g_log_probs, None, targets.column, options)
        return hopper.head_gradients(*operands, targets, scalars, options, engine)
    return chunked.head_gradients(*operands, targets, normaliser, g_log_probs, None, options, engine)
