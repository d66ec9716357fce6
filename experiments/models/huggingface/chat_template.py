"""Chat templates: Jinja programs that turn messages into the text of a prompt, run in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxlogp.errors import require

Message = Mapping[str, str]
"""`role` (system, user, assistant) and `content`."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the special tokens that it may name.

    No date is given to it (`strftime_now` is undefined), so that a prompt is the same text on every day.

    Args:
        source: the Jinja program.
        tokens: special tokens by name, such as `bos_token`.

    Raises:
        ValueError: a program with an error of syntax, or the extra hf is not installed.
    """

    source: str
    tokens: Mapping[str, str]

    def __post_init__(self) -> None:
        # Compiled here, so that an error of syntax is found when the template is read.
        _ = self._program

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a conversation up to where the model is to speak.

        Args:
            messages: in their order.

        Raises:
            ValueError: the template refuses the messages, or fails.
        """
        try:
            copies = [dict(each) for each in messages]
            given = {"messages": copies, "add_generation_prompt": True, "raise_exception": _raise_exception}
            return self._program.render(**self.tokens, **given)
        # A template is a program: it fails with whatever its expressions raise.
        except Exception as error:
            raise ValueError(f"chat template: expected text for {len(messages)} messages, got {error!r}") from None

    @cached_property
    def _program(self) -> Any:
        try:
            from jinja2 import TemplateError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            require(False, "chat template", 'the extra hf (pip install -e ".[experiments,hf]")', "no package jinja2")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        try:
            return environment.from_string(self.source)
        except (TemplateError, RecursionError) as error:
            raise ValueError(f"chat template: expected a Jinja program, got {error!r}") from None


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own escapes HTML, which templates do not expect.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise ValueError(message)
