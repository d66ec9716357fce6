"""Nested dataclasses as JSON with a hash, such as config.json, read back without loss.

JSON has no NaN and no infinity: they are written as the strings "nan", "inf" and "-inf", which the readers turn back
into floats.
"""

import json
import math
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from experiments.options import type_hints
from experiments.runs.files import digest_of_json, write_json
from jaxlogp.errors import require

NON_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
LARGEST_BYTES = 1 << 30
LARGEST_FLOAT = sys.float_info.max
MAX_DEPTH = 64
ConfigT = typing.TypeVar("ConfigT")


def save_config(path: Path, config: Any) -> None:
    """Writes nested dataclasses as config.json, with the sha256 that `load_config` checks.

    Fields may be bool, int, float, str, None, Path, Literal, tuples, unions and dataclasses of these. Raises ValueError for
    a configuration that `load_config` could not return unchanged.
    """
    values = exact_json(config, "config")
    write_json(path, {"config": values, "sha256": digest_of_json(values)})


def load_config(path: Path, config_type: type[ConfigT]) -> ConfigT:
    """Rebuilds the configuration that `save_config` wrote; ValueError if it is damaged, or a key or type is another."""
    return from_json(read_config(path), config_type, f"{path}: config")


def read_object(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file; ValueError naming the path where there is none."""
    try:
        size = path.stat().st_size
        require(size <= LARGEST_BYTES, "size", f"at most {LARGEST_BYTES} bytes", size)
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected a JSON object, got {type(error).__name__}: {error}") from error
    require(isinstance(value, dict), str(path), "a JSON object", type(value).__name__)
    return value


def parse_json(text: bytes) -> Any:
    """Parses a JSON value; ValueError where there is none, or one so deep that a walk through it would fail later."""
    try:
        value = json.loads(text)
    except RecursionError:
        value = None
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        level = [value] if isinstance(value, dict | list) else []
        for _ in range(MAX_DEPTH):
            level = [inner for each in level for inner in _inside(each)]
        require(value is not None and not level, "JSON", f"values nested at most {MAX_DEPTH} deep", "deeper ones")
    return value


def _inside(value: Any) -> list[Any]:
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return [each for each in inside if isinstance(each, dict | list)]


def read_config(path: Path) -> dict[str, Any]:
    """Returns the values of config.json; ValueError where they do not match its hash."""
    return read_sealed(path, "config")


def read_sealed(path: Path, name: str) -> Any:
    """Returns the values that a file has under `name`; ValueError where they do not match the sha256 beside them."""
    stored = read_object(path)
    require(stored.keys() == {name, "sha256"}, str(path), f"the keys {name} and sha256", sorted(stored))
    seen = digest_of_json(stored[name])
    require(seen == stored["sha256"], str(path), f"values with sha256 {stored['sha256']}", f"{seen}: edited or damaged")
    return stored[name]


def exact_json(value: Any, place: str) -> Any:
    """Returns a dataclass as JSON values from which `from_json` builds its equal; ValueError if there are none."""
    values = to_json(value, place)
    rebuilt = from_json(values, type(value), place)
    changed = [field.name for field in fields(value) if getattr(rebuilt, field.name) != getattr(value, field.name)]
    require(not changed, place, "values that JSON returns unchanged", f"others in {', '.join(changed)}")
    return values


def to_json(value: Any, place: str = "config", levels: int = MAX_DEPTH - 2) -> Any:
    """Returns dataclasses, mappings, tuples and paths as JSON values; ValueError that names the place of anything else.

    `levels` bounds their nesting, so that `parse_json` still takes a checkpoint's record two levels down in its manifest.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Path):
        return str(value)
    require(levels > 0, place, "values that are not nested so deep", "deeper ones")
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        require(all(type(name) is str for name in value), place, "names that are text", sorted(map(repr, value)))
        return {name: to_json(item, f"{place}.{name}", levels - 1) for name, item in value.items()}
    is_list = isinstance(value, list | tuple)
    require(is_list, place, "a JSON value, a path or a tuple of them", type(value).__name__)
    return [to_json(item, place, levels - 1) for item in value]


def from_json(value: Any, annotation: Any, place: str) -> Any:
    """Converts JSON back to one annotated type, or raises ValueError that names the place."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    wanted = getattr(annotation, "__name__", None) if origin is None else str(annotation)
    if annotation is Any:
        return value
    if is_dataclass(annotation):
        return _build_dataclass(value, annotation, place)
    if origin in (typing.Union, types.UnionType):
        return _build_first(value, arguments, place)
    if origin is typing.Literal and any(type(value) is type(choice) and value == choice for choice in arguments):
        return value
    if origin is dict and isinstance(value, dict):
        return {name: from_json(item, arguments[1], f"{place}.{name}") for name, item in value.items()}
    if origin is list and isinstance(value, list):
        return [from_json(item, arguments[0], place) for item in value]
    if origin is tuple and isinstance(value, list):
        kinds = (arguments[0],) * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) == len(value):
            return tuple(from_json(item, kind, place) for item, kind in zip(value, kinds, strict=True))
    if annotation is float and (type(value) is int or (isinstance(value, str) and value in NON_FINITE)):
        require(
            type(value) is str or abs(value) <= LARGEST_FLOAT, place, "a number that float64 holds", repr(value)[:200]
        )
        return float(value)
    if annotation is Path and isinstance(value, str):
        return Path(value)
    if annotation in (bool, int, float, str, type(None)) and type(value) is annotation:
        return value
    raise ValueError(f"{place}: expected {wanted}, got {repr(value)[:200]}")


def _build_first(value: Any, choices: tuple[Any, ...], place: str) -> Any:
    reasons = []
    for choice in choices:
        try:
            return from_json(value, choice, place)
        except ValueError as reason:
            reasons.append(str(reason))
    raise ValueError("; or ".join(reasons))


def _build_dataclass(value: Any, config_type: Any, place: str) -> Any:
    require(isinstance(value, dict), place, f"the fields of {config_type.__name__}", repr(value)[:200])
    names = [field.name for field in fields(config_type) if field.init]
    unknown, missing = sorted(value.keys() - set(names)), [name for name in names if name not in value]
    require(not unknown, place, f"the keys of {config_type.__name__}", f"unknown {', '.join(unknown)}")
    require(not missing, place, f"every key of {config_type.__name__}", f"none named {', '.join(missing)}")
    hints = type_hints(config_type)
    return config_type(**{name: from_json(value[name], hints[name], f"{place}.{name}") for name in names})
