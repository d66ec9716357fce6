"""How every command line here reports bad input: one line on stderr and exit code 2."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Turns a ValueError in the ``with`` block into ``error: <its message>`` on stderr and exit code 2."""
    try:
        yield
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
