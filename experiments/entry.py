"""The way into a command by ``python -m``: a signal ends it in one line, from the first import to the interpreter's end.

A command's module begins with a call of `run_module`, before it imports anything else. Its imports take a second, and so may
the end of the interpreter. A package that is missing is one line too. Ctrl-C in the first 20 ms, before a line of this
project has been read, is answered by Python.
"""

import contextlib
import importlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

ENVIRONMENT = 3
"""`experiments.runs.ends.ExitCode.ENVIRONMENT`, which is not imported yet."""


def run_module(name: str) -> NoReturn:
    """Imports a command's module under its own name, runs its ``run_cli``, and ends in SystemExit."""
    # In the background of a shell SIGINT is ignored, and stays so.
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interrupts:
        signal.signal(signal.SIGINT, _end)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)
    try:
        command = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("experiments", "jaxlogp"):
            raise
        _leave(ENVIRONMENT, f'no package {error.name}; install the trainer: pip install -e ".[experiments]"')
    except ValueError as error:
        # JAX reads its variables when it is imported.
        if "JAX flag" not in str(error):
            raise
        _leave(ENVIRONMENT, f"environment: {error}")
    try:
        # The command says what Ctrl-C left behind.
        if interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command.run_cli()
        importlib.import_module("experiments.processes").processes().finish()
    except KeyboardInterrupt:
        _end(signal.SIGINT, None)
    finally:
        if interrupts:
            signal.signal(signal.SIGINT, _end)
    sys.exit(0)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the process; an exception would end in whatever a library does when an import of its own fails."""
    _leave(128 + number, "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}")


def _leave(code: int, sentence: str) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, f"error: {sentence}\n".encode())
    os._exit(code)
