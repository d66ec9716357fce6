"""Options as fields of nested dataclasses: by dotted name (``schedule.docs_per_step``), as they are typed
(``--schedule.docs-per-step``), and with a range in their annotation (``Annotated[int, AtLeast(1)]``)."""

import contextlib
import dataclasses
import difflib
import functools
import math
import re
import typing
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from jaxlogp.errors import require

OptionsT = TypeVar("OptionsT")


class Range:
    """Values that an option may have, besides None, and how a refusal says so: a mark in its annotation."""

    def __init__(self, expected: str, allows: Callable[[Any], bool]) -> None:
        self.expected, self.allows = expected, allows


class AtLeast(Range):
    """Numbers from `lowest` on."""

    def __init__(self, lowest: float) -> None:
        super().__init__(f"at least {lowest}", lambda value: value >= lowest)


class Within(Range):
    """Numbers from `lowest` to `highest`, both included."""

    def __init__(self, lowest: float, highest: float) -> None:
        super().__init__(f"a number in [{lowest}, {highest}]", lambda value: lowest <= value <= highest)


class Positive(Range):
    """Finite numbers above 0."""

    def __init__(self) -> None:
        super().__init__("a finite number > 0", lambda value: 0.0 < value < math.inf)


class OneOf(Range):
    """Some texts."""

    def __init__(self, *choices: str) -> None:
        super().__init__(f"one of {', '.join(choices)}", choices.__contains__)


def option_name(field: str) -> str:
    """Returns how a field is typed.

    Example:
        >>> option_name("schedule.docs_per_step")
        '--schedule.docs-per-step'
    """
    return f"--{field.replace('_', '-')}"


type_hints = functools.cache(typing.get_type_hints)
"""`typing.get_type_hints`, once for each class in a process."""


def flat_fields(options: type, prefix: str = "") -> dict[str, Any]:
    """Returns annotations by dotted name."""
    hints = type_hints(options, include_extras=True)
    found: dict[str, Any] = {}
    for each in dataclasses.fields(options):
        hint = hints[each.name]
        if dataclasses.is_dataclass(hint):
            found |= flat_fields(typing.cast(type, hint), f"{prefix}{each.name}.")
        else:
            found[prefix + each.name] = hint
    return found


def range_of(hint: Any) -> Range | None:
    """Returns the range in an annotation, or None."""
    return next((mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Range)), None)


def check_ranges(options: Any) -> None:
    """Compares every option with its range; the ValueError names the option as it is typed."""
    for name, hint in flat_fields(type(options)).items():
        value, allowed = value_of(options, name), range_of(hint)
        if allowed is not None and value is not None:
            require(allowed.allows(value), option_name(name), allowed.expected, value)


def value_of(options: Any, field: str) -> Any:
    """Returns the value at a dotted name."""
    for part in field.split("."):
        options = getattr(options, part)
    return options


def replaced(options: OptionsT, values: Mapping[str, Any]) -> OptionsT:
    """Returns the options with other values, by dotted name; ValueError if there is no such field."""
    known = flat_fields(type(options))
    for field, value in values.items():
        if field not in known:
            raise ValueError(f"{field}: expected one of {', '.join(known)}, got a field that is none of them")
        options = _replaced(options, field.split("."), value)
    return options


def _replaced(options: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    inner = _replaced(getattr(options, first), rest, value) if rest else value
    return dataclasses.replace(options, **{first: inner})


def typed_options(arguments: Sequence[str], options: type) -> list[str]:
    """Returns the fields that a valid command line names: what was typed, even if it equals the default.

    Example:
        >>> from experiments.config import Config
        >>> typed_options(["--seed=1", "--schedule.docs-per-step", "64", "--evaluation.no-kl"], Config)
        ['seed', 'schedule.docs_per_step', 'evaluation.kl']
    """
    known = flat_fields(options)
    typed: dict[str, None] = {}
    for argument in arguments:
        if not argument.startswith("--"):
            continue
        section, dot, name = argument[2:].partition("=")[0].replace("-", "_").rpartition(".")
        for each in (name, name.removeprefix("no_")):
            if section + dot + each in known:
                typed[section + dot + each] = None
                break
    return list(typed)


def names_as_typed(options: type) -> dict[str, str]:
    """Returns how an option is typed, by the names that a sentence about it may begin with.

    They are the dotted name, the name alone where no other section has it, and that of a section, which stands for its path
    if it has one.
    """
    named = [field for field, hint in flat_fields(options).items() if not _is_positional(hint)]
    alone = [field.rpartition(".")[2] for field in named]
    names = {section: option_name(section) for section in (field.rpartition(".")[0] for field in named) if section}
    names |= {name: option_name(field) for name, field in zip(alone, named, strict=True) if alone.count(name) == 1}
    names |= {field.removesuffix(".path"): option_name(field) for field in named if field.endswith(".path")}
    # The dotted names last: `name` is --name, and not --loss.name.
    return names | {field: option_name(field) for field in named}


def nearest_option(typed: str, options: type) -> str | None:
    """Returns the option that an unknown one may stand for: one without its section, cut short, misspelt or abbreviated.

    Example:
        >>> from experiments.config import Config
        >>> [nearest_option(typed, Config) for typed in ("--steps", "--rollout.n", "--seeed", "--optimizer.lr", "--x.y")]
        ['--schedule.steps', '--rollout.num-generations', '--seed', '--optimizer.learning-rate', None]
    """
    names = [option_name(field) for field, hint in flat_fields(options).items() if not _is_positional(hint)]
    alone = typed.replace("_", "-").rpartition(".")[2].removeprefix("--")
    section = typed[: len(typed) - len(alone)]
    # Without the section that all of them share, which would make any two alike.
    of_section = {name.removeprefix(section): name for name in names if name.startswith(section)}
    misspelt = difflib.get_close_matches(alone, of_section, n=1, cutoff=0.7)
    letters = re.compile(".*".join(map(re.escape, alone)))
    candidates = (
        [name for name in names if name.startswith(section + alone)],
        sorted((name for name in names if name.endswith(f".{alone}")), key=len),
        [of_section[name] for name in misspelt],
        [name for rest, name in of_section.items() if letters.match(rest)] if section != "--" else [],
        difflib.get_close_matches(typed, names, n=1, cutoff=0.8),
    )
    return next((found[0] for found in candidates if found), None)


def _is_positional(hint: Any) -> bool:
    return any("Positional" in repr(each) for each in getattr(hint, "__metadata__", ()))


@contextlib.contextmanager
def option_errors(section: str) -> Generator[None, None, None]:
    """Names the option of a section where an object that is made of its options refuses an argument."""
    try:
        yield
    except ValueError as error:
        argument, _, rest = str(error).partition(":")
        raise ValueError(f"{option_name(f'{section}.{argument}')}:{rest}") from None
