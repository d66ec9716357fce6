"""The tokenizer of a checkpoint directory: tokenizer.json, its special tokens, the chat template and what ends an answer."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from experiments.extras import import_extra
from experiments.models.huggingface.chat_template import ChatTemplate, Message
from experiments.models.huggingface.files import JsonObject, is_integer, read_object, read_text
from experiments.models.huggingface.turn_spans import render_turns
from experiments.models.tokenizer import UNKNOWN
from jaxlogp.errors import require

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, eq=False)
class PretrainedTokenizer:
    """A `Tokenizer` whose prompts go through a chat template; without one, they are plain text after the start token.

    Its inner one is of the package tokenizers. Training answers end with the first of `eos_ids`.
    """

    inner: Any
    eos_ids: tuple[int, ...]
    pad_id: int
    template: ChatTemplate | None

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id. Asked for with every prompt; the vocabulary is built again for each answer."""
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """Returns ids of a text; special tokens spelled out in it become their ids, none is added."""
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Returns ids of a question as the user's only message; without a template, of its text after the start token."""
        if self.template is None:
            return self.inner.encode(text, add_special_tokens=True).ids
        return self.encode_messages([{"role": "user", "content": text}])

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """Returns ids of a conversation, up to where the model is to speak; ValueError without a template that takes it."""
        text = self._required_template.render(messages)
        # A bound on prompts asks for those without content, for which a template may write nothing.
        is_read = bool(text) or not any(message["content"] for message in messages)
        require(is_read, "chat template", f"text for {len(messages)} messages", "an empty text")
        return self.encode(text)

    def encode_turns(self, messages: Sequence[Message], turns: Sequence[int]) -> tuple[list[int], list[bool]]:
        """Returns the ids of a whole conversation, and which of them are labels: those of the given turns.

        A turn's labels are its content and what the template writes to end it, its end token being the last: white space
        behind that is none. A token is a label if its first character is one. A token that begins before the turn is
        none, because the policy, asked to speak, would not draw it; one that runs over the turn's end is.
        ValueError without a template, or as `experiments.models.huggingface.turn_spans.render_turns`.
        """
        text, spans = render_turns(self._required_template, messages, turns)
        encoding = self._without_post_processor.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int64)
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        labels = np.zeros(ids.size, bool)
        for span in spans:
            end, ending = span.end, np.isin(ids, self.eos_ids) & (starts >= span.start) & (ends <= span.end)
            if ending.any() and not text[ends[ending][-1] : end].strip():
                end = ends[ending][-1]
            labels |= (starts >= span.start) & (starts < end)
        return ids.tolist(), labels.tolist()

    def longest_prompt(self, text_tokens: int) -> int:
        # A token is at least a byte of text.
        return len(self.encode_prompt("")) + text_tokens

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids up to the first of `eos_ids`, without special tokens; unknown ids read as U+FFFD."""
        answer = list(ids)
        answer = answer[: min((answer.index(end) for end in self.eos_ids if end in answer), default=None)]
        if self._ids.issuperset(answer):
            return self.inner.decode(answer)
        runs = ((known, list(run)) for known, run in groupby(answer, self._ids.__contains__))
        return "".join(self.inner.decode(run) if known else UNKNOWN * len(run) for known, run in runs)

    @property
    def _required_template(self) -> ChatTemplate:
        expected = "a chat template, for prompts that are conversations"
        if self.template is None:
            raise ValueError(f"messages: expected {expected}, got none, or --model.no-chat-template")
        return self.template

    @cached_property
    def _without_post_processor(self) -> Any:
        """The inner tokenizer, whose post-processor would take spaces out of the offsets of a token."""
        options = json.loads(self.inner.to_str())
        return type(self.inner).from_str(json.dumps({**options, "post_processor": None}))

    @cached_property
    def _ids(self) -> frozenset[int]:
        """All that have a token. Asked for in every text again, they take longer than decoding."""
        return frozenset(number for number in range(self.vocab_size) if self.inner.id_to_token(number) is not None)


def load_tokenizer(path: Path, *, chat_template: bool | None = True) -> PretrainedTokenizer:
    """Returns the tokenizer of a directory; ValueError if a file is damaged, or a token or template is missing."""
    inner = _inner(path)
    options = _optional(path, "tokenizer_config.json")
    tokens = {name: _token_text(options, name) for name in SPECIAL_TOKENS if options.has(name)}
    for name in ("bos_token", "eos_token"):
        # A template would write it in pieces, and no answer would end with it.
        known = name not in tokens or inner.token_to_id(tokens[name]) is not None
        require(known, f"{options.place}, {name}", "a token of tokenizer.json", repr(tokens.get(name)))
    template = None if chat_template is False else _template(path, options, tokens, needed=chat_template is True)
    ids = [_optional(path, name) for name in ("generation_config.json", "config.json")]
    # The tokenizer's own end token first: it is the one that ends a turn of the chat.
    named = [inner.token_to_id(tokens["eos_token"])] if "eos_token" in tokens else []
    listed = next((_id_list(file, "eos_token_id") for file in ids if file.has("eos_token_id")), [])
    eos_ids = tuple(dict.fromkeys(each for each in (*named, *listed) if each is not None))
    require(bool(eos_ids), "tokenizer", "a token that ends an answer (eos_token or eos_token_id)", "none")
    pad = inner.token_to_id(tokens["pad_token"]) if "pad_token" in tokens else None
    return PretrainedTokenizer(inner, eos_ids, eos_ids[0] if pad is None else pad, template)


def _inner(path: Path) -> Any:
    package = import_extra("tokenizers", "tokenizer", "hf")
    text = read_text(path / "tokenizer.json")
    try:
        inner = package.Tokenizer.from_str(text)
    # The package raises bare exceptions for all that it cannot read.
    except Exception as error:
        raise ValueError(f"tokenizer.json: expected a tokenizer, got {error}") from None
    require(inner.get_vocab_size() > 0, "tokenizer.json", "a vocabulary", "an empty one")
    # Rows are padded and cut elsewhere.
    inner.no_padding()
    inner.no_truncation()
    return inner


def _optional(path: Path, name: str) -> JsonObject:
    return read_object(path / name) if (path / name).exists() else JsonObject(name, {})


def _token_text(options: JsonObject, name: str) -> str:
    is_object = isinstance(options.values[name], dict)
    return options.object(name).text("content") if is_object else options.text(name)


def _template(path: Path, options: JsonObject, tokens: dict[str, str], *, needed: bool) -> ChatTemplate | None:
    if (path / "chat_template.jinja").exists():
        return ChatTemplate(read_text(path / "chat_template.jinja"), tokens)
    source = options.values.get("chat_template")
    if isinstance(source, list):
        named = [each for each in source if isinstance(each, dict) and each.get("name") == "default"]
        source = named[-1].get("template") if named else None
    if source is None and not needed:
        return None
    expected = "a chat template (or --model.no-chat-template, for prompts as they are)"
    require(source is not None, "tokenizer", expected, f"none in {path}")
    require(isinstance(source, str), f"{options.place}, chat_template", "a string", type(source).__name__)
    return ChatTemplate(source, tokens)


def _id_list(file: JsonObject, key: str) -> list[int]:
    values = file.values[key]
    values = values if isinstance(values, list) else [values]
    are_ids = all(is_integer(each) and 0 <= each < 2**31 for each in values)
    require(are_ids, f"{file.place}, {key}", "an id or a list of them", repr(values))
    return values
