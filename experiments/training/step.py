"""One optimizer step: unreduced sums of each micro-batch, added up, divided once, applied.

The model body runs under GSPMD. Head, loss and metrics run in one ``shard_map`` over ("data", "tensor"): the head's
vocabulary is split over "tensor", and every sum is psum'ed over "data" there, explicitly. The gradient is that of the
global loss SUM; the step's own totals divide it when all micro-batches are in.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from experiments.config import LossConfig
from experiments.models.decoder import Decoder
from experiments.models.sharding import decoder_shardings
from jaxlogp import (
    HeadRun,
    MicroBatch,
    PolicyMetricTerms,
    StepSums,
    TokenLogProbs,
    VocabShards,
    WeightedSum,
    linear_log_probs,
    losses,
    masked_max,
    policy_loss,
    policy_metric_terms,
    record_head_runs,
    reward_terms,
    staleness_terms,
    weighted_sum,
)


class TrainState(NamedTuple):
    """Parameters and optimizer state, placed on the mesh."""

    params: nnx.State
    opt_state: optax.OptState


class MicroSums(NamedTuple):
    """Sums of one or more micro-batches, and the largest |log-prob of the trainer - of the sampler| at a label, in nats."""

    sums: StepSums
    drift: Float[Array, ""]


class AppliedStep(NamedTuple):
    """A step after its update; ``finite`` False means that the update was refused and the state is the old one."""

    state: TrainState
    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    finite: Bool[Array, ""]
    metrics: dict[str, Array]
    drift: Float[Array, ""]


def place_micro_batch(ranks: tuple[MicroBatch, ...], mesh: Mesh) -> MicroBatch:
    """Stacks the micro-batches of all data ranks along their rows; ``num_documents`` becomes a value per rank."""

    def stack(*leaves):
        joined = jnp.stack(leaves) if leaves[0].ndim == 0 else jnp.concatenate(leaves)
        return jax.device_put(joined, NamedSharding(mesh, P("data")))

    return jax.tree.map(stack, *ranks)


class TrainStep:
    """Compiled pieces of an optimizer step for one model, mesh, loss and optimizer.

    Args:
      graph: graph definition of the decoder.
      mesh: axes "data" and "tensor", of type Auto.
      loss: the loss options.
      optimizer: the optax transformation.
      temperature: divisor of the logits.
      supervised: train by cross-entropy on the labels (the warm start) instead of the policy loss.

    Attributes:
      head_run: the head call of the step: public function and engine; None before the first micro-batch is traced.
    """

    def __init__(
        self,
        graph: nnx.GraphDef[Decoder],
        mesh: Mesh,
        loss: LossConfig,
        optimizer: optax.GradientTransformation,
        *,
        temperature: float = 1.0,
        supervised: bool = False,
    ) -> None:
        self._graph, self._mesh, self._loss, self._optimizer = graph, mesh, loss, optimizer
        self._temperature, self._supervised = temperature, supervised
        self._simulated = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self._everywhere = NamedSharding(mesh, P())
        self._micro = jax.jit(self._micro_sums)
        self._add = jax.jit(_add)
        self._apply = None
        self.head_run: HeadRun | None = None

    @property
    def num_compilations(self) -> int:
        """How many shapes of micro-batch have been compiled; 1, whatever their number."""
        return self._micro._cache_size()

    def init(self, params: nnx.State) -> TrainState:
        """Places ``params`` on the mesh and makes the optimizer's state beside them."""
        return self.place(TrainState(params, self._optimizer.init(params)))

    def place(self, state: TrainState) -> TrainState:
        """Puts every part of a state where the step wants it."""
        return jax.device_put(state, TrainState(*(decoder_shardings(part, self._mesh) for part in state)))

    def micro_sums(self, params: nnx.State, batch: MicroBatch, documents_seen: int) -> MicroSums:
        """Sums of one global micro-batch (see :func:`place_micro_batch`), nothing divided."""
        sums = self._micro(params, batch, jnp.int32(documents_seen))
        # Simulated devices share one pool of threads: the collectives of several programs in flight can wait for each
        # other's threads until XLA aborts the process.
        return jax.block_until_ready(sums) if self._simulated else sums

    def sums_of(
        self, params: nnx.State, rounds: Iterable[tuple[MicroBatch, ...]], documents_seen: int
    ) -> MicroSums | None:
        """Sums of a step, whose micro-batches come in rounds, one for each data rank; None without any."""
        total = None
        for ranks in rounds:
            part = self.micro_sums(params, place_micro_batch(ranks, self._mesh), documents_seen)
            total = part if total is None else self.add(total, part)
        return total

    def add(self, left: MicroSums, right: MicroSums) -> MicroSums:
        """Sums of two disjoint parts of a step together."""
        return self._add(left, right)

    def apply(self, state: TrainState, step: MicroSums) -> AppliedStep:
        """Divides by the step's totals and updates; a loss or gradient that is not finite leaves the state as it was."""
        if self._apply is None:
            places = jax.tree.map(lambda x: x.sharding, state)
            self._apply = jax.jit(self._update, out_shardings=AppliedStep(places, *(self._everywhere,) * 5))
        return self._apply(state, step)

    def _micro_sums(self, params: nnx.State, batch: MicroBatch, documents_seen: Array) -> MicroSums:
        def global_sum(params):
            model = nnx.merge(self._graph, params)
            hidden = model(batch.tokens, batch.positions, batch.segment_ids)
            weight = model.head_weight()
            shards = VocabShards.even(weight.shape[0], self._mesh.shape["tensor"])
            mapped = jax.shard_map(
                functools.partial(self._local, shards),
                mesh=self._mesh,
                in_specs=(P("data"), P("tensor"), P("data"), P()),
                out_specs=P(),
            )
            loss, terms, drift = mapped(hidden, shards.shard_rows(weight), batch, documents_seen)
            return loss.sum, (loss, terms, drift)

        gradients, (loss, terms, drift) = jax.grad(global_sum, has_aux=True)(params)
        return MicroSums(StepSums.of(gradients, loss, terms), drift)

    def _local(self, shards: VocabShards, hidden: Array, weight: Array, batch: MicroBatch, documents_seen: Array):
        with record_head_runs() as runs:
            result = linear_log_probs(
                hidden,
                weight,
                batch.targets,
                mask=batch.mask,
                temperature=self._temperature,
                with_entropy=self._loss.metrics == "with_entropy" and not self._supervised,
                axis_name="tensor",
                vocab=shards,
                engine=self._loss.engine,
                fp32_head=self._loss.fp32_head,
            )
        self.head_run = runs[0]
        loss, terms, drift = loss_and_terms(self._loss, result, batch, documents_seen, supervised=self._supervised)
        drift = drift if self._supervised else lax.pmax(drift, "data")
        return loss.psum("data"), terms.psum("data"), drift

    def _update(self, state: TrainState, step: MicroSums) -> AppliedStep:
        finished = step.sums.finish()
        norm = optax.tree.norm(finished.gradients)
        finite = jnp.isfinite(norm) & jnp.isfinite(finished.loss)
        gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), finished.gradients, state.params)
        updates, opt_state = self._optimizer.update(gradients, state.opt_state, state.params)
        new = TrainState(optax.apply_updates(state.params, updates), opt_state)
        state = jax.tree.map(lambda old, new: jnp.where(finite, new, old), state, new)
        return AppliedStep(state, finished.loss, norm, finite, finished.metrics, step.drift)


