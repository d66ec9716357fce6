"""Gradient sums of a step from micro-batches as they come: one compiled program over the whole mesh.

The model body runs under GSPMD. Head, loss and metrics run in one ``shard_map`` over all axes: the head's vocabulary is
sharded over the tensor ranks, and every sum over the ranks that hold other tokens is an explicit psum there. The
gradient, which lies as the parameters do, is that of the global loss SUM; `experiments.learner.update` divides it once
all micro-batches are in.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from experiments.learner.backend import CompiledSums, GradientBackend, LabelValues, StepGradient, add_gradients
from experiments.learner.computed import has_effect
from experiments.learner.exact_kl import ReferenceHead
from experiments.learner.head_placement import HeadPlacement
from experiments.learner.model_source import ModelParts
from experiments.learner.objectives import NO_CONSTANTS, LossConstants, LossTerms, Objective
from experiments.learner.packing import GlobalMicroBatch, Packing
from experiments.models.compiled_program import lower_program
from experiments.models.mesh import TENSOR_AXIS, document_axis, ranks_here, token_axes, wait_if_simulated
from experiments.models.placement import bytes_a_device, whole_on_host
from experiments.models.sharding import parameter_shardings
from jaxlogp import Document, MicroBatch, StepSums, Support, TokenLogProbs, linear_log_probs
from jaxlogp.head import HeadRun, record_head_runs
from jaxlogp.head.registry import EngineChoice, default_shards


class GspmdGradients(GradientBackend):
    compiler_options = None
    head_run: HeadRun | None = None

    def __init__(
        self,
        graph: nnx.GraphDef,
        mesh: Mesh,
        objective: Objective,
        *,
        temperature: float,
        engine: EngineChoice,
        accumulate: str = "float32",
        frozen: nnx.State | None = None,
        frozen_head: bool = False,
        teacher: ModelParts | None = None,
    ) -> None:
        self._graph, self._mesh, self._objective = graph, mesh, objective
        rows, sequence = token_axes(mesh)
        self._row_spec, self._token_spec = P(rows), P(rows, sequence)
        self._token_axes = rows + sequence
        self._ranks_here = ranks_here(mesh)
        self._frozen, self._frozen_head = nnx.State({}) if frozen is None else frozen, frozen_head
        self._teacher = teacher
        self._temperature, self._engine, self._accumulate = temperature, engine, jnp.dtype(accumulate)
        self._sums = jax.jit(self._of_micro_batch)
        self._score = jax.jit(functools.partial(self._of_scoring, self._local_log_probs))
        self._entropies = jax.jit(functools.partial(self._of_scoring, self._local_entropies))
        self._add = jax.jit(add_gradients, donate_argnums=0)

    @property
    def num_compilations(self) -> int:
        compiled: Any = self._sums
        return compiled._cache_size()

    def trace(self, params: nnx.State, padding: GlobalMicroBatch) -> None:
        constants = self._with_reference(NO_CONSTANTS, params)
        jax.eval_shape(self._sums, params, self._frozen, self._placed(padding), np.int32(0), constants)

    def lower(self, params: nnx.State, padding: GlobalMicroBatch) -> Callable[[], CompiledSums]:
        constants = self._with_reference(NO_CONSTANTS, params)
        compiled = lower_program(self._sums, params, self._frozen, self._placed(padding), np.int32(0), constants)

        def sums() -> CompiledSums:
            program = compiled()
            beside = program.bytes_beside(bytes_a_device((params, self._frozen, constants.reference)))
            return CompiledSums((program,), beside, program.results[0])

        return sums

    def _with_reference(self, constants: LossConstants, own: nnx.State | None) -> LossConstants:
        """Returns constants with the teacher's parameters, or without a teacher the run's `own`, where they are read."""
        if not self._objective.reads_reference_head:
            return constants
        return constants._replace(reference=own if self._teacher is None else self._teacher.params)

    def sums_waiting(self, rounds: int) -> int:
        return min(rounds - 1, 1)

    def without_zeros(
        self, documents: Sequence[Document], packing: Packing
    ) -> tuple[list[Document], list[GlobalMicroBatch]]:
        computed = [document for document in documents if has_effect(document)]
        return computed, packing.rounds(computed)

    def accumulate(
        self,
        params: nnx.State,
        rounds: Iterable[GlobalMicroBatch],
        version: int,
        constants: LossConstants = NO_CONSTANTS,
        observe: Callable[[GlobalMicroBatch, LabelValues], None] | None = None,
    ) -> StepGradient | None:
        constants = self._with_reference(constants, constants.reference)
        total = None
        for each in rounds:
            operands = (params, self._frozen, self._placed(each), np.int32(version), constants)
            part, log_probs = wait_if_simulated(self._sums(*operands), self._mesh)
            total = part if total is None else self._add(total, part)
            # Its memory is for the next one.
            del part
            if observe is not None:
                observe(each, whole_on_host(log_probs).reshape(each.shape))
        return total

    def score(self, params: nnx.State, scored: GlobalMicroBatch) -> LabelValues:
        return self._scored(self._score, params, scored)

    def entropies(self, params: nnx.State, scored: GlobalMicroBatch) -> LabelValues:
        return self._scored(self._entropies, params, scored)

    def _scored(self, program: Callable[..., Array], params: nnx.State, scored: GlobalMicroBatch) -> LabelValues:
        batch = self._placed(scored, with_columns=False)
        return whole_on_host(wait_if_simulated(program(params, self._frozen, batch), self._mesh)).reshape(scored.shape)

    def _placed(self, given: GlobalMicroBatch, *, with_columns: bool = True) -> MicroBatch:
        """Rows of all ranks in one dimension, each on its own rank, copied from the host directly to each device."""
        here = [given.micro_batch(rank) for rank in self._ranks_here]
        if not with_columns:
            # One program, whatever columns there are.
            here = [dataclasses.replace(each, per_token={}) for each in here]
        here = [dataclasses.replace(each, support=_flat(each.support)) for each in here]
        return jax.tree.map(lambda *pieces: self._over_ranks(given.packing.ranks, pieces), *here)

    def _over_ranks(self, ranks: int, pieces: tuple[np.ndarray, ...]) -> Array:
        """Joins the arrays of the ranks that have a device in this process; a number becomes one number per rank."""
        here = dict(zip(self._ranks_here, map(np.atleast_1d, pieces), strict=True))
        rows, *rest = here[self._ranks_here[0]].shape
        sharding = NamedSharding(self._mesh, self._spec_of(pieces[0]))

        def part(index: tuple[slice, ...]) -> np.ndarray:
            return here[(index[0].start or 0) // rows][(slice(None), *index[1:])]

        return jax.make_array_from_callback((ranks * rows, *rest), sharding, part)

    def _spec_of(self, x: Array) -> P:
        return self._token_spec if x.ndim > 1 else self._row_spec

    def _of_micro_batch(
        self, params: nnx.State, frozen: nnx.State, batch: MicroBatch, version: Array, constants: LossConstants
    ) -> tuple[StepGradient, Float[Array, "R T"]]:
        reference = None
        if constants.reference is not None:
            graph, rest = (self._graph, frozen) if self._teacher is None else self._teacher[::2]
            hidden, weight, head = self._head_of((graph, constants.reference, rest), batch)
            reference, constants = ReferenceHead(hidden, weight, head.spec), constants._replace(reference=None)

        def global_sum(params):
            out_specs, further = (P(), self._token_spec), (reference, version, constants)
            parts, log_probs = self._with_head(self._local_parts, (params, frozen), batch, out_specs, *further)
            return parts.loss.sum, (parts, log_probs)

        gradients, (parts, log_probs) = jax.grad(global_sum, has_aux=True)(params)
        if self._mesh.size > 1:
            gradients = lax.with_sharding_constraint(gradients, parameter_shardings(gradients, self._mesh))
        sums = StepSums.of(gradients, parts.loss, parts.terms, gradient_dtype=self._accumulate)
        return StepGradient(sums, parts.drift), log_probs

    def _of_scoring(self, local, params: nnx.State, frozen: nnx.State, batch: MicroBatch) -> Array:
        return self._with_head(local, (params, frozen), batch, self._token_spec)

    def _with_head(self, local, states: tuple[nnx.State, ...], batch: MicroBatch, out_specs: Any, *further):
        """Runs ``local(head, hidden, weight, batch, ...)`` on every rank, from the hidden states of ``batch``."""
        hidden, weight, head = self._head_of((self._graph, *states), batch)
        of_head = self._token_spec, P(TENSOR_AXIS)
        of_further = (ReferenceHead(*of_head, x.spec) if isinstance(x, ReferenceHead) else P() for x in further)
        mapped = jax.shard_map(
            functools.partial(local, head),
            mesh=self._mesh,
            in_specs=(*of_head, jax.tree.map(self._spec_of, batch), *of_further),
            out_specs=out_specs,
        )
        return mapped(hidden, weight, batch, *further)

    def _head_of(self, parts: tuple[Any, ...], batch: MicroBatch) -> tuple[Array, Array, HeadPlacement]:
        """Returns hidden states, and the head's weight in shards of the vocabulary, of a model taken apart."""
        model = nnx.merge(*parts)
        hidden = model.hidden_states(batch.tokens, batch.positions, batch.segment_ids)
        spec, weight = model.head()
        shards = default_shards(self._engine, weight.shape[0], self._mesh.shape[TENSOR_AXIS])
        spec = dataclasses.replace(spec, temperature=self._temperature)
        head = HeadPlacement(spec, TENSOR_AXIS, shards, self._engine, self._frozen_head)
        return hidden, shards.shard_rows(weight), head

    def _local_parts(
        self,
        head: HeadPlacement,
        hidden: Array,
        weight: Array,
        batch: MicroBatch,
        reference: ReferenceHead | None,
        version: Array,
        constants: LossConstants,
    ) -> tuple[LossTerms, Float[Array, "R T"]]:
        batch = self._with_own_support(batch)
        with record_head_runs() as runs, jax.named_scope("head"):
            operands = (hidden, weight, batch, version, constants)
            (loss, terms, drift), log_probs = self._objective.from_hidden(*operands, head, reference)
        self.head_run = runs[0]
        axes = self._token_axes
        return LossTerms(loss.psum(axes), terms.psum(axes), lax.pmax(drift, axes)), log_probs

    def _local_log_probs(
        self, head: HeadPlacement, hidden: Array, weight: Array, batch: MicroBatch
    ) -> Float[Array, "R T"]:
        return self._local_scores(head, hidden, weight, batch).log_probs

    def _local_entropies(
        self, head: HeadPlacement, hidden: Array, weight: Array, batch: MicroBatch
    ) -> Float[Array, "R T"]:
        entropies = self._local_scores(head, hidden, weight, batch, with_entropy=True).entropy
        assert entropies is not None, "they were asked for"
        return entropies

    def _local_scores(
        self, head: HeadPlacement, hidden: Array, weight: Array, batch: MicroBatch, *, with_entropy: bool = False
    ) -> TokenLogProbs:
        batch = self._with_own_support(batch)
        keywords = {"mask": batch.mask, "support": batch.support, "with_entropy": with_entropy, **head.keywords()}
        return linear_log_probs(hidden, weight, batch.targets, **keywords)

    def _with_own_support(self, batch: MicroBatch) -> MicroBatch:
        """Returns the batch of this rank with the support of its tokens, in the place of that of its whole rows."""
        if batch.support is None:
            return batch
        (rows, tokens), whole = batch.mask.shape, batch.support.counts.size
        sequence = document_axis(self._mesh)
        if sequence is None:
            own = Support(batch.support.ids, batch.support.counts.reshape(rows, tokens))
        else:
            row, place = (jnp.arange(size, dtype=jnp.int32) for size in (rows, tokens))
            first = row[:, None] * (whole // rows) + lax.axis_index(sequence) * tokens
            own = batch.support.of_tokens(first + place)
        return dataclasses.replace(batch, support=own)


def _flat(support: Support | None) -> Support | None:
    """Returns the support of tokens in one dimension, which no sequence ranks split."""
    return None if support is None else Support(support.ids, support.counts.reshape(-1))
