"""The promise of every command line here: whatever happens ends in one line on stderr and an exit code.

`run_command` covers all of a command: its options, what it reads, what it does and what it writes. Which exception has
which exit code is said once, in `exit_code`, and printed by `--help`. A traceback is shown with `--debug` alone.
"""

import contextlib
import errno
import io
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import jax
import tyro

from experiments.compilation_cache import OPTION, VARIABLE, take_cache_option, use_compilation_cache
from experiments.options import names_as_typed, nearest_option
from experiments.processes import processes
from experiments.runs.ends import ExitCode, RunEnded
from experiments.terminal import printable

OptionsT = TypeVar("OptionsT")
ResultT = TypeVar("ResultT")

DEBUG = "--debug"
HELP = f"""
{DEBUG}, anywhere on the command line, shows the traceback of an error. {OPTION} DIR keeps compiled programs in a
folder, {OPTION} none keeps none. Without it they are kept in the user's cache folder, or in {VARIABLE}, but not of
several processes.

Exit codes:

    0         done
    1         a bug
    2         an option, a file or a run folder that cannot be used
    3         the environment failed (disk, permission, package, device, memory)
    4         a guard refused to continue
    130, 143  ended by Ctrl-C, SIGTERM
"""
GPU_MEMORY = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Variables of JAX for the share of a GPU's memory that it may take, by their new and their old name."""
SHARE_OF_GPU = "0.9"
"""Unless the environment says otherwise: a command has its GPUs for itself. JAX takes three quarters."""
_ERRNO_IN_TEXT = re.compile(r"\[OS error \d+: (E[A-Z]+)")
"""As tensorstore writes a fault of the file system into a ValueError."""
_OF_A_COLLECTIVE = re.compile(r"[A-Z_]+: Gloo ")
"""As JAX writes, into a ValueError too, that a process of the run has gone."""
_SETS_UP_PLATFORMS = "jax._src.xla_bridge"
_BOX = "╭╮╰╯─+- "
"""Drawn with the second half where the stream has no other letters."""


def run_command(
    options: type[OptionsT],
    main: Callable[[OptionsT], ResultT],
    *,
    program: str,
    description: str,
    arguments: Sequence[str] | None = None,
    default: Callable[[Sequence[str]], OptionsT] | None = None,
) -> ResultT:
    """Runs a command from its command line, and returns what `main` returns; else one line on stderr and SystemExit.

    `program` is its module, as ``python -m`` takes it. Without `arguments`, they are those of the process. `default` makes
    the defaults from the command line; without it they are those of `options`.
    """
    given = arguments_of(arguments)
    with one_line_errors(options, debug=DEBUG in given):
        if not any(name in os.environ for name in GPU_MEMORY):
            os.environ[GPU_MEMORY[0]] = SHARE_OF_GPU
        cache, given = take_cache_option([each for each in given if each != DEBUG])
        defaults: dict[str, Any] = {} if default is None else {"default": default(given)}
        with _refusals_in_one_line(options):
            if not {"-h", "--help"}.isdisjoint(given):
                # Not by tyro, which joins the lines of a paragraph and does not wrap them.
                print(_wrapped(f"{description}\n{HELP}"))
            config = tyro.cli(options, args=given, prog=f"python -m {program}", description="", **defaults)
        use_compilation_cache(cache, distributed="--distributed" in given)
        result = main(config)
        # Here, and not when the interpreter ends: a closed pipe or a full disk is reported like any other fault.
        sys.stdout.flush()
        return result


def _wrapped(text: str) -> str:
    """Fits paragraphs into the window; indented ones stay as they are."""
    width = min(80, shutil.get_terminal_size().columns)
    paragraphs = [each.strip("\n") for each in text.split("\n\n")]
    return "\n\n".join(each if each.startswith(" ") else textwrap.fill(each, width) for each in paragraphs)


def arguments_of(arguments: Sequence[str] | None) -> list[str]:
    return list(sys.argv[1:] if arguments is None else arguments)


