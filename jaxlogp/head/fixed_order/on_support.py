"""Engine ``fixed_order`` on a support: no bit depends on the vocabulary mesh, the batch, or the order of ids and tokens.

A logit is a sum of exact products, in one tree over the hidden dimension. All that is summed over ids or tokens is summed
as integers, in any order and on any number of ranks: with s the power of two above the largest term of a sum, each term is
x = s (a + b 2^-18 + c 2^-36).

Ids and tokens are computed in blocks of one size, as a compiler may give an exponential other bits in another shape.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxlogp._arrays import nan_where
from jaxlogp._compat import vary_over
from jaxlogp._stats import TokenLogProbs
from jaxlogp.head.call import HeadCall, HeadGradients
from jaxlogp.head.fixed_order.nodes import missing_axes, require_same_on_all_shards
from jaxlogp.head.fixed_order.plan import finish_logits, product_gradient
from jaxlogp.head.fixed_order.stats import logit_gradient
from jaxlogp.head.fold import TileSums, carried, finish_sums, from_limbs, limbs, sum_shards, sum_tiles
from jaxlogp.head.support.engine import Kept, column_of_target
from jaxlogp.head.support.ids import values_at
from jaxlogp.invariance.exact import product
from jaxlogp.invariance.order import fold_halves

# Two limbs of 2^18 for each id of a block fit into int32, beside what was carried before.
BLOCK = 2048
TOKEN_BLOCK = 128
_MANTISSA_BITS = 23
# Biased exponent of the largest terms that can be scaled; a sum with a larger one, infinity or NaN is NaN.
_LARGEST_EXPONENT = 250

Slice = Callable[[Array], Array]
"""Takes the ids of one block out of an array of all."""


class OnSupport:
    """The two passes of one call. After the last id there are ids of no token and no row, up to a whole block."""

    def __init__(self, call: HeadCall) -> None:
        self._call, self._axes = call, call.axes
        self._tokens, self._width = call.hidden.shape
        dtype = call.operand_dtype
        self._exact = dtype.itemsize == 2
        self._hidden, self._weight = (vary_over(x.astype(dtype), self._axes) for x in (call.hidden, call.weight))
        missing = (0, -call.support.row.shape[0] % BLOCK)
        self._row = jnp.pad(call.support.row, missing, constant_values=call.num_columns)
        self._token = jnp.pad(call.support.token, missing, constant_values=self._tokens)
        self._blocks = -(-call.support.count // BLOCK)
        self._column = jnp.pad(column_of_target(call), missing, constant_values=-1)

    def forward(self) -> tuple[TokenLogProbs, Kept]:
        """Computes values per token."""
        call, logits = self._call, self._logits()
        largest = jax.ops.segment_max(logits, self._token, self._tokens)
        if call.axis_name is not None:
            largest = lax.pmax(vary_over(largest, self._axes), call.axis_name)
        # Of a token without ids.
        largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
        sums = sum_shards(self._sums(logits, largest), call.axis_name, call.targets.codes)
        per_block = jax.tree.map(self._in_blocks, (sums, call.targets.mask, call.targets.invalid))
        found = lax.map(lambda x: finish_sums(x[0], x[1], call.vocab_size, x[2]), per_block)
        values, normaliser = jax.tree.map(lambda x: x.reshape(-1)[: self._tokens], found)
        return jax.tree.map(lambda x: nan_where(call.support.broken, x), values), Kept(logits, normaliser)

    def backward(self, kept: Kept, g: TokenLogProbs) -> HeadGradients:
        """Computes gradients, each summed over the mesh axes over which its operand does not vary."""
        call = self._call
        require_same_on_all_shards(call)
        gradient = self._logit_gradients(kept, g)

        def terms(take_other: Callable[[Slice], Array], here: Slice) -> Float[Array, "ids columns"]:
            dz = here(gradient)[:, None]
            # A token without a cotangent adds nothing, even where its hidden state is NaN.
            return jnp.where(dz == 0.0, 0.0, dz * take_other(here).astype(jnp.float32))

        sums = functools.partial(self._exact_sums, axes=missing_axes(call.hidden, self._axes))
        d_hidden = sums(functools.partial(terms, self._rows), self._token, (self._tokens, self._width))
        d_hidden = nan_where(call.targets.invalid[:, None], d_hidden).astype(call.hidden_gradient_dtype)
        if call.frozen:
            return HeadGradients(d_hidden, None, None)
        sums = functools.partial(self._exact_sums, axes=missing_axes(call.weight, self._axes))
        d_weight = sums(functools.partial(terms, self._states), self._row, (call.num_columns, self._width))
        d_weight = (d_weight.T if call.vocab_dim else d_weight).astype(call.weight_gradient_dtype)
        if call.bias is None:
            return HeadGradients(d_hidden, d_weight, None)
        sums = functools.partial(self._exact_sums, axes=missing_axes(call.bias, self._axes))
        d_bias = sums(lambda here: here(gradient)[:, None], self._row, (call.num_columns, 1))
        return HeadGradients(d_hidden, d_weight, d_bias[:, 0])

    def _rows(self, here: Slice) -> Array:
        """Rows of the weight, in its operand dtype."""
        dim = self._call.vocab_dim
        rows = jnp.take(self._weight, here(self._row), axis=dim, mode="clip")
        return rows.T if dim else rows

    def _states(self, here: Slice) -> Array:
        """Hidden states."""
        return jnp.take(self._hidden, here(self._token), axis=0, mode="clip")

    def _logits(self) -> Float[Array, " ids"]:
        """Computes the final logit of each id, -inf after the last."""
        call = self._call

        def step(here: Slice) -> Float[Array, " block"]:
            left, right = (x(here).astype(jnp.float32).T for x in (self._states, self._rows))
            # The product of two 16-bit floats is exact in fp32.
            total = fold_halves(left * right if self._exact else product(left, right))
            bias = None if call.bias is None else values_at(call.bias, here(self._row), 0)
            logits = finish_logits(total[None, :], bias, call.spec)[0]
            return jnp.where(here(self._token) < self._tokens, logits, -jnp.inf)

        return self._per_block(step, -jnp.inf)

    def _sums(self, logits: Float[Array, " ids"], largest: Float[Array, " tokens"]) -> TileSums:
        """Adds up the ids of this shard: each one is a tile of one column."""
        entropy = self._call.with_entropy

        def step(here: Slice, total: Array) -> Array:
            z, token, column = here(logits), here(self._token), here(self._column)
            target = jnp.where(column == 0, z, 0.0)
            tile = jnp.stack([z, jnp.ones_like(z), jnp.zeros_like(z), target])[None]
            found = sum_tiles(tile, values_at(largest, token, jnp.inf), column, entropy)
            shifted = [] if found.sum_exp_shifted is None else [*found.sum_exp_shifted]
            terms = jnp.stack([*found.sum_exp, *shifted, found.broken, found.target, found.owners])
            total = total.at[:, token].add(terms, mode="drop")
            limbs_first = [total[first : first + 3] for first in range(0, len(terms) - 3, 3)]
            return jnp.concatenate([*(jnp.stack(carried(each)) for each in limbs_first), total[-3:]])

        total = self._over_blocks(step, jnp.zeros((9 if entropy else 6, self._tokens), jnp.int32))
        return TileSums(largest, total[:3], total[3:6] if entropy else None, *total[-3:])

    def _logit_gradients(self, kept: Kept, g: TokenLogProbs) -> Float[Array, " ids"]:
        one = jnp.ones(1, bool)

        def step(here: Slice) -> Float[Array, " block"]:
            token, logits = here(self._token), here(kept.logits)[:, None]
            logits = jnp.where(token[:, None] < self._tokens, logits, 0.0)
            per_id = jax.tree.map(lambda x: values_at(x, token, 0.0), (kept.normaliser, g.log_probs, g.entropy))
            gradient = logit_gradient(logits, here(self._column), one, *per_id)
            return product_gradient(gradient, logits, self._call.spec)[:, 0]

        return self._per_block(step, 0.0)

    def _exact_sums(
        self, terms: Callable[[Slice], Array], index: Int[Array, " ids"], shape: tuple[int, int], axes: frozenset
    ) -> Float[Array, "sums columns"]:
        """Σ over ids of terms(block) [ids, columns], by their index, over the blocks and over mesh axes."""

        def normal(here: Slice) -> tuple[Array, Array]:
            """The terms, and the bits of their magnitudes; 0 for denormal numbers, which some programs keep."""
            x = terms(here)
            magnitude = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
            tiny = magnitude < 1 << _MANTISSA_BITS
            return jnp.where(tiny, 0.0, x), jnp.where(tiny, 0, magnitude)

        def enlarge(here: Slice, largest: Array) -> Array:
            return largest.at[here(index)].max(normal(here)[1], mode="drop")

        largest = self._over_blocks(enlarge, jnp.zeros(shape, jnp.int32))
        largest = lax.pmax(largest, tuple(axes)) if axes else largest
        exponent = largest >> _MANTISSA_BITS
        kept = jnp.clip(exponent, 1, _LARGEST_EXPONENT)
        # 2^(126 - exponent), by which the largest term becomes less than 1, and its inverse.
        scale, unscale = (lax.bitcast_convert_type(x << _MANTISSA_BITS, jnp.float32) for x in (253 - kept, kept + 1))

        def add(here: Slice, total: Array) -> Array:
            place = here(index)
            x = normal(here)[0] * scale.at[place].get(mode="fill", fill_value=0.0)
            return jnp.stack(carried(total.at[:, place].add(jnp.stack(limbs(x)), mode="drop")))

        total = self._over_blocks(add, jnp.zeros((3, *shape), jnp.int32))
        total = lax.psum(total, tuple(axes)) if axes else total
        sums = from_limbs(total) * unscale
        sums = jnp.where(jnp.abs(sums) < jnp.finfo(jnp.float32).tiny, 0.0, sums)
        return nan_where(exponent > _LARGEST_EXPONENT, sums)

    def _in_blocks(self, x: Array) -> Array:
        """[..., tokens] as [blocks, ..., tokens of a block]."""
        padded = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, -self._tokens % TOKEN_BLOCK)])
        return jnp.moveaxis(padded.reshape(*x.shape[:-1], -1, TOKEN_BLOCK), -2, 0)

    def _per_block(self, step: Callable[[Slice], Array], fill: float) -> Float[Array, " ids"]:
        """Computes one number for each id, block by block."""

        def body(index: Array, x: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(x, step(_block(index)), index * BLOCK, axis=0)

        numbers = vary_over(jnp.full(self._row.shape, fill, jnp.float32), self._axes)
        return lax.fori_loop(0, self._blocks, body, numbers)

    def _over_blocks(self, step: Callable[[Slice, Array], Array], carry: Array) -> Array:
        def body(index: Array, carry: Array) -> Array:
            return step(_block(index), carry)

        return lax.fori_loop(0, self._blocks, body, vary_over(carry, self._axes))


def _block(index: Array) -> Slice:
    return functools.partial(lax.dynamic_slice_in_dim, start_index=index * BLOCK, slice_size=BLOCK)
