"""Parameters and models in memory, from a run's newest checkpoint or from disk, for commands that do not train."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
from flax import nnx

from experiments.config import Config, validate
from experiments.learner.replicas import require_same_frozen
from experiments.learner.soundness import finite_leaves, name_non_finite
from experiments.loop.find_model import find_model
from experiments.loop.inference import Inference, make_inference
from experiments.loop.resume import with_saved_model
from experiments.loop.run_parts import (
    UserParts,
    changed_since,
    files_of,
    parts_of,
    require_own_task,
    require_same_files,
)
from experiments.loop.session import identity_of_run
from experiments.loop.supervised import find_task
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.models.huggingface.export import made_files
from experiments.models.huggingface.own_tokenizers import pretrained_form
from experiments.models.lora import LoraConfig, merged
from experiments.models.packaged import located
from experiments.models.parameters import abstract_decoder
from experiments.models.pretrained import Pretrained, open_pretrained, small_files
from experiments.models.sharding import on_one_device
from experiments.models.tokenizer import Tokenizer
from experiments.runs.checkpoint import complete_steps
from experiments.runs.config_file import load_config
from experiments.runs.console import RunConsole
from experiments.runs.folder import RunFolder, run_and_step
from experiments.runs.identity import RunParts
from experiments.runs.run_writer import read_checkpoint
from experiments.tasks import Task
from jaxlogp.errors import require


class LoadedRun(NamedTuple):
    inference: Inference
    params: nnx.State
    step: int


def load_run(
    run: str | Path, change: Callable[[Config], Config] = lambda stored: stored, *, task: Task | None = None
) -> LoadedRun:
    """Loads the parameters of a run's newest checkpoint, or of RUN@STEP. Writes nothing: the run may be training.

    `change` makes the options to read it with; `task` is your own, if the run began with one.
    """
    stored = _open(run, task)
    config = change(stored.config)
    inference = make_inference(config, config.data.user_task(task) if task is not None else None, restored=True)
    now = parts_of(inference.config, inference.task, UserParts(task), None, None, inference.model)
    require_same_files(stored.parts, now.files)
    for warning in changed_since(stored.parts, now):
        RunConsole().warn(warning)
    backend = inference.backend
    params, at = _restore(stored, backend.place(backend.take_params()), backend.frozen)
    return LoadedRun(inference, params, at)


class _Stored(NamedTuple):
    folder: RunFolder
    step: int | None
    config: Config
    parts: RunParts


def _open(run: str | Path, task: Task | None) -> _Stored:
    path, step = run_and_step(run)
    folder = RunFolder.open(path)
    # Refused here, and not after a model has been made.
    some = f"at least one complete step in {folder.checkpoints}"
    require(bool(complete_steps(folder.checkpoints)), "checkpoints", some, "none")
    parts = load_config(folder.parts, RunParts)
    require_own_task(parts, task)
    return _Stored(folder, step, with_saved_model(load_config(folder.config, Config), folder), parts)


def _restore(stored: _Stored, params: nnx.State, frozen: nnx.State) -> tuple[nnx.State, int]:
    """Returns the parameters of a checkpoint in the places of `params`, which are freed first, and its step."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params)
    structure = jax.tree.structure(params)
    del params
    identity, template = identity_of_run(stored.folder, stored.config), {"params": nnx.to_pure_dict(shapes)}
    found = read_checkpoint(stored.folder.checkpoints, identity, template, stored.step)
    require_same_frozen(found.record.learner, frozen)
    restored = jax.tree.unflatten(structure, jax.tree.leaves(found.arrays["params"]))
    fault = name_non_finite("parameters", restored, jax.device_get(jax.jit(finite_leaves)(restored)))
    warnings = [] if fault is None else [f"checkpoint step {found.step}: {fault} (an older one: RUN@STEP)"]
    for warning in (*found.warnings, *warnings):
        RunConsole().warn(warning)
    return restored, found.step


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, adapters merged, and what it began as, where it is or was a model on disk."""

    params: nnx.State
    config: DecoderConfig
    tokenizer: Tokenizer
    pretrained: Pretrained | None

    @property
    def graph(self) -> nnx.GraphDef[Decoder]:
        return abstract_decoder(self.config)[0]

    def files(self) -> dict[str, bytes]:
        """The files of a checkpoint directory, without weights; ValueError if transformers lacks the architecture."""
        if self.pretrained is not None:
            return small_files(self.pretrained)
        return made_files(self.config, pretrained_form(self.tokenizer))


def load_model(path: str | Path, *, dtype: str | None = None) -> LoadedModel:
    """A run's newest checkpoint, or RUN@STEP, or a model on disk on the first device, with its chat template where there is
    one. The dtype is that of activations and parameters of a model on disk, by default float32; a run has its own.

    Raises:
        ValueError: neither of them, or one that cannot be used.
    """
    given, path = path, run_and_step(located(path))[0]
    require(path.exists(), "model", "a run folder, a directory or a GGUF file", f"{path}, which does not exist")
    if (path / "env.json").is_file():
        require(dtype is None, "--dtype", "no value together with a run, which has its own", dtype)
        return _model_of_run(given)
    found, dtype = open_pretrained(path, chat_template=None), dtype or "float32"
    config = replace(found.config, dtype=dtype, param_dtype=dtype)
    params = found.weights().load(config, on_one_device(jax.devices()[0]))
    return LoadedModel(params, config, found.tokenizer, found)


def _model_of_run(run: str | Path) -> LoadedModel:
    stored = _open(run, None)
    validate(stored.config)
    config = stored.config.resolved()
    # No part of a model from disk depends on the task, whose file may be gone.
    task = None if config.model.path is not None else find_task(config)
    model = find_model(config, task, None, restored=True)
    require(model.decoder is not None, "model", "a run of the project's own decoder", config.model.own)
    decoder = model.decoder
    require_same_files(stored.parts, files_of(model))
    parts = model.parts(on_one_device(jax.devices()[0]), None)
    frozen = parts.frozen
    params, _ = _restore(stored, parts.params, frozen)
    if decoder.lora.rank:
        params = merged(params, frozen, decoder.lora.scale)
        decoder = replace(decoder, lora=LoraConfig())
    return LoadedModel(params, decoder, model.tokenizer, model.pretrained)
