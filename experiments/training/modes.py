"""What `--invariant` replaces: how sums are computed and tokens are drawn. Everything else is the same trainer."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.config import Config
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.models.mesh import TENSOR_AXIS, make_mesh, parse_mesh
from experiments.models.parameters import abstract_decoder
from experiments.models.sharding import on_one_device, parameter_shardings
from experiments.sampling.cached_draw import CachedDraw
from experiments.sampling.completer import Draw
from experiments.sampling.leaf_draw import LeafDraw
from experiments.sampling.pick import DrawOptions
from experiments.sampling.prompts import Sizes
from experiments.tasks.tokenizer import Tokenizer
from experiments.training.leaf_programs import LeafPrograms
from experiments.training.leaf_sums import LeafSums
from experiments.training.micro_batch_sums import MicroBatchSums
from experiments.training.objectives import Objective
from experiments.training.sums import GradientSums
from jaxlogp import ReductionOrder, VocabShards
from jaxlogp.errors import require

Load = Callable[[DecoderConfig, Callable[[nnx.State], Any]], nnx.State]
"""Parameters of a decoder, placed by shardings for its abstract state."""


def placeholders(decoder: DecoderConfig, shardings: Callable[[nnx.State], Any]) -> nnx.State:
    """A `Load` of zeros, in the place of parameters that a checkpoint will bring."""
    _, state = abstract_decoder(decoder)
    return jax.tree.map(lambda leaf, place: jnp.zeros(leaf.shape, leaf.dtype, device=place), state, shardings(state))


class Mode(Protocol):
    """A way to compute the same run.

    Attributes:
      mesh: the device mesh.
      params: the decoder's first parameters.
      order: the numeric identity of the head, where the mode has one.
      block: number of documents dealt to a data rank at a time.
      share_rows: whether documents share rows.
      vocab: the shards of the head's vocabulary over the tensor ranks.
    """

    mesh: jax.sharding.Mesh
    params: nnx.State
    order: ReductionOrder | None
    block: int
    share_rows: bool
    vocab: VocabShards

    def sums(self, objective: Objective, temperature: float) -> GradientSums:
        """Gradient sums of an objective."""

    def draw(self, tokenizer: Tokenizer, sizes: Sizes, options: DrawOptions) -> Draw:
        """A way to draw completions."""


class PlainMode:
    """Whole micro-batches under GSPMD, and a sampler with a cache."""

    order: ReductionOrder | None = None
    block = 1
    share_rows = True

    def __init__(self, config: Config, decoder: DecoderConfig, load: Load | None = None) -> None:
        self.mesh = make_mesh(parse_mesh(config.mesh))
        self._engine, self._accumulate = config.loss.engine, config.schedule.accumulate
        self.vocab = VocabShards.even(decoder.vocab_size, self.mesh.shape[TENSOR_AXIS])
        if load is None:
            self._graph, self.params = nnx.split(Decoder(decoder, rngs=nnx.Rngs(config.seed), mesh=self.mesh))
        else:
            self._graph, _ = abstract_decoder(decoder, self.mesh)
            self.params = load(decoder, lambda state: parameter_shardings(state, self.mesh))

    def sums(self, objective: Objective, temperature: float) -> MicroBatchSums:
        """See `Mode`."""
        options = {"temperature": temperature, "engine": self._engine, "accumulate": self._accumulate}
        return MicroBatchSums(self._graph, self.mesh, objective, **options)

    def draw(self, tokenizer: Tokenizer, sizes: Sizes, options: DrawOptions) -> CachedDraw:
        """See `Mode`."""
        return CachedDraw(self._graph, self.mesh, tokenizer, sizes, options)


class InvariantMode:
    """Leaves in a fixed order, and a sampler that runs the trainer's own programs."""

    share_rows = False

    def __init__(self, config: Config, decoder: DecoderConfig, load: Load | None = None) -> None:
        spec = parse_mesh(config.mesh)
        self.mesh, self.block = make_mesh(spec), config.invariance.leaf_rows
        dtype = "float32" if decoder.fp32_head else decoder.dtype
        self.order = config.invariance.order(decoder.vocab_size, dtype)
        expected = f"tensor ranks that divide the {self.order.granules} granules of the vocabulary, with --invariant"
        require(self.order.granules % spec.tensor == 0, "--mesh", expected, spec.tensor)
        self.order.check_across_processes()
        self.vocab = self.order.shards(decoder.vocab_size, spec.tensor)
        # The body, the embedding lookup included, is replicated on the tensor ranks.
        if load is None:
            self._graph, self.params = nnx.split(Decoder(decoder, rngs=nnx.Rngs(config.seed)))
        else:
            self._graph, _ = abstract_decoder(decoder)
            self.params = load(decoder, on_one_device(self.mesh.devices.flat[0]))
        self._decoder = decoder
        self._programs: dict[float, LeafPrograms] = {}

    def sums(self, objective: Objective, temperature: float) -> LeafSums:
        """See `Mode`."""
        return LeafSums(self._leaf_programs(temperature), objective, self.block)

    def draw(self, tokenizer: Tokenizer, sizes: Sizes, options: DrawOptions) -> LeafDraw:
        """See `Mode`."""
        programs = self._leaf_programs(options.temperature)
        return LeafDraw(programs, tokenizer, sizes, leaf_rows=self.block, greedy=options.greedy)

    def _leaf_programs(self, temperature: float) -> LeafPrograms:
        # One set per temperature, so that sampler and trainer share compiled programs.
        if temperature not in self._programs:
            shared = (self._graph, self._decoder, self.mesh, self.order)
            self._programs[temperature] = LeafPrograms(*shared, temperature=temperature)
        return self._programs[temperature]


def replicated_embedding(decoder: DecoderConfig, mesh: jax.sharding.Mesh) -> str | None:
    """A warning where tensor ranks do not divide the vocabulary, or None."""
    ranks = mesh.shape[TENSOR_AXIS]
    if decoder.vocab_size % ranks == 0:
        return None
    return (
        f"{ranks} tensor ranks do not divide the vocabulary of {decoder.vocab_size}: the embedding table "
        "is replicated on every rank, and the head's shards are uneven"
    )
