"""Documents that wait for a step, in one order."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.learner.packing import GlobalMicroBatch, Packing
from jaxlogp import Document, Support

LOG_PROBS = ("sampler_log_probs", "old_log_probs")


class DocumentQueue:
    """Documents that wait for a step, oldest first; what a step leaves is part of the checkpoint."""

    def __init__(self, documents: Sequence[Document] = ()) -> None:
        self.documents = tuple(documents)

    def lacks(self, number: int) -> bool:
        """Whether fewer than `number` documents wait; of 0, whether none does."""
        return len(self.documents) < max(number, 1)

    def add(self, documents: Sequence[Document]) -> None:
        self.documents += tuple(documents)

    def rounds(self, packing: Packing, at_most: int | None = None) -> Iterator[GlobalMicroBatch]:
        """Yields rounds of the oldest documents, `at_most` so many in all; those of a round leave the queue with it."""
        left = len(self.documents) if at_most is None else min(at_most, len(self.documents))
        while left:
            taken = packing.round_of(self.documents[:left])
            self.documents = self.documents[taken.num_documents :]
            left -= taken.num_documents
            yield taken

    def to_json(self) -> list[dict[str, Any]]:
        return [_to_json(document) for document in self.documents]

    @classmethod
    def from_json(cls, values: list[dict[str, Any]]) -> "DocumentQueue":
        """Restores the queue of a checkpoint, on any number of ranks."""
        return cls([_from_json(each) for each in values])


def _to_json(document: Document) -> dict[str, Any]:
    # A float32 survives the conversion to a Python float and to JSON's shortest form exactly. A source of one's own may
    # have given numbers of NumPy or JAX.
    apart = ("labels", "support", "columns")
    names = [field.name for field in dataclasses.fields(document) if field.init and field.name not in apart]
    plain = {name: getattr(document, name) for name in names}
    values = {name: value if value is None else np.asarray(value).tolist() for name, value in plain.items()}
    # What is allowed above 0 depends on the dtype: a float16 log-prob of 0.001 would be refused as a float32 one.
    log_probs = {name: plain[name] for name in LOG_PROBS if plain[name] is not None}
    values["dtypes"] = {name: value.dtype.name for name, value in log_probs.items()}
    # Label positions are fewer than labels, and numbers in JSON.
    values["labels"] = document.label_positions.tolist()
    support = document.support
    values["support"] = support and {"ids": support.ids.tolist(), "counts": support.counts.tolist()}
    return values | {"columns": {name: column.tolist() for name, column in document.columns.items()}}


def _from_json(saved: dict[str, Any]) -> Document:
    values = dict(saved)
    tokens = np.array(values["tokens"], np.int32)
    labels = np.zeros(tokens.size, bool)
    labels[values["labels"]] = True
    dtypes = {"advantages": np.float32, "versions": np.int32, **values.pop("dtypes")}
    arrays = {
        name: np.array(values[name], dtype) if isinstance(values[name], list) else values[name]
        for name, dtype in dtypes.items()
    }
    columns = {name: np.array(column, np.float32) for name, column in values["columns"].items()}
    support = values["support"] and Support(
        *(np.array(values["support"][name], np.int32) for name in ("ids", "counts"))
    )
    own = {"tokens": tokens, "labels": labels, "columns": columns, "support": support}
    return Document(**{**values, **arrays, **own})
