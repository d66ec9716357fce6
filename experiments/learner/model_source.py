"""Sources of a run's model: drawn from a seed, read from disk, or the user's own."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from experiments.models.attention import AttentionRun
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.models.lora import LoraConfig
from experiments.models.mesh import HEAD_AXES, SEQUENCE_AXIS, size_of
from experiments.models.parameters import abstract_decoder
from experiments.models.placement import placed
from experiments.models.pretrained import Pretrained
from experiments.models.tokenizer import Tokenizer
from jaxlogp.errors import require

Shardings = Callable[[nnx.State], Any]
"""A sharding for every leaf of a state, such as `experiments.models.sharding.parameter_shardings`."""


class ModelParts(NamedTuple):
    """A model taken apart: `nnx.merge(graph, params, frozen)` is it again."""

    graph: nnx.GraphDef
    params: nnx.State
    frozen: nnx.State


class ModelSource(Protocol):
    """A model that a run begins with; one that is no `Decoder` has no `decoder`, one that is not on disk no `pretrained`."""

    tokenizer: Tokenizer
    vocab_size: int
    decoder: DecoderConfig | None
    pretrained: Pretrained | None
    warning: str | None

    def parts(self, shardings: Shardings, mesh: Mesh | None) -> ModelParts:
        """The model, parameters in their places or still to be placed; `mesh` is what the model is told of it."""

    def graph(self, mesh: Mesh) -> nnx.GraphDef:
        """Graph definition of the model on another mesh."""

    def attention_run(self, rows: int, length: int, mesh: Mesh) -> AttentionRun:
        """How micro-batches attend; one that was named and cannot run here is refused."""


@dataclass(frozen=True)
class DecoderSource:
    """A `Decoder`, drawn from a seed or read from disk; of one that is `restored` a checkpoint brings the parameters."""

    tokenizer: Tokenizer
    decoder: DecoderConfig
    seed: int
    pretrained: Pretrained | None = None
    restored: bool = False
    warning = None

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    def parts(self, shardings: Shardings, mesh: Mesh | None) -> ModelParts:
        if self.decoder.lora.rank:
            return self._adapted(shardings, mesh)
        graph, abstract = abstract_decoder(self.decoder, mesh)
        if self.restored:
            params = placeholders(abstract, shardings)
        elif self.pretrained is not None:
            params = self._read(self.decoder, shardings)
        else:
            params = self._drawn(abstract, shardings)
        return ModelParts(graph, params, nnx.State({}))

    def graph(self, mesh: Mesh) -> nnx.GraphDef:
        return abstract_decoder(self.decoder, mesh)[0]

    def _adapted(self, shardings: Shardings, mesh: Mesh | None) -> ModelParts:
        """Adapters to be trained, and the base from disk, which no checkpoint holds."""
        graph, abstract = abstract_decoder(self.decoder, mesh)
        adapters = self._drawn(nnx.filter_state(abstract, nnx.LoRAParam), shardings)
        return ModelParts(graph, adapters, self._read(replace(self.decoder, lora=LoraConfig()), shardings))

    def _drawn(self, abstract: nnx.State, shardings: Shardings) -> nnx.State:
        places, tree = jax.tree.flatten(shardings(abstract))
        kind = nnx.LoRAParam if self.decoder.lora.rank else ...
        return _draws(self.decoder, kind, tuple(places), tree)(jax.random.key(self.seed))

    def _read(self, decoder: DecoderConfig, shardings: Shardings) -> nnx.State:
        assert self.pretrained is not None, "a model from disk"
        return self.pretrained.weights().load(decoder, shardings)

    def attention_run(self, rows: int, length: int, mesh: Mesh) -> AttentionRun:
        if size_of(mesh, SEQUENCE_AXIS) > 1:
            ranks, heads = size_of(mesh, *HEAD_AXES), self.decoder.num_kv_heads
            expected = f"sequence times tensor ranks that divide the {heads} key-value heads"
            require(heads % ranks == 0, "--mesh", expected, ranks)
        try:
            return self.decoder.attention_run(rows, length, mesh)
        except ValueError as error:
            seen = f"{self.decoder.attention}: {error}"
            require(False, "--model.attention", "an implementation that can run here", seen)
            raise


@dataclass(frozen=True)
class UserModel:
    """The user's own model, which stays as it is: what is trained is a copy of its parameters.

    `found` is what `--model.own` names, which makes the model, or the model itself if it was passed from Python.
    """

    tokenizer: Tokenizer
    model: nnx.Module
    found: Any
    decoder = None
    pretrained = None

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def parts(self, shardings: Shardings, mesh: Mesh | None) -> ModelParts:
        del mesh
        graph, params, frozen = nnx.split(self.model, nnx.Param, ...)
        # The first step takes over the memory of the parameters that it is given.
        params = jax.tree.map(jnp.copy, params)
        return ModelParts(graph, params, placed(frozen, shardings(frozen)))

    def graph(self, mesh: Mesh) -> nnx.GraphDef:
        del mesh
        return nnx.split(self.model)[0]

    def attention_run(self, rows: int, length: int, mesh: Mesh) -> AttentionRun:
        return AttentionRun("own", f"{type(self.model).__name__} computes hidden states by itself")

    @property
    def warning(self) -> str:
        name = type(self.model).__name__
        return f"{name} has no key-value cache: for every token of a completion its whole row is computed again"


@functools.lru_cache(maxsize=64)
def _draws(decoder: DecoderConfig, kind: Any, places: tuple, tree: Any) -> Callable[[jax.Array], nnx.State]:
    """Returns a program that draws a decoder's parameters of a kind, and no others, each shard where it belongs."""
    drawn = lambda key: nnx.state(Decoder(decoder, rngs=nnx.Rngs(params=key)), kind)  # noqa: E731
    # A CPU's compiler takes a quarter of the time so, and makes the same bits.
    options = {"xla_backend_optimization_level": 1}
    return jax.jit(drawn, out_shardings=jax.tree.unflatten(tree, places), compiler_options=options)


def placeholders(abstract: nnx.State, shardings: Shardings) -> nnx.State:
    """Zeros in the place of parameters that a checkpoint will bring."""
    places = shardings(abstract)
    return jax.tree.map(lambda leaf, place: jnp.zeros(leaf.shape, leaf.dtype, device=place), abstract, places)
