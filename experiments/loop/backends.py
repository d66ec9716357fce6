"""Execution backends of a run: sharded micro-batches, or bitwise reproducible with `--invariant`."""

import contextlib
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.config import Config
from experiments.invariant.backend import InvariantBackend
from experiments.learner.backend import Backend, BaseBackend
from experiments.learner.gradients import GspmdGradients
from experiments.learner.model_source import ModelParts, ModelSource
from experiments.learner.objectives import Objective
from experiments.learner.replicas import Replicas
from experiments.models.mesh import TENSOR_AXIS, make_mesh, num_ranks, parse_mesh
from experiments.models.placement import placed
from experiments.models.sharding import parameter_shardings, place_parameters
from experiments.options import option_errors
from experiments.sampling.decoder_sampler import DecoderSampler
from experiments.sampling.options import SamplingOptions
from experiments.sampling.recompute import RecomputeSampler
from experiments.sampling.sample_token import CompletionRule
from experiments.sampling.sampler import SampledModel, Sampler
from jaxlogp.head.registry import default_shards

MOST_WHOLE = 8 * 2**30
"""Largest bytes of a model, in the activations' dtype, of which every tensor rank has all while it draws rows of its own."""


class RunBackend(Backend, Protocol):
    """A way to compute the same run, on the device `mesh` of the training.

    `sampled_frozen` is what is not trained, on the mesh of rollouts. `leaf_rows` are rows of a micro-batch with one document
    each; None where documents share rows. `sampler` says how completions are drawn, and why so; `rollout_ranks` are the
    ranks that draw rows of their own.
    """

    mesh: jax.sharding.Mesh
    sampled_frozen: nnx.State
    leaf_rows: int | None
    sampler: str
    rollout_ranks: int

    def make_sampler(self, options: SamplingOptions, row_length: int) -> Sampler:
        """Makes a sampler for rows of so many tokens. `options` have a temperature, and no stop texts."""


class GspmdBackend(BaseBackend):
    """Whole micro-batches under GSPMD, and a sampler with a cache."""

    leaf_rows = None

    def __init__(self, config: Config, model: ModelSource) -> None:
        super().__init__()
        self.mesh, self._tokenizer = make_mesh(parse_mesh(config.mesh)), model.tokenizer
        self.replicas = Replicas(self.mesh)
        self._engine, self._accumulate = config.loss.head_engine(), config.schedule.accumulate
        with option_errors("loss"):
            self.vocab = default_shards(self._engine, model.vocab_size, self.mesh.shape[TENSOR_AXIS])
        self._cached = model.decoder is not None
        self.sampler = "whole rows for every token: the model has no cache"
        # Adapters are of projections.
        self._frozen_head = model.decoder is not None and model.decoder.lora.rank > 0
        parts = model.parts(lambda state: parameter_shardings(state, self.mesh), self.mesh)
        self._graph, self._params, self.frozen = parts
        dtype = jnp.dtype(model.decoder.dtype if model.decoder is not None else "float32")
        numbers = sum(leaf.size for leaf in jax.tree.leaves((self._params, self.frozen)))
        whole = model.decoder is not None and numbers * dtype.itemsize <= MOST_WHOLE
        rollouts = rollout_mesh(config, self.mesh, keep_tensor=not whole)
        self.rollout_ranks = num_ranks(rollouts)
        if model.decoder is not None:
            run = model.decoder.cached_attention_run(rollouts)
            self.sampler = f"a cache, attention {run.implementation} ({run.reason})"
            if config.rollout.mesh is None and rollouts.shape[TENSOR_AXIS] < self.mesh.shape[TENSOR_AXIS]:
                self.sampler += "; tensor ranks draw rows of their own (--rollout.mesh names another mesh)"
        with option_errors("rollout") if config.rollout.mesh is not None else contextlib.nullcontext():
            places = [parameter_shardings(state, rollouts) for state in (self._params, self.frozen)]
        apart = rollouts != self.mesh
        self.sampled_frozen = placed(self.frozen, places[1]) if apart else self.frozen
        there = places[0] if apart else None
        self._sampled = SampledModel(model.graph(rollouts), rollouts, self.sampled_frozen, there)

    def place(self, tree: Any) -> Any:
        return place_parameters(tree, self.mesh)

    def _make_gradients(self, objective: Objective, temperature: float, teacher: ModelParts | None) -> GspmdGradients:
        options = {"engine": self._engine, "accumulate": self._accumulate, "frozen": self.frozen}
        options |= {"frozen_head": self._frozen_head, "teacher": teacher}
        return GspmdGradients(self._graph, self.mesh, objective, temperature=temperature, **options)

    def make_sampler(self, options: SamplingOptions, row_length: int) -> Sampler:
        del row_length
        kind = DecoderSampler if self._cached else RecomputeSampler
        return kind(self._sampled, CompletionRule(options, self._tokenizer.eos_ids, self._tokenizer.pad_id))


def rollout_mesh(config: Config, mesh: jax.sharding.Mesh, *, keep_tensor: bool) -> jax.sharding.Mesh:
    """Returns the mesh of the rollouts: if none is named, that of the training as `MeshSpec.of_rollouts` has it."""
    if config.rollout.mesh is None:
        trained = parse_mesh(config.mesh)
        spec = trained.of_rollouts(keep_tensor=keep_tensor)
        return mesh if spec == trained else make_mesh(spec)
    with option_errors("rollout"):
        return make_mesh(parse_mesh(config.rollout.mesh))


def make_backend(config: Config, model: ModelSource) -> RunBackend:
    if not config.invariant:
        return GspmdBackend(config, model)
    mesh = make_mesh(parse_mesh(config.mesh))
    small = config.model.has_task_vocabulary
    rollouts = rollout_mesh(config, mesh, keep_tensor=True)
    return InvariantBackend(model, mesh, rollouts, config.invariance, small_vocabulary=small)
