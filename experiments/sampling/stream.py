"""The stream of rounds that feeds a trainer, and its documents that wait for a step."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from experiments.sampling.packing import Packing, Round
from jaxlogp import Document


class RoundStream:
    """An iterator of rounds, endless or not, fed by rollouts on demand.

    A rollout is sampled when the queues of all ranks are empty. Documents left over by a step stay queued for the next
    one, and are part of the checkpoint.

    Args:
        rollout: makes the documents of the next rollout; an empty list means that the data has ended.
        packing: makes rounds of them.

    Attributes:
        queues: waiting documents of each rank.
        seconds: time spent in rollouts; the reader may reset it.
    """

    def __init__(self, rollout: Callable[[], list[Document]], packing: Packing) -> None:
        self._rollout, self._packing = rollout, packing
        self.queues = packing.deal([])
        self.seconds = 0.0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Round:
        # Only between rounds: a rollout inside a round would put more documents into a step on one mesh than on
        # another.
        if not any(self.queues):
            started = time.perf_counter()
            self.queues = self._packing.deal(self._rollout())
            self.seconds += time.perf_counter() - started
        if not any(self.queues):
            raise StopIteration
        return self._packing.take_round(self.queues)

    def queued(self) -> list[list[dict[str, Any]]]:
        """The queues as plain JSON values."""
        return [[_to_json(document) for document in queue] for queue in self.queues]

    def restore(self, queued: list[list[dict[str, Any]]]) -> None:
        """Restores the queues of a checkpoint; on another number of ranks the documents are dealt again."""
        if len(queued) == len(self.queues):
            self.queues = [deque(map(_from_json, queue)) for queue in queued]
        else:
            self.queues = self._packing.deal(_from_json(values) for queue in queued for values in queue)


def _to_json(document: Document) -> dict[str, Any]:
    # A float32 survives the conversion to a Python float and to JSON's shortest form exactly.
    plain = {field.name: getattr(document, field.name) for field in dataclasses.fields(document) if field.init}
    values = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in plain.items()}
    # Label positions are fewer than labels, and numbers in JSON.
    values["labels"] = document.label_positions.tolist()
    return values | {"columns": {name: column.tolist() for name, column in document.columns.items()}}


def _from_json(values: dict[str, Any]) -> Document:
    tokens = np.array(values["tokens"], np.int32)
    labels = np.zeros(tokens.size, bool)
    labels[values["labels"]] = True
    dtypes = {
        "advantages": np.float32,
        "sampler_log_probs": np.float32,
        "old_log_probs": np.float32,
        "versions": np.int32,
    }
    arrays = {
        name: np.array(values[name], dtype) if isinstance(values[name], list) else values[name]
        for name, dtype in dtypes.items()
    }
    columns = {name: np.array(column, np.float32) for name, column in values["columns"].items()}
    return Document(**{**values, **arrays, "tokens": tokens, "labels": labels, "columns": columns})
