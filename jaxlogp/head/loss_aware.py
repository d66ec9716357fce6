"""Policy gradients of hidden states and head weight in one pass: three products of [tokens, V] instead of four.

The two-step path, ``policy_loss(linear_log_probs(...))`` differentiated, computes the logits twice, because the loss's
cotangents arrive after the forward pass has dropped them. A loss that is a sum over tokens has cotangents that are known
as soon as a token's log-prob is, so a chunk's logits are turned into their gradient while they are there.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._compat import union_of_varying_axes, vary_over
from jaxlogp.errors import require, require_ids_in_range
from jaxlogp.head.api import _check_operands, _check_options
from jaxlogp.head.chunked import ChunkedEngine
from jaxlogp.head.engines import Engine, HeadRun, choose_engine, report
from jaxlogp.head.hopper import HopperEngine
from jaxlogp.head.hopper.loss_aware import values_and_gradients
from jaxlogp.head.live_rows import live_rows
from jaxlogp.head.projection import HeadOptions, dot, finish_logits, product_gradient
from jaxlogp.logits import OUT_OF_VOCAB, LocalTargets, check_targets, localise, mask_cotangents
from jaxlogp.policy import policy_loss
from jaxlogp.reduce import WeightedSum
from jaxlogp.stats import TokenLogProbs, finish, logit_gradient, tile_stats
from jaxlogp.vocab import local_shard

# fp32 numbers of the logits of one chunk of tokens, 256 MiB.
CHUNK_ELEMENTS = 2**26


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
    entropy_coefficient: float = 0.0,
    with_entropy: bool = False,
    bias: Float[Array, " vocab"] | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    out_of_vocab: str = "error",
    fp32_head: bool = False,
    engine: str | Engine = "auto",
) -> PolicyGradients:
    """A policy loss of linear log-probs with its gradients, [tokens, V] logits computed once and never stored whole.

    loss.sum = policy_loss(linear_log_probs(hidden, weight, targets, ...), ...).sum - entropy_coefficient Σ_t m_t H_t, and
    the gradients are those of loss.sum / denominator: as if the two functions were differentiated one through the other,
    with one product fewer. The whole vocabulary must be in ``weight`` (no shards); over data shards the caller sums the
    gradient of the weight.

    Args:
      hidden: [*tokens, H], any float dtype.
      weight: [V, H].
      targets: [*tokens], integer ids.
      old_log_probs: [*tokens], log-probs of the targets under the sampler.
      advantages: [*tokens].
      mask: [*tokens], True where the target is a label; others cost nothing and get exact zeros.
      denominator: what the step divides the sum by, a number or a scalar array (the label count of the whole step).
      kind: "grpo"; a ratio of whole documents ("gspo") is not known token by token.
      epsilon: as in :func:`jaxlogp.policy_loss`.
      epsilon_high: as in :func:`jaxlogp.policy_loss`.
      entropy_coefficient: weight of the entropy bonus, a Python number.
      with_entropy: also return the entropy (always computed where the coefficient is not 0).
      bias: [V] or None.
      temperature: as in :func:`jaxlogp.linear_log_probs`.
      logit_scale: as in :func:`jaxlogp.linear_log_probs`.
      softcap: as in :func:`jaxlogp.linear_log_probs`.
      out_of_vocab: as in :func:`jaxlogp.linear_log_probs`.
      fp32_head: as in :func:`jaxlogp.linear_log_probs`.
      engine: "auto", "chunked" (any device), "hopper", or an engine object.

    Returns:
      PolicyGradients.

    Raises:
      ValueError: wrong shapes, dtypes or options, a kind whose ratio is not a token's, or operands that a named engine
        does not take.

    Example:
      >>> hidden, weight = jnp.ones((2, 4)), jnp.zeros((8, 4))
      >>> old = jnp.full(2, -jnp.log(8.0))
      >>> out = linear_policy_gradients(hidden, weight, jnp.array([1, 2]), old, jnp.ones(2), jnp.ones(2, bool))
      >>> float(out.loss.sum), int(out.loss.count), out.weight.shape
      (-2.0, 2, (8, 4))
    """
    require(kind == "grpo", "kind", "'grpo' (token-level ratios)", repr(kind))
    _check_operands(hidden, weight, bias)
    _check_options(temperature, logit_scale, softcap, out_of_vocab)
    require(out_of_vocab in OUT_OF_VOCAB, "out_of_vocab", f"one of {OUT_OF_VOCAB}", repr(out_of_vocab))
    shard = local_shard(weight.shape[0], None, None, "weight")
    tokens = hidden.shape[:-1]
    mask = check_targets(targets, mask, tokens, shard.vocab_size)
    if out_of_vocab == "error":
        require_ids_in_range(targets, shard.vocab_size, "targets", mask)
    hidden, weight, targets, old_log_probs, advantages, mask = (
        jnp.asarray(x) for x in (hidden, weight, targets, old_log_probs, advantages, mask)
    )
    with_entropy = with_entropy or entropy_coefficient != 0.0
    options = HeadOptions(
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        with_entropy=with_entropy,
        fp32_head=fp32_head,
        vocab_size=shard.vocab_size,
    )
    chosen, reason = choose_engine(engine, hidden, weight, bias, options)
    known = isinstance(chosen, (ChunkedEngine, HopperEngine))
    require(known, "engine", "'auto', 'chunked' or 'hopper': no other engine has this pass", repr(chosen.name))
    unfiltered = getattr(chosen, "gradient_filter", None) is None
    require(unfiltered, "engine", "an engine without a gradient_filter: this pass has none", repr(chosen))
    if isinstance(chosen, HopperEngine):
        refusal = chosen.why_not(hidden, weight, bias, options, check_device=False)
        if softcap is not None:
            refusal = "it keeps exponentials instead of logits, from which the slope of a soft cap is too coarse"
        if refusal is not None:
            automatic = isinstance(engine, str) and engine == "auto"
            require(automatic, "engine", "operands that 'hopper' takes", refusal)
            chosen, reason = (
                choose_engine("chunked", hidden, weight, bias, options)[0],
                f"auto: hopper not used: {refusal}",
            )
    hopper = isinstance(chosen, HopperEngine)
    report(HeadRun("linear_policy_gradients", chosen.name if hopper else "chunked", reason, 1))

    local = localise(targets.reshape(-1), mask.reshape(-1), shard, out_of_vocab)
    # Selected out before any product: 0 * NaN from a masked row would reach every row of the weight's gradient.
    flat = jnp.where(mask[..., None], hidden, jnp.zeros_like(hidden)).reshape(-1, hidden.shape[-1])
    old, constant = old_log_probs.reshape(-1), advantages.reshape(-1)
    loss_options = {"kind": kind, "epsilon": epsilon, "epsilon_high": epsilon_high}
    scale = 1.0 / jnp.asarray(denominator, jnp.float32)

    def cotangents(values: TokenLogProbs, chunk: tuple) -> TokenLogProbs:
        old, constant, mask = chunk
        gradient = jax.grad(lambda x: policy_loss(x, old, constant, mask, **loss_options).sum)(values.log_probs)
        entropy = jnp.where(mask, -entropy_coefficient * scale, 0.0) if with_entropy else None
        return TokenLogProbs(gradient * scale, entropy)

    run = values_and_gradients if hopper else _values_and_gradients
    extra = (chosen,) if hopper else ()
    arguments = flat, weight, bias, local, (old, constant, local.mask), options
    values, gradients = run(cotangents, *arguments, *extra)
    loss = policy_loss(values.log_probs, old, constant, local.mask, **loss_options)
    if entropy_coefficient != 0.0:
        loss = WeightedSum(loss.sum - entropy_coefficient * jnp.sum(values.entropy), loss.count)
    values = jax.tree.map(lambda x: x.reshape(tokens), values)
    return PolicyGradients(loss, values, gradients[0].reshape(hidden.shape), *gradients[1:])


def _values_and_gradients(
    cotangents: Callable[[TokenLogProbs, Any], TokenLogProbs],
    hidden: Float[Array, "tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    bias: Float[Array, " vocab"] | None,
    targets: LocalTargets,
    per_token: Any,
    options: HeadOptions,
) -> tuple[TokenLogProbs, tuple[Array, Array, Array | None]]:
    """The portable way: the logits of a chunk of tokens at once, live tokens first, chunks without any left out."""
    tokens, vocab, dtype = hidden.shape[0], weight.shape[0], options.operand_dtype(weight)
    # Gradients stay local to each rank: the operands are typed as varying over every axis in play.
    axes = union_of_varying_axes(hidden, weight, bias, *targets, *jax.tree.leaves(per_token))
    hidden, weight, bias = (None if x is None else vary_over(x, axes) for x in (hidden, weight, bias))
    chunks = -(-tokens // max(CHUNK_ELEMENTS // vocab, 1))
    size = -(-tokens // chunks)
    rows = live_rows(targets.mask, chunks * size)
    alive = jnp.arange(chunks * size, dtype=jnp.int32) < rows.count
    poison = None if targets.poison is None else rows.pack(targets.poison, False)
    column, extra = rows.pack(targets.column, -1), jax.tree.map(lambda x: rows.pack(x, 0), per_token)
    packed, operand = rows.pack(hidden.astype(dtype), 0), weight.astype(dtype)
    valid = jnp.arange(vocab, dtype=jnp.int32) < targets.width

    def chunk_step(index, carry):
        values, d_hidden, d_weight, d_bias = carry
        start = index * size

        def part(x):
            return lax.dynamic_slice_in_dim(x, start, size)

        here = part(packed)
        chunk = LocalTargets(part(column), part(alive), None if poison is None else part(poison), targets.width)
        logits = finish_logits(dot(here, operand, contract=(1, 1)), bias, options)
        stats = tile_stats(logits, chunk.column, valid, options.with_entropy)
        new, normaliser = finish(stats, chunk.mask, options.vocab_size, chunk.poison)
        g_log_probs, g_entropy = mask_cotangents(cotangents(new, jax.tree.map(part, extra)), chunk)
        gradient = logit_gradient(logits, chunk.column, valid, normaliser, g_log_probs, g_entropy)
        gradient = product_gradient(gradient, logits, options)
        rounded = gradient.astype(dtype)

        def put(x, new):
            return lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), start, axis=0)

        d_weight = d_weight + dot(rounded, here, contract=(0, 0))
        d_bias = None if bias is None else d_bias + jnp.sum(gradient, axis=0)
        return (
            jax.tree.map(put, values, new),
            put(d_hidden, dot(rounded, operand, contract=(1, 0))),
            d_weight,
            d_bias,
        )

    zeros = jnp.zeros(chunks * size, jnp.float32)
    start = (
        TokenLogProbs(zeros, zeros if options.with_entropy else None),
        jnp.zeros((chunks * size, hidden.shape[1]), hidden.dtype),
        jnp.zeros(weight.shape, jnp.float32),
        None if bias is None else jnp.zeros(bias.shape, jnp.float32),
    )
    start = jax.tree.map(lambda x: vary_over(x, axes), start)
    values, d_hidden, d_weight, d_bias = lax.fori_loop(0, -(-rows.count // size), chunk_step, start)
    values = jax.tree.map(rows.unpack, values)
    d_bias = None if bias is None else d_bias.astype(bias.dtype)
    return values, (rows.unpack(d_hidden), d_weight.astype(weight.dtype), d_bias)
