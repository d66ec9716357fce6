"""Models in memory, from a run's newest checkpoint or from disk, for commands that do not train."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from flax import nnx

from experiments.config import Config
from experiments.loop.assemble import Setup, assemble
from experiments.loop.session import identity_of_run
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.models.huggingface.export import made_files
from experiments.models.huggingface.own_tokenizers import pretrained_form
from experiments.models.lora import LoraConfig, merged
from experiments.models.packaged import located
from experiments.models.parameters import abstract_decoder
from experiments.models.pretrained import Pretrained, open_pretrained, small_files
from experiments.models.sharding import on_one_device
from experiments.runs.checkpoint import complete_steps, restore_template
from experiments.runs.config_file import load_config
from experiments.runs.console import RunConsole
from experiments.runs.folder import RunFolder, run_and_step
from experiments.runs.identity import RunParts
from experiments.runs.store import SavedRun
from experiments.tasks import Task
from experiments.tasks.configured import own_task
from experiments.tasks.tokenizer import Tokenizer
from experiments.training.resume import with_own_copy
from experiments.training.run_parts import changed_since, parts_of, require_own_task, require_same_files
from jaxlogp.errors import require


def restored(
    run: str | Path, change: Callable[[Config], Config] = lambda stored: stored, *, task: Task | None = None
) -> tuple[Setup, int]:
    """What a run, or RUN@STEP, consists of with its newest checkpoint, and the step. Writes nothing: it may be training.

    Raises:
        ValueError: no run folder, no good checkpoint, or one of another run, task or model.
    """
    path, step = run_and_step(run)
    folder = RunFolder.open(path)
    # Refused here, and not after all of it has been made.
    some = f"at least one complete step in {folder.checkpoints}"
    require(bool(complete_steps(folder.checkpoints)), "checkpoints", some, "none")
    began_with = load_config(folder.parts, RunParts)
    require_own_task(began_with, task)
    stored = change(with_own_copy(load_config(folder.config, Config), folder))
    setup = assemble(stored, own_task(task, stored.data) if task is not None else None, restored=True)
    own = {"own_task": task, "own_rewards": None, "own_model": None, "own_source": None}
    now = parts_of(setup.task, **own, pretrained=setup.origin.pretrained)
    require_same_files(began_with, now)
    console = RunConsole()
    for warning in changed_since(began_with, now):
        console.warn(warning)
    saved = SavedRun(folder, identity_of_run(folder, stored))
    found = saved.restore(restore_template(setup.learner.template(), setup.mesh), step)
    for warning in found.warnings:
        console.warn(warning)
    setup.learner.restore(found.arrays, found.extra["learner"])
    fault = setup.learner.fault()
    if fault is not None:
        console.warn(f"checkpoint step {found.step}: {fault} (an older one: RUN@STEP)")
    return setup, found.step


@dataclass(frozen=True)
class Loaded:
    """A model in memory, adapters merged, and what it began as, where it is or was a model on disk."""

    params: nnx.State
    config: DecoderConfig
    tokenizer: Tokenizer
    pretrained: Pretrained | None

    @property
    def graph(self) -> nnx.GraphDef[Decoder]:
        """Graph definition, on one device."""
        return abstract_decoder(self.config)[0]

    def files(self) -> dict[str, bytes]:
        """Those of a checkpoint directory, other than the weights.

        Raises:
            ValueError: an architecture that transformers does not have.
        """
        if self.pretrained is not None:
            return small_files(self.pretrained)
        return made_files(self.config, pretrained_form(self.tokenizer))


def load_model(path: str | Path, *, dtype: str = "float32") -> Loaded:
    """A run's newest checkpoint, or RUN@STEP, or a model on disk on the first device, with its chat template where there is
    one. The dtype is that of activations and parameters of a model on disk; a run has its own.

    Raises:
        ValueError: neither of them, or one that cannot be used.
    """
    given, path = path, run_and_step(located(path))[0]
    require(path.exists(), "model", "a run folder, a directory or a GGUF file", f"{path}, which does not exist")
    if (path / "env.json").is_file():
        setup, _ = restored(given)
        decoder = setup.origin.decoder
        assert decoder is not None, "a run of another model has been refused"
        params, lora = setup.learner.state.params, decoder.lora
        if lora.rank:
            params, decoder = merged(params, setup.backend.frozen, lora.scale), replace(decoder, lora=LoraConfig())
        return Loaded(params, decoder, setup.tokenizer, setup.origin.pretrained)
    found = open_pretrained(path, chat_template=None)
    config = replace(found.config, dtype=dtype, param_dtype=dtype)
    params = found.weights().load(config, on_one_device(jax.devices()[0]))
    return Loaded(params, config, found.tokenizer, found)
