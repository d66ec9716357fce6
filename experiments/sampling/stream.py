"""The stream of rounds that feeds a trainer: documents dealt to the data ranks, packed, checked and stacked."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import jax
import numpy as np

from jaxlogp import Document, MicroBatch, pack_documents
from jaxlogp.errors import require


@dataclass(frozen=True)
class Packing:
    """How documents become rounds. A round is one micro-batch of every data rank, stacked, as NumPy arrays.

    Args:
      ranks: data ranks.
      rows: rows per micro-batch.
      row_length: tokens per row.
      vocab_size: token ids are in [0, vocab_size).
      pad_id: padding token.
      consecutive: documents dealt to a rank at a time.
      share_rows: whether documents may share a row.
      columns: names of the documents' further columns.
    """

    ranks: int
    rows: int
    row_length: int
    vocab_size: int
    pad_id: int
    consecutive: int = 1
    share_rows: bool = True
    columns: tuple[str, ...] = ()

    def deal(self, documents: Iterable[Document]) -> list[deque[Document]]:
        """A queue per rank: runs of `consecutive` documents, dealt in turn."""
        queues: list[deque[Document]] = [deque() for _ in range(self.ranks)]
        for position, document in enumerate(documents):
            queues[position // self.consecutive % self.ranks].append(document)
        return queues

    def take_round(self, queues: list[deque[Document]]) -> MicroBatch:
        """The next round, whose documents leave the queues; a rank without documents gets only padding.

        Raises:
          ValueError: a token id outside of the vocabulary, with its document and position.
        """
        batches = [self._pack(queue) for queue in queues]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)

    def rounds(self, documents: Iterable[Document]) -> list[MicroBatch]:
        """All rounds of the documents."""
        queues, rounds = self.deal(documents), []
        while any(queues):
            rounds.append(self.take_round(queues))
        return rounds

    def padding(self) -> MicroBatch:
        """A round without documents."""
        return self.take_round([deque() for _ in range(self.ranks)])

    def _pack(self, queue: deque[Document]) -> MicroBatch:
        # Every document has at least one token, so no more documents than this can fit.
        candidates = list(islice(queue, self.rows * (self.row_length if self.share_rows else 1)))
        sizes = {"rows": self.rows, "row_length": self.row_length}
        options = {"pad_id": self.pad_id, "share_rows": self.share_rows, "columns": self.columns}
        batch, _ = pack_documents(candidates, **sizes, **options)
        self._check_ids(batch)
        for _ in range(int(batch.num_documents)):
            queue.popleft()
        return batch

    def _check_ids(self, batch: MicroBatch) -> None:
        # Checked here, because under jit an invalid id can only give NaN.
        outside = batch.tokens >= self.vocab_size
        if outside.any():
            place = tuple(int(index) for index in np.argwhere(outside)[0])
            where = f"document {batch.segment_ids[place]} of a micro-batch, position {batch.positions[place]}"
            require(False, "documents", f"token ids in [0, {self.vocab_size})", f"{batch.tokens[place]} in {where}")


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

    def __next__(self) -> MicroBatch:
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
