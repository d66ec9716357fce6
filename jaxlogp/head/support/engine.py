"""Engines of log-probs on a support: only rows of the weight that a token's support names are read, one dot product each.

For every id v of token t one logit, z = hidden[t] · weight[v], fp32 products and sums. They are reduced per token as tiles,
chunks and shards are. The backward keeps these logits and reads the rows again: dH[t] = Σ_v dz weight[v] and
dW[v] = Σ_t dz hidden[t]. Ids are taken in blocks, which bounds the memory; a loop over several ends with the last id,
whatever the capacity.

`SupportHead` has what the engines share, and `SupportEngine` sums by scatters of XLA. Its backward goes over blocks of
hidden columns outside of those of ids, so that its fp32 sums are [tokens, columns] and [named rows, columns]. On GPUs these
scatters add atomically, in any order: `jaxlogp.head.support.kernel_engine` has the engine whose bits repeat.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from jaxlogp._arrays import nan_where
from jaxlogp._compat import vary_over
from jaxlogp._stats import (
    Normaliser,
    TileStats,
    TokenLogProbs,
    all_reduce,
    combine_segments,
    finish,
    logit_gradient,
    tile_stats,
)
from jaxlogp.head.call import HeadCall, HeadGradients, HeadWeight
from jaxlogp.head.engine import Engine
from jaxlogp.head.projection import finish_logits, product_gradient
from jaxlogp.head.support.ids import values_at


class Kept(NamedTuple):
    """What the backward needs: a logit of each id and the normaliser of each token."""

    logits: Float[Array, " capacity"]
    normaliser: Normaliser


@dataclasses.dataclass(frozen=True)
class SupportHead(Engine):
    """Computes one logit for each id of a support; a subclass says how they are summed.

    Attributes:
        block_elements: most fp32 numbers of a block of ids; None for 2^29 on a GPU, where XLA gathers and reduces in one
            kernel and stores none of them, and 2^25 elsewhere.
    """

    block_elements: int | None = None
    masks_hidden = True
    takes_support = needs_support = True

    def forward(self, call: HeadCall) -> tuple[TokenLogProbs, Kept]:
        """Computes a logit for each id and reduces them per token."""
        targets = call.targets
        logits = self._logits(call)
        local = self._statistics(call, logits)
        values, normaliser = finish(
            all_reduce(local, call.axis_name, targets.codes), targets.mask, call.vocab_size, targets.invalid
        )
        return jax.tree.map(lambda x: nan_where(call.support.broken, x), values), Kept(logits, normaliser)

    def backward(self, call: HeadCall, kept: Kept, g: TokenLogProbs) -> HeadGradients:
        """Turns each logit into its gradient, and adds its row of either operand to the row of the other's gradient."""
        per_token = (kept.normaliser, g.log_probs, g.entropy)
        per_token = jax.tree.map(lambda x: _of_tokens(x, call.support.token), per_token)
        logits = kept.logits[:, None]
        gradient = product_gradient(logit_gradient(logits, column_of_target(call), None, *per_token), logits, call.spec)
        gradient = gradient[:, 0]
        d_hidden = self._hidden_gradient(call, gradient)
        if call.frozen:
            return HeadGradients(d_hidden, None, None)
        return HeadGradients(d_hidden, *self._weight_gradients(call, gradient))

    def _statistics(self, call: HeadCall, logits: Float[Array, " capacity"]) -> TileStats:
        """Computes the statistics of each token's logits."""
        raise NotImplementedError

    def _hidden_gradient(self, call: HeadCall, gradient: Float[Array, " capacity"]) -> Float[Array, "tokens hidden"]:
        """Sums dz weight[v] over the ids of each token; NaN for tokens with an invalid target."""
        raise NotImplementedError

    def _weight_gradients(
        self, call: HeadCall, gradient: Float[Array, " capacity"]
    ) -> tuple[HeadWeight, Float[Array, " vocab"] | None]:
        """Sums dz hidden[t], and dz itself if there is a bias, over the ids that name each row."""
        raise NotImplementedError

    def _logits(self, call: HeadCall) -> Float[Array, " capacity"]:
        """Computes the final logits, 0 after the last id."""
        row, token = call.support.row, call.support.token
        (tokens, width), capacity = call.hidden.shape, row.shape[0]
        hidden = call.hidden.astype(call.operand_dtype)

        def products_of(rows: Array, tokens: Array) -> Array:
            left = _take(hidden, tokens, 0, width)
            right = _take(call.weight, rows, 0, width, call.vocab_dim)
            return jnp.sum(left * right, axis=1)

        def step(start: Array, rows: Array, tokens: Array, products: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(products, products_of(rows, tokens), start, axis=0)

        blocks = self._num_blocks(capacity, width)
        if blocks == 1:
            products = products_of(row, token)
        else:
            padded = _zeros(call, (blocks * -(-capacity // blocks),))
            products = self._over_blocks(call, width, (row, token), (call.num_columns, tokens), step, padded)[:capacity]
        bias = None if call.bias is None else values_at(call.bias, row, 0)
        logits = finish_logits(products[None, :], bias, call.spec)[0]
        return jnp.where(jnp.arange(capacity, dtype=jnp.int32) < call.support.count, logits, 0.0)

    def _over_blocks(
        self, call: HeadCall, width: int, arrays: tuple[Array, ...], fills: tuple, step: Callable, carry: Array
    ) -> Array:
        """Runs ``step(start, *arrays of one block, carry)`` over blocks of ids of ``width`` numbers each, up to the last id.

        Args:
            call: the call.
            width: fp32 numbers of one id.
            arrays: [capacity] each.
            fills: values of ``arrays`` after the last id.
            step: returns the next carry.
            carry: the first carry.
        """
        capacity = call.support.row.shape[0]
        blocks = self._num_blocks(capacity, width)
        if blocks == 1:
            return step(0, *arrays, carry)
        size = -(-capacity // blocks)
        padding = 0, blocks * size - capacity
        arrays = tuple(jnp.pad(x, padding, constant_values=fill) for x, fill in zip(arrays, fills, strict=True))

        def body(index: Array, carry: Array) -> Array:
            start = index * size
            return step(start, *(lax.dynamic_slice_in_dim(x, start, size) for x in arrays), carry)

        return lax.fori_loop(0, -(-call.support.count // size), body, carry)

    def _num_blocks(self, capacity: int, width: int) -> int:
        """Returns the number of blocks of ids of ``width`` numbers each; they are of one size."""
        on_gpu = jax.devices()[0].platform == "gpu"
        most = self.block_elements or (2**29 if on_gpu else 2**25)
        return -(-capacity // max(most // width, 1))


@dataclasses.dataclass(frozen=True)
class SupportEngine(SupportHead):
    """Sums by scatters of XLA, on any device and in both layouts of the weight.

    Attributes:
        block_columns: hidden columns whose gradients are summed at a time.
    """

    block_columns: int = 512
    name = "support"

    def _statistics(self, call: HeadCall, logits: Float[Array, " capacity"]) -> TileStats:
        entries = tile_stats(logits[:, None], column_of_target(call), None, call.with_entropy)
        return combine_segments(entries, call.support.token, call.hidden.shape[0])

    def _weight_gradients(
        self, call: HeadCall, gradient: Float[Array, " capacity"]
    ) -> tuple[HeadWeight, Float[Array, " vocab"] | None]:
        d_weight = self._weight_gradient(call, gradient)
        if call.bias is None:
            return d_weight, None
        return d_weight, _zeros(call, call.bias.shape).at[call.support.row].add(gradient, mode="drop")

    def _hidden_gradient(self, call: HeadCall, gradient: Float[Array, " capacity"]) -> Float[Array, "tokens hidden"]:
        support, (tokens, _), invalid = call.support, call.hidden.shape, call.targets.invalid[:, None]

        def sums(first: Array, columns: int) -> Float[Array, "tokens columns"]:
            def step(start: Array, row: Array, token: Array, dz: Array, total: Array) -> Array:
                products = dz[:, None] * _take(call.weight, row, first, columns, call.vocab_dim)
                return total.at[token].add(products, mode="drop", indices_are_sorted=True)

            arrays, fills = (support.row, support.token, gradient), (call.num_columns, tokens, 0.0)
            total = self._over_blocks(call, columns, arrays, fills, step, _zeros(call, (tokens, columns)))
            return nan_where(invalid, total)

        return self._by_columns(call, sums, call.hidden.shape, call.hidden_gradient_dtype)

    def _weight_gradient(self, call: HeadCall, gradient: Float[Array, " capacity"]) -> Float[Array, "..."]:
        """Sums dz hidden[t] over the ids of each named row: its first id starts the sum, and the others are added."""
        token, hidden, tokens = call.support.token, call.hidden.astype(call.operand_dtype), call.hidden.shape[0]
        named = _named_rows(call)
        first_dz, first_token = values_at(gradient, named.first, 0.0), values_at(token, named.first, tokens)

        def sums(first: Array, columns: int) -> Float[Array, "vocab columns"]:
            def products(dz: Array, token: Array) -> Array:
                return dz[:, None] * _take(hidden, token, first, columns)

            def step(start: Array, place: Array, token: Array, dz: Array, total: Array) -> Array:
                return total.at[place].add(products(dz, token), mode="drop")

            arrays, fills = (named.later, token, gradient), (named.first.shape[0], tokens, 0.0)
            total = self._over_blocks(call, columns, arrays, fills, step, products(first_dz, first_token))
            return values_at(total, named.place, 0.0)

        return self._by_columns(call, sums, call.weight.shape, call.weight_gradient_dtype, call.vocab_dim)

    def _by_columns(
        self, call: HeadCall, sums: Callable[[Array, int], Array], shape: tuple[int, ...], dtype: Any, dim: int = 0
    ) -> Array:
        """Computes an array block by block of hidden columns, and rounds each block.

        Args:
            call: the call.
            sums: computes columns from (the first, their number) as fp32 [rows, columns].
            shape: shape of the result.
            dtype: dtype of the result.
            dim: the dimension of the result that runs over the rows.
        """
        width = call.hidden.shape[1]
        blocks = -(-width // self.block_columns)
        columns = -(-width // blocks)

        def block(index: Array, x: Array) -> Array:
            # The last block starts earlier, and writes columns of the one before it again.
            first = jnp.minimum(index * columns, width - columns)
            new = sums(first, columns).astype(dtype)
            return lax.dynamic_update_slice_in_dim(x, new if dim == 0 else new.T, first, axis=1 - dim)

        # All columns are written: zeros before would take a fifth of the time of both passes on an H100.
        return lax.fori_loop(0, blocks, block, vary_over(lax.empty(shape, dtype), call.axes))


class _NamedRows(NamedTuple):
    """The distinct rows that a support names: the only ones whose gradient is summed.

    Attributes:
        place: [V_local], place of each row among them; out of range if it is not named.
        first: [places], the first id that names each; ``capacity`` for places without a row.
        later: [capacity], place of the row of each id other than the first; out of range for the first.
    """

    place: Int[Array, " rows"]
    first: Int[Array, " places"]
    later: Int[Array, " capacity"]


def _named_rows(call: HeadCall) -> _NamedRows:
    rows, row = call.num_columns, call.support.row
    capacity = row.shape[0]
    size = min(rows, capacity)
    named = _zeros(call, (rows,), bool).at[row].set(True, mode="drop")
    place = jnp.where(named, jnp.cumsum(named, dtype=jnp.int32) - 1, size)
    place_of_id = values_at(place, row, size)
    index = jnp.arange(capacity, dtype=jnp.int32)
    first = (_zeros(call, (size,), jnp.int32) + capacity).at[place_of_id].min(index, mode="drop")
    return _NamedRows(place, first, jnp.where(values_at(first, place_of_id, capacity) == index, size, place_of_id))


def column_of_target(call: HeadCall) -> Int[Array, " capacity"]:
    """Returns 0 for the id that is its token's target, otherwise -1: the target's column in a tile of one column."""
    row, token = call.support.row, call.support.token
    column = values_at(call.targets.column, token, -1)
    return jnp.where(row == column, 0, -1)


def _of_tokens(x: Float[Array, " tokens"], token: Int[Array, " capacity"]) -> Float[Array, " capacity"]:
    """Returns the value of each id's token, 0 after the last id: without a cotangent the gradient there is exactly 0."""
    return values_at(x, token, 0.0)


def _take(
    x: Shaped[Array, "..."], index: Int[Array, " ids"], first: int | Array, columns: int, dim: int = 0
) -> Float[Array, "ids columns"]:
    """Returns columns [first, first + columns) of rows of x in fp32; ``dim`` is the dimension that ``index`` runs over.

    An index after the last row reads the last one, and what is made of it has to be dropped. 16-bit floats are read as
    integers: XLA on CPUs would widen all of x.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint16) if x.dtype in (jnp.bfloat16, jnp.float16) else x
    # Of the dtype of the index: with x64 a Python int, or the index of a loop, would be int64.
    first = jnp.asarray(first, index.dtype)

    def one(row: Array) -> Array:
        start, size = ((row, first), (1, columns)) if dim == 0 else ((first, row), (columns, 1))
        return lax.dynamic_slice(bits, start, size).reshape(columns)

    rows = jax.vmap(one)(index)
    rows = rows if bits.dtype == x.dtype else lax.bitcast_convert_type(rows, x.dtype)
    return rows.astype(jnp.float32)


def _zeros(call: HeadCall, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    return vary_over(jnp.zeros(shape, dtype), call.axes)
