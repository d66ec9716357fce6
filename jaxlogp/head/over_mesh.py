"""Head calls on global arrays: how they lie on a mesh, and the ``shard_map`` that runs them, which is compiled once."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Int

from jaxlogp._arrays import AnyArray, as_int32
from jaxlogp._compat import AnyMesh, automatic_mesh_axes, axis_tuple, known_sharding, place, require_axes
from jaxlogp._vocab import VocabShards
from jaxlogp.errors import describe, require, require_hashable
from jaxlogp.head.call import WEIGHT_LAYOUTS, check_operands
from jaxlogp.head.registry import EngineChoice, default_shards, first_choice, report, with_head_runs
from jaxlogp.head.support.ids import Support, check_support, mask_by_support

# Functions that :func:`warn_of_unknown_layout` has warned of.
_WARNED: set[str] = set()


# Arrays of a support of all tokens, from which each rank takes its own.
_OF_SUPPORT = ("support_ids", "support_counts")

HeadOperands = tuple[Array, Array, Array | None]
"""Hidden states, weight, and bias or None."""


class Layout(NamedTuple):
    """The placement of a head call on a mesh; static and hashable."""

    mesh: AnyMesh
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


def support_arrays(
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
    _require_one_order(tokens.mesh, head.mesh)
    possible = (
        hidden.ndim > 1
        and isinstance(vocab_axis, str)
        and (weight_axis is None or isinstance(weight_axis, str))
        and not (weight_axis is not None and chosen is not None and chosen.reduces_gradients)
        and not any(tokens.spec[1:])
        and vocab_axis not in token_axes
        and (not token_axes or dict(tokens.mesh.shape) == dict(head.mesh.shape))
    )
    if not possible and any(head.spec):
        _require_one_mesh(tokens.mesh, head.mesh)
    # Over an axis that does not split tokens, every rank needs the whole of H anyway.
    gathered = weight_axis if weight_axis in token_axes else None
    axes = {"vocab_axis": vocab_axis, "weight_axis": gathered, "token_axes": token_axes}
    return {"mesh": head.mesh, **axes} if possible else None


def _require_one_order(tokens: AnyMesh, head: AnyMesh) -> None:
    """JAX moves no array between devices in another order, and names operands of its own."""
    if isinstance(tokens, Mesh) and isinstance(head, Mesh):
        ids, wanted = ([device.id for device in mesh.devices.flat] for mesh in (tokens, head))
        require(ids == wanted, "hidden", f"the devices of weight, in the order {wanted}", f"devices {ids}")


def _require_one_mesh(tokens: AnyMesh, head: AnyMesh) -> None:
    """Types of two meshes cannot be those of one program."""
    if all(AxisType.Explicit in mesh.axis_types for mesh in (tokens, head)):
        shape, wanted = dict(tokens.shape), dict(head.shape)
        require(shape == wanted, "hidden", f"the mesh of weight, {wanted}", f"a mesh {shape}")


def warn_of_unknown_layout(function: str, *operands: Any, stacklevel: int) -> None:
    """Warns, once per process for each function, if traced operands may be split over Auto axes of the mesh context."""
    axes = automatic_mesh_axes()
    if not axes or function in _WARNED or not any(isinstance(x, Tracer) for x in operands):
        return
    _WARNED.add(function)
    unknown = f"{function}: traced arrays do not say how they are split over the Auto mesh axes {axes}"
    cure = f"so XLA may gather them; call sharded_{function}(..., mesh=...) instead"
    warnings.warn(f"{unknown}, {cure}", stacklevel=stacklevel)


def layout_of(
    hidden: Any,
    weight: Any,
    bias: Any,
    mesh: AnyMesh,
    vocab_axis: str,
    token_axes: tuple[str, ...],
    weight_axis: str | None,
    options: dict[str, Any],
) -> Layout:
    weight_layout, sequence_dim = options.get("weight_layout", "vh"), options.get("sequence_dim")
    check_operands(hidden, weight, bias, weight_layout)
    weight_axes = () if weight_axis is None else (weight_axis,)
    require_axes(mesh, vocab_axis=(vocab_axis,), token_axes=token_axes)
    # Apart: ranks that split tokens may split the head too, which is gathered.
    require_axes(mesh, weight_axis=weight_axes)
    for name, instead in (("axis_name", "vocab_axis"), ("document_axis_name", "token_axes")):
        require(name not in options, name, f"not to be given ({instead} names it)", repr(options.get(name)))
    tokens = hidden.shape[:-1]
    split = math.prod(mesh.shape[axis] for axis in token_axes)
    ok = len(tokens) > 0 and tokens[0] % split == 0
    require(ok, "hidden", f"a first dimension divisible by {split}", f"shape {hidden.shape}")
    if sequence_dim is not None:
        ok = isinstance(sequence_dim, int) and not isinstance(sequence_dim, bool) and 0 <= sequence_dim < len(tokens)
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
    return Layout(mesh, vocab_axis, token_axes, weight_axis, vocab_dim, sequence_dim)


def run_over_mesh(
    function: Callable,
    out_specs: Any,
    layout: Layout,
    heads: dict[str, HeadOperands],
    arrays: dict[str, Array | None],
    vocab: VocabShards | None,
    options: dict[str, Any],
) -> Any:
    """Runs the program of ``function``, which computes on each rank, on the placed operands, and reports its head runs.

    `heads` lie alike; each is by the prefix of its arguments of ``function``, the first by an empty one.
    """
    _, weight, _ = heads[""]
    mesh, vocab_size = layout.mesh, weight.shape[layout.vocab_dim]
    engine = options.get("engine", "auto")
    shards = default_shards(engine, vocab_size, mesh.shape[layout.vocab_axis]) if vocab is None else vocab
    require(isinstance(shards, VocabShards), "vocab", "a VocabShards or None", describe(shards))
    require(vocab_size == shards.vocab_size, "weight", f"vocab_size {shards.vocab_size} rows", describe(weight))
    options = options | {"vocab": shards, "engine": tuple(engine) if isinstance(engine, list) else engine}
    require_hashable(options)

    def placed(hidden: Array, weight: Array, bias: Array | None) -> HeadOperands:
        weight = place(shards.shard_rows(weight, layout.vocab_dim), mesh, layout.weight)
        bias = None if bias is None else place(shards.shard_rows(bias), mesh, PartitionSpec(layout.vocab_axis))
        return place(hidden, mesh, layout.hidden), weight, bias

    heads = {prefix: placed(*head) for prefix, head in heads.items()}
    specs = layout.specs(arrays)
    arrays = {name: None if x is None else place(x, mesh, specs[name]) for name, x in arrays.items()}
    result, runs = _program(heads, arrays, function, out_specs, layout, tuple(sorted(options.items())))
    for run in runs:
        report(run)
    return result


# Outside of jit, a shard_map compiles each of its operations, and in every call again.
@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _program(
    heads: dict[str, HeadOperands],
    arrays: dict[str, Array | None],
    function: Callable,
    out_specs: Any,
    layout: Layout,
    options: tuple[tuple[str, Any], ...],
) -> Any:
    def local(heads: dict[str, HeadOperands], arrays: dict[str, Array | None]) -> Any:
        given = arrays | dict(options) | {"axis_name": layout.vocab_axis}
        for prefix, (hidden, weight, bias) in heads.items():
            if layout.weight_axis is not None:
                weight = lax.all_gather(weight, layout.weight_axis, axis=1 - layout.vocab_dim, tiled=True)
            given |= {f"{prefix}hidden": hidden, f"{prefix}weight": weight, f"{prefix}bias": bias}
        if _OF_SUPPORT[0] in given:
            support, own = Support(*map(given.pop, _OF_SUPPORT)), given["targets"]
            first = lax.axis_index(layout.token_axes) * own.size if layout.token_axes else 0
            index = first + jnp.arange(own.size, dtype=jnp.int32).reshape(own.shape)
            given["support"] = support.of_tokens(index)
        return with_head_runs(lambda: function(layout, **given))

    of_head = layout.hidden, layout.weight, PartitionSpec(layout.vocab_axis)
    in_specs, out_specs = (dict.fromkeys(heads, of_head), layout.specs(arrays)), (out_specs, PartitionSpec())
    return jax.shard_map(local, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs)(heads, arrays)
