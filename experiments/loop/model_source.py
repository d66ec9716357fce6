"""Where the model of a run comes from: drawn for the task's tokenizer, read from disk, or the user's own."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from experiments.config import Config, ModelConfig
from experiments.models.attention import AttentionRun
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.models.lora import LoraConfig
from experiments.models.mesh import HEAD_AXES, SEQUENCE_AXIS, size_of
from experiments.models.parameters import abstract_decoder
from experiments.models.placement import placed
from experiments.models.pretrained import Pretrained, open_pretrained
from experiments.models.protocol import check_model
from experiments.named import OWN, call_named, import_named
from experiments.tasks import Task
from experiments.tasks.tokenizer import Tokenizer, tokenizer_for
from jaxlogp.errors import require

Shardings = Callable[[nnx.State], Any]
"""A sharding for every leaf of a state, such as `experiments.models.sharding.parameter_shardings`."""


class Parts(NamedTuple):
    """A model taken apart: `nnx.merge(graph, params, frozen)` is it again."""

    graph: nnx.GraphDef
    params: nnx.State
    frozen: nnx.State


class Origin(Protocol):
    """A model that a run begins with; one that is no `Decoder` has no `decoder`, one that is not on disk no `pretrained`."""

    tokenizer: Tokenizer
    vocab_size: int
    decoder: DecoderConfig | None
    pretrained: Pretrained | None
    warning: str | None

    def parts(self, shardings: Shardings, mesh: Mesh | None) -> Parts:
        """The model, parameters in their places or still to be placed; `mesh` is what the model is told of it."""

    def graph(self, mesh: Mesh) -> nnx.GraphDef:
        """Graph definition of the model on another mesh."""

    def attention_run(self, rows: int, length: int, mesh: Mesh) -> AttentionRun:
        """How micro-batches attend; one that was named and cannot run here is refused."""


@dataclass(frozen=True)
class DecoderOrigin:
    """A `Decoder`, drawn from a seed or read from disk; of one that is `restored` a checkpoint brings the parameters."""

    tokenizer: Tokenizer
    decoder: DecoderConfig
    seed: int
    pretrained: Pretrained | None = None
    restored: bool = False
    warning = None

    @property
    def vocab_size(self) -> int:
        """See `Origin`."""
        return self.decoder.vocab_size

    def parts(self, shardings: Shardings, mesh: Mesh | None) -> Parts:
        """See `Origin`."""
        if self.decoder.lora.rank:
            return self._adapted(shardings, mesh)
        if self.pretrained is None and not self.restored:
            graph, params = nnx.split(Decoder(self.decoder, rngs=nnx.Rngs(self.seed), mesh=mesh))
        else:
            graph, abstract = abstract_decoder(self.decoder, mesh)
            params = placeholders(abstract, shardings) if self.restored else self._read(self.decoder, shardings)
        return Parts(graph, params, nnx.State({}))

    def graph(self, mesh: Mesh) -> nnx.GraphDef:
        """See `Origin`."""
        return abstract_decoder(self.decoder, mesh)[0]

    def _adapted(self, shardings: Shardings, mesh: Mesh | None) -> Parts:
        """Adapters to be trained, and the base from disk, which no checkpoint holds."""
        graph, _ = abstract_decoder(self.decoder, mesh)
        # Compiled, so that no more than the adapters is drawn.
        drawn = jax.jit(lambda: nnx.state(Decoder(self.decoder, rngs=nnx.Rngs(self.seed)), nnx.LoRAParam))
        return Parts(graph, drawn(), self._read(replace(self.decoder, lora=LoraConfig()), shardings))

    def _read(self, decoder: DecoderConfig, shardings: Shardings) -> nnx.State:
        assert self.pretrained is not None, "a model from disk"
        return self.pretrained.weights().load(decoder, shardings)

    def attention_run(self, rows: int, length: int, mesh: Mesh) -> AttentionRun:
        """See `Origin`."""
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
class OwnOrigin:
    """The user's own model. It stays as it is: what is trained is a copy of its parameters.

    Attributes:
        found: what `--model.own` names, which makes the model; the model itself if it was passed from Python.
    """

    tokenizer: Tokenizer
    model: nnx.Module
    found: Any
    decoder = None
    pretrained = None

    @property
    def vocab_size(self) -> int:
        """See `Origin`."""
        return self.tokenizer.vocab_size

    def parts(self, shardings: Shardings, mesh: Mesh | None) -> Parts:
        """See `Origin`."""
        del mesh
        graph, params, frozen = nnx.split(self.model, nnx.Param, ...)
        # The first step takes over the memory of the parameters that it is given.
        params = jax.tree.map(jnp.copy, params)
        return Parts(graph, params, placed(frozen, shardings(frozen)))

    def graph(self, mesh: Mesh) -> nnx.GraphDef:
        """See `Origin`."""
        del mesh
        return nnx.split(self.model)[0]

    def attention_run(self, rows: int, length: int, mesh: Mesh) -> AttentionRun:
        """See `Origin`."""
        return AttentionRun("own", f"{type(self.model).__name__} computes hidden states by itself")

    @property
    def warning(self) -> str:
        """See `Origin`."""
        name = type(self.model).__name__
        return f"{name} has no key-value cache: for every token of a completion its whole row is computed again"


def origin_of(config: Config, task: Task, model: nnx.Module | None, *, restored: bool) -> Origin:
    """The origin that the options, or the caller, name; of one that is `restored` a checkpoint brings the parameters.

    Args:
        config: the options; `with_own_model` has put a note of the caller's model into them.
        task: its tokenizer is that of a model from nothing, and of the user's own.
        model: passed from Python, or None.
        restored: whether a checkpoint will bring the parameters.

    Raises:
        ValueError: a model that cannot be used, or a run that began with another one.
    """
    options = config.model
    if options.own is not None or model is not None:
        return _own_origin(config, tokenizer_for(task), model)
    if options.path is None:
        decoder = options.decoder(tokenizer_for(task).vocab_size, config.invariant)
        # A named shape has its own vocabulary, of which a model from nothing samples any token.
        tokenizer = tokenizer_for(task, decoder.vocab_size)
        return DecoderOrigin(tokenizer, decoder, config.seed, restored=restored)
    found = open_pretrained(options.path, chat_template=options.chat_template)
    decoder = replace(options.of_pretrained(found.config, config.invariant), lora=config.lora)
    return DecoderOrigin(found.tokenizer, decoder, config.seed, found, restored)


def with_own_model(config: Config, model: nnx.Module | None) -> Config:
    """The options, with a note of the model that was passed from Python, if any.

    Raises:
        ValueError: options of the decoder in addition to the user's own model, or two models.
    """
    if model is not None:
        expected = "no other options where train is given a model"
        require(config.model == ModelConfig(), "--model", expected, "other options")
        return replace(config, model=ModelConfig(own=OWN + type(model).__name__))
    own = config.model.own
    only = own is None or config.model == ModelConfig(own=own)
    require(only, "--model", "no other options with --model.own", "other options")
    return config


def _own_origin(config: Config, tokenizer: Tokenizer, passed: nnx.Module | None) -> OwnOrigin:
    own = config.model.own
    if own is not None and not own.startswith(OWN):
        require(passed is None, "--model.own", "None where a model is passed from Python", own)
        model, found = _named_model(own, tokenizer.vocab_size)
        check_model(model, tokenizer.vocab_size, "--model.own")
    else:
        model = found = _passed_model(own, passed)
        check_model(model, tokenizer.vocab_size)
    seen = f"a {type(model).__name__}, whose bits are not known"
    require(not config.invariant, "--invariant", "the project's own decoder", seen)
    return OwnOrigin(tokenizer, model, found)


def _passed_model(own: str | None, model: nnx.Module | None) -> nnx.Module:
    """Returns the model from Python, if it is the one that the run began with."""
    name = None if model is None else type(model).__name__
    python = "as the run began (from Python: model=)"
    wanted = "none, as the run began" if own is None else f"your own model {own.removeprefix(OWN)}, {python}"
    same = own == (None if name is None else OWN + name)
    require(same, "--model.own", wanted, "none" if name is None else f"your own model {name}")
    assert model is not None, "there is a name"
    return model


def _named_model(name: str, vocab_size: int) -> tuple[Any, Any]:
    """Returns the model that `--model.own` names, and the function or class that makes it."""
    expected = "module:name of a function or class that makes a Flax model, of no argument or of the vocabulary size"
    found = import_named("--model.own", name, expected)
    makes = callable(found) and not isinstance(found, nnx.Module)
    require(makes, "--model.own", expected, f"{name!r}, which is a {type(found).__name__}")

    def make() -> Any:
        # The signature of a module's class is that of its metaclass.
        signature = inspect.signature(found.__init__ if isinstance(found, type) else found)
        required = [
            each for each in signature.parameters.values() if each.default is each.empty and each.kind in _PLACES
        ]
        return found(vocab_size) if len(required) - isinstance(found, type) == 1 else found()

    return call_named("--model.own", name, expected, make), found


_PLACES = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def placeholders(abstract: nnx.State, shardings: Shardings) -> nnx.State:
    """Zeros in the place of parameters that a checkpoint will bring."""
    places = shardings(abstract)
    return jax.tree.map(lambda leaf, place: jnp.zeros(leaf.shape, leaf.dtype, device=place), abstract, places)
