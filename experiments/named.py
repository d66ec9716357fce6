"""Objects that options name as module:name, such as a task, a reward, a model or a source of your own.

A module is found as by ``import``; the current directory is among the places for ``python -m``.
"""

import importlib
from collections.abc import Callable
from typing import Any

from jaxlogp.errors import require

OWN = "own:"
"""Before the name of an object that was passed from Python, in the options that a run keeps."""
NOT_A_MODULE = f"a module of another name than {OWN.removesuffix(':')}"
"""What is expected, too, where such an object is missing: the text may have been meant as module:name."""


def is_module_name(text: str) -> bool:
    """Returns True for module:name, whether or not there is such a module.

    Example:
        >>> is_module_name("package.module:name"), is_module_name("addition:2")
        (True, False)
    """
    module, _, name = text.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), name))


def import_named(option: str, text: str, expected: str) -> Any:
    """Returns the object that an option names; ValueError says what it `expected`, and why there is none."""
    require(is_module_name(text), option, expected, repr(text))
    module, _, name = text.partition(":")
    try:
        found = importlib.import_module(module)
    # A script without a main guard may end the process.
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        is_missing = missing is not None and f"{module}.".startswith(f"{missing}.")
        reason = f"there is no module {missing}" if is_missing else f"module {module} raised {_described(error)}"
        raise ValueError(f"{option}: expected {expected}, got {text!r}, but {reason}") from error
    require(hasattr(found, name), option, expected, f"{text!r}, but module {module} has no {name}")
    return getattr(found, name)


def call_named(option: str, text: str, expected: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what a named function or class makes; ValueError, with the words of `import_named`, if it raises."""
    try:
        return function(*arguments)
    except Exception as error:
        raise ValueError(f"{option}: expected {expected}, got {text!r}, which raised {_described(error)}") from error


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
