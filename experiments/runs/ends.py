"""Ways in which a run ends before its last step, each with its exit code; `experiments.command_line.HELP` lists all."""

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command line here; a signal's is 128 plus its number."""

    BUG = 1
    BAD_INPUT = 2
    ENVIRONMENT = 3
    GUARD = 4


class RunEnded(Exception):
    """A run that ended early in an orderly way; the message is one sentence that says what was kept."""

    exit_code: int


class AlreadyFinished(RunEnded):
    """A run that had finished before."""

    exit_code = 0


class GuardAbort(RunEnded):
    """Numbers that cannot be trained on, in too many steps in a row."""

    exit_code = ExitCode.GUARD


class Interrupted(RunEnded):
    """A signal, answered at the end of a step."""

    def __init__(self, number: signal.Signals, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number
