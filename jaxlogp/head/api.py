"""The front door of the head: ``linear_log_probs`` and its siblings for global arrays and for plain logits."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._compat import AxisName, place, refuse_unchecked_gradient, union_of_varying_axes, vary_over
from jaxlogp.errors import describe, require, require_floating, require_ids_in_range
from jaxlogp.head.fixed_order.engine import FixedOrderEngine
from jaxlogp.head.projection import HeadOptions
from jaxlogp.head.reference import materialised_logits
from jaxlogp.head.registry import Engine, HeadRun, choose_engine, mask_hidden, named_engine, report
from jaxlogp.logits import check_temperature
from jaxlogp.reduce import WeightedSum
from jaxlogp.stats import TokenLogProbs
from jaxlogp.targets import OUT_OF_VOCAB, LocalTargets, check_targets, localise
from jaxlogp.vocab import VocabShards, local_shard


def linear_log_probs(
    hidden: Float[Array, "*tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    targets: Int[Array, "*tokens"],
    *,
    mask: Bool[Array, "*tokens"] | None = None,
    bias: Float[Array, " vocab"] | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    with_entropy: bool = False,
    axis_name: AxisName | None = None,
    vocab: VocabShards | None = None,
    out_of_vocab: str = "error",
    fp32_head: bool = False,
    engine: str | Engine = "auto",
) -> TokenLogProbs:
    """Log-probs of the targets, and entropies, from hidden states and head weight, [tokens, V] logits never stored.

    z = softcap(logit_scale (hidden · weightᵀ + bias)) / temperature, with softcap(a) = cap tanh(a / cap);
    log_prob = z[target] - logsumexp(z); entropy = logsumexp(z) - Σ p z. Differentiable in hidden, weight and bias.

    Inside ``shard_map`` with ``axis_name`` the weight is the local block of the vocabulary. Hidden states that are the
    same on all shards get their gradient summed over the shards exactly once; so does a weight that is the same on all
    ranks of a data axis. Both follow from replication types, hence gradients need ``check_vma=True`` (its default).

    Args:
      hidden: [*tokens, H], any float dtype. Cast to the weight's dtype for the product unless ``fp32_head``; its gradient
        comes back in its own dtype.
      weight: [V, H], or the local block [V_local, H]. Products accumulate in fp32; fp32 means fp32, never TF32.
      targets: [*tokens], integer ids of the whole vocabulary.
      mask: [*tokens], bool; False gives exactly 0 with exactly zero gradients, whatever is in hidden or targets there.
      bias: [V] or [V_local], added to the product.
      temperature: T, a Python number > 0; the weight is never rounded by it.
      logit_scale: multiplier of the logits (MuP output scale), a finite Python number other than 0.
      softcap: cap, a Python number > 0, or None.
      with_entropy: also return the entropy; no additional collective either way.
      axis_name: mesh axis over which the vocabulary is sharded.
      vocab: the shards; None means equal ones. Blocks of uneven shards have vocab.max_width rows
        (:meth:`VocabShards.shard_rows`).
      out_of_vocab: for active targets outside of [0, V): "error", or "zero" (value 0, gradient -p g).
      fp32_head: multiply in fp32 whatever the dtypes, without an fp32 copy of the weight (``reference`` makes one).
      engine: "auto", "chunked", "reference", "hopper" (kernels for NVIDIA Hopper), "triton" (kernels for NVIDIA GPUs of
        compute capability 8 and 9.0, through jax-triton), "fixed_order" (bitwise the same on every mesh and in every
        batch, see docs/invariance.md), or an engine object such as ``ChunkedEngine(token_chunk=256)``.

    Returns:
      TokenLogProbs of fp32 arrays [*tokens] in nats; entropy is None unless asked for.

    Raises:
      ValueError: wrong shapes, dtypes or options; an active target outside of [0, V) with ``out_of_vocab="error"`` where
        the values are known. Under ``jax.jit`` such a token's log-prob and gradient are NaN. Also raised when a sharded
        call is differentiated under ``shard_map(check_vma=False)``.

    Example:
      >>> hidden, weight = jnp.ones((2, 3, 4)), jnp.zeros((8, 4))
      >>> result = linear_log_probs(hidden, weight, jnp.zeros((2, 3), jnp.int32), with_entropy=True)
      >>> bool(jnp.allclose(result.log_probs, -jnp.log(8.0)) and jnp.allclose(result.entropy, jnp.log(8.0)))
      True

    References:
      NovaSky-AI/SkyRL pull request 1765 and volcengine/verl (fused head); ServiceNow/Fast-LLM pull request 520 (fp32
      head); Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024.
    """
    options = HeadOptions(
        temperature, logit_scale, softcap, with_entropy, fp32_head, axis_name, vocab_size=0, shards=vocab
    )
    call = _prepare("linear_log_probs", hidden, weight, bias, targets, mask, options, out_of_vocab, engine)
    result = call.engine.log_probs(*call.operands)
    return jax.tree.map(lambda x: x.reshape(hidden.shape[:-1]), result)


class _Call(NamedTuple):
    """A checked call: the engine, and what its methods take (flat hidden, weight, bias, targets, options)."""

    engine: Engine
    operands: tuple[Array, Array, Array | None, LocalTargets, HeadOptions]


def _prepare(
    path: str,
    hidden: Array,
    weight: Array,
    bias: Array | None,
    targets: Array,
    mask: Array | None,
    options: HeadOptions,
    out_of_vocab: str,
    engine: str | Engine,
) -> _Call:
    """Checks everything, chooses the engine and reports it under ``path``, and types the operands, masked where it asks."""
    axis_name, vocab = options.axis_name, options.shards
    check_operands(hidden, weight, bias)
    check_options(options.temperature, options.logit_scale, options.softcap, out_of_vocab)
    shard = local_shard(weight.shape[0], axis_name, vocab, "weight")
    tokens = hidden.shape[:-1]
    options = dataclasses.replace(options, vocab_size=shard.vocab_size, all_live=mask is None)
    mask = check_targets(targets, mask, tokens, shard.vocab_size)
    if out_of_vocab == "error":
        require_ids_in_range(targets, shard.vocab_size, "targets", mask)
    # Over shards hidden states go in as fp32, see below.
    operand = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype if axis_name is None else jnp.float32)
    chosen, reason = choose_engine(engine, operand, weight, bias, options)
    num_shards = 1 if axis_name is None else lax.axis_size(axis_name)
    report(HeadRun(path, chosen.name, reason, num_shards))

    local = localise(targets.reshape(-1), mask.reshape(-1), shard, out_of_vocab)
    hidden, weight, bias = (
        None if x is None else refuse_unchecked_gradient(x, axis_name) for x in (hidden, weight, bias)
    )
    if not chosen.reduces_gradients:
        # Typed as varying over every axis in play, each operand's transpose owns the one psum that its gradient needs.
        axes = union_of_varying_axes(hidden, weight, bias, *local) | ({axis_name} if axis_name is not None else set())
        if axis_name is not None:
            # The psum of the hidden gradient over the shards then runs in fp32, and the sum is rounded once.
            hidden = hidden.astype(jnp.float32)
        hidden, weight, bias = (None if x is None else vary_over(x, axes) for x in (hidden, weight, bias))
    hidden = mask_hidden(chosen, hidden, mask)
    return _Call(chosen, (hidden.reshape(-1, hidden.shape[-1]), weight, bias, local, options))


def skipped_tiles(
    hidden: Float[Array, "*tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    targets: Int[Array, "*tokens"],
    *,
    engine: Engine,
    mask: Bool[Array, "*tokens"] | None = None,
    bias: Float[Array, " vocab"] | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    axis_name: AxisName | None = None,
    vocab: VocabShards | None = None,
    out_of_vocab: str = "error",
    fp32_head: bool = False,
) -> WeightedSum:
    """How many blocks of the logits' gradient the engine's gradient filter leaves out of the backward, and of how many.

    From the same tile maxima as the backward's decision, with a cotangent at every token of the mask: a loss that gives
    some of them none (advantage 0, clipped) leaves out more. Costs one forward pass, and no gradient flows through it.

    Args:
      hidden: [*tokens, H].
      weight: [V, H], or the local block [V_local, H].
      targets: [*tokens].
      engine: an engine object with a gradient filter, such as ``ChunkedEngine(gradient_filter=GradientFilter())``.
      mask: as in :func:`linear_log_probs`, and so are the arguments below.
      bias: [V] or [V_local], or None.
      temperature: T.
      logit_scale: multiplier of the logits.
      softcap: cap or None.
      axis_name: mesh axis over which the vocabulary is sharded; its shards' blocks are added up. Ranks of a data axis
        are the caller's to add (:meth:`WeightedSum.psum`).
      vocab: the shards; None means equal ones.
      out_of_vocab: "error" or "zero".
      fp32_head: multiply in fp32 whatever the dtypes.

    Returns:
      WeightedSum(blocks left out, all blocks); its mean() is the share that is left out.

    Raises:
      ValueError: an engine without a gradient filter, or what linear_log_probs refuses.

    Example:
      >>> from jaxlogp import ChunkedEngine, GradientFilter
      >>> weight = jnp.where(jnp.arange(8) < 4, 20.0, 0.0)[:, None]
      >>> engine = ChunkedEngine(vocab_tile=2, gradient_filter=GradientFilter())
      >>> float(skipped_tiles(jnp.ones((3, 1)), weight, jnp.zeros(3, jnp.int32), engine=engine).mean())
      0.5
    """
    ok = getattr(engine, "gradient_filter", None) is not None
    require(ok, "engine", "an engine object with a gradient_filter", describe(engine))
    options = HeadOptions(temperature, logit_scale, softcap, False, fp32_head, axis_name, vocab_size=0, shards=vocab)
    call = _prepare("skipped_tiles", hidden, weight, bias, targets, mask, options, out_of_vocab, engine)
    *arrays, local, options = call.operands
    arrays = (None if x is None else lax.stop_gradient(x) for x in arrays)
    return call.engine.skipped_tiles(*arrays, local, options).psum(axis_name)


def head_logits(
    hidden: Float[Array, "*tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    *,
    bias: Float[Array, " vocab"] | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    fp32_head: bool = False,
) -> Float[Array, "*tokens vocab"]:
    """The logits themselves, before the temperature, by the dtype policy of :func:`linear_log_probs`; for samplers.

    softcap(logit_scale (hidden · weightᵀ + bias)), fp32. Stores [tokens, V]: a sampler has one token a sequence.

    Args:
      hidden: [*tokens, H].
      weight: [V, H].
      bias: [V] or None.
      logit_scale: as in :func:`linear_log_probs`.
      softcap: as in :func:`linear_log_probs`.
      fp32_head: as in :func:`linear_log_probs`.

    Returns:
      fp32 logits [*tokens, V].

    Raises:
      ValueError: wrong shapes, dtypes or options.

    Example:
      >>> head_logits(jnp.ones((2, 4)), jnp.ones((8, 4)), logit_scale=0.5)[0, 0].item()
      2.0
    """
    check_operands(hidden, weight, bias)
    check_options(1.0, logit_scale, softcap, "error")
    options = HeadOptions(logit_scale=logit_scale, softcap=softcap, fp32_head=fp32_head)
    logits = materialised_logits(hidden.reshape(-1, hidden.shape[-1]), weight, bias, options)
    return logits.reshape(*hidden.shape[:-1], weight.shape[0])


def sharded_linear_log_probs(
    hidden: Float[Array, "*tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    targets: Int[Array, "*tokens"],
    *,
    mesh: Mesh,
    vocab_axis: str = "tensor",
    token_axes: tuple[str, ...] = ("data",),
    vocab: VocabShards | None = None,
    weight_axis: str | None = None,
    mask: Bool[Array, "*tokens"] | None = None,
    bias: Float[Array, " vocab"] | None = None,
    **options: object,
) -> TokenLogProbs:
    """:func:`linear_log_probs` on global arrays: builds the ``shard_map`` over ``mesh`` and runs it.

    Args:
      hidden: [*tokens, H], first dimension split over ``token_axes``.
      weight: [V, H], the whole weight; rows split over ``vocab_axis``. Shards that are not equal are laid out in blocks
        first (a copy of the weight; a vocabulary that divides evenly needs none).
      targets: [*tokens].
      mesh: the device mesh; Explicit and Auto axes both work.
      vocab_axis: mesh axis that shards the vocabulary.
      token_axes: mesh axes that shard the first token dimension; () for none.
      vocab: the shards; None means ``VocabShards.even``, or what the order of engine "fixed_order" asks for.
      weight_axis: mesh axis over which H is split as well (FSDP style); the weight is gathered over it, and its gradient
        scattered back, inside.
      mask: [*tokens] or None.
      bias: [V] or None.
      **options: further keyword arguments of :func:`linear_log_probs`, except ``axis_name``.

    Returns:
      TokenLogProbs of global arrays [*tokens].

    Raises:
      ValueError: an axis that ``mesh`` does not have, sizes that it does not divide, or what linear_log_probs refuses.
    """
    check_operands(hidden, weight, bias)
    for argument, axis in [("vocab_axis", vocab_axis), *(("token_axes", axis) for axis in token_axes)]:
        require(axis in mesh.shape, argument, f"an axis of the mesh {tuple(mesh.axis_names)}", repr(axis))
    require("axis_name" not in options, "axis_name", "not to be given (vocab_axis names it)", options.get("axis_name"))
    engine = options.get("engine", "auto")
    # "auto" never takes the fixed order, so its choice, made inside, does not matter here.
    chosen = named_engine("chunked" if isinstance(engine, str) and engine == "auto" else engine)
    shards = vocab
    if shards is None:
        cut = chosen.order.shards if isinstance(chosen, FixedOrderEngine) else VocabShards.even
        shards = cut(weight.shape[0], mesh.shape[vocab_axis])
    require(isinstance(shards, VocabShards), "vocab", "a VocabShards or None", describe(shards))
    require(weight.shape[0] == shards.vocab_size, "weight", f"vocab_size {shards.vocab_size} rows", describe(weight))
    tokens = hidden.shape[:-1]
    labels = check_targets(targets, mask, tokens, shards.vocab_size)
    if options.get("out_of_vocab", "error") == "error":
        require_ids_in_range(targets, shards.vocab_size, "targets", labels)
    split = math.prod(mesh.shape[axis] for axis in token_axes)
    seen = f"shape {hidden.shape}"
    require(len(tokens) > 0 and tokens[0] % split == 0, "hidden", f"a first dimension divisible by {split}", seen)

    token_spec = PartitionSpec(token_axes if token_axes else None)
    hidden_size = weight.shape[1]
    if weight_axis is not None:
        require(weight_axis in mesh.shape, "weight_axis", f"an axis of {tuple(mesh.axis_names)}", repr(weight_axis))
        size = mesh.shape[weight_axis]
        require(not chosen.reduces_gradients, "weight_axis", f"None with engine {chosen.name!r}", repr(weight_axis))
        require(hidden_size % size == 0, "weight", f"a second dimension divisible by {size}", describe(weight))

    def local(hidden: Array, weight: Array, bias: Array | None, targets: Array, mask: Array | None) -> TokenLogProbs:
        if weight_axis is not None:
            weight = lax.all_gather(weight, weight_axis, axis=1, tiled=True)
        return linear_log_probs(
            hidden, weight, targets, mask=mask, bias=bias, axis_name=vocab_axis, vocab=shards, **options
        )

    specs = (token_spec, PartitionSpec(vocab_axis, weight_axis), PartitionSpec(vocab_axis), token_spec, token_spec)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=token_spec)
    rows = shards.shard_rows(weight), None if bias is None else shards.shard_rows(bias)
    operands = (hidden, *rows, targets, mask)
    return mapped(*(x if x is None else place(x, mesh, spec) for x, spec in zip(operands, specs, strict=True)))


def check_operands(hidden: Array, weight: Array, bias: Array | None) -> None:
    """Raises ``ValueError`` unless hidden [*tokens, H], weight [V, H] and bias [V] fit."""
    require_floating(hidden, "hidden")
    require_floating(weight, "weight")
    require(hidden.ndim >= 1, "hidden", "shape [*tokens, H]", describe(hidden))
    require(weight.ndim == 2 and weight.size > 0, "weight", "shape [V, H] with V, H > 0", describe(weight))
    size = weight.shape[1]
    require(hidden.shape[-1] == size, "hidden", f"a last dimension of H = {size}, as in weight", describe(hidden))
    if bias is not None:
        require_floating(bias, "bias")
        require(bias.shape == weight.shape[:1], "bias", f"shape {weight.shape[:1]}", describe(bias))


def check_options(temperature: float, logit_scale: float, softcap: float | None, out_of_vocab: str) -> None:
    """Raises ``ValueError`` for an option out of its range."""
    check_temperature(temperature)
    ok = isinstance(logit_scale, (int, float)) and math.isfinite(logit_scale) and logit_scale != 0
    require(ok, "logit_scale", "a finite Python number other than 0", describe(logit_scale))
    ok = softcap is None or (isinstance(softcap, (int, float)) and math.isfinite(softcap) and softcap > 0)
    require(ok, "softcap", "a finite Python number > 0, or None", describe(softcap))
    require(out_of_vocab in OUT_OF_VOCAB, "out_of_vocab", f"one of {OUT_OF_VOCAB}", repr(out_of_vocab))
