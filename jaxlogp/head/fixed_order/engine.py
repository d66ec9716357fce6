"""Engine ``fixed_order``: the head, bitwise equal on every vocabulary mesh, in every batch and at every position.

The vocabulary is divided into the granules of a :class:`~jaxlogp.invariance.ReductionOrder`, granules into tiles,
tokens into blocks of rows, and every product has the shape of one block and one tile, whatever the mesh and the
batch. Forward: tile statistics are added as integers, in any order. Backward: a tile's logits are recomputed; the
hidden gradient is summed tile by tile inside a granule and by the tree across granules, the weight's by the tree over
blocks of rows.

Operands keep their types, and the backward sums each gradient over the mesh axes over which its operand does not
vary: the transpose of a cast to "varying" would be a float all-reduce, whose order is the backend's.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxlogp._compat import vary_over
from jaxlogp._stats import Normaliser, TokenLogProbs
from jaxlogp._vocab import VocabShards
from jaxlogp.head.call import HeadCall, HeadGradients
from jaxlogp.head.engine import Engine
from jaxlogp.head.fixed_order.nodes import (
    missing_axes,
    node_size,
    require_same_on_all_shards,
    sum_nodes,
    why_not_shards,
)
from jaxlogp.head.fixed_order.on_support import OnSupport
from jaxlogp.head.fixed_order.plan import Operands, Plan, Tile, product_gradient
from jaxlogp.head.fixed_order.stats import live_tokens, logit_gradient, tile_statistics
from jaxlogp.head.fold import finish_sums, sum_shards, sum_tiles
from jaxlogp.head.projection import dot
from jaxlogp.head.support.engine import Kept
from jaxlogp.invariance.exact import no_negative_zero
from jaxlogp.invariance.order import ReductionOrder, fold_halves, fold_tree


@dataclasses.dataclass(frozen=True)
class FixedOrderEngine(Engine):
    """Sums in the order that ``order`` fixes; see docs/invariance.md for what this guarantees and what it costs.

    The vocabulary must have as many ids as the order has granules: V >= 24 by default.

    Attributes:
        order: the numeric identity; ``ReductionOrder(granules=8)`` takes V >= 8.
    """

    order: ReductionOrder = dataclasses.field(default_factory=ReductionOrder)
    name = "fixed_order"
    reduces_gradients = True
    masks_hidden = True
    takes_support = True

    def why_not(self, call: HeadCall) -> str | None:
        """Refuses operands or shards that do not match the order, and gradients that need a float psum."""
        if self.order.engine != self.name:
            return f"its order is of engine {self.order.engine}"
        dtype = call.operand_dtype.name
        if self.order.dtype not in (None, dtype):
            return f"its order multiplies {self.order.dtype}, the operands are {dtype}"
        try:
            Plan.of(self.order, call)
        except ValueError as refusal:
            return f"its order does not fit: {refusal}"
        return why_not_shards(self.order, call)

    def shards(self, vocab_size: int, num_shards: int) -> VocabShards:
        """Returns shards that own whole granules."""
        return self.order.shards(vocab_size, num_shards)

    def forward(self, call: HeadCall) -> tuple[TokenLogProbs, Normaliser | Kept]:
        """Computes values per token and, in blocks, what the backward needs of every row of logits."""
        if call.support is not None:
            return OnSupport(call).forward()
        operands = Operands(Plan.of(self.order, call), call)
        return _finish(operands, _tile_statistics(operands, call), call)

    def backward(self, call: HeadCall, kept: Any, g: TokenLogProbs) -> HeadGradients:
        """Computes gradients, each summed over the mesh axes over which its operand is the same, in the fixed order.

        Raises:
            ValueError: if hidden states or a mask are typed as varying over the vocabulary axis; a float psum would sum the
                gradient.
        """
        if call.support is not None:
            return OnSupport(call).backward(kept, g)
        require_same_on_all_shards(call)
        plan, axes = Plan.of(self.order, call), call.axes
        per_token = jax.tree.map(lambda x: plan.blocks(x, 0), (g.log_probs, g.entropy))
        weight_axes, bias_axes = missing_axes(call.weight, axes), missing_axes(call.bias, axes)
        dtypes = call.weight_gradient_dtype, None if call.bias is None else jnp.float32
        sums = _Sums(Operands(plan, call), kept, *per_token, axes, weight_axes, bias_axes, *dtypes)
        d_hidden_nodes, d_weight, d_bias = sums.all_nodes()
        d_hidden = plan.unblock(sum_nodes(d_hidden_nodes, missing_axes(call.hidden, axes), call.axis_name))
        d_hidden = jnp.where(call.targets.mask[:, None], d_hidden, 0.0).astype(call.hidden_gradient_dtype)
        d_weight = lax.slice_in_dim(
            sum_nodes(d_weight[None], weight_axes, None), 0, call.num_columns, axis=call.vocab_dim
        )
        if call.bias is not None:
            d_bias = sum_nodes(d_bias[None], bias_axes, None)[: call.bias.shape[0]]
        return HeadGradients(d_hidden, d_weight.astype(call.weight_gradient_dtype), d_bias)


def _tile_statistics(operands: Operands, call: HeadCall) -> Float[Array, "tiles 4 blocks rows"]:
    """The statistics of every tile of this shard: max, Σ e^(z - max), Σ e^(z - max) (z - max), the target's logit or 0."""
    plan = operands.plan

    def step(index, statistics):
        tile = operands.tile(index // plan.tiles, index % plan.tiles)

        def block_step(block, statistics):
            logits = tile.logits(block)
            column = tile.targets(block)
            target = jnp.take_along_axis(logits, jnp.where(column >= 0, column, 0)[:, None], axis=-1)[:, 0]
            found = tile_statistics(logits, tile.valid, call.with_entropy)
            return statistics.at[index, :, block].set(jnp.stack([*found, jnp.where(column >= 0, target, 0.0)]))

        return lax.fori_loop(0, plan.num_blocks, block_step, statistics)

    tiles = plan.granules * plan.tiles
    empty = jnp.zeros((tiles, 4, plan.num_blocks, plan.order.row_block), jnp.float32)
    return lax.fori_loop(0, tiles, step, vary_over(empty, call.axes))


def _finish(
    operands: Operands, statistics: Float[Array, "tiles 4 blocks rows"], call: HeadCall
) -> tuple[TokenLogProbs, Normaliser]:
    """Values per token and, in blocks, what the backward needs. Block by block: exp and log keep one shape."""
    plan, targets = operands.plan, call.targets
    maximum = jnp.max(statistics[:, 0], axis=0)
    if call.axis_name is not None:
        maximum = lax.pmax(maximum, call.axis_name)

    def add(block):
        return sum_tiles(statistics[:, :, block], maximum[block], operands.column[block], call.with_entropy)

    sums = lax.map(add, jnp.arange(plan.num_blocks))
    sums = jax.tree.map(lambda x: jnp.moveaxis(x, 0, -2), sums)
    codes = None if targets.codes is None else plan.blocks(targets.codes, 0)
    sums = jax.tree.map(lambda x: jnp.moveaxis(x, -2, 0), sum_shards(sums, call.axis_name, codes))
    mask = plan.blocks(targets.mask, False)
    invalid = None if targets.invalid is None else plan.blocks(targets.invalid, False)
    result, normaliser = lax.map(lambda x: finish_sums(x[0], x[1], call.vocab_size, x[2]), (sums, mask, invalid))
    return jax.tree.map(plan.unblock, result), normaliser


@dataclasses.dataclass(frozen=True)
class _Sums:
    """The loops of the backward."""

    operands: Operands
    normaliser: Normaliser
    g_log_probs: Array
    g_entropy: Array | None
    axes: frozenset
    weight_axes: frozenset
    bias_axes: frozenset
    weight_dtype: Any
    bias_dtype: Any

    def all_nodes(self) -> tuple[Array, Array, Array | None]:
        """Hidden gradients of the local nodes of the tree [nodes, blocks, rows, H]; those of weight and bias."""
        plan = self.operands.plan
        size = node_size(plan.granules)
        nodes = plan.granules // size
        weight, bias = self.operands.weight, self.operands.bias
        # A gradient that other ranks add to is rounded after that; otherwise a tile is complete, and rounded once, when
        # written.
        d_weight = jnp.zeros(weight.shape, jnp.float32 if self.weight_axes else self.weight_dtype)
        d_bias = None if bias is None else jnp.zeros(bias.shape, jnp.float32 if self.bias_axes else self.bias_dtype)

        def step(node, carry):
            d_hidden, written = carry
            part, written = self.subtree(size, node * size, written)
            return d_hidden.at[node].set(part), written

        carry = jnp.zeros((nodes, *self.operands.hidden.shape), jnp.float32), (d_weight, d_bias)
        carry = jax.tree.map(lambda x: vary_over(x, self.axes), carry)
        d_hidden, (d_weight, d_bias) = lax.fori_loop(0, nodes, step, carry)
        return d_hidden, d_weight, d_bias

    def subtree(self, size: int, first: Array, written: tuple) -> tuple[Array, tuple]:
        """Hidden gradient of ``size`` granules (a power of two): two halves in a loop, so that the body is compiled once."""
        if size == 1:
            return self.granule(first, written)
        half = size // 2

        def step(index, carry):
            total, written = carry
            part, written = self.subtree(half, first + index * half, written)
            return total + part, written

        # A granule has no -0.0, so starting from zero changes no bit.
        return lax.fori_loop(0, 2, step, (self._zeros(self.operands.hidden.shape), written))

    def granule(self, granule: Array, written: tuple) -> tuple[Array, tuple]:
        """Hidden gradient of one granule, tile after tile."""
        plan = self.operands.plan

        def step(index, carry):
            d_hidden, (d_weight, d_bias) = carry
            tile = self.operands.tile(granule, index)
            d_hidden, d_rows, d_entries = self.tile(tile, d_hidden)
            # A tile that overlaps the previous one does not write the rows that they share.
            d_weight = plan.write(d_weight, d_rows, tile.start, tile.valid, self.operands.vocab_dim)
            d_bias = None if d_bias is None else plan.write(d_bias, d_entries, tile.start, tile.valid)
            return d_hidden, (d_weight, d_bias)

        start = self._zeros(self.operands.hidden.shape), written
        d_hidden, written = lax.fori_loop(0, plan.tiles, step, start)
        return no_negative_zero(d_hidden), written

    def tile(self, tile: Tile, d_hidden: Array) -> tuple[Array, Array, Array | None]:
        """Adds a tile to the hidden gradient; its rows of the weight's and the bias's gradients, by the tree over blocks."""
        operands, spec = self.operands, self.operands.spec

        def step(block, carry):
            d_hidden, d_weight, d_bias = carry
            logits = tile.logits(block)
            normaliser = jax.tree.map(lambda x: x[block], self.normaliser)
            g_log_probs = self.g_log_probs[block]
            g_entropy = None if self.g_entropy is None else self.g_entropy[block]
            gradient = logit_gradient(logits, tile.targets(block), tile.valid, normaliser, g_log_probs, g_entropy)
            gradient = product_gradient(gradient, logits, spec)
            rounded = gradient.astype(operands.dtype)
            # A row without a cotangent adds nothing, even where its hidden state is NaN.
            live = live_tokens(g_log_probs, g_entropy)[:, None]
            rows = jnp.where(live, operands.hidden[block], jnp.zeros((), operands.dtype))
            d_hidden = d_hidden.at[block].add(dot(rounded, tile.weight, contract=(1, 0)))
            d_weight = d_weight.at[block].set(no_negative_zero(dot(rounded, rows, contract=(0, 0))))
            if d_bias is not None:
                d_bias = d_bias.at[block].set(no_negative_zero(fold_halves(gradient)))
            return d_hidden, d_weight, d_bias

        blocks = operands.plan.num_blocks
        d_weight = self._zeros((blocks, *tile.weight.shape))
        d_bias = None if tile.bias is None else self._zeros((blocks, *tile.bias.shape))
        d_hidden, d_weight, d_bias = lax.fori_loop(0, blocks, step, (d_hidden, d_weight, d_bias))
        fold = functools.partial(fold_tree, combine=jnp.add)
        return d_hidden, fold(d_weight), None if d_bias is None else fold(d_bias)

    def _zeros(self, shape: tuple[int, ...]) -> Array:
        return vary_over(jnp.zeros(shape, jnp.float32), self.axes)
