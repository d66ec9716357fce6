"""The backend of `--invariant`: sums of leaves in a fixed order, and a sampler that runs the trainer's own programs."""

from typing import Any

import jax

from experiments.invariant.leaf_programs import LeafPrograms
from experiments.invariant.leaf_ranks import LeafRanks
from experiments.invariant.leaf_sampler import InvariantSampler
from experiments.invariant.leaf_sums import LeafSums
from experiments.invariant.options import InvarianceConfig, head_here
from experiments.learner.backend import BaseBackend
from experiments.learner.model_source import ModelParts, ModelSource
from experiments.learner.objectives import Objective
from experiments.learner.replicas import Replicas
from experiments.models.mesh import TENSOR_AXIS, num_ranks
from experiments.models.placement import on_device
from experiments.models.sharding import on_one_device
from experiments.sampling.options import SamplingOptions
from experiments.sampling.sample_token import CompletionRule
from jaxlogp.errors import require
from jaxlogp.head import FixedOrderEngine, FixedOrderHopperEngine


class InvariantBackend(BaseBackend):
    def __init__(
        self,
        model: ModelSource,
        mesh: jax.sharding.Mesh,
        rollout_mesh: jax.sharding.Mesh,
        options: InvarianceConfig,
        *,
        small_vocabulary: bool,
    ) -> None:
        super().__init__()
        decoder = model.decoder
        assert decoder is not None, "other models have been refused"
        self.mesh, self.leaf_rows = mesh, options.leaf_rows
        dtype = "float32" if decoder.fp32_head else decoder.dtype
        self._order = options.order(decoder.vocab_size, dtype)
        self._rollout_mesh, self.rollout_ranks = rollout_mesh, num_ranks(rollout_mesh)
        expected = f"tensor ranks that divide the {self._order.granules} granules of the vocabulary, with --invariant"
        for option, mesh in (("--mesh", self.mesh), ("--rollout.mesh", self._rollout_mesh)):
            require(self._order.granules % mesh.shape[TENSOR_AXIS] == 0, option, expected, mesh.shape[TENSOR_AXIS])
            self._require_shards(option, decoder.vocab_size, mesh.shape[TENSOR_AXIS])
        hopper = self._order.engine == "hopper"
        self._engine = FixedOrderHopperEngine(order=self._order) if hopper else FixedOrderEngine(self._order)
        self._block = options.block
        choice = head_here("auto", dtype, small_vocabulary=small_vocabulary)
        reason = choice.reason if choice.engine == self._order.engine else "not what auto takes here"
        by = f"the trainer's program for blocks of {self._block} tokens"
        self.sampler = f"a cache, by {by}; head {self._order.engine} ({reason})"
        self.vocab = self._order.shards(decoder.vocab_size, mesh.shape[TENSOR_AXIS])
        ranks = LeafRanks(self.mesh)
        self._state_device = ranks.state_device
        self.replicas = Replicas(ranks.state_mesh, ranks.replicate_over_processes)
        # The body, the embedding lookup included, is replicated on the tensor ranks.
        self._graph, self._params, self.frozen = model.parts(on_one_device(ranks.state_device), None)
        self.sampled_frozen = self.frozen
        self._decoder, self._tokenizer = decoder, model.tokenizer
        self._programs: dict[tuple[float, jax.sharding.Mesh], LeafPrograms] = {}

    def _require_shards(self, option: str, vocab_size: int, ranks: int) -> None:
        try:
            self._order.shards(vocab_size, ranks)
        except ValueError as error:
            expected = f"tensor ranks that a vocabulary of {vocab_size} fills with tiles of head {self._order.engine}"
            require(False, option, expected, f"{ranks} (--invariance.engine fixed_order has smaller ones): {error}")

    def place(self, tree: Any) -> Any:
        """Puts arrays unsharded on one device of each process."""
        return on_device(tree, self._state_device)

    def _make_gradients(self, objective: Objective, temperature: float, teacher: ModelParts | None) -> LeafSums:
        assert teacher is None, "it has been refused"
        return LeafSums(self._leaf_programs(temperature, self.mesh), objective)

    def make_sampler(self, options: SamplingOptions, row_length: int) -> InvariantSampler:
        assert options.temperature is not None, "that of the run, if no other is named"
        rule = CompletionRule(options, self._tokenizer.eos_ids, self._tokenizer.pad_id)
        programs = self._leaf_programs(options.temperature, self._rollout_mesh)
        return InvariantSampler(programs, rule, row_length, self.leaf_rows)

    def _leaf_programs(self, temperature: float, mesh: jax.sharding.Mesh) -> LeafPrograms:
        # One set for each, so that sampler and trainer share compiled programs.
        key = temperature, mesh
        if key not in self._programs:
            options = {"block": self._block, "temperature": temperature}
            self._programs[key] = LeafPrograms(self._graph, self._decoder, mesh, self._engine, **options)
        return self._programs[key]
