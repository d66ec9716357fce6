"""Engine of log-probs on a support: only rows of the weight that a token's support names are read, one dot product each.

For every id v of token t one logit, z = hidden[t] · weight[v], fp32 products and sums. They are reduced per token as tiles,
chunks and shards are. The backward keeps these logits and reads the rows again: dH[t] = Σ_v dz weight[v] and
dW[v] = Σ_t dz hidden[t]. Loops over blocks of ids end with the last id, whatever the capacity, and bound the memory; the
backward goes over blocks of hidden columns outside of them, so that its fp32 sums are [tokens, columns] and
[V_local, columns].
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
    TokenLogProbs,
    all_reduce,
    combine_segments,
    finish,
    logit_gradient,
    tile_stats,
)
from jaxlogp.head.call import HeadCall, HeadGradients
from jaxlogp.head.engine import Engine
from jaxlogp.head.projection import finish_logits, product_gradient


class _Kept(NamedTuple):
    """What the backward needs: a logit of each id and the normaliser of each token."""

    logits: Float[Array, " capacity"]
    normaliser: Normaliser


@dataclasses.dataclass(frozen=True)
class SupportEngine(Engine):
    """Computes one logit for each id of a support.

    Attributes:
        block_elements: fp32 numbers of a block of ids, gathered at a time.
        block_columns: hidden columns whose gradients are summed at a time.
    """

    block_elements: int = 2**25
    block_columns: int = 512
    name = "support"
    masks_hidden = True
    takes_support = True

    def forward(self, call: HeadCall) -> tuple[TokenLogProbs, _Kept]:
        """Computes a logit for each id and reduces them per token."""
        targets, support = call.targets, call.support
        logits = self._logits(call)
        entries = tile_stats(logits[:, None], _column_of_target(call), None, call.with_entropy)
        local = combine_segments(entries, support.token, targets.mask.shape[0])
        values, normaliser = finish(
            all_reduce(local, call.axis_name, targets.codes), targets.mask, call.vocab_size, targets.invalid
        )
        return jax.tree.map(lambda x: nan_where(support.broken, x), values), _Kept(logits, normaliser)

    def backward(self, call: HeadCall, kept: _Kept, g: TokenLogProbs) -> HeadGradients:
        """Turns each logit into its gradient, and adds its row of either operand to the row of the other's gradient."""
        row, token = call.support.row, call.support.token
        per_token = jax.tree.map(lambda x: _of_tokens(x, token), (kept.normaliser, g.log_probs, g.entropy))
        logits = kept.logits[:, None]
        gradient = product_gradient(
            logit_gradient(logits, _column_of_target(call), None, *per_token), logits, call.spec
        )
        d_hidden, d_weight = self._products(call, gradient[:, 0])
        d_hidden = nan_where(call.targets.invalid[:, None], d_hidden)
        if call.frozen:
            return HeadGradients(d_hidden, None, None)
        d_bias = None if call.bias is None else _zeros(call, call.bias.shape).at[row].add(gradient[:, 0], mode="drop")
        return HeadGradients(d_hidden, d_weight, d_bias)

    def _logits(self, call: HeadCall) -> Float[Array, " capacity"]:
        """Computes the final logits, 0 after the last id."""
        row, token = call.support.row, call.support.token
        width = call.hidden.shape[1]
        hidden = call.hidden.astype(call.operand_dtype)

        def step(start: Array, rows: Array, tokens: Array, products: Array) -> Array:
            left = _take(hidden, tokens, 0, width)
            right = _take(call.weight, rows, 0, width, call.vocab_dim)
            return lax.dynamic_update_slice_in_dim(products, jnp.sum(left * right, axis=1), start, axis=0)

        capacity = row.shape[0]
        products = self._over_blocks(call, width, (row, token), step, lambda size: _zeros(call, (size,)))[:capacity]
        bias = None if call.bias is None else call.bias.at[row].get(mode="fill", fill_value=0)
        logits = finish_logits(products[None, :], bias, call.spec)[0]
        return jnp.where(jnp.arange(capacity, dtype=jnp.int32) < call.support.count, logits, 0.0)

    def _products(self, call: HeadCall, gradient: Float[Array, " capacity"]) -> tuple[Array, Array | None]:
        """Computes the gradients of hidden and weight, block by block of their columns."""
        (tokens, width), rows = call.hidden.shape, call.num_columns
        blocks = -(-width // self.block_columns)
        columns = -(-width // blocks)
        hidden = call.hidden.astype(call.operand_dtype)

        def block(index: Array, carry: tuple[Array, Array | None]) -> tuple[Array, Array | None]:
            # The last block starts earlier, and writes columns of the one before it again.
            first = jnp.minimum(index * columns, width - columns)

            def step(start: Array, rows: Array, tokens: Array, dz: Array, sums: tuple) -> tuple:
                d_hidden, d_weight = sums
                right = _take(call.weight, rows, first, columns, call.vocab_dim)
                d_hidden = d_hidden.at[tokens].add(dz[:, None] * right, mode="drop", indices_are_sorted=True)
                if d_weight is not None:
                    left = _take(hidden, tokens, first, columns)
                    d_weight = d_weight.at[rows].add(dz[:, None] * left, mode="drop")
                return d_hidden, d_weight

            d_weight = None if call.frozen else _zeros(call, (rows, columns))
            arrays = call.support.row, call.support.token, gradient
            new_hidden, new_weight = self._over_blocks(
                call, columns, arrays, step, lambda size: (_zeros(call, (tokens, columns)), d_weight)
            )
            d_hidden, d_weight = carry
            d_hidden = _write(d_hidden, new_hidden, first)
            return d_hidden, None if call.frozen else _write(d_weight, new_weight, first, call.vocab_dim)

        d_weight = None if call.frozen else _zeros(call, call.weight.shape, call.weight_gradient_dtype)
        carry = _zeros(call, call.hidden.shape, call.hidden_gradient_dtype), d_weight
        return lax.fori_loop(0, blocks, block, carry)

    def _over_blocks(
        self, call: HeadCall, width: int, arrays: tuple[Array, ...], step: Callable, initial: Callable[[int], Any]
    ) -> Any:
        """Runs ``step(start, *arrays of one block, carry)`` over blocks of ids of ``width`` numbers each, up to the last id.

        Args:
            call: the call.
            width: fp32 numbers of one id.
            arrays: [capacity] each: rows, tokens and maybe gradients.
            step: returns the next carry.
            initial: the first carry, from the capacity padded to whole blocks.
        """
        capacity = call.support.row.shape[0]
        size = min(capacity, max(self.block_elements // width, 1))
        padded = -(-capacity // size) * size
        fills = call.num_columns, call.hidden.shape[0], 0
        arrays = tuple(
            jnp.pad(x, (0, padded - capacity), constant_values=fill) for x, fill in zip(arrays, fills, strict=False)
        )

        def body(index: Array, carry: Any) -> Any:
            start = index * size
            return step(start, *(lax.dynamic_slice_in_dim(x, start, size) for x in arrays), carry)

        return lax.fori_loop(0, -(-call.support.count // size), body, initial(padded))


def _column_of_target(call: HeadCall) -> Int[Array, " capacity"]:
    """Returns 0 for the id that is its token's target, otherwise -1: the target's column in a tile of one column."""
    row, token = call.support.row, call.support.token
    column = call.targets.column.at[token].get(mode="fill", fill_value=-1)
    return jnp.where(row == column, 0, -1)


def _of_tokens(x: Float[Array, " tokens"], token: Int[Array, " capacity"]) -> Float[Array, " capacity"]:
    """Returns the value of each id's token, 0 after the last id: without a cotangent the gradient there is exactly 0."""
    return x.at[token].get(mode="fill", fill_value=0.0)


def _take(
    x: Shaped[Array, "..."], index: Int[Array, " ids"], first: int | Array, columns: int, dim: int = 0
) -> Float[Array, "ids columns"]:
    """Returns columns [first, first + columns) of rows of x in fp32; ``dim`` is the dimension that ``index`` runs over.

    An index after the last row reads the last one, and what is made of it has to be dropped. 16-bit floats are read as
    integers: XLA on CPUs would widen all of x.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint16) if x.dtype in (jnp.bfloat16, jnp.float16) else x

    def one(row: Array) -> Array:
        start, size = ((row, first), (1, columns)) if dim == 0 else ((first, row), (columns, 1))
        return lax.dynamic_slice(bits, start, size).reshape(columns)

    rows = jax.vmap(one)(index)
    rows = rows if bits.dtype == x.dtype else lax.bitcast_convert_type(rows, x.dtype)
    return rows.astype(jnp.float32)


def _write(x: Array, block: Float[Array, "rows columns"], first: Array, dim: int = 0) -> Array:
    """Writes and rounds columns from ``first`` on."""
    new = block.astype(x.dtype)
    return lax.dynamic_update_slice_in_dim(x, new if dim == 0 else new.T, first, axis=1 - dim)


def _zeros(call: HeadCall, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    return vary_over(jnp.zeros(shape, dtype), call.axes)
