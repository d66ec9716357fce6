"""Log-probs and entropies straight from hidden states and head weight, on a rank or on arrays over a mesh; also
``head_logits`` and ``skipped_tiles``.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._arrays import as_int32
from jaxlogp._compat import AnyMesh, AxisName, automatic_axes, leading_spec
from jaxlogp._reduce import WeightedSum
from jaxlogp._stats import TokenLogProbs
from jaxlogp._targets import check_targets
from jaxlogp._vocab import VocabShards
from jaxlogp.errors import describe, require, require_flags
from jaxlogp.head.call import HeadWeight, check_kinds, check_operands, head_call
from jaxlogp.head.engine import Engine
from jaxlogp.head.over_mesh import (
    Layout,
    known_layout,
    layout_of,
    run_over_mesh,
    support_arrays,
    warn_of_unknown_layout,
)
from jaxlogp.head.projection import HeadSpec
from jaxlogp.head.reference import materialised_logits
from jaxlogp.head.registry import EngineChoice, HeadRun, choose_engine, report
from jaxlogp.head.support.ids import Support
from jaxlogp.head.values import head_values, operands_of


def linear_log_probs(
    hidden: Float[Array, "*hidden_tokens hidden"],
    weight: HeadWeight,
    targets: Int[Array, "*tokens"],
    mask: Bool[Array, "*tokens"] | None = None,
    *,
    bias: Float[Array, " vocab"] | None = None,
    support: Support | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    with_entropy: bool = False,
    with_lse: bool = False,
    axis_name: AxisName | None = None,
    vocab: VocabShards | None = None,
    sequence_dim: int | None = None,
    out_of_vocab: str = "error",
    fp32_head: bool = False,
    weight_layout: str = "vh",
    frozen_head: bool = False,
    engine: EngineChoice = "auto",
) -> TokenLogProbs:
    """Computes log-probs of the targets, and entropies, from hidden states and head weight, without [tokens, V] logits.

    z = softcap(logit_scale (hidden · weightᵀ + bias)) / temperature, with softcap(a) = cap tanh(a / cap);
    log_prob = z[target] - logsumexp(z); entropy = logsumexp(z) - Σ p z. Differentiable in hidden, weight and bias.

    Inside ``shard_map``, with ``axis_name``, the weight is the local shard of the vocabulary. Hidden states that are the
    same on all shards get their gradient summed over the shards exactly once, by a psum in the backward, and so does a
    weight that is the same on all ranks of a data axis. Replication types tell which arrays are the same, so gradients need
    ``check_vma=True``, the default of ``shard_map``. Reverse mode only. The gradient of ``reference``, and of ``chunked``
    without a gradient filter, can be differentiated again (``jax.hessian``); the other engines refuse that.

    On whole arrays whose weight is known to be split along V over one mesh axis (by an Explicit axis in its type, or as a
    concrete array), the call is :func:`sharded_linear_log_probs`. Under ``jax.jit`` with Auto axes, and while a call with
    such arrays is differentiated, nothing is known: XLA then gathers the weight, and every device computes all tokens.
    Call :func:`sharded_linear_log_probs` there. The first such call in a mesh context (``jax.set_mesh``) warns.

    Targets, mask and hidden states must be the same on all ranks of ``axis_name``. Targets or masks that differ give NaN;
    :func:`jaxlogp.invariance.nan_unless_equal` checks hidden states. With ``sequence_dim`` (Megatron's sequence parallelism)
    each rank instead passes the hidden states of its part of the tokens, and targets and mask of all tokens. The parts are
    gathered before the product, and one reduce-scatter in fp32 sums and splits the gradient.

    With ``support`` the distribution is that over the ids S that a truncated sampler kept for the token: log Σ_{v in S} e^z
    in place of logsumexp(z), likewise in the entropy, and a gradient of exactly 0 for every other id. Only the rows of these
    ids are read, at a cost that follows their number.

    Args:
        hidden: [*tokens, H], bf16, fp16 or fp32 (float64 is refused, because all sums are fp32). Cast to the weight's dtype
            for the product unless ``fp32_head``; its gradient has its own dtype.
        weight: [V, H], or the local shard [V_local, H]. Products accumulate in fp32; fp32 means fp32, never TF32.
        targets: [*tokens], integer ids of the whole vocabulary.
        mask: [*tokens], bool; False gives exactly 0 with exactly zero gradients, whatever hidden and targets hold; None for
            all tokens.
        bias: [V] or [V_local], added to the product; None for no bias.
        support: ids that each token was drawn from, of the whole vocabulary and the same on all ranks of ``axis_name``
            (supports that differ give NaN); a token without ids is masked. None for the whole vocabulary. Needs
            out_of_vocab "error" and engine "auto", "support_kernels", "support" or "fixed_order".
        temperature: T, a Python number from 2^-126 to 2^126; applied to the logits, so it never rounds the weight.
        logit_scale: multiplier of the logits (MuP output scale), a Python number of size 2^-126 to 2^126.
        softcap: cap, a Python number from 2^-126 to 2^126, or None. A product that overflows gives NaN.
        with_entropy: whether to return the entropy, at no additional collective.
        with_lse: whether to return log Σ e^z, a constant, for :func:`jaxlogp.linear_policy_loss`.
        axis_name: mesh axis over which the vocabulary is sharded.
        vocab: the shards; None for equal ones, except under ``shard_map(check_vma=False)``, where they must be given.
            Uneven shards are padded to vocab.max_width rows (:meth:`VocabShards.shard_rows`).
        sequence_dim: dimension of the tokens along which ``axis_name`` splits hidden, in equal parts in the order of the
            ranks; None if every rank has all of them.
        out_of_vocab: treatment of active targets outside [0, V): "error", or "zero" (value 0, gradient -p g).
        fp32_head: whether to multiply in fp32 regardless of the dtypes, without an fp32 copy of the weight (``reference``
            makes one).
        weight_layout: "vh", or "hv" for a weight [H, V] such as the kernel of a Flax ``Linear``, which is used without a
            transposed copy.
        frozen_head: whether to treat weight and bias as constants, as when only adapters are trained; their gradients are 0
            and are not computed.
        engine: "auto", "chunked", "reference", "hopper" (kernels for NVIDIA Hopper), "triton" (kernels for NVIDIA GPUs of
            compute capability 8 and 9.0, through jax-triton), "fixed_order" (bitwise equal on every mesh and in every batch,
            see docs/invariance.md; its default order needs V >= 24), "support_kernels" or "support" (for a ``support``
            alone), an engine object such as ``ChunkedEngine(token_chunk=256)``, or a sequence of names and objects, the
            first of which that supports the call is used.

    Returns:
        TokenLogProbs of fp32 arrays [*tokens] in nats; entropy and lse are None unless asked for.

    Raises:
        ValueError: if a shape, dtype or option is wrong; if the surrounding ``shard_map`` lacks ``axis_name``, or there is
            none although the weight alone varies over an axis; if the weight, or with ``sequence_dim`` the hidden states,
            are the same on all vocabulary shards; if a known active target is outside [0, V) with ``out_of_vocab="error"``
            or not in its support, or a known support has an id twice in a token, an id outside [0, V), or more ids than
            its capacity (under ``jax.jit`` log-prob and gradient of the token are NaN, except that an id other than the
            target counts as often as it occurs); if a sharded call is differentiated under
            ``shard_map(check_vma=False)``; or if a gradient is differentiated again with an engine that refuses it.

    Example:
        >>> hidden, weight = jnp.ones((2, 3, 4)), jnp.zeros((8, 4))
        >>> result = linear_log_probs(hidden, weight, jnp.zeros((2, 3), jnp.int32), with_entropy=True)
        >>> bool(jnp.allclose(result.log_probs, -jnp.log(8.0)) and jnp.allclose(result.entropy, jnp.log(8.0)))
        True

    References:
        NovaSky-AI/SkyRL pull request 1765 and volcengine/verl (fused head); ServiceNow/Fast-LLM pull request 520 (fp32
        head); Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024; Korthikanti et al., Reducing
        Activation Recomputation in Large Transformer Models, 2022 (sequence parallelism).
    """
    spec = HeadSpec(temperature, logit_scale, softcap, fp32_head)
    layout = {"axis_name": axis_name, "vocab": vocab, "weight_layout": weight_layout, "sequence_dim": sequence_dim}
    layout |= {"out_of_vocab": out_of_vocab, "with_entropy": with_entropy, "frozen": frozen_head}

    def run(hidden, weight, bias, targets, mask, support):
        call = head_call(hidden, weight, bias, targets, mask, spec, support=support, **layout)
        chosen, reason = choose_engine(engine, call)
        report(HeadRun("linear_log_probs", chosen.name, reason, call.num_shards))
        values = head_values(chosen, call)
        lse = jax.lax.stop_gradient(values.lse) if with_lse else None
        return jax.tree.map(lambda x: x.reshape(targets.shape), values._replace(lse=lse))

    check_operands(hidden, weight, bias, weight_layout)
    require_flags(with_entropy=with_entropy, with_lse=with_lse, frozen_head=frozen_head)
    check_kinds(targets, mask, support)
    unsharded = axis_name is None and vocab is None and sequence_dim is None
    mesh = known_layout(hidden, weight, weight_layout, engine) if unsharded else None
    if mesh is not None:
        options = {"with_entropy": with_entropy, "with_lse": with_lse, "out_of_vocab": out_of_vocab, "engine": engine}
        options |= {"weight_layout": weight_layout, "frozen_head": frozen_head, **spec.keywords(), **mesh}
        arrays = {"mask": mask, "bias": bias, "support": support}
        return sharded_linear_log_probs(hidden, weight, targets, **arrays, **options)
    if unsharded:
        warn_of_unknown_layout("linear_log_probs", hidden, weight, stacklevel=3)
    specs = leading_spec(hidden, hidden.ndim - 1)
    return automatic_axes(run, hidden, weight, bias, targets, mask, support, out_specs=specs)


def sharded_linear_log_probs(
    hidden: Float[Array, "*tokens hidden"],
    weight: HeadWeight,
    targets: Int[Array, "*tokens"],
    mask: Bool[Array, "*tokens"] | None = None,
    *,
    mesh: AnyMesh,
    vocab_axis: str = "tensor",
    token_axes: tuple[str, ...] = ("data",),
    weight_axis: str | None = None,
    vocab: VocabShards | None = None,
    bias: Float[Array, " vocab"] | None = None,
    support: Support | None = None,
    **options: Any,
) -> TokenLogProbs:
    """Runs :func:`linear_log_probs` on global arrays, in a ``shard_map`` over ``mesh``, as one program.

    Compiled once for each combination of shapes and options, also outside ``jax.jit``.

    Args:
        hidden: [*tokens, H], first dimension split over ``token_axes``; with ``sequence_dim`` that dimension is split over
            ``vocab_axis`` as well.
        weight: [V, H] ([H, V] with ``weight_layout="hv"``), the whole weight, with V split over ``vocab_axis``. Unequal
            shards are padded to one width first, which copies each rank's rows; see :meth:`VocabShards.shard_rows`.
        targets: [*tokens], integer token ids.
        mask: [*tokens], bool, or None.
        mesh: the device mesh; Explicit and Auto axes both work.
        vocab_axis: mesh axis that shards the vocabulary.
        token_axes: mesh axes that shard the first token dimension; () for none.
        weight_axis: one of token_axes, over which H is split as well (FSDP style), or None. Inside the ``shard_map`` the
            weight is gathered over it and its gradient scattered back.
        vocab: the shards; None for ``VocabShards.aligned``, or those that the order of engine "fixed_order" requires.
        bias: [V] or None.
        support: the ids that each token was drawn from, of all tokens, or None.
        **options: further keyword arguments of :func:`linear_log_probs`, except ``axis_name``.

    Returns:
        TokenLogProbs of global arrays [*tokens].

    Raises:
        ValueError: if ``mesh`` lacks an axis or does not divide a size, or linear_log_probs refuses an argument.

    Example:
        >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"))
        >>> hidden, weight = jax.numpy.ones((2, 4)), jax.numpy.zeros((8, 4))
        >>> result = sharded_linear_log_probs(hidden, weight, jax.numpy.array([1, 2]), mesh=mesh)
        >>> [round(x, 4) for x in result.log_probs.tolist()]
        [-2.0794, -2.0794]
    """
    layout = layout_of(hidden, weight, bias, mesh, vocab_axis, token_axes, weight_axis, options)
    out_of_vocab = options.get("out_of_vocab", "error")
    check_targets(targets, mask, hidden.shape[:-1], weight.shape[layout.vocab_dim], out_of_vocab)
    arrays = {"targets": as_int32(targets), "mask": mask}
    arrays |= support_arrays(support, targets, mask, weight.shape[layout.vocab_dim])
    return run_over_mesh(_of_rank, layout.tokens, layout, {"": (hidden, weight, bias)}, arrays, vocab, options)


def _of_rank(layout: Layout, hidden: Array, weight: Array, **given: Any) -> TokenLogProbs:
    return linear_log_probs(hidden, weight, **given)


def head_logits(
    hidden: Float[Array, "*tokens hidden"],
    weight: HeadWeight,
    *,
    bias: Float[Array, " vocab"] | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    fp32_head: bool = False,
    weight_layout: str = "vh",
) -> Float[Array, "*tokens vocab"]:
    """Computes the logits before the temperature, for samplers, with the dtype policy of :func:`linear_log_probs`.

    softcap(logit_scale (hidden · weightᵀ + bias)), fp32. Stores [tokens, V]; a sampler has only one token per sequence.

    Args:
        hidden: [*tokens, H], bf16, fp16 or fp32.
        weight: [V, H], or [H, V] with ``weight_layout="hv"``.
        bias: [V] or None.
        logit_scale: multiplier of the logits, a finite Python number other than 0.
        softcap: cap, as in :func:`linear_log_probs`, or None.
        fp32_head: whether to multiply in fp32 regardless of the dtypes.
        weight_layout: "vh" or "hv", as in :func:`linear_log_probs`.

    Returns:
        fp32 logits [*tokens, V].

    Raises:
        ValueError: if a shape, dtype or option is wrong.

    Example:
        >>> head_logits(jnp.ones((2, 4)), jnp.ones((8, 4)), logit_scale=0.5)[0, 0].item()
        2.0
    """
    check_operands(hidden, weight, bias, weight_layout)
    spec = HeadSpec(logit_scale=logit_scale, softcap=softcap, fp32_head=fp32_head)
    logits = materialised_logits(hidden.reshape(-1, hidden.shape[-1]), weight, bias, spec, weight_layout)
    return logits.reshape(*hidden.shape[:-1], logits.shape[-1])


def skipped_tiles(
    hidden: Float[Array, "*tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    targets: Int[Array, "*tokens"],
    mask: Bool[Array, "*tokens"] | None = None,
    *,
    engine: Engine,
    bias: Float[Array, " vocab"] | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    axis_name: AxisName | None = None,
    vocab: VocabShards | None = None,
    out_of_vocab: str = "error",
    fp32_head: bool = False,
) -> WeightedSum:
    """Counts the blocks of the logits' gradient that the engine's gradient filter skips in the backward, and all blocks.

    Uses the tile maxima of the backward, and assumes a cotangent at every token of the mask; a loss that gives some tokens
    none (advantage 0, clipped) skips more blocks. Costs one forward pass, and no gradient flows through it.

    Args:
        hidden: [*tokens, H], bf16, fp16 or fp32.
        weight: [V, H], or the local shard [V_local, H].
        targets: [*tokens], integer ids of the whole vocabulary.
        mask: [*tokens], bool, False for tokens that do not count; None for all tokens.
        engine: an engine object with a gradient filter, such as ``ChunkedEngine(gradient_filter=GradientFilter())``.
        bias: [V] or [V_local], or None.
        temperature: T, as in :func:`linear_log_probs`.
        logit_scale: multiplier of the logits, a finite Python number other than 0.
        softcap: cap, as in :func:`linear_log_probs`, or None.
        axis_name: mesh axis over which the vocabulary is sharded; the blocks of all shards are added up. The caller adds
            those of the ranks of a data axis (:meth:`WeightedSum.psum`).
        vocab: the shards; None for equal ones.
        out_of_vocab: "error" or "zero", as in :func:`linear_log_probs`.
        fp32_head: whether to multiply in fp32 regardless of the dtypes.

    Returns:
        WeightedSum(skipped blocks, all blocks); its mean() is the share of skipped blocks.

    Raises:
        ValueError: if the engine has no gradient filter, or linear_log_probs refuses an argument.

    Example:
        >>> from jaxlogp.head import ChunkedEngine, GradientFilter
        >>> weight = jnp.where(jnp.arange(8) < 4, 20.0, 0.0)[:, None]
        >>> engine = ChunkedEngine(vocab_tile=2, gradient_filter=GradientFilter())
        >>> float(skipped_tiles(jnp.ones((3, 1)), weight, jnp.zeros(3, jnp.int32), engine=engine).mean())
        0.5
    """
    ok = getattr(engine, "gradient_filter", None) is not None
    require(ok, "engine", "an engine object with a gradient_filter", describe(engine))
    spec = HeadSpec(temperature, logit_scale, softcap, fp32_head)
    layout = {"axis_name": axis_name, "vocab": vocab, "weight_layout": "vh"}
    layout |= {"out_of_vocab": out_of_vocab, "with_entropy": False, "sequence_dim": None}

    def run(hidden, weight, bias, targets, mask):
        call = head_call(hidden, weight, bias, targets, mask, spec, **layout)
        chosen, reason = choose_engine(engine, call)
        report(HeadRun("skipped_tiles", chosen.name, reason, call.num_shards))
        call = operands_of(chosen, jax.tree.map(jax.lax.stop_gradient, call))
        return chosen.skipped_tiles(call).psum(axis_name)

    check_operands(hidden, weight, bias)
    return automatic_axes(run, hidden, weight, bias, targets, mask, out_specs=PartitionSpec())
