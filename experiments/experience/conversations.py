"""Documents for supervised fine-tuning, from a file with one JSON object a line; `load_conversations` reads it.

A line is a prompt with its completion, or a conversation of several turns:

    {"prompt": "2+2=", "completion": "4"}
    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}

The prompt is a text or a list of messages, encoded like a prompt of the task jsonl:PATH. The labels are the tokens of the
completion and an end token. Of a conversation, they are the turns of the assistant; "train": false in a message takes its
turn out, and "train": true puts the turn of another role in. "metadata" may hold anything and is not read. Other keys are
refused.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.experience.limits import NO_LIMITS, Limits
from experiments.experience.prompts import encode
from experiments.models.tokenizer import Tokenizer
from experiments.tasks.json_lines import METADATA, check_text, parse_lines, parse_messages, parse_object, parse_prompt
from experiments.tasks.jsonl import JsonlTask
from experiments.tasks.protocol import SPLITS, Message, Split, prompt_text, split_of
from jaxlogp import Document

PROMPT, COMPLETION, MESSAGES, TRAIN = "prompt", "completion", "messages", "train"


@dataclass(frozen=True)
class Conversations:
    """Documents of one file by split, in the order of its lines; with the sha256 of the file, and the tokens and the line of
    the longest."""

    path: str
    documents: dict[Split, tuple[Document, ...]]
    digest: str
    longest: int
    longest_line: int


def load_conversations(path: str, tokenizer: Tokenizer, limits: Limits = NO_LIMITS) -> Conversations:
    """Reads a UTF-8 file of prompts with completions and of conversations, all of it, into memory.

    A line is held out if a task of its prompt would hold it out: a hash decides, of the prompt, or of the turns of a
    conversation that are not trained on. So a prompt is in the same split here and in jsonl:PATH, with any completion.
    Conversations need a tokenizer with a chat template. No document is cut short to fit the limits.

    Raises:
        ValueError: if the file cannot be read or is too large or empty; or, with its number, if a line is not what it must
            be, has no label, or makes a document beyond the limits.
    """
    documents: dict[Split, list[Document]] = {split: [] for split in SPLITS}
    parsed, digest = parse_lines(path, lambda line: _parse(line, tokenizer, limits))
    for split, document in parsed:
        documents[split].append(document)
    sizes = [document.tokens.size for _, document in parsed]
    longest = max(sizes)
    by_split = {split: tuple(documents[split]) for split in SPLITS}
    return Conversations(path, by_split, digest, longest, sizes.index(longest) + 1)


def _parse(line: bytes, tokenizer: Tokenizer, limits: Limits) -> tuple[Split, Document]:
    record = parse_object(line)
    keys = (MESSAGES,) if MESSAGES in record else (PROMPT, COMPLETION)
    unknown = sorted(set(record) - {*keys, METADATA})
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; a line has {', '.join((*keys, METADATA))}")
    for key in keys:
        if key not in record:
            raise ValueError(f"missing key {key!r}; a line has {PROMPT} and {COMPLETION}, or {MESSAGES}")
    if MESSAGES in record:
        split, document = _conversation(record[MESSAGES], tokenizer)
    else:
        split, document = _completion(record[PROMPT], record[COMPLETION], tokenizer)
    return split, limits.check(document)


def _completion(prompt: Any, completion: Any, tokenizer: Tokenizer) -> tuple[Split, Document]:
    prompt = parse_prompt(PROMPT, prompt)
    check_text(COMPLETION, completion)
    ids = [*tokenizer.encode(completion), tokenizer.eos_ids[0]]
    document = Document.of_completion(np.array(encode(tokenizer, prompt), np.int32), np.array(ids, np.int32))
    return split_of(JsonlTask.family, prompt_text(prompt)), document


def _conversation(value: Any, tokenizer: Tokenizer) -> tuple[Split, Document]:
    messages = parse_messages(MESSAGES, value, optional=(TRAIN,))
    turns = [number for number, message in enumerate(messages) if _is_trained(message, value[number], number)]
    if not turns:
        raise ValueError(f"{MESSAGES!r} has no turn to train on, neither of the assistant nor with {TRAIN!r}: true")
    ids, labels = tokenizer.encode_turns([message._asdict() for message in messages], turns)
    # Nothing predicts the first token.
    labels = np.array([False, *labels[1:]])
    if not labels.any():
        raise ValueError(f"{MESSAGES!r} has no token to train on")
    context = tuple(message for number, message in enumerate(messages) if number not in turns)
    return split_of(JsonlTask.family, prompt_text(context or messages)), Document(np.array(ids, np.int32), labels)


def _is_trained(message: Message, fields: dict[str, Any], number: int) -> bool:
    train = fields.get(TRAIN, message.role == "assistant")
    if not isinstance(train, bool):
        raise ValueError(f"'{MESSAGES}[{number}].{TRAIN}' must be true or false, got {type(train).__name__}")
    return train
