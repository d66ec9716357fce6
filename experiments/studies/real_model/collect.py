"""Head states of a real model that reads given text and its own samples, with checks that it was loaded correctly.

Needs the extra `gguf`. The body runs in fp32; hidden states are rounded to bf16 once, at the end, and so is the head's
weight. Perplexities are those of the fp32 model.
"""

import functools
import hashlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from experiments.models.decoder import Decoder
from experiments.models.gguf import GgufFile, read_gguf
from experiments.models.gguf_tokenizer import load_gguf_tokenizer
from experiments.models.huggingface.tokenizer import PretrainedTokenizer
from experiments.models.pretrained import gguf_weights
from experiments.sampling.pick import DrawOptions
from experiments.sampling.sampler import SamplerOptions, sample
from experiments.studies.real_model.states import HeadStates, StoredWeight, TokenSet
from jaxlogp import linear_log_probs
from jaxlogp.errors import require

GREEDY_PROMPT = "The three primary colours are red,"
GREEDY_TOKENS = 24
ROWS_AT_A_TIME = 4


@dataclass(frozen=True)
class Reading:
    """The fp32 model's results on rows of tokens.

    Attributes:
        hidden: bf16 [N, H].
        targets: int32 [N].
        log_probs: fp32 [N], nats.
    """

    hidden: Float[np.ndarray, "N H"]
    targets: Int[np.ndarray, " N"]
    log_probs: Float[np.ndarray, " N"]


