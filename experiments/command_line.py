"""How every command line here reports bad input: one line on stderr and exit code 2."""

import contextlib
import sys
from collections.abc import Iterator

from experiments.runs.stops import Stopped


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Turns a ValueError in the ``with`` block into ``error: <its message>`` on stderr and exit code 2, and the early end of
    a run into its message and exit code."""
    try:
        yield
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except Stopped as stop:
        print(stop, file=sys.stderr)
        raise SystemExit(stop.exit_code) from None
