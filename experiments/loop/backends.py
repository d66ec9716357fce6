"""Execution backends of a run: sharded micro-batches, or bitwise reproducible with `--invariant`."""

import contextlib
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from experiments.config import Config
from experiments.invariant.backend import InvariantBackend
from experiments.learner.backend import Backend, GivesParams
from experiments.learner.gradients import GspmdGradients
from experiments.learner.model_source import ModelSource
from experiments.learner.objectives import Objective
from experiments.learner.replicas import Replicas
from experiments.models.mesh import TENSOR_AXIS, make_mesh, parse_mesh
from experiments.models.placement import bytes_a_device, placed
from experiments.models.sharding import parameter_shardings, place_parameters
from experiments.options import refused_as
from experiments.sampling.cached_draw import DecoderSampler
from experiments.sampling.policy import Sampler
from experiments.sampling.recompute import RecomputeSampler
from experiments.sampling.sample_token import DrawOptions
from experiments.sampling.sampler import Samples
from jaxlogp.head.registry import default_shards


class RunBackend(Backend, Protocol):
    """A way to compute the same run, on the device `mesh` of the training.

    Attributes:
        sampled_frozen: what is not trained, where rollouts are drawn, a copy on a mesh of their own.
        leaf_rows: rows of a micro-batch, each with a document of its own; None where documents share rows.
        sampler: how completions are drawn, and why so.
    """

    mesh: jax.sharding.Mesh
    sampled_frozen: nnx.State
    leaf_rows: int | None
    sampler: str

    def make_sampler(self, max_new_tokens: int, row_length: int, options: DrawOptions) -> Sampler:
        """Makes a way to draw completions of up to so many tokens, in rows of so many."""


class GspmdBackend(GivesParams):
    """Whole micro-batches under GSPMD, and a sampler with a cache."""

    leaf_rows = None

    def __init__(self, config: Config, model: ModelSource) -> None:
        self.mesh, self._tokenizer = make_mesh(parse_mesh(config.mesh)), model.tokenizer
        self.replicas = Replicas(self.mesh)
        self._rollout_mesh = rollout_mesh(config, self.mesh)
        self._engine, self._accumulate = config.loss.head_engine(), config.schedule.accumulate
        with refused_as("loss"):
            self.vocab = default_shards(self._engine, model.vocab_size, self.mesh.shape[TENSOR_AXIS])
        self._cached = model.decoder is not None
        self.sampler = "whole rows for every token: the model has no cache"
        if model.decoder is not None:
            run = model.decoder.cached_attention_run(self._rollout_mesh)
            self.sampler = f"a cache, attention {run.implementation} ({run.reason})"
        # Adapters are of projections.
        self._frozen_head = model.decoder is not None and model.decoder.lora.rank > 0
        parts = model.parts(lambda state: parameter_shardings(state, self.mesh), self.mesh)
        self._graph, self._params, self.frozen = parts
        self._sampled_graph = model.graph(self._rollout_mesh)
        with refused_as("rollout") if config.rollout.mesh is not None else contextlib.nullcontext():
            places = [parameter_shardings(state, self._rollout_mesh) for state in (self._params, self.frozen)]
        apart = self._rollout_mesh != self.mesh
        self._sampled_params = places[0] if apart else None
        self.sampled_frozen = placed(self.frozen, places[1]) if apart else self.frozen

    def place(self, tree: Any) -> Any:
        return place_parameters(tree, self.mesh)

    def gradients(self, objective: Objective, temperature: float) -> GspmdGradients:
        options = {"engine": self._engine, "accumulate": self._accumulate, "frozen": self.frozen}
        options["frozen_head"] = self._frozen_head
        return GspmdGradients(self._graph, self.mesh, objective, temperature=temperature, **options)

    def make_sampler(self, max_new_tokens: int, row_length: int, options: DrawOptions) -> Sampler:
        del row_length
        kind = DecoderSampler if self._cached else RecomputeSampler
        draw = kind(self._sampled_graph, self._rollout_mesh, self._tokenizer, max_new_tokens, options)
        return WholeModelDraw(draw, self.sampled_frozen, self._sampled_params)


def rollout_mesh(config: Config, mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Returns the mesh of the rollouts: that of the training if no other is named, with rows in place of parts of rows."""
    if config.rollout.mesh is None:
        spec = parse_mesh(config.mesh)
        return mesh if spec.sequence == 1 else make_mesh(spec.of_rollouts)
    with refused_as("rollout"):
        return make_mesh(parse_mesh(config.rollout.mesh))


def make_backend(config: Config, model: ModelSource) -> RunBackend:
    """Makes the backend that the options name."""
    if not config.invariant:
        return GspmdBackend(config, model)
    mesh = make_mesh(parse_mesh(config.mesh))
    small = config.model.has_task_vocabulary
    return InvariantBackend(model, mesh, rollout_mesh(config, mesh), config.invariance, small_vocabulary=small)


class WholeModelDraw(Sampler):
    """A `Sampler` for the trained parameters alone, of one that needs all that the model consists of."""

    def __init__(self, draw: Sampler, frozen: nnx.State, places: nnx.State | None) -> None:
        self._draw, self._frozen, self._places = draw, frozen, places

    def __call__(
        self, params: nnx.State, prompts: np.ndarray, lengths: np.ndarray, copies: int, key: jax.Array
    ) -> Samples:
        here = params if self._places is None else placed(params, self._places)
        return self._draw(nnx.merge_state(here, self._frozen), prompts, lengths, copies, key)

    def memory(self, params: nnx.State, prompts: int, tokens: int, copies: int) -> int | None:
        """Includes what the trained parameters take on a mesh of their own."""
        shape = prompts, tokens, copies
        if self._places is None:
            return self._draw.memory(nnx.merge_state(params, self._frozen), *shape)

        def there(leaf: jax.Array, place: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

        trained = jax.tree.map(there, params, self._places)
        beside = self._draw.memory(nnx.merge_state(trained, self._frozen), *shape)
        return None if beside is None else beside + bytes_a_device(trained)
