"""The trainer's own step for a model of random weights: micro-batch sums, then one update."""

import functools
import itertools
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx
from jax.stages import Compiled

from benchmarks.support_speed import MOST_IDS, draw_counts, draw_ids
from experiments.config import OptimizerConfig
from experiments.learner.backend import StepGradient
from experiments.learner.gradients import GspmdGradients
from experiments.learner.objectives import PolicyObjective
from experiments.learner.optimizers import OPTIMIZERS
from experiments.learner.packing import GlobalMicroBatch, Packing
from experiments.learner.update import TrainState, Update
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.models.mesh import MeshSpec, document_axis, make_mesh
from experiments.models.sharding import place_parameters
from jaxlogp import Document, Support
from jaxlogp.errors import require
from jaxlogp.losses import grpo

STEPS = 1000
"""Of the run whose schedule the updates follow."""
ONE_DEVICE = MeshSpec()


@dataclass(frozen=True)
class Rows:
    """Packed rows of a step.

    Attributes:
        rows: of one rank in the whole step.
        length: tokens of a row.
        document: tokens of a document.
        micro_batches: how many the step is cut into.
    """

    rows: int
    length: int
    document: int
    micro_batches: int

    @property
    def tokens(self) -> int:
        """Slots of one rank in the step, padding too."""
        return self.rows * self.length


@dataclass(frozen=True)
class RandomSupport:
    """Random ids that log-probs are taken over, as many as a sampler with top-p keeps.

    Attributes:
        law: law of the ids, as in `benchmarks.support_speed`.
        room: ids for which a micro-batch has room, for each of its tokens.
    """

    law: str
    room: int


class Step:
    """A model's training step, compiled for its rows.

    Args:
        config: the decoder.
        rows: what a step reads.
        engine: the head's engine.
        optimizer: name of the optimizer, and after a colon the dtype of its first moment, if not float32.
        accumulate: dtype of the gradient's sums.
        spec: the device mesh.
        support: ids that log-probs are taken over; None for the whole vocabulary.
    """

    def __init__(
        self,
        config: DecoderConfig,
        rows: Rows,
        engine: str,
        optimizer: str = "adamw",
        accumulate: str = "float32",
        spec: MeshSpec = ONE_DEVICE,
        support: RandomSupport | None = None,
    ) -> None:
        mesh = make_mesh(spec)
        # Weights are drawn on the device, whole: their values do not matter.
        graph, params = nnx.split(nnx.jit(lambda: Decoder(config, rngs=nnx.Rngs(0), mesh=mesh))())
        self.config, self.rows, self.spec = config, rows, spec
        self.num_parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        objective = PolicyObjective(grpo(), "with_entropy", document_axis(mesh))
        options = {"temperature": 1.0, "engine": engine, "accumulate": accumulate}
        self.sums = GspmdGradients(graph, mesh, objective, **options)
        self.update = Update(
            optimizer_of(optimizer).optimizer(STEPS),
            functools.partial(place_parameters, mesh=mesh),
        )
        self.state: TrainState = self.update.init(params)
        self.rounds = packed_rounds(rows, config.vocab_size, spec.ranks, support)

    def __call__(self) -> StepGradient:
        """One step; what it returns is ready when the step is done."""
        sums = self.sums.accumulate(self.state.params, self.rounds, 0)
        self.state, applied = self.update(self.state, sums)
        return applied

    @property
    def state_bytes(self) -> int:
        """What the first device holds of parameters and optimizer state."""
        first = jax.devices()[0]
        arrays = (leaf.addressable_shards for leaf in jax.tree.leaves(self.state))
        return sum(shard.data.nbytes for shards in arrays for shard in shards if shard.device == first)

    def micro_batch_program(self) -> Compiled:
        """The compiled gradient sums of one micro-batch."""
        return self.sums.lower(self.state.params, self.rounds[0])().programs[0].compiled


def optimizer_of(text: str) -> OptimizerConfig:
    """An optimizer as it is written: adamw, or adamw:bfloat16 with the dtype of its first moment."""
    known = (*OPTIMIZERS, "adamw:bfloat16", "muon:bfloat16")
    require(text in known, "--optimizer", f"one of {', '.join(known)}", text)
    name, _, first_moment = text.partition(":")
    return OptimizerConfig(name=name, learning_rate=1e-6, first_moment_dtype=first_moment or "float32")


def packed_rounds(
    rows: Rows, vocab_size: int, ranks: int = 1, support: RandomSupport | None = None
) -> list[GlobalMicroBatch]:
    """Micro-batches of random documents, a label on every token but the first; packed as the trainer packs."""
    rng = np.random.default_rng(0)
    per_row = rows.length // rows.document
    tail = rows.length - per_row * rows.document
    of_row = [rows.document] * per_row + ([tail] if tail > 1 else [])
    lengths = [length for _ in range(rows.rows) for length in of_row for _ in range(ranks)]
    if support is None:
        documents = [_document(rng, vocab_size, rng.integers(0, vocab_size, length - 1)) for length in lengths]
        capacity = None
    else:
        documents = _documents_on_support(rng, vocab_size, lengths, support.law)
        capacity = support.room * rows.tokens // rows.micro_batches
    size = rows.rows // rows.micro_batches, rows.length
    packing = Packing(ranks, *size, vocab_size, 0, support_capacity=capacity)
    rounds = packing.rounds(documents)
    assert len(rounds) == rows.micro_batches
    return rounds


def _documents_on_support(rng: np.random.Generator, vocab_size: int, lengths: list[int], law: str) -> list[Document]:
    """Draws each token evenly from a support of its own."""
    ends = np.cumsum([0] + [length - 1 for length in lengths])
    counts = draw_counts(rng, int(ends[-1]), min(MOST_IDS, vocab_size // 8))
    drawn = Support.from_counts(counts, draw_ids(rng, counts, vocab_size, law))
    tokens = drawn.ids[np.cumsum(counts) - counts]
    return [
        _document(rng, vocab_size, tokens[start:stop], drawn.part(start, stop))
        for start, stop in itertools.pairwise(ends.tolist())
    ]


def _document(
    rng: np.random.Generator, vocab_size: int, completion: np.ndarray, support: Support | None = None
) -> Document:
    """Returns a document with the log-probs of a policy that knows nothing."""
    counts = np.full(completion.size, vocab_size) if support is None else np.asarray(support.counts)
    log_probs = -np.log(counts.astype(np.float32))
    prompt, advantage = rng.integers(0, vocab_size, 1), float(rng.normal())
    return Document.of_completion(prompt, completion, log_probs, support=support, advantages=advantage)


def model_flops(config: DecoderConfig, rows: Rows, num_parameters: int, context: int) -> float:
    """Floating-point operations of one rank's step that the model needs; what is computed twice does not count.

    6 for each token and parameter, but those of a table that is only looked up, whose head is another; and
    12 · layers · heads · features · context / 2 for each token's attention.

    Args:
        config: the decoder.
        rows: of the step.
        num_parameters: of the model, a tied head once.
        context: tokens that attend to each other: a row for the usual number, a document for what is needed.
    """
    attention = 6 * config.num_layers * config.num_heads * config.head_dim * context
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    return rows.tokens * (6 * (num_parameters - looked_up) + attention)
