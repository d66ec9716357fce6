"""``linear_log_probs`` and ``linear_policy_loss`` on global arrays, in a ``shard_map`` that is compiled once."""

import functools
import math
import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._arrays import AnyArray, as_int32
from jaxlogp._compat import automatic_mesh_axes, axis_tuple, known_sharding, place, require_axes
from jaxlogp._reduce import WeightedSum
from jaxlogp._stats import TokenLogProbs
from jaxlogp._targets import check_targets
from jaxlogp._vocab import VocabShards
from jaxlogp.errors import describe, require
from jaxlogp.head.api import linear_log_probs
from jaxlogp.head.call import WEIGHT_LAYOUTS, HeadWeight, check_operands
from jaxlogp.head.policy_loss import linear_policy_loss
from jaxlogp.head.registry import EngineChoice, default_shards, first_choice, report, with_head_runs
from jaxlogp.head.support.ids import Support, check_support, mask_by_support
from jaxlogp.losses import PolicyLoss, grpo, loss_tokens
from jaxlogp.losses.inputs import labels_of

# Functions that :func:`warn_of_unknown_layout` has warned of.
_WARNED: set[str] = set()


# Arrays of a support of all tokens, from which each rank takes its own.
_OF_SUPPORT = ("support_ids", "support_counts")


class _Layout(NamedTuple):
    """The placement of a head call on a mesh; static and hashable."""

    mesh: Mesh
    vocab_axis: str
    token_axes: tuple[str, ...]
    weight_axis: str | None
    vocab_dim: int
    sequence_dim: int | None

    @property
    def tokens(self) -> PartitionSpec:
        return PartitionSpec(self.token_axes if self.token_axes else None)

    @property
    def hidden(self) -> PartitionSpec:
        if self.sequence_dim is None:
            return self.tokens
        split = [self.token_axes, *[()] * self.sequence_dim]
        split[self.sequence_dim] += (self.vocab_axis,)
        return PartitionSpec(*(axes if axes else None for axes in split))

    @property
    def weight(self) -> PartitionSpec:
        return PartitionSpec(*(self.vocab_axis if dim == self.vocab_dim else self.weight_axis for dim in range(2)))

    def specs(self, arrays: dict[str, Array | None]) -> dict[str, PartitionSpec]:
        whole = [name for name, x in arrays.items() if x is None or x.ndim == 0 or name in _OF_SUPPORT]
        return {name: PartitionSpec() if name in whole else self.tokens for name in arrays}


