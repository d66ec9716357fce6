"""The model of a run: what the options name, or the caller brings."""

import inspect
from dataclasses import replace
from typing import Any

from flax import nnx

from experiments.config import Config, ModelConfig
from experiments.learner.model_source import DecoderSource, ModelSource, UserModel
from experiments.models.pretrained import open_pretrained
from experiments.models.protocol import check_model
from experiments.models.tokenizer import Tokenizer, tokenizer_for
from experiments.named import NOT_A_MODULE, OWN, call_named, import_named
from experiments.tasks import Task
from jaxlogp.errors import require

_PLACES = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def find_model(config: Config, task: Task, model: nnx.Module | None, *, restored: bool) -> ModelSource:
    """Returns the model that the options, or the caller, name; of one that is `restored` a checkpoint brings the parameters.

    The task's tokenizer is that of a model from nothing, and of the user's own.
    """
    options = config.model
    if options.own is not None or model is not None:
        return _user_model(config, tokenizer_for(task.alphabet), model)
    if options.path is None:
        decoder = options.decoder(tokenizer_for(task.alphabet).vocab_size, config.invariant)
        # A named shape has its own vocabulary, of which a model from nothing samples any token.
        tokenizer = tokenizer_for(task.alphabet, decoder.vocab_size)
        return DecoderSource(tokenizer, decoder, config.seed, restored=restored)
    found = open_pretrained(options.path, chat_template=options.chat_template)
    decoder = replace(options.of_pretrained(found.config, config.invariant), lora=config.lora)
    return DecoderSource(found.tokenizer, decoder, config.seed, found, restored)


def with_own_model(config: Config, model: nnx.Module | None) -> Config:
    """The options, with a note of the model that was passed from Python, if any."""
    if model is not None:
        expected = "no other options where train is given a model"
        require(config.model == ModelConfig(), "--model", expected, "other options")
        return replace(config, model=ModelConfig(own=OWN + type(model).__name__))
    own = config.model.own
    only = own is None or config.model == ModelConfig(own=own)
    require(only, "--model", "no other options with --model.own", "other options")
    return config


def _user_model(config: Config, tokenizer: Tokenizer, passed: nnx.Module | None) -> UserModel:
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
    return UserModel(tokenizer, model, found)


def _passed_model(own: str | None, model: nnx.Module | None) -> nnx.Module:
    """Returns the model from Python, if it is the one that the run began with."""
    name = None if model is None else type(model).__name__
    python = f"as the run began (from Python: model=), or {NOT_A_MODULE}"
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
