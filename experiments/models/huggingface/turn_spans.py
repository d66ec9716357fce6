"""Positions of turns in the text of a conversation, for training on some of them.

`render_turns` renders a conversation by its chat template and finds what is written in each wanted turn: its content and its
end, without its header. A template may mark this for the turns of the assistant by {% generation %}. Otherwise prefixes of
the conversation are rendered: a turn of the assistant is what its message adds to the text that asks the model to speak.
"""

import re
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from experiments.models.huggingface.chat_template import ChatTemplate, Message
from jaxlogp.errors import require

ASSISTANT = "assistant"
_MARKED = re.compile(r"\{%[-+]?\s*generation\b")


class Span(NamedTuple):
    """Characters [start, end) of a text."""

    start: int
    end: int


def render_turns(template: ChatTemplate, messages: Sequence[Message], turns: Sequence[int]) -> tuple[str, list[Span]]:
    """Renders a whole conversation, and finds the messages with the indices `turns` in the text.

    A turn of another role than assistant begins with the content of its message, because no prompt ends with the header of
    that role. ValueError if the template refuses the messages or a prefix of them; if it writes a wanted turn differently
    without the turns that follow; or if its {% generation %} blocks are not one for each turn of the assistant.
    """
    text = template.render(messages, to_answer=False)
    marked = _marked_spans(template, messages, text) if _MARKED.search(template.source) else {}
    return text, [marked.get(turn) or _turn_span(template, messages, turn, text) for turn in turns]


def _marked_spans(template: ChatTemplate, messages: Sequence[Message], text: str) -> dict[int, Span]:
    """Returns the template's own marks by the index of the message."""
    # Random, so that no message can contain them.
    start, end = marks = (secrets.token_hex(16), secrets.token_hex(16))
    pieces = re.split(f"({start}|{end})", template.render(messages, to_answer=False, marks=marks))
    assistant = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
    expected = f"one block {{% generation %}} for each of {len(assistant)} turns of the assistant"
    found = pieces[1::2]
    require(found == [start, end] * len(assistant), "chat template", expected, f"{found.count(start)} blocks")
    plain = pieces[::2]
    require("".join(plain) == text, "chat template", "the same text with and without marks", "another one with them")
    bounds = [sum(map(len, plain[:number])) for number in range(1, len(plain))]
    spans = map(Span, bounds[::2], bounds[1::2])
    return dict(zip(assistant, spans, strict=True))


def _turn_span(template: ChatTemplate, messages: Sequence[Message], turn: int, text: str) -> Span:
    role = messages[turn]["role"]
    through = text if turn + 1 == len(messages) else template.render(messages[: turn + 1], to_answer=False)
    header = _header_through(template, messages, turn)
    place = f"chat template, messages[{turn}] ({role})"
    remedy = "; mark the turns of the assistant by {% generation %} in the template" if role == ASSISTANT else ""
    expected = "a turn that does not depend on those after it"
    require(text.startswith(through), place, expected, f"another text without them{remedy}")
    require(through.startswith(header), place, "a turn that begins as its prompt ends", f"another text{remedy}")
    return Span(len(header), len(through))


def _header_through(template: ChatTemplate, messages: Sequence[Message], turn: int) -> str:
    """Returns the text up to where the content of a turn begins."""
    before, role = messages[:turn], messages[turn]["role"]
    if role == ASSISTANT:
        return template.render(before)
    content = secrets.token_hex(16)
    header, found, _ = template.render([*before, {"role": role, "content": content}], to_answer=False).partition(
        content
    )
    require(found, f"chat template, messages[{turn}] ({role})", "to write its content", "a text without it")
    return header
