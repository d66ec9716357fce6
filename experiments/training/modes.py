"""What `--invariant` replaces: how sums are computed and tokens are drawn. Everything else is the same trainer."""

import contextlib
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from experiments.config import Config
from experiments.config.invariance import head_here
from experiments.learner.backend import Backend
from experiments.learner.gradients import GspmdGradients
from experiments.learner.objectives import Objective
from experiments.learner.replicas import Replicas
from experiments.loop.model_source import Origin
from experiments.models.mesh import TENSOR_AXIS, make_mesh, parse_mesh
from experiments.models.placement import bytes_a_device, on_device, placed
from experiments.models.sharding import on_one_device, parameter_shardings, place_parameters
from experiments.options import refused_as
from experiments.sampling.cached_draw import CachedDraw
from experiments.sampling.leaf_draw import LeafDraw
from experiments.sampling.pick import DrawOptions
from experiments.sampling.policy import Draw
from experiments.sampling.sampler import Samples
from experiments.sampling.uncached_draw import UncachedDraw
from experiments.training.leaf_programs import LeafPrograms
from experiments.training.leaf_ranks import LeafRanks
from experiments.training.leaf_sums import LeafSums
from jaxlogp.errors import require
from jaxlogp.head import FixedOrderEngine, FixedOrderHopperEngine
from jaxlogp.head.registry import default_shards


class Mode(Backend, Protocol):
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

    def draw(self, max_new_tokens: int, row_length: int, options: DrawOptions) -> Draw:
        """Makes a way to draw completions of up to so many tokens, in rows of so many."""


class _GivesParams(Mode):
    """A mode that gives its first parameters away."""

    _params: nnx.State | None

    def take_params(self) -> nnx.State:
        params, self._params = self._params, None
        assert params is not None, "they are given away once"
        return params


class PlainMode(_GivesParams):
    """Whole micro-batches under GSPMD, and a sampler with a cache."""

    leaf_rows = None

    def __init__(self, config: Config, origin: Origin) -> None:
        self.mesh, self._tokenizer = make_mesh(parse_mesh(config.mesh)), origin.tokenizer
        self.replicas = Replicas(self.mesh)
        self._rollout_mesh = rollout_mesh(config, self.mesh)
        self._engine, self._accumulate = config.loss.head_engine(), config.schedule.accumulate
        with refused_as("loss"):
            self.vocab = default_shards(self._engine, origin.vocab_size, self.mesh.shape[TENSOR_AXIS])
        self._cached = origin.decoder is not None
        self.sampler = "whole rows for every token: the model has no cache"
        if origin.decoder is not None:
            run = origin.decoder.cached_attention_run(self._rollout_mesh)
            self.sampler = f"a cache, attention {run.implementation} ({run.reason})"
        # Adapters are of projections.
        self._frozen_head = origin.decoder is not None and origin.decoder.lora.rank > 0
        parts = origin.parts(lambda state: parameter_shardings(state, self.mesh), self.mesh)
        self._graph, self._params, self.frozen = parts
        self._sampled_graph = origin.graph(self._rollout_mesh)
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

    def draw(self, max_new_tokens: int, row_length: int, options: DrawOptions) -> Draw:
        del row_length
        kind = CachedDraw if self._cached else UncachedDraw
        draw = kind(self._sampled_graph, self._rollout_mesh, self._tokenizer, max_new_tokens, options)
        return WholeModelDraw(draw, self.sampled_frozen, self._sampled_params)


def rollout_mesh(config: Config, mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Returns the mesh of the rollouts: that of the training if no other is named, with rows in place of parts of rows."""
    if config.rollout.mesh is None:
        spec = parse_mesh(config.mesh)
        return mesh if spec.sequence == 1 else make_mesh(spec.of_rollouts)
    with refused_as("rollout"):
        return make_mesh(parse_mesh(config.rollout.mesh))


class WholeModelDraw(Draw):
    """A `Draw` for the trained parameters alone, of one that needs all that the model consists of."""

    def __init__(self, draw: Draw, frozen: nnx.State, places: nnx.State | None) -> None:
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


class InvariantMode(_GivesParams):
    """Leaves in a fixed order, and a sampler that runs the trainer's own programs."""

    def __init__(self, config: Config, origin: Origin) -> None:
        spec, decoder = parse_mesh(config.mesh), origin.decoder
        assert decoder is not None, "other models have been refused"
        self.mesh, self.leaf_rows = make_mesh(spec), config.invariance.leaf_rows
        dtype = "float32" if decoder.fp32_head else decoder.dtype
        self._order = config.invariance.order(decoder.vocab_size, dtype)
        self._rollout_mesh = rollout_mesh(config, self.mesh)
        expected = f"tensor ranks that divide the {self._order.granules} granules of the vocabulary, with --invariant"
        for option, mesh in (("--mesh", self.mesh), ("--rollout.mesh", self._rollout_mesh)):
            require(self._order.granules % mesh.shape[TENSOR_AXIS] == 0, option, expected, mesh.shape[TENSOR_AXIS])
            self._require_shards(option, decoder.vocab_size, mesh.shape[TENSOR_AXIS])
        hopper = self._order.engine == "hopper"
        self._engine = FixedOrderHopperEngine(order=self._order) if hopper else FixedOrderEngine(self._order)
        self._block = config.invariance.block
        choice = head_here("auto", dtype, small_vocabulary=config.model.has_task_vocabulary)
        reason = choice.reason if choice.engine == self._order.engine else "not what auto takes here"
        by = f"the trainer's program for blocks of {self._block} tokens"
        self.sampler = f"a cache, by {by}; head {self._order.engine} ({reason})"
        self.vocab = self._order.shards(decoder.vocab_size, spec.tensor)
        ranks = LeafRanks(self.mesh)
        self._home = ranks.home
        self.replicas = Replicas(ranks.homes, ranks.over_homes)
        # The body, the embedding lookup included, is replicated on the tensor ranks.
        self._graph, self._params, self.frozen = origin.parts(on_one_device(ranks.home), None)
        self.sampled_frozen = self.frozen
        self._decoder, self._tokenizer = decoder, origin.tokenizer
        self._programs: dict[tuple[float, jax.sharding.Mesh], LeafPrograms] = {}

    def _require_shards(self, option: str, vocab_size: int, ranks: int) -> None:
        try:
            self._order.shards(vocab_size, ranks)
        except ValueError as error:
            expected = f"tensor ranks that a vocabulary of {vocab_size} fills with tiles of head {self._order.engine}"
            require(False, option, expected, f"{ranks} (--invariance.engine fixed_order has smaller ones): {error}")

    def place(self, tree: Any) -> Any:
        """Puts arrays unsharded on one device of each process."""
        return on_device(tree, self._home)

    def gradients(self, objective: Objective, temperature: float) -> LeafSums:
        return LeafSums(self._leaf_programs(temperature, self.mesh), objective)

    def draw(self, max_new_tokens: int, row_length: int, options: DrawOptions) -> LeafDraw:
        programs, limits = self._leaf_programs(options.temperature, self._rollout_mesh), (max_new_tokens, row_length)
        return LeafDraw(programs, self._tokenizer, *limits, leaf_rows=self.leaf_rows, greedy=options.greedy)

    def _leaf_programs(self, temperature: float, mesh: jax.sharding.Mesh) -> LeafPrograms:
        # One set for each, so that sampler and trainer share compiled programs.
        key = temperature, mesh
        if key not in self._programs:
            options = {"block": self._block, "temperature": temperature}
            self._programs[key] = LeafPrograms(self._graph, self._decoder, mesh, self._engine, **options)
        return self._programs[key]
