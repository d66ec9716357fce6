"""Strict reading of files with one JSON object a line, for tasks and for documents.

`parse_lines` reads a whole file by a function of one line, which begins with `parse_object`. The messages of that function,
`check_text` and the like are reasons alone: `parse_lines` adds the path and the number of the line.
"""

import hashlib
import json
import math
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from experiments.tasks.protocol import Message, Prompt

METADATA = "metadata"
"""Key of a line whose value may be anything."""
MAX_BYTES = 2**30
"""Largest size of a file, which is read whole: what is made of its lines takes several times as much memory."""


Parsed = TypeVar("Parsed")


def read_lines(path: str | Path) -> tuple[list[bytes], str]:
    """Reads the lines of a file, all of it, into memory; returns them without their ends, and the sha256 of the file.

    ValueError if it cannot be read, is a pipe or a device, is larger than `MAX_BYTES`, or is empty.
    """
    try:
        require_regular(path)
        size = Path(path).stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"{size} bytes, more than {MAX_BYTES}")
        content = Path(path).read_bytes()
    # A path with a null character is a ValueError of its own.
    except (OSError, ValueError) as error:
        seen = getattr(error, "strerror", None) or error
        raise ValueError(f"file {path}: expected a readable file, got {seen}") from error
    lines = content.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    if not lines:
        raise ValueError(f"file {path}: expected one JSON object a line, got an empty file")
    return lines, hashlib.sha256(content).hexdigest()


def digest_of(path: str | Path) -> tuple[str, str]:
    """Returns the absolute path of a file of lines, and its sha256; raises as `read_lines`."""
    _, digest = read_lines(path)
    return str(Path(path).resolve()), digest


def parse_lines(path: str | Path, parse: Callable[[bytes], Parsed]) -> tuple[list[Parsed], str]:
    """Parses every line of a file; returns what was parsed, and the sha256 of the file.

    ValueError as `read_lines`; or as `parse`, after the path and the number of the line, counted from 1.
    """
    lines, digest = read_lines(path)
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            parsed.append(parse(line))
        except ValueError as error:
            raise ValueError(f"file {path}, line {number}: {error}") from error
    return parsed, digest


def require_regular(path: str | Path) -> None:
    """Raises ValueError for a pipe, which would block, and for a device, which may never end."""
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError("a pipe, socket or device")


def parse_object(line: bytes) -> dict[str, Any]:
    """Parses one line; ValueError if it is no JSON object in UTF-8, has a key twice, or a number is not finite."""
    try:
        record = json.loads(
            line.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant, parse_float=_finite
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError("invalid JSON: nested too deeply") from error
    except ValueError as error:
        # Python's own words; those of the functions below pass through.
        if "set_int_max_str_digits" not in str(error):
            raise
        most = sys.get_int_max_str_digits()
        raise ValueError(f"expected integers of at most {most} digits, got a longer one") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    return record


def check_text(key: str, value: Any) -> None:
    """Raises ValueError unless the value of a key is a text that UTF-8 can hold, with more than white space in it."""
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be a string, got {type(value).__name__}")
    # An empty answer would reward the model for saying nothing.
    if not value.strip():
        raise ValueError(f"{key!r} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{key!r} holds half of a surrogate pair at character {error.start}") from error


def parse_messages(key: str, value: Any, *, optional: tuple[str, ...] = ()) -> tuple[Message, ...]:
    """Returns the messages of a key: a list, not empty, of objects with role and content, and `optional` keys."""
    if not isinstance(value, list):
        raise ValueError(f"{key!r} must be a list of messages, got {type(value).__name__}")
    if not value:
        raise ValueError(f"{key!r} is empty")
    return tuple(_message(f"{key}[{number}]", message, optional) for number, message in enumerate(value))


def _message(place: str, value: Any, optional: tuple[str, ...]) -> Message:
    names = Message._fields
    if not isinstance(value, dict) or not set(names) <= set(value) <= {*names, *optional}:
        seen = f"keys {', '.join(sorted(value))}" if isinstance(value, dict) else type(value).__name__
        wanted = " and ".join(names) + "".join(f", and perhaps {name}" for name in optional)
        raise ValueError(f"{place!r} must be an object with {wanted}, got {seen}")
    for name in names:
        check_text(f"{place}.{name}", value[name])
    return Message(value["role"], value["content"])


def _constant(word: str) -> NoReturn:
    raise ValueError(f"invalid JSON: {word} is not a number of JSON")


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"expected numbers that float64 holds, got {digits[:40]}")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for key, value in pairs:
        if key in record:
            raise ValueError(f"key {key!r} occurs twice in one object")
        record[key] = value
    return record


def parse_prompt(key: str, value: Any) -> Prompt:
    """Returns a text, or the messages of a list; ValueError naming the key for anything else."""
    if isinstance(value, list):
        return parse_messages(key, value)
    check_text(key, value)
    return value
