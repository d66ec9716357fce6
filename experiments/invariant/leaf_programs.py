"""The compiled programs of one leaf, which trainer and sampler of `--invariant` share.

The same computation may give different bits in another program, or in the same program compiled for another number of
devices. So everything that needs no other rank runs as a program for one device, on one device of each rank
(`experiments.invariant.leaf_ranks`); only the head runs over the tensor axis, and its engine makes the results independent
of that axis. The body of the model is not split in this mode, over "tensor" or over "fsdp".
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from experiments.invariant.block_forward import BlockForward, BodyWeights
from experiments.invariant.leaf_ranks import LeafRanks
from experiments.models.compiled_program import CompiledProgram, lower_program, shapes_on
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.models.mesh import TENSOR_AXIS
from jaxlogp import Support, TokenLogProbs, VocabShards, linear_log_probs
from jaxlogp.errors import EngineUnavailable, require
from jaxlogp.head import FixedOrderEngine, FixedOrderHopperEngine, HeadRun, record_head_runs

LeafEngine = FixedOrderEngine | FixedOrderHopperEngine


def compiler_options(platform: str) -> dict[str, Any] | None:
    """Returns what XLA needs to be told so that a program gives the same bits in every run, and compiled again.

    On a GPU it would add up scatters by atomic operations, in the order in which they happen to come, and choose products
    by their times, which differ from one compilation to the next.
    """
    return {"xla_gpu_deterministic_ops": True} if platform == "gpu" else None


class LeafParameters(NamedTuple):
    """Parameters where the forward passes need them: whole on each rank, as the body and as a draw reads them, and the
    head's rows over the tensor ranks."""

    weights: list[BodyWeights]
    heads: list[Float[Array, "V H"]]
    rows: Float[Array, "blocks H"]


