"""The small files of a checkpoint directory, as JSON objects with checked values."""

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlogp.errors import require

MAX_BYTES = 2**28
"""Far above any tokenizer.json; more is not read into memory."""
MAX_SHOWN = 200
"""Characters of a wrong value in a message: a list may have a vocabulary's tokens."""


def read_text(path: Path) -> str:
    """Reads a file, and raises ValueError if there is none, it is too large, or it is not UTF-8."""
    require(path.is_file(), "model directory", f"one with {path.name}", f"none in {path.parent}")
    size = path.stat().st_size
    require(size <= MAX_BYTES, path.name, f"at most {MAX_BYTES} bytes", size)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name}: expected readable UTF-8 text, got {error}") from None


def read_object(path: Path) -> "JsonObject":
    """Reads the JSON object in a file, and raises ValueError if there is none."""
    text = read_text(path)
    try:
        values = json.loads(text)
    # Python itself refuses an integer of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: expected JSON, got {error}") from None
    require(isinstance(values, dict), path.name, "a JSON object", type(values).__name__)
    return JsonObject(path.name, values)


@dataclass(frozen=True)
class JsonObject:
    """An object of a JSON file, or a GGUF file's metadata; names file and key where a value is not what it must be."""

    place: str
    values: Mapping[str, Any]

    def has(self, key: str) -> bool:
        """Returns True if there is a value other than null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer; the default stands in for a missing one, and None for no default."""
        return self._value(key, default, "a positive integer", lambda value: is_integer(value) and 1 <= value < 2**31)

    def number(self, key: str, default: float | None = None) -> float:
        def is_right(value: Any) -> bool:
            return (is_integer(value) or isinstance(value, float)) and 0 < value <= sys.float_info.max

        return float(self._value(key, default, "a finite number above 0", is_right))

    def index(self, key: str, size: int, default: int | None = None) -> int:
        """Returns an integer of at least 0 and below `size`."""
        return self._value(
            key, default, f"an integer in [0, {size})", lambda value: is_integer(value) and 0 <= value < size
        )

    def texts(self, key: str) -> list[str]:
        """Returns a list of strings."""
        return self._list(key, "strings", lambda value: isinstance(value, str))

    def integers(self, key: str) -> list[int]:
        """Returns a list of integers."""
        return self._list(key, "integers", is_integer)

    def flag(self, key: str, default: bool) -> bool:
        return self._value(key, default, "true or false", lambda value: isinstance(value, bool))

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default, "a string", lambda value: isinstance(value, str))
        require(is_utf8(value), f"{self.place}, {key}", "text that UTF-8 can hold", repr(value)[:MAX_SHOWN])
        return value

    def object(self, key: str) -> "JsonObject":
        """Returns an object; a missing one is empty."""
        value = self._value(key, {}, "an object", lambda value: isinstance(value, dict))
        return JsonObject(f"{self.place}, {key}", value)

    def _list(self, key: str, members: str, is_right: Callable[[Any], bool]) -> list[Any]:
        return self._value(
            key, None, f"a list of {members}", lambda value: isinstance(value, list) and all(map(is_right, value))
        )

    def _value(self, key: str, default: Any, expected: str, is_right: Callable[[Any], bool]) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        require(value is not None, self.place, f"the key {key}", "none")
        require(is_right(value), f"{self.place}, {key}", expected, repr(value)[:MAX_SHOWN])
        return value


def is_utf8(text: str) -> bool:
    """Returns True for a text without halves of surrogate pairs, which JSON and Jinja can write and UTF-8 cannot."""
    return re.search("[\ud800-\udfff]", text) is None


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
