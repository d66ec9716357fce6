"""Embedding lookup, replicated or vocabulary-parallel, with bitwise the rows of the table in any layout."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Integer

from jaxlogp._agreement import counters, id_codes, same_ids
from jaxlogp._arrays import as_int32, nan_where
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
    varying_axes,
)
from jaxlogp._vocab import LocalShard, VocabShards, local_shard
from jaxlogp.errors import (
    describe,
    require,
    require_flags,
    require_ids_in_range,
    require_integer,
    require_operand_dtype,
    require_tokens,
)
from jaxlogp.invariance.exact import no_negative_zero
from jaxlogp.invariance.order import gather_bits, in_mesh_order, segment_tree_sum

_BITS = {2: jnp.uint16, 4: jnp.uint32}
# For the words that tell whether all shards have the same ids: they are sent in the narrowest of these types.
_WORD_BITS = 16


def embedding_lookup(
    table: Float[Array, "vocab hidden"],
    token_ids: Integer[Array, "*tokens"],
    *,
    axis_name: AxisName | None = None,
    vocab: VocabShards | None = None,
    fixed_order: bool = False,
) -> Float[Array, "*tokens hidden"]:
    """Returns the rows of ``table`` for model-input ids.

    Under ``axis_name`` the owner of an id contributes the bits of its row as integers, the others 0, and one integer psum
    adds them. So the result is bitwise equal to the unsharded one, -0.0 and NaN payloads included. Reverse mode only.


    Args:
        table: [V, H], or the local shard [V_local, H]; bf16, fp16 or fp32.
        token_ids: [*tokens], integer, the same on all shards. There is no ignore index: every id must be in [0, V).
        axis_name: mesh axis over which the vocabulary is sharded.
        vocab: the shards; None for equal ones.
        fixed_order: whether to sum the gradient of a row in an order that depends only on its own tokens: a binary tree over
            its occurrences in token order, over all data ranks together. The same occurrences in the same order then give
            equal bits, whatever lies between them, on any mesh and with any backend's scatter. Costs log2(tokens) passes
            over the cotangents and, with several data ranks, a gather of them.


    Returns:
        [*tokens, H] in the table's dtype.

    Raises:
        ValueError: if a shape or dtype is wrong, a known id is outside [0, V) (under ``jax.jit`` its row is NaN, as is that
            of an id that differs over ``axis_name``), the table does not vary over ``axis_name``, or a sharded call is
            differentiated under ``shard_map(check_vma=False)``.

    Example:
        >>> embedding_lookup(jnp.eye(3), jnp.array([2])).tolist()
        [[0.0, 0.0, 1.0]]

    References:
        RL-Align/RL-Kernel pull request 190.
    """
    _check(table, token_ids)
    require_flags(fixed_order=fixed_order)
    shard = local_shard(table.shape[0], axis_name, vocab, "table")
    require_varying(table, axis_name, "table")
    require_ids_in_range(token_ids, shard.vocab_size, "token_ids")
    specs = PartitionSpec(*leading_spec(token_ids, token_ids.ndim), None)
    run = functools.partial(_lookup, shard=shard, axis_name=axis_name, fixed_order=fixed_order)
    return automatic_axes(run, jnp.asarray(table), as_int32(token_ids), out_specs=specs)


class _Rows(NamedTuple):
    """The rows of the local shard that the tokens read.

    Attributes:
        row: int32 [*tokens], 0 where the shard does not own the id.
        owned: bool [*tokens], True where the shard owns the id.
        codes: int32 [*tokens], for the comparison with other shards; None with one shard.
    """

    row: Array
    owned: Array
    codes: Array | None


# One program also outside of jit, like the head's.
@functools.partial(jax.jit, static_argnames=("axis_name", "fixed_order"))
def _lookup(table: Array, token_ids: Array, shard: LocalShard, axis_name: AxisName | None, fixed_order: bool) -> Array:
    valid = (token_ids >= 0) & (token_ids < shard.vocab_size)
    local = jnp.where(valid, token_ids, 0) - shard.start
    owned = valid & (local >= 0) & (local < shard.width)
    axes = union_of_varying_axes(table, token_ids) | ({axis_name} if axis_name is not None else set())
    table = refuse_unchecked_gradient(table, axis_name)
    if not fixed_order:
        # The transpose of the cast is the all-reduce that the gradient of a shared table needs.
        table = vary_over(table, axes)
    codes = id_codes(token_ids, jnp.ones_like(valid)) if shard.num_shards > 1 else None
    rows = _owned_rows(table, _Rows(jnp.where(owned, local, 0), owned, codes), axis_name, fixed_order)
    return nan_where(~valid[..., None], rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _owned_rows(table: Array, tokens: _Rows, axis_name: AxisName | None, fixed_order: bool) -> Array:
    """Returns the rows of the table, 0.0 where not owned; over ``axis_name`` the owner's row, sent as bits."""
    del fixed_order
    rows = table.at[tokens.row].get(mode="promise_in_bounds")
    rows = jnp.where(tokens.owned[..., None], rows, jnp.zeros_like(rows))
    if axis_name is None:
        return rows
    bits = lax.bitcast_convert_type(rows, _BITS[table.dtype.itemsize])
    if tokens.codes is None:
        return lax.bitcast_convert_type(lax.psum(bits, axis_name), table.dtype)
    words = jnp.moveaxis(counters(tokens.codes, axis_name, _WORD_BITS), 0, -1).astype(bits.dtype)
    bits = lax.psum(jnp.concatenate([bits, words], axis=-1), axis_name)
    rows = lax.bitcast_convert_type(bits[..., : rows.shape[-1]], table.dtype)
    words = jnp.moveaxis(bits[..., rows.shape[-1] :].astype(jnp.int32), -1, 0)
    same = same_ids(words, axis_name, _WORD_BITS)
    return nan_where(~same[..., None], rows)


