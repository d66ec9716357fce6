"""The way into a command by ``python -m``: Ctrl-C ends its imports, which take a second, in one line too.

A command's module begins with a call of `run_module`, before it imports anything else.
"""

import contextlib
import importlib
import os
import signal
import sys
from types import FrameType, ModuleType
from typing import NoReturn


def run_module(name: str) -> NoReturn:
    """Imports a command's module under its own name, and runs its ``run_cli``.

    Raises:
        SystemExit: always; see `experiments.command_line` for its code.
    """
    command = _imported(name)
    command.run_cli()
    sys.exit(0)


def _imported(name: str) -> ModuleType:
    # In the background of a shell it is ignored, and stays so.
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return importlib.import_module(name)
    signal.signal(signal.SIGINT, _end)
    try:
        return importlib.import_module(name)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """No exception: it would end in whatever a library does when an import of its own fails. Nothing is open yet."""
    with contextlib.suppress(OSError):
        os.write(2, b"error: interrupted\n")
    os._exit(128 + number)
