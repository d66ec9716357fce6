"""The optimizer step of `--invariant`: the same parameters, bit for bit, on every mesh and every micro-batch cut.

The unit of computation is the leaf: `leaf_rows` rows with one document each, always of one shape. What a leaf yields
does not depend on the mesh, and leaves are added in one binary tree over the documents' order, whether they come from
micro-batches one after the other or from data ranks side by side.

A compiler may turn the same computation into other bits in another program, or in the same program for another number of
devices. So everything that needs no other rank runs as a program for one device, on the first device of each data rank;
the head alone runs over the "tensor" axis, and engine `fixed_order` makes its results independent of it:

    hidden = body(params)                            each data rank
    log_probs, entropy = head(hidden, weight)        data, tensor
    sums, g = loss(log_probs, entropy)               each data rank
    d_hidden, d_weight = head_vjp(hidden, weight, g) data, tensor
    leaf = body_vjp(params, d_hidden), d_weight, sums each data rank

Leaves then travel to the first device, where they are added and the update is made. The body of the model is not split
over "tensor" in this mode, and parameters and optimizer state are whole.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from experiments.config import LossConfig
from experiments.models.decoder import Decoder, DecoderConfig
from experiments.training.step import MicroSums, TrainState, TrainStep, loss_and_terms
from jaxlogp import (
    FixedOrderEngine,
    HeadRun,
    MicroBatch,
    ReductionOrder,
    TokenLogProbs,
    VocabShards,
    linear_log_probs,
    record_head_runs,
)
from jaxlogp._compat import vary_over
from jaxlogp.errors import require
from jaxlogp.invariance.exact import no_negative_zero
from jaxlogp.policy.accumulate import StepSums

HEAD_NAMES = {True: "embed_tokens", False: "lm_head"}


class Loaded(NamedTuple):
    """Parameters where the leaf's programs want them: whole on each data rank, the head's rows over the tensor ranks."""

    ranks: list[nnx.State]
    rows: Float[Array, "blocks H"]


class LeafPrograms:
    """The compiled programs of one leaf on every data rank; trainer and sampler share them.

    Lists hold one item per data rank, arrays on the first device of that rank.

    Args:
      graph: graph definition of a decoder without a mesh.
      config: sizes and options of the decoder.
      mesh: axes "data" and "tensor", of type Auto.
      order: the numeric identity of the head.
      temperature: divisor of the logits.
      fp32_head: multiply hidden states and head in fp32.

    Attributes:
      devices: the first device of each data rank.
      head_run: the head call; None before it is traced.
    """

    def __init__(
        self,
        graph: nnx.GraphDef[Decoder],
        config: DecoderConfig,
        mesh: Mesh,
        order: ReductionOrder,
        *,
        temperature: float,
        fp32_head: bool,
    ) -> None:
        self.graph, self.config, self.mesh, self.devices = graph, config, mesh, list(mesh.devices[:, 0])
        self.head_run: HeadRun | None = None
        self._order, self._options = order, {"temperature": temperature, "fp32_head": fp32_head}
        self._body = jax.jit(self._one_body)
        self._weight = jax.jit(self.weight_of)
        self._head = jax.jit(self._all_log_probs)
        self._head_vjp = jax.jit(self._all_gradients)

    def load(self, params: nnx.State) -> Loaded:
        """Copies the parameters to where a leaf needs them, once for many leaves."""
        weight = self._weight(params)
        rows = self._shards().shard_rows(weight)
        ranks = [jax.device_put(params, device) for device in self.devices]
        return Loaded(ranks, jax.device_put(rows, NamedSharding(self.mesh, P("tensor"))))

    def weight_of(self, params: nnx.State) -> Float[Array, "V H"]:
        """The head in the activations' dtype."""
        return nnx.merge(self.graph, params).head_weight()

    def body(self, loaded: Loaded, inputs: list[tuple]) -> list[Array]:
        """Hidden states [rows, T, H] of each rank's (tokens, positions, segment_ids)."""
        return [self._body(params, *each) for params, each in zip(loaded.ranks, inputs, strict=True)]

    def head(self, loaded: Loaded, hidden: list, targets: list, mask: list) -> list[TokenLogProbs]:
        """Log-probs and entropies of each rank's tokens."""
        operands = (self._join(hidden), loaded.rows, self._join(targets), self._join(mask))
        # One program with collectives in flight at a time: see TrainStep.micro_sums.
        result = jax.block_until_ready(self._head(*operands))
        return [TokenLogProbs(*pair) for pair in zip(*map(self._split, result), strict=True)]

    def head_vjp(self, loaded: Loaded, hidden: list, targets: list, mask: list, g_log_probs: list) -> list[tuple]:
        """Gradients of each rank's hidden states, and of the head [1, V, H] by that rank alone."""
        operands = (self._join(hidden), loaded.rows, *map(self._join, (targets, mask, g_log_probs)))
        d_hidden, d_weight = jax.block_until_ready(self._head_vjp(*operands))
        return list(zip(self._split(d_hidden), self._split(d_weight), strict=True))

    def _one_body(self, params, tokens, positions, segment_ids):
        return nnx.merge(self.graph, params)(tokens, positions, segment_ids)

    def body_vjp(self, params, inputs: tuple, d_hidden):
        """Gradients of the parameters for one rank's inputs; to be compiled by the caller."""
        _, pull_back = jax.vjp(lambda params: self._one_body(params, *inputs), params)
        return pull_back(d_hidden)[0]

    def _shards(self) -> VocabShards:
        return self._order.shards(self.config.vocab_size, self.mesh.shape["tensor"])

    def _local_log_probs(self, hidden, rows, targets, mask) -> TokenLogProbs:
        vocab = self._shards()
        options = {**self._options, "axis_name": "tensor", "vocab": vocab, "engine": FixedOrderEngine(self._order)}
        with record_head_runs() as runs:
            result = linear_log_probs(hidden, rows, targets, mask=mask, with_entropy=True, **options)
        self.head_run = runs[0]
        return result

    def _all_log_probs(self, hidden, rows, targets, mask):
        data = P("data")
        specs = (data, P("tensor"), data, data)
        mapped = jax.shard_map(self._local_log_probs, mesh=self.mesh, in_specs=specs, out_specs=data)
        return mapped(hidden, rows, targets, mask)

    def _all_gradients(self, hidden, rows, targets, mask, g_log_probs):
        def local(hidden, rows, targets, mask, g_log_probs):
            # Typed as varying over the data ranks: each keeps its own gradient of the head.
            rows = vary_over(rows, {"data"})

            def log_probs(hidden, rows):
                return self._local_log_probs(hidden, rows, targets, mask).log_probs

            _, pull_back = jax.vjp(log_probs, hidden, rows)
            d_hidden, d_rows = pull_back(g_log_probs)
            return d_hidden, d_rows[None]

        data = P("data")
        specs, out_specs = (data, P("tensor"), data, data, data), (data, P("data", "tensor"))
        mapped = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=out_specs)
        d_hidden, d_rows = mapped(hidden, rows, targets, mask, g_log_probs)
        return d_hidden, jax.vmap(self._shards().unshard_rows)(d_rows)

    def _join(self, pieces: list) -> Array:
        """One array over the mesh, split over "data" and whole on every tensor rank; copies only."""
        copies = [
            jax.device_put(piece, device)
            for piece, row in zip(pieces, self.mesh.devices, strict=True)
            for device in row
        ]
        shape = (len(pieces) * copies[0].shape[0], *copies[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(self.mesh, P("data")), copies)

    def _split(self, joined: Array) -> list[Array]:
        """Each data rank's part, on its first device; copies only."""
        whole = jax.device_put(joined, NamedSharding(self.mesh, P("data")))
        parts = {shard.device: shard.data for shard in whole.addressable_shards}
        return [parts[device] for device in self.devices]


class InvariantStep(TrainStep):
    """A :class:`~experiments.training.step.TrainStep` with the sums of a step in one fixed order.

    Args:
      programs: the leaf's programs.
      loss: the loss options.
      optimizer: the optax transformation.
      leaf_rows: rows of a leaf; a micro-batch is a whole number of leaves.
      supervised: train by cross-entropy on the labels (the warm start).
    """

    def __init__(
        self,
        programs: LeafPrograms,
        loss: LossConfig,
        optimizer: optax.GradientTransformation,
        *,
        leaf_rows: int,
        supervised: bool = False,
    ) -> None:
        super().__init__(programs.graph, programs.mesh, loss, optimizer, supervised=supervised)
        self._programs, self._leaf_rows = programs, leaf_rows
        self._home = programs.devices[0]
        self._everywhere = SingleDeviceSharding(self._home)
        self._leaf_loss = jax.jit(self._one_loss)
        self._leaf_sums = jax.jit(self._one_sums)

    def place(self, state: TrainState) -> TrainState:
        """Whole parameters and optimizer state on the first device."""
        return jax.device_put(state, self._home)

    @property
    def num_compilations(self) -> int:
        """How many shapes of leaf have been compiled; 1 for each data rank, whatever the number of leaves."""
        return self._leaf_loss._cache_size()

    def sums_of(
        self, params: nnx.State, rounds: Iterable[tuple[MicroBatch, ...]], documents_seen: int
    ) -> MicroSums | None:
        """Sums of a step: every round's leaves in the order of their documents, folded neighbours first."""
        tree, loaded = TreeFold(self.add), self._programs.load(params)
        for ranks in rounds:
            for leaves in zip(*(split_rows(rank, self._leaf_rows) for rank in ranks), strict=True):
                for leaf in self._sums_of_leaves(loaded, leaves, documents_seen):
                    tree.push(jax.device_put(leaf, self._home))
        return tree.total()

    def _sums_of_leaves(self, loaded: Loaded, leaves: tuple[MicroBatch, ...], documents_seen: int) -> list[MicroSums]:
        """The sums of one leaf of each data rank."""
        batches = [jax.device_put(leaf, device) for leaf, device in zip(leaves, self._programs.devices, strict=True)]
        inputs = [(batch.tokens, batch.positions, batch.segment_ids) for batch in batches]
        targets, mask = [batch.targets for batch in batches], [batch.mask for batch in batches]
        hidden = self._programs.body(loaded, inputs)
        results = self._programs.head(loaded, hidden, targets, mask)
        seen = np.int32(documents_seen)
        sums, g_log_probs = zip(
            *(self._leaf_loss(result, batch, seen) for result, batch in zip(results, batches, strict=True)), strict=True
        )
        gradients = self._programs.head_vjp(loaded, hidden, targets, mask, list(g_log_probs))
        self.head_run = self._programs.head_run
        return [
            self._leaf_sums(*operands, *pair)
            for *operands, pair in zip(loaded.ranks, inputs, sums, gradients, strict=True)
        ]

    def _one_loss(self, result: TokenLogProbs, batch: MicroBatch, documents_seen):
        """Loss, metric terms and drift of one leaf, and the gradient of the loss sum."""

        def total(log_probs):
            with_gradient = TokenLogProbs(log_probs, result.entropy)
            parts = loss_and_terms(self._loss, with_gradient, batch, documents_seen, supervised=self._supervised)
            return parts[0].sum, parts

        g_log_probs, parts = jax.grad(total, has_aux=True)(result.log_probs)
        return parts, g_log_probs

    def _one_sums(self, params, inputs, parts, d_hidden, d_weight) -> MicroSums:
        """The gradient of one leaf, the head's part included, with the leaf's other sums."""
        loss, terms, drift = parts
        d_params = self._programs.body_vjp(params, inputs, d_hidden)
        d_params = add_to(d_params, HEAD_NAMES[self._programs.config.tie_embeddings], d_weight[0])
        sums = MicroSums(StepSums.of(d_params, loss, terms), drift)
        # A leaf of padding is a zero of the tree only if no sum is -0.0.
        return jax.tree.map(lambda x: no_negative_zero(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, sums)


def add_to(state: nnx.State, name: str, extra: Array) -> nnx.State:
    """`state` with `extra` added to the parameter `name` of its top level."""

    def leaf(path, x):
        key = path[0]
        return x + extra.astype(x.dtype) if getattr(key, "key", getattr(key, "name", None)) == name else x

    return jax.tree_util.tree_map_with_path(leaf, state)


class TreeFold:
    """Adds parts that come one after the other in the binary tree over their order, keeping log2 of them.

    ((p0 p1) (p2 p3)) p4 for five parts; neutral parts at the end change nothing.

    Args:
      add: adds two neighbours.

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
        """The next part."""
        level = 0
        while self._nodes and self._nodes[-1][0] == level:
            part = self._add(self._nodes.pop()[1], part)
            level += 1
        self._nodes.append((level, part))

    def total(self) -> Any | None:
        """All parts together, or None without any."""
        if not self._nodes:
            return None
        _, total = self._nodes.pop()
        while self._nodes:
            total = self._add(self._nodes.pop()[1], total)
        return total


def split_rows(batch: MicroBatch, rows: int) -> list[MicroBatch]:
    """A micro-batch of one document a row, as micro-batches of `rows` rows.

    Raises:
      ValueError: a number of rows that is not a multiple, or two documents in a row.
    """
    total = batch.tokens.shape[0]
    require(total % rows == 0, "rows", f"a multiple of {rows} rows, the leaf", total)
    documents = int(batch.num_documents)
    first = np.where(batch.segment_ids[:, 0] < 0, -1, np.arange(total))
    own_row = (batch.segment_ids == first[:, None]) | (batch.segment_ids < 0)
    require(bool(own_row.all()), "batch", "one document a row, in order", "documents that share a row")
    return [_leaf_of(batch, start, rows, documents) for start in range(0, total, rows)]


def _leaf_of(batch: MicroBatch, start: int, rows: int, documents: int) -> MicroBatch:
    here = slice(start, start + rows)
    count = min(max(documents - start, 0), rows)
    length = batch.tokens.shape[1]
    segments = np.where(batch.segment_ids[here] < 0, -1, batch.segment_ids[here] - start)
    last = np.clip(np.arange(rows), 0, max(count - 1, 0))[:, None]
    per_document = {
        name: np.concatenate([getattr(batch, name)[start : start + count], np.zeros(rows * length - count, dtype)])
        for name, dtype in (("rewards", np.float32), ("model_versions", np.int32))
    }
    per_token = {
        name: getattr(batch, name)[here]
        for name in ("tokens", "targets", "positions", "mask", "old_log_probs", "advantages")
    }
    return MicroBatch(
        **per_token,
        document_ids=np.broadcast_to(last, (rows, length)).astype(np.int32),
        segment_ids=segments.astype(np.int32),
        **per_document,
        num_documents=np.full(1, count, np.int32),
    )