def _owned_rows_forward(
    table: Array, tokens: _Rows, axis_name: AxisName | None, fixed_order: bool
) -> tuple[Array, tuple]:
    return _owned_rows(table, tokens, axis_name, fixed_order), (table, tokens.row, tokens.owned)


def _owned_rows_backward(axis_name: AxisName | None, fixed_order: bool, residuals: tuple, g: Array) -> tuple:
    # A token may occur thousands of times: its cotangents are added in fp32 and rounded once.
    table, row_ids, owned = residuals
    g = jnp.where(owned[..., None], g.astype(jnp.float32), 0.0)
    if fixed_order:
        gradient = _gradient_in_fixed_order(table, row_ids, owned, g, axis_name)
    else:
        zeros = vary_over(jnp.zeros(table.shape, jnp.float32), union_of_varying_axes(table, row_ids))
        gradient = zeros.at[row_ids].add(g, mode="promise_in_bounds")
    return gradient.astype(table.dtype), None


def _gradient_in_fixed_order(table: Array, row_ids: Array, owned: Array, g: Array, axis_name: AxisName | None) -> Array:
    ids = jnp.where(owned, row_ids, table.shape[0]).reshape(-1)
    g = no_negative_zero(g.reshape(-1, g.shape[-1]))
    # Data ranks that share the table gather each other's tokens, in global order, and all compute the same sums.
    for name in reversed(in_mesh_order(union_of_varying_axes(ids, g) - varying_axes(table) - {axis_name})):
        ids, g = (gather_bits(x, name).reshape(-1, *x.shape[1:]) for x in (ids, g))
    return segment_tree_sum(g, ids, table.shape[0])


_owned_rows.defvjp(_owned_rows_forward, _owned_rows_backward)


def sharded_embedding_lookup(
    table: Float[Array, "vocab hidden"],
    token_ids: Integer[Array, "*tokens"],
    *,
    mesh: AnyMesh,
    vocab_axis: str = "tensor",
    token_axes: tuple[str, ...] = ("data",),
    sequence_axis: str | None = None,
    fixed_order: bool = False,
) -> Float[Array, "*tokens hidden"]:
    """Runs :func:`embedding_lookup` on global arrays, in a ``shard_map`` over ``mesh``.

    Args:
        table: [V, H], rows split over ``vocab_axis``; padded to shards of one width first if the axis does not divide V.
        token_ids: [*tokens], first dimension split over ``token_axes``.
        mesh: the device mesh.
        vocab_axis: mesh axis that shards the vocabulary.
        token_axes: mesh axes that shard the first token dimension; () for none.
        sequence_axis: mesh axis that shards the second token dimension, or None.
        fixed_order: whether to sum gradients in a fixed order; see :func:`embedding_lookup`.

    Returns:
        [*tokens, H], split like ``token_ids``.

    Raises:
        ValueError: if ``mesh`` lacks an axis, or embedding_lookup refuses an argument.
    """
    _check(table, token_ids)
    sequence_axes = () if sequence_axis is None else (sequence_axis,)
    require_axes(mesh, vocab_axis=(vocab_axis,), token_axes=token_axes, sequence_axis=sequence_axes)
    require(
        token_ids.ndim > len(sequence_axes), "token_ids", "a second dimension for sequence_axis", describe(token_ids)
    )
    require_ids_in_range(token_ids, table.shape[0], "token_ids")
    shards = VocabShards.even(table.shape[0], mesh.shape[vocab_axis])
    token_spec = PartitionSpec(token_axes if token_axes else None, *sequence_axes)
    rows = place(shards.shard_rows(table), mesh, PartitionSpec(vocab_axis))
    ids = place(as_int32(token_ids), mesh, token_spec)
    return _mapped_lookup(rows, ids, mesh, token_spec, vocab_axis, shards, fixed_order)


# Outside of jit, a shard_map compiles each of its operations, and in every call again.
@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6))
def _mapped_lookup(
    rows: Array,
    ids: Array,
    mesh: AnyMesh,
    token_spec: PartitionSpec,
    vocab_axis: str,
    shards: VocabShards,
    fixed_order: bool,
) -> Array:
    run = functools.partial(embedding_lookup, axis_name=vocab_axis, vocab=shards, fixed_order=fixed_order)
    specs = PartitionSpec(vocab_axis), token_spec
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=token_spec)(rows, ids)


def _check(table: Array, token_ids: Array) -> None:
    require_operand_dtype(table, "table")
    require(table.ndim == 2 and table.size > 0, "table", "shape [V, H] with V, H > 0", describe(table))
    require_integer(token_ids, "token_ids")
    require_tokens(token_ids, "token_ids")
