"""The form of a document in JSON, one in a line of a file; `experiments.experience.stored` describes it."""

import json
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from experiments.experience.document_fields import (
    INT32_MAX,
    KEYS,
    LOG_PROBS,
    NEEDED,
    OPTIONAL,
    SUPPORT,
    as_bool,
    as_float32,
    check_names,
    check_support_names,
)
from experiments.tasks.json_lines import parse_object
from jaxlogp import Document, Support
from jaxlogp.errors import is_number, require

LARGEST = float(np.finfo(np.float32).max)


def parse_document(line: bytes) -> Document:
    """Parses the document of one line, and raises ValueError with the reason alone if it is not sound."""
    record = parse_object(line)
    check_names(record, NEEDED, KEYS)
    values: dict[str, Any] = {name: _floats(name, record[name]) for name in LOG_PROBS if name in record}
    for name in OPTIONAL:
        value = record.get(name)
        if name in record and isinstance(value, list) and name != "reward":
            values[name] = _integers(name, value) if name == "versions" else _floats(name, value)
        elif name in record:
            expected = "a number" if name == "reward" else "a number or a list of numbers"
            require(is_number(value) and abs(value) <= LARGEST, name, expected, _short(value))
            values[name] = value
    if check_support_names(record):
        ids, counts = (_integers(name, record[name]) for name in SUPPORT)
        values["support"] = Support.from_counts(counts, ids).part(0, counts.size)
    tokens, labels = (_integers(name, record[name]) for name in NEEDED)
    return Document(tokens, as_bool(labels), **values)


def format_document(document: Document) -> bytes:
    """Returns the line of a document, and raises ValueError if fp32 does not hold a value."""
    record: dict[str, Any] = {"tokens": document.tokens.tolist(), "labels": document.labels.astype(int).tolist()}
    for name in LOG_PROBS:
        if (values := getattr(document, name)) is not None:
            record[name] = as_float32(name, values).tolist()
    for name, default in OPTIONAL.items():
        value = getattr(document, name)
        if np.ndim(value):
            record[name] = (np.asarray(value) if name == "versions" else as_float32(name, value)).tolist()
        elif value != default:
            as_float32(name, np.asarray(value))
            record[name] = int(value) if name == "versions" else float(value)
    if document.support is not None:
        arrays = document.support.ids, document.support.counts
        record |= {name: np.asarray(array).tolist() for name, array in zip(SUPPORT, arrays, strict=True)}
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _integers(name: str, value: Any) -> Int[np.ndarray, " length"]:
    are_integers = isinstance(value, list) and all(type(each) is int for each in value)
    require(are_integers, name, "a list of integers", _short(value))
    wrong = [each for each in value if not 0 <= each <= INT32_MAX]
    require(not wrong, name, f"integers in [0, {INT32_MAX}]", wrong[:1])
    return np.array(value, np.int32)


def _floats(name: str, value: Any) -> Float[np.ndarray, " length"]:
    require(isinstance(value, list) and all(map(is_number, value)), name, "a list of numbers", _short(value))
    wrong = [each for each in value if abs(each) > LARGEST]
    require(not wrong, name, "numbers that fp32 holds", _short(wrong[:1]))
    return np.array(value, np.float32)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
