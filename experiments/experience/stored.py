"""Documents in files: rollouts of other systems, or a run's own, read as a source and written.

`read_documents` reads what `write_documents` writes, as does `--source stored:PATH`. A .jsonl file has a document a line:

    {"tokens": [5, 6, 7], "labels": [0, 1, 1], "advantages": 0.5, "sampler_log_probs": [-0.5, -0.1], "reward": 1.0}

`tokens` and `labels` are needed. `sampler_log_probs` and `old_log_probs` have a number for each label, `advantages` and
`versions` one number or one for each label, and `reward` is a number, as in `jaxlogp.Document`. `support_counts` has the
number of ids that each label was drawn from, and `support_ids` these ids one after the other.

A .safetensors file has the same values of all documents one after the other: `tokens` and `labels` [tokens], `offsets`
[documents + 1] where each document begins and the last one ends, `sampler_log_probs` and `old_log_probs` [labels], `reward`
[documents], `advantages` and `versions` in one of these two shapes, `support_counts` [labels] and `support_ids` [ids].
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from experiments.experience.document_arrays import join_documents, split_documents
from experiments.experience.document_lines import format_document, parse_document
from experiments.experience.limits import NO_LIMITS, Limits
from experiments.extras import import_extra
from experiments.models.huggingface.weights import opened_safetensors
from experiments.runs.files import replace_file
from experiments.tasks.json_lines import parse_lines, require_regular
from jaxlogp import Document
from jaxlogp.errors import require

DTYPES = ("BOOL", *(f"{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64)), "F16", "BF16", "F32", "F64")
"""Dtypes that NumPy knows, as a .safetensors file names them."""


def read_documents(path: str | Path, limits: Limits = NO_LIMITS) -> tuple[list[Document], str]:
    """Reads all documents of a .jsonl or .safetensors file; returns them, and the sha256 of the file.

    Values of labels are converted to fp32, the dtype of packed rows.

    Raises:
        ValueError: if the file cannot be read, or a document is not sound or beyond the limits; in one sentence with the
            path and the number of the line, or of the document, which counts from 0.
    """
    if _is_jsonl(path):
        return parse_lines(path, lambda line: limits.check(parse_document(line)))
    try:
        require_regular(path)
        with open(path, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        seen = getattr(error, "strerror", None) or error
        raise ValueError(f"file {path}: expected a readable file, got {seen}") from error
    with opened_safetensors(Path(path), f"file {path}") as tensors:
        for name in tensors.keys():
            dtype = tensors.get_slice(name).get_dtype()
            require(dtype in DTYPES, f"file {path}, {name}", f"one of {', '.join(DTYPES)}", dtype)
        arrays = {name: tensors.get_tensor(name) for name in tensors.keys()}
    try:
        return split_documents(arrays, limits), digest
    except ValueError as error:
        raise ValueError(f"file {path}, {error}") from error


def write_documents(path: str | Path, documents: Iterable[Document]) -> None:
    """Writes documents to a .jsonl or .safetensors file, replacing it atomically.

    Log-probs and advantages of labels are stored in fp32, bit by bit; numbers of a document in fp64. Values that all
    documents leave at their default are omitted. In a .safetensors file, where advantages or versions are one number in
    some documents and several in others, all documents get one for each label.

    Raises:
        ValueError: if there is no document; if a document has further columns, or a value that fp32 does not hold; or, in
            a .safetensors file, if only some documents have log-probs, or one could not tell numbers of labels from
            numbers of documents.
    """
    documents = tuple(documents)
    require(len(documents) > 0, "documents", "at least one", "none")
    for number, document in enumerate(documents):
        require(not document.columns, f"documents[{number}]", "no further columns", sorted(document.columns))
    if _is_jsonl(path):
        content = b"".join(map(format_document, documents))
    else:
        content = _save(join_documents(documents))
    replace_file(Path(path), content)


def _is_jsonl(path: str | Path) -> bool:
    suffix = Path(path).suffix
    require(suffix in (".jsonl", ".safetensors"), "documents", "a file .jsonl or .safetensors", path)
    return suffix == ".jsonl"


def _save(arrays: dict[str, np.ndarray]) -> bytes:
    return import_extra("safetensors.numpy", "documents", "hf").save(arrays)
