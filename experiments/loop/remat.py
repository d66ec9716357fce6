"""The recomputation of a run whose options name none: the least that is expected to fit, then what takes less."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.config import Config
from experiments.experience.prompts import length_limits
from experiments.learner.model_source import ModelSource
from experiments.loop.memory import device_limit, size, training_bytes
from experiments.loop.supervised import SupervisedFile
from experiments.models.decoder_config import DecoderConfig
from experiments.models.mesh import parse_mesh
from experiments.models.parameters import abstract_decoder
from experiments.processes import processes
from experiments.tasks import Task

FROM_LEAST = ("products", "attention", "full")
"""Policies of `experiments.models.remat` by what they compute again. What the compiler would keep by itself is not known
before it has compiled, and was 3 % faster than products."""
ROOM = 0.75
"""Part of a device's memory that may be predicted to be taken; the head's blocks and what a layer works with come on top."""


class RematChoice(NamedTuple):
    policy: str
    reason: str

    def __str__(self) -> str:
        return f"recomputation in the backward pass: {self.policy} ({self.reason})"


def remat_choices(config: Config, task: Task | SupervisedFile, model: ModelSource) -> Iterator[RematChoice]:
    """Yields policies from the first that is expected to fit; none without a decoder, with `--invariant`, or on a CPU."""
    limits = processes().gather("memory for recomputation", device_limit(jax.local_devices()))
    limit = min((each for each in limits if each is not None), default=None)
    if limit is None or model.decoder is None or config.invariant:
        return
    mesh = parse_mesh(config.mesh)
    if isinstance(task, SupervisedFile):
        sizes = task.sizes(model.tokenizer, config.schedule, mesh, None)
    else:
        sizes = length_limits(task, model.tokenizer, config.rollout, config.schedule, mesh)
    # Gradients of micro-batches: their sum, those that are added, and the next.
    held = training_bytes(config, abstract_decoder(model.decoder)[1], gradients=3) // (mesh.fsdp * mesh.tensor)
    tokens = sizes.rows * sizes.row // mesh.sequence
    fitted = False
    for policy in FROM_LEAST:
        kept = kept_bytes(model.decoder, policy, tokens, mesh.tensor)
        fitted = fitted or held + kept <= ROOM * limit or policy == FROM_LEAST[-1]
        if fitted:
            parts = f"{size(kept)} of a micro-batch is kept, beside {size(held)} of state and gradients"
            yield RematChoice(policy, f"{parts}, of {size(limit)}")


def kept_bytes(decoder: DecoderConfig, policy: str, tokens: int, tensor: int = 1) -> int:
    """What the layers keep of so many tokens for the backward pass, on one of `tensor` ranks."""
    wide, narrow = jnp.dtype(decoder.stream_dtype).itemsize, jnp.dtype(decoder.dtype).itemsize
    attended = decoder.num_heads * decoder.head_dim * narrow + 4 * decoder.num_heads
    projected = (decoder.num_heads + 2 * decoder.num_kv_heads) * decoder.head_dim + 2 * decoder.intermediate_size
    of_layer = decoder.hidden_size * wide
    if policy in ("attention", "products"):
        of_layer += attended // tensor
    if policy == "products":
        of_layer += decoder.hidden_size * wide + projected * narrow // tensor
    return decoder.num_layers * tokens * of_layer