@contextlib.contextmanager
def one_line_errors(options: type | None = None, *, debug: bool = False) -> Generator[None, None, None]:
    """Turns what ends the ``with`` block into one line, fields of `options` as on the command line, and an exit code."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code(error)
        if debug:
            print(printable(traceback.format_exc()), end="", file=sys.stderr)
        # An error echoes paths, options, and the exceptions of a user's own functions.
        sentence = printable(_sentence(error, code, {} if options is None else names_as_typed(options)), keep="")
        here = processes()
        if not isinstance(error, RunEnded):
            here.end(code, sentence, is_origin=not _may_come_from_elsewhere(error))
        if here.first:
            _report(code, sentence)
        raise SystemExit(code) from None


def exit_code(error: BaseException) -> int:
    """Returns the exit code of what ended a command; see `HELP` and `experiments.runs.ends`."""
    if isinstance(error, RunEnded):
        return int(error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return 130
    if _is_fault(error):
        return int(ExitCode.ENVIRONMENT)
    return int(ExitCode.BAD_INPUT if isinstance(error, ValueError) else ExitCode.BUG)


def _may_come_from_elsewhere(error: BaseException) -> bool:
    """Returns True if it may follow from what happened to another process."""
    if _OF_A_COLLECTIVE.match(str(error)):
        return True
    return isinstance(error, jax.errors.JaxRuntimeError) and not _is_fault(error)


def _is_fault(error: BaseException) -> bool:
    """Returns True if the environment failed, and not an option or the program."""
    if isinstance(error, MemoryError | OSError) or _ERRNO_IN_TEXT.search(str(error)):
        return True
    if _found_no_device(error):
        return True
    if _OF_A_COLLECTIVE.match(str(error)):
        return True
    if isinstance(error, jax.errors.JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()
    # A ValueError about a file that cannot be read has been made of an OSError on purpose.
    if isinstance(error, ValueError):
        return False
    inner = error.__cause__ or error.__context__
    return inner is not None and _is_fault(inner)


def _found_no_device(error: BaseException) -> bool:
    """Returns True if JAX failed to set up a platform, which it says by an AssertionError without a text, among others."""
    frames = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__))
    return isinstance(error, AssertionError | RuntimeError) and _SETS_UP_PLATFORMS in frames


def _sentence(error: BaseException, code: int, names: dict[str, str]) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split())
    if _found_no_device(error):
        platforms = os.environ.get("JAX_PLATFORMS", "no value")
        return f"JAX_PLATFORMS: expected devices that are here, got {platforms}{text and f' ({text})'}"
    if code == ExitCode.BUG:
        return f"{type(error).__name__}: {text} (a bug; run again with {DEBUG} for the traceback)"
    if code != ExitCode.BAD_INPUT:
        return text or type(error).__name__
    argument, colon, rest = text.partition(":")
    return f"{names.get(argument.replace('-', '_'), argument)}{colon}{rest}" if colon else text


def _report(code: int, sentence: str) -> None:
    with contextlib.suppress(OSError):
        print(sentence if code == 0 else f"error: {sentence}", file=sys.stdout if code == 0 else sys.stderr, flush=True)
    try:
        sys.stdout.flush()
    except OSError as error:
        # The interpreter would try again at its end, and print a traceback.
        if error.errno in (errno.EPIPE, errno.ENOSPC):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _refusals_in_one_line(options: type) -> Generator[None, None, None]:
    """Makes one sentence of the box in which tyro refuses a command line for `options`."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            yield
    except SystemExit as stopped:
        if stopped.code in (0, None):
            raise
        raise ValueError(_first_sentence(box.getvalue(), options)) from None


def _first_sentence(box: str, options: type) -> str:
    """Returns the first section of a box, and the option that an unknown one may stand for."""
    lines: list[str] = []
    for line in box.splitlines()[1:]:
        text = line.strip("│| ")
        if not set(text) <= set(_BOX):
            lines.append(text)
        elif lines:
            break
    message = " ".join(lines).rstrip(".")
    unknown = re.match(r"Unrecognized options: (--[\w.-]+)", message)
    meant = None if unknown is None else nearest_option(unknown[1], options)
    hint = "" if meant is None else f" (perhaps {meant})"
    return f"{message[:1].lower()}{message[1:]}{hint}; --help lists all options"
