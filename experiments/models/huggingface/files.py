"""The small files of a checkpoint directory, as JSON objects with checked values."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlogp.errors import require

MAX_BYTES = 2**28
"""Far above any tokenizer.json; more is not read into memory."""


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
    try:
        values = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path.name}: expected JSON, got {error}") from None
    require(isinstance(values, dict), path.name, "a JSON object", type(values).__name__)
    return JsonObject(path.name, values)


@dataclass(frozen=True)
class JsonObject:
    """An object of a JSON file, which names file and key where a value is not what it must be."""

    place: str
    values: Mapping[str, Any]

    def has(self, key: str) -> bool:
        """Returns True if there is a value other than null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer; the default stands in for a missing one, and None for no default."""
        value = self._value(key, default)
        is_integer = isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31
        require(is_integer, f"{self.place}, {key}", "a positive integer", repr(value))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a finite number above 0, likewise."""
        value = self._value(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
        require(is_number, f"{self.place}, {key}", "a finite number above 0", repr(value))
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        require(isinstance(value, bool), f"{self.place}, {key}", "true or false", repr(value))
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        require(isinstance(value, str), f"{self.place}, {key}", "a string", repr(value))
        return value

    def object(self, key: str) -> "JsonObject":
        """Returns an object; a missing one is empty."""
        value = self._value(key, {})
        require(isinstance(value, dict), f"{self.place}, {key}", "an object", repr(value))
        return JsonObject(f"{self.place}, {key}", value)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        require(value is not None, self.place, f"the key {key}", "none")
        return value
