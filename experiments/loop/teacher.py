"""The model that a policy is distilled from: on disk, with the policy's token ids."""

from dataclasses import replace

import jax

from experiments.config import Config
from experiments.learner.model_source import DecoderSource, ModelParts, ModelSource
from experiments.models.pretrained import open_pretrained
from experiments.models.sharding import parameter_shardings
from experiments.models.tokenizer import Tokenizer
from jaxlogp.errors import require

OPTION = "--loss.teacher"


def load_teacher(
    config: Config, model: ModelSource, rows: int, length: int, mesh: jax.sharding.Mesh
) -> ModelParts | None:
    """Reads the teacher of a run onto the mesh, in the dtype of activations; None without one.

    `rows` and `length` are those of a micro-batch. ValueError if it has other ids than the policy, or cannot be used.
    """
    if config.loss.teacher is None:
        return None
    try:
        found = open_pretrained(config.loss.teacher, chat_template=None)
    except ValueError as error:
        raise ValueError(f"{OPTION}: {error}") from None
    expected = f"a model whose embedding has the policy's {model.vocab_size} rows"
    require(found.config.vocab_size == model.vocab_size, OPTION, expected, found.config.vocab_size)
    _require_same_ids(model.tokenizer, found.tokenizer)
    decoder = config.model.in_disk_model(found.config)
    source = DecoderSource(found.tokenizer, replace(decoder, param_dtype=decoder.dtype), config.seed, found)
    source.attention_run(rows, length, mesh)
    return source.parts(lambda state: parameter_shardings(state, mesh), mesh)


def _require_same_ids(ours: Tokenizer, theirs: Tokenizer) -> None:
    """Refuses a teacher to which a token of the policy is another one."""
    expected = f"a tokenizer whose end tokens are the policy's, {ours.eos_ids}"
    require(ours.eos_ids == theirs.eos_ids, OPTION, expected, theirs.eos_ids)
    for token in range(min(ours.vocab_size, theirs.vocab_size)):
        texts = ours.decode([token]), theirs.decode([token])
        expected = f"a tokenizer in which token {token} is {texts[0]!r}, as in the policy's"
        require(texts[0] == texts[1], OPTION, expected, repr(texts[1]))
