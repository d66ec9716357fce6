"""The process in which chat templates are compiled and rendered: requests and replies are lines of JSON on its pipes.

A template is a program of whoever made the model directory. Jinja's sandbox keeps it from files and from Python's internals,
but not from a loop without end or a text of gigabytes, and inside of one operation nothing can interrupt it. The kernel can:
it ends a process after so many seconds of computing and refuses it memory. So this file is run as a script, and imports
nothing of this project but itself.
"""

import json
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_ERROR_CHARACTERS = 400


def main() -> None:
    """Answers requests until the input ends.

    A request is [source, variables], or [source, null] to compile only; a reply is [the text, null] or [null, an error].
    The arguments of the script are the bounds: seconds of computing of a request, bytes of memory, characters of a text.
    """
    max_seconds, max_bytes, max_characters = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
    # These are for the process that asks, which ends this one by closing the pipe.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Without a handler in Python, which would wait for the operation in progress; not a clock's time, which goes on while a
    # machine is stopped.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, max_seconds)
        reply = _reply(*json.loads(line), max_bytes, max_characters)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(reply, flush=True)


def _reply(source: str, variables: dict[str, Any] | None, max_bytes: int, max_characters: int) -> str:
    try:
        program = _compiled(source)
        if variables is None:
            return json.dumps([None, None])
        text, size = [], 0
        for piece in program.generate(variables, raise_exception=_raise_exception):
            text.append(piece)
            size += len(piece)
            if size > max_characters:
                return json.dumps([None, f"more than {max_characters} characters"])
        return json.dumps(["".join(text), None])
    except MemoryError:
        return json.dumps([None, f"more than {max_bytes >> 20} MiB of memory"])
    # A template is a program: it fails with whatever its expressions raise.
    except Exception as error:
        return json.dumps([None, repr(error)[:MAX_ERROR_CHARACTERS]])


class _Generation(Extension):
    """{% generation %} … {% endgeneration %}: its body between variables `generation_start` and `generation_end`."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[Any]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (
            nodes.Output([nodes.Name(f"generation_{side}", "load")], lineno=line) for side in ("start", "end")
        )
        return [start, *body, end]


@lru_cache(8)
def _compiled(source: str) -> Any:
    extensions = [loopcontrols, _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own escapes HTML, which templates do not expect.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise ValueError(message)


if __name__ == "__main__":
    main()
