"""Names of options as they are written on the command line."""

import contextlib
from collections.abc import Iterator


def dashed(name: str) -> str:
    return name.replace("_", "-")


@contextlib.contextmanager
def refused_as(section: str) -> Iterator[None]:
    """Names the option of this section where an object that is made of its options refuses an argument."""
    try:
        yield
    except ValueError as error:
        argument, _, rest = str(error).partition(":")
        raise ValueError(f"--{section}.{dashed(argument)}:{rest}") from None
