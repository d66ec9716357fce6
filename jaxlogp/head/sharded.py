"""``linear_log_probs`` on global arrays: the ``shard_map`` around it."""

import math

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxlogp._compat import place
from jaxlogp.errors import describe, require, require_ids_in_range
from jaxlogp.head.api import linear_log_probs
from jaxlogp.head.call import check_operands
from jaxlogp.head.registry import default_shards, first_choice
from jaxlogp.stats import TokenLogProbs
from jaxlogp.targets import check_targets
from jaxlogp.vocab import VocabShards


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
      weight: [V, H], the whole weight; rows split over ``vocab_axis``. Unequal shards are padded to one width first, a
        copy of each rank's rows; see :meth:`VocabShards.shard_rows`.
      targets: [*tokens].
      mesh: the device mesh; Explicit and Auto axes both work.
      vocab_axis: mesh axis that shards the vocabulary.
      token_axes: mesh axes that shard the first token dimension; () for none.
      vocab: the shards; None means ``VocabShards.aligned``, or those that the order of engine "fixed_order" requires.
      weight_axis: mesh axis over which H is split as well (FSDP style); the weight is gathered over it, and its
        gradient scattered back, inside.
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
    choice = options.get("engine", "auto")
    engine = first_choice(choice)
    shards = default_shards(choice, weight.shape[0], mesh.shape[vocab_axis]) if vocab is None else vocab
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
    if weight_axis is not None:
        require(weight_axis in mesh.shape, "weight_axis", f"an axis of {tuple(mesh.axis_names)}", repr(weight_axis))
        size = mesh.shape[weight_axis]
        # An engine that sums gradients itself, in its own order, must see the weight as it is stored.
        ok = engine is None or not engine.reduces_gradients
        require(ok, "weight_axis", "None with an engine that sums gradients itself", repr(weight_axis))
        require(weight.shape[1] % size == 0, "weight", f"a second dimension divisible by {size}", describe(weight))

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
