"""The stream of rounds that feeds a trainer, and its documents that wait for a step."""

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
    columns = {name: values.tolist() for name, values in document.columns.items()}
    arrays = {"tokens": document.tokens.tolist(), "old_log_probs": document.old_log_probs.tolist()}
    return {**vars(document), **arrays, "columns": columns}


def _from_json(values: dict[str, Any]) -> Document:
    columns = {name: np.array(column, np.float32) for name, column in values["columns"].items()}
    arrays = {
        "tokens": np.array(values["tokens"], np.int32),
        "old_log_probs": np.array(values["old_log_probs"], np.float32),
    }
    return Document(**{**values, **arrays, "columns": columns})
