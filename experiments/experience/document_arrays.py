"""The form of documents as flat arrays by name; `experiments.experience.stored` describes it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from experiments.experience.document_fields import (
    INT32_MAX,
    KEYS,
    LOG_PROBS,
    NEEDED,
    OFFSETS,
    OPTIONAL,
    SUPPORT,
    as_bool,
    as_float32,
    check_names,
    check_support_names,
)
from experiments.experience.limits import Limits
from jaxlogp import Document, Support
from jaxlogp.errors import describe, require


def join_documents(documents: Sequence[Document]) -> dict[str, np.ndarray]:
    """Returns the arrays of documents, by name.

    ValueError if only some documents have log-probs or a support, fp32 does not hold a value, or numbers of labels
    could not be told from numbers of documents.
    """
    counts = [document.num_labels for document in documents]
    lengths = [document.tokens.size for document in documents]
    arrays = {
        "tokens": np.concatenate([document.tokens for document in documents]).astype(np.int32),
        "labels": np.concatenate([document.labels for document in documents]),
        OFFSETS: np.cumsum([0, *lengths], dtype=np.int64),
    }
    for name in LOG_PROBS:
        values = [getattr(document, name) for document in documents]
        without = [number for number, each in enumerate(values) if each is None]
        if len(without) < len(values):
            expected = f"{name} as in other documents (or a .jsonl file)"
            require(not without, f"documents{without[:1]}", expected, None)
            arrays[name] = as_float32(name, np.concatenate(values))
    for name, default in OPTIONAL.items():
        values = [getattr(document, name) for document in documents]
        if any(map(np.ndim, values)):
            flat = np.concatenate([np.broadcast_to(each, count) for each, count in zip(values, counts, strict=True)])
            arrays[name] = flat.astype(np.int32) if name == "versions" else as_float32(name, flat)
        elif any(each != default for each in values):
            arrays[name] = np.array(values, np.int32 if name == "versions" else np.float64)
        if name in arrays:
            _is_per_label(name, arrays[name], np.array(counts))
            as_float32(name, arrays[name])
    supports = [document.support for document in documents if document.support is not None]
    if supports:
        require(len(supports) == len(documents), "documents", "a support in all or in none", f"{len(supports)} of them")
        joined = Support.concatenate(supports)
        arrays |= dict(zip(SUPPORT, (joined.ids, joined.counts), strict=True))
    return arrays


def split_documents(arrays: dict[str, np.ndarray], limits: Limits) -> list[Document]:
    """Returns the documents of arrays, and raises ValueError if an array or a document is not sound or beyond the limits."""
    needed = (*NEEDED, OFFSETS)
    check_names(arrays, needed, (*needed, *KEYS))
    for name, array in arrays.items():
        integral = name in (*needed, "versions", *SUPPORT)
        kind, dtype = (jnp.integer, "an integer dtype") if integral else (jnp.floating, "a floating dtype")
        require(array.ndim == 1, name, "one axis", describe(array))
        known = jnp.issubdtype(array.dtype, kind) or (name == "labels" and array.dtype == np.bool_)
        require(known, name, dtype, describe(array))
    tokens, labels, offsets = arrays["tokens"], as_bool(arrays["labels"]), arrays[OFFSETS].astype(np.int64)
    require(labels.size == tokens.size, "labels", f"{tokens.size} values, one for each token", labels.size)
    sound = offsets.size > 1 and offsets[0] == 0 and offsets[-1] == tokens.size and bool(np.all(np.diff(offsets) > 0))
    require(sound, OFFSETS, f"rising numbers from 0 to {tokens.size}, the number of tokens", "others")
    wrong = tokens[(tokens < 0) | (tokens > INT32_MAX)]
    require(not wrong.size, "tokens", f"ids in [0, {INT32_MAX}]", wrong[:1])
    counts = np.add.reduceat(labels.astype(np.int64), offsets[:-1])
    pieces: dict[str, Sequence[Any]] = {}
    for name in (*LOG_PROBS, *OPTIONAL):
        if name in arrays:
            pieces[name] = _pieces(name, arrays[name], counts)
    if check_support_names(arrays):
        pieces["support"] = _supports(*(arrays[name] for name in SUPPORT), counts)
    documents = []
    for number, (start, stop) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        values = {name: piece[number] for name, piece in pieces.items()}
        try:
            document = Document(tokens[start:stop].astype(np.int32), labels[start:stop], **values)
            documents.append(limits.check(document))
        except ValueError as error:
            raise ValueError(f"documents[{number}]: {error}") from error
    return documents


def _pieces(name: str, array: np.ndarray, counts: Int[np.ndarray, " documents"]) -> Sequence[Any]:
    """Returns the values of each document: an array for its labels, or a number."""
    if not _is_per_label(name, array, counts):
        # Others that are not finite are named with their document.
        as_float32(name, array[np.isfinite(array)])
        return array.tolist() if array.dtype.kind in "iu" else array.astype(np.float64).tolist()
    return np.split(array if name == "versions" else as_float32(name, array), np.cumsum(counts)[:-1])


def _supports(
    ids: Int[np.ndarray, " ids"], sizes: Int[np.ndarray, " labels"], counts: Int[np.ndarray, " documents"]
) -> list[Support]:
    total = int(counts.sum())
    require(sizes.size == total, "support_counts", f"{total} values, one for each label", sizes.size)
    support, ends = Support.from_counts(sizes, ids), np.cumsum([0, *counts])
    return [support.part(int(start), int(stop)) for start, stop in pairwise(ends)]


def _is_per_label(name: str, array: np.ndarray, counts: Int[np.ndarray, " documents"]) -> bool:
    """Returns True if an array has a value for each label, False if it has one for each document."""
    labels, documents = int(counts.sum()), counts.size
    allowed = {} if name == "reward" else {"label": labels}
    allowed |= {} if name in LOG_PROBS else {"document": documents}
    expected = " or ".join(f"{size} values, one for each {thing}" for thing, size in allowed.items())
    require(array.size in allowed.values(), name, expected, array.size)
    ambiguous = len(allowed) == 2 and labels == documents and bool(np.any(counts != 1))
    require(not ambiguous, name, "not as many labels as documents (or a .jsonl file)", f"{labels} of both")
    return "label" in allowed and array.size != allowed.get("document")
