"""Gradient sums of `--invariant`: bitwise equal on every mesh.

The unit of computation is the leaf: `leaf_rows` rows with one document each, always of the same shape. A round has one of
every data rank. The result of a leaf does not depend on the mesh, and leaves are added in one binary tree over the
documents' order, whether they come from successive rounds or from different data ranks.

    hidden = body(params)                              each data rank
    log_probs, entropy = head(hidden, weight)          data, tensor
    sums, g = objective(log_probs, entropy)            each data rank
    d_hidden, d_weight = head_vjp(hidden, weight, g)   data, tensor
    leaf = body_vjp(params, d_hidden), d_weight, sums  each data rank

The ranks share the additions (`experiments.invariant.leaf_exchange`); the update is made of the whole sums, by every process
on one of its devices. See `experiments.invariant.leaf_programs` for why the programs are separate.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from experiments.invariant.leaf_exchange import LeafExchange
from experiments.invariant.leaf_programs import LeafParameters, LeafPrograms
from experiments.learner.backend import CompiledSums, LabelValues, StepGradient, add_gradients
from experiments.learner.computed import has_effect
from experiments.learner.objectives import NO_CONSTANTS, LossConstants, Objective
from experiments.learner.packing import GlobalMicroBatch, Packing
from experiments.models.compiled_program import bytes_in_turn, lower_program, shapes_on
from jaxlogp import Document, MicroBatch, StepSums, TokenLogProbs
from jaxlogp.head import HeadRun


class LeafSums:
    """Sums of a step in one fixed order; see `experiments.learner.backend.GradientBackend`."""

    def __init__(self, programs: LeafPrograms, objective: Objective) -> None:
        self._programs, self._objective = programs, objective
        self._exchange = LeafExchange(programs.ranks)
        self.compiler_options = options = programs.compiler_options
        self._loss = jax.jit(self._one_loss, compiler_options=options)
        self._leaf = jax.jit(self._one_leaf, compiler_options=options)
        self._add = jax.jit(add_gradients, donate_argnums=0, compiler_options=options)

    @property
    def head_run(self) -> HeadRun | None:
        return self._programs.head_run

    @property
    def num_compilations(self) -> int:
        """1 per data rank, whatever the number of leaves."""
        compiled: Any = self._loss
        return compiled._cache_size()

    def trace(self, params: nnx.State, padding: GlobalMicroBatch) -> None:
        self._programs.trace(padding.packing.rows, padding.packing.row_length, padding.packing.support_capacity)

    def lower(self, params: nnx.State, padding: GlobalMicroBatch) -> Callable[[], CompiledSums]:
        """Lowers the programs of a leaf, for the first rank; the others' are compiled when they are called."""
        programs, ranks, packing = self._programs, self._programs.ranks, padding.packing
        shape = packing.rows, packing.row_length, packing.support_capacity
        loaded, batch, device = programs.shapes(params), self._placed(padding)[0], ranks.devices[0]
        step, _ = programs.reader.lower(loaded.weights[0], packing.rows, packing.row_length, device)
        head, values = programs.lower_head(*shape)
        head_vjp, gradients = programs.lower_head_vjp(*shape)
        parts, _ = jax.eval_shape(self._loss, TokenLogProbs(*values), batch, np.int32(0), NO_CONSTANTS)
        inputs, copies = (batch.tokens, batch.positions, batch.segment_ids), shapes_on(device, params)
        leaf = lower_program(self._leaf, copies, inputs, shapes_on(device, parts), *gradients)

        def sums() -> CompiledSums:
            compiled = leaf(), head_vjp(), head(), step()
            # What is loaded, and hidden states of the size of their gradients, are there all the time.
            held = loaded.weights, loaded.heads, loaded.rows, gradients[0]
            counted = copies, loaded.rows, loaded.rows, loaded.weights
            of_one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), compiled[0].results)
            need = bytes_in_turn(held, zip(compiled, counted, strict=True))
            return CompiledSums(compiled, need, shapes_on(ranks.state_device, of_one))

        return sums

    def sums_waiting(self, rounds: int) -> int:
        """Returns the nodes of the tree that wait, in parts that the ranks share."""
        ranks = self._programs.ranks.count
        return -(-((rounds * ranks).bit_length() - 1) // ranks)

    def without_zeros(
        self, documents: Sequence[Document], packing: Packing
    ) -> tuple[list[Document], list[GlobalMicroBatch]]:
        """Omits whole leaves only, which keep their place in the tree."""
        computed, rounds = [], []
        for each in packing.rounds(documents):
            leaves = [[each.documents[number] for number in numbers] for numbers in each.by_rank]
            skipped = {rank for rank, leaf in enumerate(leaves) if not any(map(has_effect, leaf))}
            rounds.append(replace(each, skipped=frozenset(skipped)))
            computed += [document for rank, leaf in enumerate(leaves) if rank not in skipped for document in leaf]
        return computed, rounds

    def accumulate(
        self,
        params: nnx.State,
        rounds: Iterable[GlobalMicroBatch],
        version: int,
        constants: LossConstants = NO_CONSTANTS,
        observe: Callable[[GlobalMicroBatch, LabelValues], None] | None = None,
    ) -> StepGradient | None:
        """Adds every round's leaves in the order of their documents, neighbours first."""
        tree, loaded = TreeFold(self._add), self._programs.load(params)
        # After what the forward passes read, which need not wait for them.
        copies = [jax.device_put(params, device) for device in self._programs.ranks.devices]
        for each in rounds:
            ranks = range(each.packing.ranks)
            if each.skipped.issuperset(ranks):
                leaves = [None for _ in ranks]
            else:
                sums, values = self._sums_of_leaves(copies, loaded, self._placed(each), version, constants)
                if observe is not None:
                    observe(each, self._on_host(each, [value.log_probs for value in values]))
                # The metrics of a leaf do not depend on which others are computed along with it.
                leaves = [None if rank in each.skipped else leaf for rank, leaf in enumerate(self._exchange.deal(sums))]
            for leaf in leaves:
                tree.push(leaf)
        self._programs.unload()
        total = tree.total()
        return None if total is None else self._exchange.whole(total)

    def score(self, params: nnx.State, scored: GlobalMicroBatch) -> LabelValues:
        return self._scored(params, scored, "log_probs")

    def entropies(self, params: nnx.State, scored: GlobalMicroBatch) -> LabelValues:
        return self._scored(params, scored, "entropy")

    def _scored(self, params: nnx.State, scored: GlobalMicroBatch, name: str) -> LabelValues:
        _, _, values = self._values_of_leaves(self._programs.load(params), self._placed(scored))
        return self._on_host(scored, [getattr(value, name) for value in values])

    def _on_host(self, scored: GlobalMicroBatch, of_leaves: list[Array]) -> LabelValues:
        return self._programs.ranks.on_host(of_leaves).reshape(scored.shape)

    def _placed(self, leaves: GlobalMicroBatch) -> list[MicroBatch]:
        """Returns the leaf of each data rank that this process computes, on its device."""
        ranks = self._programs.ranks
        made = [jax.tree.map(np.atleast_1d, leaves.micro_batch(rank)) for rank in ranks.here]
        return [jax.device_put(leaf, device) for leaf, device in zip(made, ranks.devices, strict=True)]

    def _values_of_leaves(
        self, loaded: LeafParameters, batches: list[MicroBatch]
    ) -> tuple[list, list, list[TokenLogProbs]]:
        """Returns inputs of the body, hidden states and head values of each rank's leaf."""
        inputs = [(batch.tokens, batch.positions, batch.segment_ids) for batch in batches]
        hidden = self._programs.body(loaded, [batch.tokens for batch in batches])
        return inputs, hidden, self._programs.head(loaded, hidden, *_head_operands(batches))

    def _sums_of_leaves(
        self,
        params: list[nnx.State],
        loaded: LeafParameters,
        batches: list[MicroBatch],
        version: int,
        constants: LossConstants,
    ) -> tuple[list[StepGradient], list[TokenLogProbs]]:
        """Returns the sums of one leaf of each data rank, of which every array has a first dimension of 1, and the values
        that they were computed from."""
        inputs, hidden, values = self._values_of_leaves(loaded, batches)
        of_step = (np.int32(version), constants)
        parts, cotangents = zip(
            *(self._loss(value, batch, *of_step) for value, batch in zip(values, batches, strict=True)), strict=True
        )
        gradients = self._programs.head_vjp(loaded, hidden, *_head_operands(batches), list(cotangents))
        operands = zip(params, inputs, parts, gradients, strict=True)
        return [self._leaf(*each, *pair) for *each, pair in operands], values

    def _one_loss(self, values: TokenLogProbs, batch: MicroBatch, version: Array, constants: LossConstants):
        """Returns loss, metric terms and drift of one leaf, and the loss sum's gradient for log-probs and entropies."""

        def total(log_probs, entropy):
            values = TokenLogProbs(log_probs, entropy)
            parts = self._objective.from_log_probs(values, batch, version, constants)
            return parts.loss.sum, parts

        cotangents, parts = jax.grad(total, argnums=(0, 1), has_aux=True)(values.log_probs, values.entropy)
        return parts, cotangents

    def _one_leaf(self, params, inputs, parts, d_hidden, d_weight) -> StepGradient:
        """Returns the gradient of one leaf, including the head's, with the leaf's other sums."""
        loss, terms, drift = parts
        d_params = self._programs.body_vjp(params, inputs, d_hidden)
        d_params = add_to(d_params, self._programs.config.head_name, d_weight[0])
        sums = StepGradient(StepSums.of(d_params, loss, terms), drift)
        # A leaf of padding is neutral in the tree only if no sum is -0.0.
        return jax.tree.map(lambda x: _no_negative_zero(x)[None], sums)


def _head_operands(batches: list[MicroBatch]) -> tuple[list, list, list]:
    """Returns targets, masks and supports of the leaves."""
    return tuple([getattr(batch, name) for batch in batches] for name in ("targets", "mask", "support"))


def _no_negative_zero(x: Array) -> Array:
    return jnp.where(x == 0.0, 0.0, x) if jnp.issubdtype(x.dtype, jnp.floating) else x


def add_to(state: nnx.State, name: str, extra: Array) -> nnx.State:
    """Returns `state` with `extra` added to the one parameter of the module `name`."""

    def leaf(path, x):
        key = path[0]
        return x + extra.astype(x.dtype) if getattr(key, "key", getattr(key, "name", None)) == name else x

    return jax.tree_util.tree_map_with_path(leaf, state)


class TreeFold:
    """Adds successive parts in the binary tree over their order, keeping only log2 of their number in memory.

    ((p0 p1) (p2 p3)) p4 for five parts; neutral parts at the end change nothing. None is neutral, and is not added.

    Example:
        >>> fold = TreeFold(lambda a, b: f"({a}{b})")
        >>> for part in "abcde":
        ...     fold.push(part)
        >>> fold.total()
        '(((ab)(cd))e)'
    """

    def __init__(self, add: Callable[[Any, Any], Any]) -> None:
        self._add = add
        self._nodes: list[tuple[int, Any]] = []

    def push(self, part: Any) -> None:
        level = 0
        while self._nodes and self._nodes[-1][0] == level:
            part = self._sum(self._nodes.pop()[1], part)
            level += 1
        self._nodes.append((level, part))

    def total(self) -> Any | None:
        if not self._nodes:
            return None
        _, total = self._nodes.pop()
        while self._nodes:
            total = self._sum(self._nodes.pop()[1], total)
        return total

    def _sum(self, left: Any | None, right: Any | None) -> Any | None:
        if left is None or right is None:
            return right if left is None else left
        return self._add(left, right)