def sharded_linear_log_probs(
    hidden: Float[Array, "*tokens hidden"],
    weight: HeadWeight,
    targets: Int[Array, "*tokens"],
    mask: Bool[Array, "*tokens"] | None = None,
    *,
    mesh: Mesh,
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
    layout = _layout(hidden, weight, bias, mesh, vocab_axis, token_axes, weight_axis, options)
    out_of_vocab = options.get("out_of_vocab", "error")
    check_targets(targets, mask, hidden.shape[:-1], weight.shape[layout.vocab_dim], out_of_vocab)
    arrays = {"targets": as_int32(targets), "mask": mask}
    arrays |= _support_arrays(support, targets, mask, weight.shape[layout.vocab_dim])
    return _run(_log_probs, layout, (hidden, weight, bias), arrays, vocab, options)


def sharded_linear_policy_loss(
    hidden: Float[Array, "*tokens hidden"],
    weight: HeadWeight,
    targets: Int[AnyArray, "*tokens"],
    old_log_probs: Float[AnyArray, "*tokens"] | None,
    advantages: Float[AnyArray, "*rows"],
    mask: Bool[AnyArray, "*tokens"] | None = None,
    *,
    mesh: Mesh,
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
    layout = _layout(hidden, weight, bias, mesh, vocab_axis, token_axes, weight_axis, options)
    out_of_vocab = options.get("out_of_vocab", "error")
    check_targets(targets, mask, hidden.shape[:-1], weight.shape[layout.vocab_dim], out_of_vocab)
    documents = {"sampler_log_probs": sampler_log_probs, "ref_log_probs": ref_log_probs, "document_ids": document_ids}
    documents["penalized"] = penalized
    of_support = _support_arrays(support, targets, mask, weight.shape[layout.vocab_dim])
    # Its checks of values, which the program cannot make; nothing is computed.
    labels = labels_of(mask, targets.shape) if support is None else mask_by_support(support, mask, targets.shape)
    of_step = {"labels_per_document": labels_per_document, "mean_weight": mean_weight, "entropy_scale": entropy_scale}
    further = documents | of_step
    # Rules that read log-probs get theirs in the program.
    further["log_probs"] = np.zeros(targets.shape, np.float32)
    checked = functools.partial(loss_tokens, loss, old_log_probs, advantages, labels, **further)
    jax.eval_shape(lambda: checked(num_documents=num_documents)[1])
    documents["document_ids"] = None if document_ids is None else as_int32(document_ids)
    arrays: dict[str, Any] = {"targets": as_int32(targets), "mask": mask, "old_log_probs": old_log_probs}
    arrays |= documents | {"advantages": advantages, "lse": lse} | of_support
    arrays |= {name: None if value is None else jnp.asarray(value) for name, value in of_step.items()}
    options = options | {"loss": loss}
    static = num_documents is None or isinstance(num_documents, int | np.integer)
    given, value = (options, num_documents) if static else (arrays, as_int32(num_documents))
    given["num_documents"] = value
    return _run(_policy_loss, layout, (hidden, weight, bias), arrays, vocab, options)


def _support_arrays(
    support: Support | None, targets: Int[AnyArray, "*tokens"], mask: Bool[AnyArray, "*tokens"] | None, vocab_size: int
) -> dict[str, Array]:
    """Returns the arrays of a support by name, once its known values have been checked."""
    if support is None:
        return {}
    check_support(support, targets, mask_by_support(support, mask, targets.shape), vocab_size)
    return dict(zip(_OF_SUPPORT, (as_int32(support.ids), as_int32(support.counts)), strict=True))


def known_layout(hidden: Any, weight: Any, weight_layout: str, engine: EngineChoice) -> dict[str, Any] | None:
    """Returns the arguments of a sharded function for arrays known to be split along V alone, otherwise None.

    The shardings of concrete arrays and those over Explicit axes are known; inside a ``shard_map`` none is.
    """
    tokens, head = known_sharding(hidden), known_sharding(weight)
    vocab_dim = WEIGHT_LAYOUTS.index(weight_layout)
    vocab_axis, weight_axis = head.spec[vocab_dim], head.spec[1 - vocab_dim]
    token_axes = axis_tuple(tokens.spec[0]) if hidden.ndim > 1 else ()
    chosen = first_choice(engine)
    possible = (
        hidden.ndim > 1
        and isinstance(vocab_axis, str)
        and (weight_axis is None or isinstance(weight_axis, str))
        and not (weight_axis is not None and chosen is not None and chosen.reduces_gradients)
        and not any(tokens.spec[1:])
        and vocab_axis not in token_axes
        and (not token_axes or dict(tokens.mesh.shape) == dict(head.mesh.shape))
    )
    # Over an axis that does not split tokens, every rank needs the whole of H anyway.
    gathered = weight_axis if weight_axis in token_axes else None
    axes = {"vocab_axis": vocab_axis, "weight_axis": gathered, "token_axes": token_axes}
    return {"mesh": head.mesh, **axes} if possible else None


def warn_of_unknown_layout(function: str, *operands: Any, stacklevel: int) -> None:
    """Warns, once per process for each function, if traced operands may be split over Auto axes of the mesh context."""
    axes = automatic_mesh_axes()
    if not axes or function in _WARNED or not any(isinstance(x, Tracer) for x in operands):
        return
    _WARNED.add(function)
    unknown = f"{function}: traced arrays do not say how they are split over the Auto mesh axes {axes}"
    cure = f"so XLA may gather them; call sharded_{function}(..., mesh=...) instead"
    warnings.warn(f"{unknown}, {cure}", stacklevel=stacklevel)


def _log_probs(layout: _Layout, hidden: Array, weight: Array, **given: Any) -> TokenLogProbs:
    return linear_log_probs(hidden, weight, **given)


def _policy_loss(layout: _Layout, hidden: Array, weight: Array, **given: Any) -> tuple[WeightedSum, TokenLogProbs]:
    # Without ids documents are rows, which no axis splits.
    axes = layout.token_axes if layout.token_axes and given["document_ids"] is not None else None
    total, values = linear_policy_loss(hidden, weight, document_axis_name=axes, **given)
    return total.psum(layout.token_axes), values


_OUT_SPECS: dict[Callable, Callable[[_Layout], Any]] = {
    _log_probs: lambda layout: layout.tokens,
    _policy_loss: lambda layout: (PartitionSpec(), layout.tokens),
}


def _layout(
    hidden: Any,
    weight: Any,
    bias: Any,
    mesh: Mesh,
    vocab_axis: str,
    token_axes: tuple[str, ...],
    weight_axis: str | None,
    options: dict[str, Any],
) -> _Layout:
    weight_layout, sequence_dim = options.get("weight_layout", "vh"), options.get("sequence_dim")
    check_operands(hidden, weight, bias, weight_layout)
    weight_axes = () if weight_axis is None else (weight_axis,)
    require_axes(mesh, vocab_axis=(vocab_axis,), token_axes=token_axes, weight_axis=weight_axes)
    for name, instead in (("axis_name", "vocab_axis"), ("document_axis_name", "token_axes")):
        require(name not in options, name, f"not to be given ({instead} names it)", repr(options.get(name)))
    tokens = hidden.shape[:-1]
    split = math.prod(mesh.shape[axis] for axis in token_axes)
    ok = len(tokens) > 0 and tokens[0] % split == 0
    require(ok, "hidden", f"a first dimension divisible by {split}", f"shape {hidden.shape}")
    if sequence_dim is not None:
        ok = isinstance(sequence_dim, int) and 0 <= sequence_dim < len(tokens)
        require(ok, "sequence_dim", f"a dimension of the tokens {tokens}", repr(sequence_dim))
        parts = mesh.shape[vocab_axis] * (split if sequence_dim == 0 else 1)
        expected = f"a dimension {sequence_dim} divisible by {parts}"
        require(tokens[sequence_dim] % parts == 0, "hidden", expected, f"shape {hidden.shape}")
    vocab_dim = WEIGHT_LAYOUTS.index(weight_layout)
    if weight_axis is not None:
        expected = f"one of token_axes {token_axes}, or None"
        require(weight_axis in token_axes, "weight_axis", expected, repr(weight_axis))
        size, engine = mesh.shape[weight_axis], first_choice(options.get("engine", "auto"))
        # An engine that sums gradients itself, in its own order, must see the weight as it is stored.
        ok = engine is None or not engine.reduces_gradients
        require(ok, "weight_axis", "None with an engine that sums gradients itself", repr(weight_axis))
        expected = f"a hidden dimension divisible by {size}"
        require(weight.shape[1 - vocab_dim] % size == 0, "weight", expected, describe(weight))
    return _Layout(mesh, vocab_axis, token_axes, weight_axis, vocab_dim, sequence_dim)


def _run(
    function: Callable,
    layout: _Layout,
    operands: tuple[Array, Array, Array | None],
    arrays: dict[str, Array | None],
    vocab: VocabShards | None,
    options: dict[str, Any],
) -> Any:
    """Runs the program of ``function`` on the placed operands and reports its head runs."""
    hidden, weight, bias = operands
    mesh, vocab_size = layout.mesh, weight.shape[layout.vocab_dim]
    engine = options.get("engine", "auto")
    shards = default_shards(engine, vocab_size, mesh.shape[layout.vocab_axis]) if vocab is None else vocab
    require(isinstance(shards, VocabShards), "vocab", "a VocabShards or None", describe(shards))
    require(vocab_size == shards.vocab_size, "weight", f"vocab_size {shards.vocab_size} rows", describe(weight))
    options = options | {"vocab": shards, "engine": tuple(engine) if isinstance(engine, list) else engine}
    for name, value in options.items():
        require(isinstance(value, Hashable), name, "a hashable value, not an array", describe(value))

    weight = place(shards.shard_rows(weight, layout.vocab_dim), mesh, layout.weight)
    bias = None if bias is None else place(shards.shard_rows(bias), mesh, PartitionSpec(layout.vocab_axis))
    hidden = place(hidden, mesh, layout.hidden)
    specs = layout.specs(arrays)
    arrays = {name: None if x is None else place(x, mesh, specs[name]) for name, x in arrays.items()}
    result, runs = _program((hidden, weight, bias), arrays, function, layout, tuple(sorted(options.items())))
    for run in runs:
        report(run)
    return result


# Outside of jit, a shard_map compiles each of its operations, and in every call again.
@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _program(
    operands: tuple[Array, Array, Array | None],
    arrays: dict[str, Array | None],
    function: Callable,
    layout: _Layout,
    options: tuple[tuple[str, Any], ...],
) -> Any:
    def local(operands: tuple[Array, Array, Array | None], arrays: dict[str, Array | None]) -> Any:
        hidden, weight, bias = operands
        if layout.weight_axis is not None:
            weight = lax.all_gather(weight, layout.weight_axis, axis=1 - layout.vocab_dim, tiled=True)
        given = arrays | dict(options) | {"bias": bias, "axis_name": layout.vocab_axis}
        if _OF_SUPPORT[0] in given:
            support, own = Support(*map(given.pop, _OF_SUPPORT)), given["targets"]
            first = lax.axis_index(layout.token_axes) * own.size if layout.token_axes else 0
            index = first + jnp.arange(own.size, dtype=jnp.int32).reshape(own.shape)
            given["support"] = support.of_tokens(index)
        return with_head_runs(lambda: function(layout, hidden, weight, **given))

    in_specs = (layout.hidden, layout.weight, PartitionSpec(layout.vocab_axis)), layout.specs(arrays)
    out_specs = _OUT_SPECS[function](layout), PartitionSpec()
    return jax.shard_map(local, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs)(operands, arrays)