def loss_and_terms(
    config: LossConfig, result: TokenLogProbs, batch: MicroBatch, documents_seen: Array, *, supervised: bool
) -> tuple[WeightedSum, PolicyMetricTerms, Array]:
    """Loss, metric terms and largest |log-prob of the trainer - of the sampler| of one data rank, nothing reduced."""
    if supervised:
        return weighted_sum(-result.log_probs, batch.mask), PolicyMetricTerms({}), jnp.float32(0)
    loss, terms = _policy(config, result, batch, documents_seen)
    difference = jnp.abs(lax.stop_gradient(result.log_probs) - batch.old_log_probs)
    return loss, terms, masked_max(difference, batch.mask)


def _policy(config: LossConfig, result, batch: MicroBatch, documents_seen: Array):
    """Local loss and metric terms of one data rank."""
    num_documents = batch.num_documents[0]
    inputs = (result.log_probs, batch.old_log_probs, batch.advantages, batch.mask)
    bounds = {"epsilon": config.epsilon, "epsilon_high": config.epsilon_high}
    kind = (
        losses.grpo(**bounds) if config.kind == "grpo" else losses.gspo(weighting=config.document_weighting, **bounds)
    )
    shared = {"loss": kind, "document_ids": batch.document_ids, "num_documents": num_documents}
    loss = policy_loss(*inputs, **shared)
    if config.metrics == "none":
        return loss, PolicyMetricTerms({})
    detached = (lax.stop_gradient(inputs[0]), *inputs[1:])
    entropy = None if result.entropy is None else lax.stop_gradient(result.entropy)
    present = jnp.arange(batch.rewards.shape[0], dtype=jnp.int32) < num_documents
    terms = policy_metric_terms(*detached, entropy=entropy, level=config.metrics, **shared)
    terms = terms | reward_terms(batch.rewards, present)
    return loss, terms | staleness_terms(documents_seen, batch.model_versions, present)


def _add(left: MicroSums, right: MicroSums) -> MicroSums:
    return MicroSums(left.sums + right.sums, jnp.maximum(left.drift, right.drift))