def collect_states(
    gguf: Path,
    texts: Sequence[Path],
    *,
    tokens: int,
    row_length: int,
    prompts: Sequence[str],
    num_generations: int,
    new_tokens: int,
    seed: int,
) -> HeadStates:
    """Reads the model and the text.

    Args:
        gguf: the model.
        texts: files of text; each gives the same number of tokens, or all that it has.
        tokens: maximum number, over all texts.
        row_length: tokens per row; each row begins without context.
        prompts: questions to sample answers for, at temperature 1; without questions there is no such set.
        num_generations: answers per prompt.
        new_tokens: maximum number of tokens per answer.
        seed: seed of the sampler.

    Returns:
        The states, with sets "text" and "samples".

    Raises:
        ValueError: a file that cannot be used.
    """
    for text in texts:
        require(text.is_file(), "--text", "a file", f"{text.name}, which is not a file")
    file = read_gguf(gguf)
    tokenizer, model = load_gguf_tokenizer(file, chat_template=False), gguf_weights(file).decoder()
    readings = [_read_text(model, tokenizer, text, tokens // len(texts), row_length) for text in texts]
    sets = [TokenSet("text", *(np.concatenate([getattr(one, x) for one in readings]) for x in ("hidden", "targets")))]
    facts = _origin(file, gguf) | {
        "texts": [_text_facts(text, one) for text, one in zip(texts, readings, strict=True)],
        "greedy": GREEDY_PROMPT + _greedy(model, tokenizer),
    }
    if prompts:
        samples, facts["samples"] = _samples(model, tokenizer, prompts, num_generations, new_tokens, seed)
        sets.append(samples)
    return HeadStates(tuple(sets), _stored_weight(file, model), facts)


def _origin(file: GgufFile, path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    names = ("gguf", "tokenizers", "jax", "flax", "numpy")
    return {
        "model": str(file.metadata.get("general.name", "unnamed")),
        "file": path.name,
        "sha256": digest,
        "versions": {name: importlib.metadata.version(name) for name in names},
    }


def _text_facts(path: Path, reading: Reading) -> dict[str, Any]:
    return {
        "name": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "tokens": int(reading.targets.size),
        "perplexity": float(np.exp(-reading.log_probs.mean())),
    }


def _read_text(model: Decoder, tokenizer: PretrainedTokenizer, path: Path, tokens: int, row_length: int) -> Reading:
    try:
        ids = tokenizer.encode(path.read_text(encoding="utf-8"))[: tokens + 1]
    except UnicodeDecodeError as error:
        raise ValueError(f"--text: expected UTF-8, got {path.name}: {error}") from None
    require(len(ids) > 1, "--text", "files of two tokens or more", f"{path.name} with {len(ids)}")
    # A row holds one token more than it predicts, the first of the next row.
    rows = [ids[start : start + row_length + 1] for start in range(0, len(ids) - 1, row_length)]
    padded = np.zeros((len(rows), row_length + 1), np.int32)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    lengths = np.array([len(row) for row in rows])
    return _read(model, padded, np.arange(row_length) < lengths[:, None] - 1)


def _read(model: Decoder, rows: Int[np.ndarray, "R T"], wanted: np.ndarray) -> Reading:
    """Hidden states, targets and log-probs where a token of [R, T - 1] is wanted; padding comes last."""
    graph, state = nnx.split(model)
    pieces = []
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        piece = rows[start : start + ROWS_AT_A_TIME]
        filled = np.pad(piece, ((0, ROWS_AT_A_TIME - len(piece)), (0, 0)))
        pieces.append([np.asarray(x)[: len(piece)] for x in _forward(graph, state, jnp.asarray(filled))])
    hidden, log_probs = (np.concatenate(x) for x in zip(*pieces, strict=True))
    return Reading(hidden[wanted], rows[:, 1:][wanted], log_probs[wanted])


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph: nnx.GraphDef[Decoder], state: nnx.State, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bf16 hidden states and fp32 log-probs of the next token; causal, so trailing padding changes nothing."""
    model = nnx.merge(graph, state)
    inputs = rows[:, :-1]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32), inputs.shape)
    hidden = model.hidden_states(inputs, positions, jnp.zeros_like(inputs))
    result = linear_log_probs(hidden, model.head()[1], rows[:, 1:])
    return hidden.astype(jnp.bfloat16), result.log_probs


def _greedy(model: Decoder, tokenizer: PretrainedTokenizer) -> str:
    prompt = jnp.asarray([tokenizer.encode(GREEDY_PROMPT)], jnp.int32)
    options = SamplerOptions(GREEDY_TOKENS, tokenizer.eos_ids, tokenizer.pad_id, DrawOptions(greedy=True))
    length = jnp.asarray([prompt.shape[1]], jnp.int32)
    drawn = sample(model, prompt, length, jax.random.key(0), options)
    return tokenizer.decode(drawn.tokens[0, : int(drawn.lengths[0])].tolist())


def chat_prompt(tokenizer: PretrainedTokenizer, question: str) -> str:
    """The question as a chat turn where the vocabulary has ChatML's control tokens; otherwise as it is."""
    if tokenizer.inner.token_to_id("<|im_start|>") is None:
        return question
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def _samples(
    model: Decoder,
    tokenizer: PretrainedTokenizer,
    prompts: Sequence[str],
    num_generations: int,
    new_tokens: int,
    seed: int,
) -> tuple[TokenSet, dict[str, Any]]:
    """Answers at temperature 1, read again by the model, as for a policy gradient."""
    encoded = [tokenizer.encode(chat_prompt(tokenizer, prompt)) for prompt in prompts for _ in range(num_generations)]
    lengths = np.array([len(ids) for ids in encoded], np.int32)
    padded = np.full((len(encoded), int(lengths.max())), tokenizer.pad_id, np.int32)
    for place, ids in enumerate(encoded):
        padded[place, : len(ids)] = ids
    options = SamplerOptions(new_tokens, tokenizer.eos_ids, tokenizer.pad_id)
    drawn = sample(model, jnp.asarray(padded), jnp.asarray(lengths), jax.random.key(seed), options)
    answers, sizes = np.asarray(drawn.tokens), np.asarray(drawn.lengths)
    rows = np.full((len(encoded), padded.shape[1] + new_tokens), tokenizer.pad_id, np.int32)
    wanted = np.zeros((len(encoded), rows.shape[1] - 1), bool)
    for place, (ids, answer, size) in enumerate(zip(encoded, answers, sizes, strict=True)):
        rows[place, : len(ids) + size] = [*ids, *answer[:size]]
        wanted[place, len(ids) - 1 : len(ids) - 1 + size] = True
    reading = _read(model, rows, wanted)
    sampled = np.asarray(drawn.log_probs)[np.arange(new_tokens) < sizes[:, None]]
    facts = {
        "answers": len(encoded),
        "tokens": int(sizes.sum()),
        "finished": int((np.isin(answers[np.arange(len(sizes)), sizes - 1], tokenizer.eos_ids)).sum()),
        "fp32_sampler_against_forward": float(np.abs(sampled - reading.log_probs).max()),
        "example": [prompts[0], tokenizer.decode(answers[0, : sizes[0]].tolist())],
    }
    return TokenSet("samples", reading.hidden, reading.targets, sampled), facts


def _stored_weight(file: GgufFile, model: Decoder) -> StoredWeight:
    """8-bit blocks as stored in the file, everything else as bf16."""
    import gguf

    tensor = file.tensors["token_embd.weight" if model.config.tie_embeddings else "output.weight"]
    if tensor.tensor_type != gguf.GGMLQuantizationType.Q8_0:
        return StoredWeight(np.asarray(model.head()[1].astype(jnp.bfloat16)))
    vocab_size, hidden_size = model.config.vocab_size, model.config.hidden_size
    # A block is an fp16 scale and 32 integers.
    blocks = np.asarray(tensor.data).reshape(vocab_size, -1, 34)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(vocab_size, hidden_size)
    return StoredWeight(values, scales)
