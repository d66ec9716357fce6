"""Log-probs and entropies from logits, whole or sharded over the vocabulary."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Integer

from jaxlogp._arrays import as_int32
from jaxlogp._compat import (
    AnyMesh,
    AxisName,
    automatic_axes,
    leading_spec,
    place,
    refuse_unchecked_gradient,
    require_axes,
    require_varying,
    union_of_varying_axes,
    vary_over,
)
from jaxlogp._stats import Normaliser, TokenLogProbs, all_reduce, finish, logit_gradient, tile_stats
from jaxlogp._targets import OUT_OF_VOCAB, LocalTargets, check_targets, localise, mask_cotangents
from jaxlogp._vocab import VocabShards, local_shard
from jaxlogp.errors import describe, require, require_flags, require_hashable, require_operand_dtype
from jaxlogp.head.projection import HeadSpec, finish_logits, product_gradient


def log_probs_from_logits(
    logits: Float[Array, "*tokens vocab"],
    targets: Integer[Array, "*tokens"],
    mask: Bool[Array, "*tokens"] | None = None,
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    with_entropy: bool = False,
    with_lse: bool = False,
    axis_name: AxisName | None = None,
    vocab: VocabShards | None = None,
    out_of_vocab: str = "error",
) -> TokenLogProbs:
    """Computes log-probs of the targets and entropies of softmax(logit_scale · logits / temperature).

    z = logit_scale · logits / T in fp32; lse = logsumexp(z) over the whole vocabulary; log_prob = z[target] - lse;
    entropy = lse - Σ p z. Inside ``shard_map``, with ``axis_name``, the maximum takes one pmax and the sums take one
    psum. The gradient is g (onehot - p) + g_H p (Σ p z - z), times logit_scale / T, cast once to the logits' dtype.
    Reverse mode only.

    Targets and mask must be the same on all ranks of ``axis_name``; a token where they differ gets NaN.


    Args:
        logits: [*tokens, V], or the local shard [*tokens, V_local] under ``axis_name``; fp32, bf16 or fp16 (float64 is
            refused, because all sums are fp32).
        targets: [*tokens], integer token ids of the whole vocabulary.
        mask: [*tokens], bool; False gives exactly 0 with exactly zero gradient, whatever the id and the logits; None for
            all tokens.
        temperature: T, a Python number > 0.
        logit_scale: multiplier of the logits, a finite Python number other than 0.
        with_entropy: whether to return the entropy, at no additional collective.
        with_lse: whether to return log Σ e^z, a constant.
        axis_name: mesh axis over which the vocabulary is sharded.
        vocab: the shards; None for equal ones. Uneven shards are padded to vocab.max_width columns.
        out_of_vocab: treatment of active targets outside [0, V): "error", or "zero" (value 0, gradient -p g).

    Returns:
        TokenLogProbs of fp32 arrays [*tokens] in nats; entropy and lse are None unless asked for.

    Raises:
        ValueError: if a shape, dtype, option or vocabulary does not match; if a known active target is outside [0, V) with
            ``out_of_vocab="error"`` (under ``jax.jit`` its log-prob and gradient are NaN); if the logits do not vary over
            ``axis_name``; or if a sharded call is differentiated under ``shard_map(check_vma=False)``.

    Example:
        >>> logits = jnp.array([[0.1, -0.2, 1.7, 0.3, 1.2, -0.5]])
        >>> print(f"{float(log_probs_from_logits(logits, jnp.array([4])).log_probs[0]):.5f}")
        -1.33958

    References:
        RL-Align/RL-Kernel pull request 103 (tensor-parallel-invariant selected log-probs).
    """
    require_operand_dtype(logits, "logits")
    require(logits.ndim >= 1 and logits.shape[-1] > 0, "logits", "shape [*tokens, V] with V > 0", describe(logits))
    spec = HeadSpec(temperature, logit_scale)
    require_flags(with_entropy=with_entropy, with_lse=with_lse)
    require(out_of_vocab in OUT_OF_VOCAB, "out_of_vocab", f"one of {OUT_OF_VOCAB}", repr(out_of_vocab))
    tokens, rows = logits.shape[:-1], logits.shape[-1]
    shard = local_shard(rows, axis_name, vocab, "logits")
    require_varying(logits, axis_name, "logits")
    labels = check_targets(targets, mask, tokens, shard.vocab_size, out_of_vocab)

    def run(logits, targets, mask):
        local = localise(targets.reshape(-1), mask.reshape(-1), shard, out_of_vocab)
        result = _flat(
            logits.reshape(-1, rows),
            local,
            spec=spec,
            with_entropy=with_entropy,
            axis_name=axis_name,
            vocab_size=shard.vocab_size,
        )
        lse = jax.lax.stop_gradient(result.lse) if with_lse else None
        return jax.tree.map(lambda x: x.reshape(tokens), result._replace(lse=lse))

    return automatic_axes(run, logits, targets, jnp.asarray(labels), out_specs=leading_spec(logits, len(tokens)))


def sharded_log_probs_from_logits(
    logits: Float[Array, "*tokens vocab"],
    targets: Integer[Array, "*tokens"],
    mask: Bool[Array, "*tokens"] | None = None,
    *,
    mesh: AnyMesh,
    vocab_axis: str = "tensor",
    token_axes: tuple[str, ...] = ("data",),
    vocab: VocabShards | None = None,
    **options: Any,
) -> TokenLogProbs:
    """Runs :func:`log_probs_from_logits` on global arrays, in a ``shard_map`` over ``mesh``, as one program.

    Args:
        logits: [*tokens, V], first dimension split over ``token_axes`` and V over ``vocab_axis``.
        targets: [*tokens], integer token ids.
        mask: [*tokens], bool, or None.
        mesh: the device mesh; Explicit and Auto axes both work.
        vocab_axis: mesh axis that shards the vocabulary.
        token_axes: mesh axes that shard the first token dimension; () for none.
        vocab: the shards; None for ``VocabShards.even``. Unequal ones are padded to one width first, which copies.
        **options: further keyword arguments of :func:`log_probs_from_logits`, except ``axis_name``.

    Returns:
        TokenLogProbs of global arrays [*tokens].

    Raises:
        ValueError: if ``mesh`` lacks an axis or does not divide a size, or log_probs_from_logits refuses an argument.

    Example:
        >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"))
        >>> values = sharded_log_probs_from_logits(jnp.zeros((2, 8)), jnp.array([4, 1]), mesh=mesh)
        >>> [round(x, 4) for x in values.log_probs.tolist()]
        [-2.0794, -2.0794]
    """
    require_operand_dtype(logits, "logits")
    require_axes(mesh, vocab_axis=(vocab_axis,), token_axes=token_axes)
    require("axis_name" not in options, "axis_name", "not to be given (vocab_axis names it)", options.get("axis_name"))
    require_hashable(options)
    split, shape = math.prod(mesh.shape[axis] for axis in token_axes), logits.shape
    ok = len(shape) >= 2 and shape[0] % split == 0
    require(ok, "logits", f"shape [*tokens, V], its first dimension divisible by {split}", describe(logits))
    shards = VocabShards.even(shape[-1], mesh.shape[vocab_axis]) if vocab is None else vocab
    require(isinstance(shards, VocabShards), "vocab", "a VocabShards or None", describe(shards))
    fits = shards.num_shards == mesh.shape[vocab_axis]
    require(fits, "vocab", f"{mesh.shape[vocab_axis]} shards, as {vocab_axis!r} has ranks", shards.num_shards)
    require(shape[-1] == shards.vocab_size, "logits", f"vocab_size {shards.vocab_size} columns", describe(logits))
    check_targets(targets, mask, shape[:-1], shards.vocab_size, options.get("out_of_vocab", "error"))
    tokens = PartitionSpec(token_axes if token_axes else None)
    columns = PartitionSpec(*tokens, *[None] * (len(shape) - 2), vocab_axis)
    specs = (columns, tokens, tokens)
    arrays = shards.shard_rows(logits, len(shape) - 1), as_int32(targets), mask
    arrays = tuple(None if x is None else place(x, mesh, spec) for x, spec in zip(arrays, specs, strict=True))
    options |= {"axis_name": vocab_axis, "vocab": shards}
    return _mapped(arrays, mesh, specs, tuple(sorted(options.items())))


# Outside of jit, a shard_map compiles each of its operations, and in every call again.
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _mapped(
    arrays: tuple[Array, Array, Array | None],
    mesh: AnyMesh,
    specs: tuple[PartitionSpec, ...],
    options: tuple[tuple[str, Any], ...],
) -> TokenLogProbs:
    run = functools.partial(log_probs_from_logits, **dict(options))
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs[1])(*arrays)


# One program also outside of jit, like the head's.
@functools.partial(jax.jit, static_argnames=("spec", "with_entropy", "axis_name", "vocab_size"))
def _flat(
    logits: Float[Array, "tokens columns"],
    targets: LocalTargets,
    spec: HeadSpec,
    with_entropy: bool,
    axis_name: AxisName | None,
    vocab_size: int,
) -> TokenLogProbs:
    # With every operand cast to varying over all axes in use, the cast's transpose is the one psum its gradient needs.
    axes = union_of_varying_axes(logits, *targets) | ({axis_name} if axis_name is not None else set())
    logits = vary_over(refuse_unchecked_gradient(logits, axis_name), axes)
    return _selected(logits, targets, (spec, with_entropy, axis_name, vocab_size))


def _valid(columns: int, targets: LocalTargets) -> Bool[Array, " columns"]:
    return jnp.arange(columns, dtype=jnp.int32) < targets.width


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _selected(logits: Array, targets: LocalTargets, options: tuple) -> TokenLogProbs:
    return _selected_forward(logits, targets, options)[0]


def _selected_forward(
    logits: Array, targets: LocalTargets, options: tuple
) -> tuple[TokenLogProbs, tuple[Array, LocalTargets, Normaliser]]:
    spec, with_entropy, axis_name, vocab_size = options
    scaled = finish_logits(logits.astype(jnp.float32), None, spec)
    local = tile_stats(scaled, targets.column, _valid(logits.shape[-1], targets), with_entropy)
    result, normaliser = finish(all_reduce(local, axis_name, targets.codes), targets.mask, vocab_size, targets.invalid)
    return result, (logits, targets, normaliser)


def _selected_backward(options: tuple, residuals: tuple, g: TokenLogProbs) -> tuple[Array, None]:
    logits, targets, normaliser = residuals
    scaled = finish_logits(logits.astype(jnp.float32), None, options[0])
    g_log_probs, g_entropy = mask_cotangents(g, targets)
    valid = _valid(logits.shape[-1], targets)
    gradient = logit_gradient(scaled, targets.column, valid, normaliser, g_log_probs, g_entropy)
    return product_gradient(gradient, scaled, options[0]).astype(logits.dtype), None


_selected.defvjp(_selected_forward, _selected_backward)