class LeafPrograms:
    """The compiled programs of one leaf on every rank; trainer and sampler share them.

    Lists are those of `LeafRanks`, `ranks`, where leaves are computed. `graph` is of a decoder without a mesh, and the mesh
    has axes "data", "fsdp" and "tensor", of type Auto. `reader` is the body, which reads `block` tokens of a row at a time.
    `spec` is the head's arithmetic, and `head_run` the head call, None before it is traced.
    """

    def __init__(
        self,
        graph: nnx.GraphDef[Decoder],
        config: DecoderConfig,
        mesh: Mesh,
        engine: LeafEngine,
        *,
        block: int,
        temperature: float,
    ) -> None:
        self.graph, self.config, self.ranks = graph, config, LeafRanks(mesh)
        self.head_run: HeadRun | None = None
        self._engine, self.spec = engine, dataclasses.replace(config.head_spec, temperature=temperature)
        self.compiler_options = options = compiler_options(self.ranks.state_device.platform)
        self.reader = BlockForward(graph, config, block, options)
        self._weight = jax.jit(self.weight_of)
        self._narrow = jax.jit(self._narrowed)
        self._loaded: tuple[nnx.State, LeafParameters] | None = None
        self._head = jax.jit(self._all_log_probs, compiler_options=options)
        self._head_vjp = jax.jit(self._all_gradients, out_shardings=self.ranks.split, compiler_options=options)

    def load(self, params: nnx.State) -> LeafParameters:
        """Copies the parameters to where leaves need them, in the activations' dtype; those of the last call are there."""
        if self._loaded is None or self._loaded[0] is not params:
            self._loaded = None
            self._loaded = params, self._copied(params)
        return self._loaded[1]

    def unload(self) -> None:
        """Drops the copies, before the memory of the parameters goes to others."""
        self._loaded = None

    def _copied(self, params: nnx.State) -> LeafParameters:
        ranks = self.ranks
        narrow = self._narrow(params) if len(ranks.devices) > 1 else None
        # Copied before the layers are taken apart: a few large arrays, where there would be hundreds.
        copies = [jax.device_put(params if each is ranks.state_device else narrow, each) for each in ranks.devices]
        weights, heads = list(map(self.reader.load, copies)), list(map(self._weight, copies))
        return LeafParameters(weights, heads, ranks.over_tensor(self._shards().shard_rows(heads[0])))

    def trace(self, rows: int, length: int, support_capacity: int | None) -> None:
        """Traces the head for leaves of a shape without compiling it; ValueError for operands that the engine refuses."""
        try:
            jax.eval_shape(self._head, *self._operands(rows, length, support_capacity))
        except EngineUnavailable as error:
            require(False, "--invariance.engine", "an engine that can run here", str(error))

    def _operands(self, rows: int, length: int, support_capacity: int | None) -> tuple:
        """Returns shapes and places of the head's operands for leaves of a shape."""
        config, shards, tokens = self.config, self._shards(), (self.ranks.count * rows, length)
        blocks = shards.num_shards * shards.max_width, config.hidden_size

        def split(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self.ranks.split)

        support = None
        if support_capacity is not None:
            support = Support(*(split(shape, "int32") for shape in ((self.ranks.count * support_capacity,), tokens)))
        weight = jax.ShapeDtypeStruct(blocks, config.dtype, sharding=NamedSharding(self.ranks.mesh, P(TENSOR_AXIS)))
        hidden = split((*tokens, config.hidden_size), config.dtype)
        return hidden, weight, split(tokens, "int32"), split(tokens, "bool"), support

    def shapes(self, params: nnx.State) -> LeafParameters:
        """Returns shapes and places of what `load` copies, on the first rank."""
        device, operands = self.ranks.devices[0], self._operands(1, 1, None)
        made = jax.eval_shape(self.reader.load, params), jax.eval_shape(self._weight, params)
        return LeafParameters(*([each] for each in shapes_on(device, made)), operands[1])

    def lower_head(
        self, rows: int, length: int, support_capacity: int | None
    ) -> tuple[Callable[[], CompiledProgram], tuple[jax.ShapeDtypeStruct, ...]]:
        """Lowers the head for leaves of a shape; returns shapes of a rank's log-probs and entropies too."""
        operands = self._operands(rows, length, support_capacity)
        return lower_program(self._head, *operands), self._of_rank(jax.eval_shape(self._head, *operands)[:2])

    def lower_head_vjp(
        self, rows: int, length: int, support_capacity: int | None
    ) -> tuple[Callable[[], CompiledProgram], tuple[jax.ShapeDtypeStruct, ...]]:
        """Lowers the gradients of the head for leaves of a shape; returns shapes of a rank's two too."""
        operands = self._operands(rows, length, support_capacity)
        values = jax.eval_shape(self._head, *operands)[:2]
        cotangents = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.ranks.split) for x in values)
        lowered = lower_program(self._head_vjp, *operands, cotangents)
        return lowered, self._of_rank(jax.eval_shape(self._head_vjp, *operands, cotangents))

    def _of_rank(self, tree: Any) -> Any:
        """Returns shapes of the first rank's part of results that the ranks split."""
        part = lambda x: jax.ShapeDtypeStruct((x.shape[0] // self.ranks.count, *x.shape[1:]), x.dtype)  # noqa: E731
        return shapes_on(self.ranks.devices[0], jax.tree.map(part, tree))

    def _narrowed(self, params: nnx.State) -> nnx.State:
        """Returns the parameters in the dtypes that the forward passes read: vectors of each layer stay as they are."""

        def narrowed(path: tuple, leaf: Array) -> Array:
            is_matrix = leaf.ndim > (2 if path[0].key == "layers" else 1)
            return leaf.astype(self.config.dtype) if is_matrix else leaf

        return jax.tree_util.tree_map_with_path(narrowed, params)

    def weight_of(self, params: nnx.State) -> Float[Array, "V H"]:
        """Returns the head in the activations' dtype."""
        return nnx.merge(self.graph, params).head()[1]

    def body(self, loaded: LeafParameters, tokens: list[Int[Array, "rows T"]]) -> list[Float[Array, "rows T H"]]:
        """Computes hidden states of each rank's rows, one document from the first slot on in each."""
        return self.ranks.side_by_side(self.reader.rows, loaded.weights, tokens)

    def head(
        self, loaded: LeafParameters, hidden: list, targets: list, mask: list, supports: list[Support | None]
    ) -> list[TokenLogProbs]:
        """Computes log-probs and entropies of each rank's tokens, on their supports where these are not None."""
        to_global = self.ranks.to_global
        operands = (to_global(hidden), loaded.rows, to_global(targets), to_global(mask), self._joined(supports))
        # Only one program with collectives in flight at a time, as in GspmdGradients.
        result = jax.block_until_ready(self._head(*operands))
        return [TokenLogProbs(*each) for each in zip(*map(self.ranks.to_local, result[:2]), strict=True)]

    def head_vjp(
        self,
        loaded: LeafParameters,
        hidden: list,
        targets: list,
        mask: list,
        supports: list[Support | None],
        cotangents: list,
    ) -> list[tuple]:
        """Computes gradients of each rank's hidden states and head [1, V, H] from those of its log-probs and entropies."""
        to_global, to_local = self.ranks.to_global, self.ranks.to_local
        joined = tuple(map(to_global, zip(*cotangents, strict=True)))
        operands = (to_global(hidden), loaded.rows, to_global(targets), to_global(mask), self._joined(supports), joined)
        d_hidden, d_weight = jax.block_until_ready(self._head_vjp(*operands))
        return list(zip(to_local(d_hidden), to_local(d_weight), strict=True))

    def _joined(self, supports: list[Support | None]) -> Support | None:
        """Returns one support over the mesh, whose ids and counts are split over the ranks."""
        return jax.tree.map(lambda *parts: self.ranks.to_global(parts), *supports)

    def body_vjp(self, params, inputs: tuple, d_hidden):
        """Computes gradients of the parameters for one rank's (tokens, positions, segment_ids); the caller compiles it.

        They start from hidden states computed again for whole rows, equal to those of `body` up to rounding.
        """

        def hidden_states(params):
            return nnx.merge(self.graph, params).hidden_states(*inputs)

        _, pull_back = jax.vjp(hidden_states, params)
        return pull_back(d_hidden)[0]

    def _shards(self) -> VocabShards:
        return self._engine.shards(self.config.vocab_size, self.ranks.mesh.shape[TENSOR_AXIS])

    def _local_log_probs(self, hidden, rows, targets, mask, support) -> TokenLogProbs:
        layout = {"axis_name": TENSOR_AXIS, "vocab": self._shards(), "engine": self._engine}
        options = {"with_entropy": True, **self.spec.keywords(), **layout}
        with record_head_runs() as runs:
            result = linear_log_probs(hidden, rows, targets, mask=mask, support=support, **options)
        self.head_run = runs[0]
        return result

    def _all_log_probs(self, hidden, rows, targets, mask, support):
        own = P(self.ranks.axes)
        specs = (own, P(TENSOR_AXIS), own, own, own)
        mapped = jax.shard_map(self._local_log_probs, mesh=self.ranks.mesh, in_specs=specs, out_specs=own)
        return mapped(hidden, rows, targets, mask, support)

    def _all_gradients(self, hidden, rows, targets, mask, support, cotangents):
        def local(hidden, rows, targets, mask, support, cotangents):
            # Typed as varying over the ranks, so that each keeps its own gradient of the head.
            rows = jax.lax.pcast(rows, self.ranks.axes, to="varying")

            def values(hidden, rows):
                return self._local_log_probs(hidden, rows, targets, mask, support)[:2]

            _, pull_back = jax.vjp(values, hidden, rows)
            d_hidden, d_rows = pull_back(cotangents)
            return d_hidden, d_rows[None]

        own = P(self.ranks.axes)
        specs, out_specs = (own, P(TENSOR_AXIS), *[own] * 4), (own, P(self.ranks.axes, TENSOR_AXIS))
        mapped = jax.shard_map(local, mesh=self.ranks.mesh, in_specs=specs, out_specs=out_specs)
        d_hidden, d_rows = mapped(hidden, rows, targets, mask, support, cotangents)
        return d_hidden, jax.vmap(self._shards().unshard_rows)(d_rows)
