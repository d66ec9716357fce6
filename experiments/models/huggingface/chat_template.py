"""Chat templates: Jinja programs that turn messages into the text of a prompt.

They come with a model directory and are not trusted: they run in a sandbox, in a process with bounds on time, memory and
output (template_process.py).
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.extras import import_extra
from experiments.models.huggingface.files import is_utf8
from jaxlogp.errors import require

Message = Mapping[str, str]
"""`role` (system, user, assistant) and `content`."""

MAX_SECONDS = 1
"""Computing time of one rendering; templates of models take a few milliseconds."""
MAX_BYTES = 160 * 2**20
"""Memory of the process that renders, of which its interpreter takes 20 MiB. Linux keeps to it, macOS does not."""
MAX_CHARACTERS = 2**22
"""Length of a rendered text."""
_SCRIPT = Path(__file__).with_name("template_process.py")


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the special tokens that it may name.

    No date is given to it (`strftime_now` is undefined), so that a prompt is the same text on every day. ValueError if it
    has an error of syntax, or the extra hf is not installed.
    """

    source: str
    tokens: Mapping[str, str]

    def __post_init__(self) -> None:
        import_extra("jinja2", "chat template", "hf")
        # Compiled here, so that an error of syntax is found when the template is read.
        self._ask("a Jinja program", None)

    def render(self, messages: Sequence[Message], *, to_answer: bool = True, marks: tuple[str, str] = ("", "")) -> str:
        """Renders a conversation: with `to_answer` up to where the model is to speak (`add_generation_prompt`).

        `marks` are written where the template's {% generation %} blocks begin and end. ValueError if the template refuses
        the messages, fails, or goes beyond this module's bounds.
        """
        variables = {**self.tokens, "messages": [dict(each) for each in messages], "add_generation_prompt": to_answer}
        variables |= dict(zip(("generation_start", "generation_end"), marks, strict=True))
        return self._ask(f"text for {len(messages)} messages", variables)

    def _ask(self, expected: str, variables: Mapping[str, Any] | None) -> Any:
        text, error = _PROCESS.ask([self.source, variables])
        require(error is None, "chat template", expected, error)
        require(text is None or is_utf8(text), "chat template", "text that UTF-8 can hold", "half of a surrogate pair")
        return text


class _TemplateProcess:
    """The process that renders: started by the first request, and again after a template has ended it."""

    def __init__(self) -> None:
        self._lock, self._owner = threading.Lock(), 0
        self._process: Any = None

    def ask(self, request: list[Any]) -> list[str | None]:
        """Returns a text and None, or None and an error."""
        with self._lock:
            process = self._running()
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            except BaseException:
                # Its reply would be taken for that to the next request.
                process.kill()
                self.close()
                raise
            if reply:
                return json.loads(reply)
            self.close()
        ended_for_time = process.returncode == -signal.SIGPROF
        return [None, f"more than {MAX_SECONDS} s of computing" if ended_for_time else f"status {process.returncode}"]

    def close(self) -> None:
        """Ends the process, by ending its input; one of a parent process is left alone."""
        if self._process is not None and self._owner == os.getpid():
            self._process.communicate()
        self._process = None

    def _running(self) -> Any:
        # A fork of this process would read replies to the other's requests.
        if self._process is not None and (self._owner != os.getpid() or self._process.poll() is not None):
            self.close()
        if self._process is None:
            # -P: the script's folder is no place to import from.
            bounds = map(str, (MAX_SECONDS, MAX_BYTES, MAX_CHARACTERS))
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT), *bounds],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                start_new_session=True,
            )
            self._owner = os.getpid()
        return self._process


_PROCESS = _TemplateProcess()
atexit.register(_PROCESS.close)
