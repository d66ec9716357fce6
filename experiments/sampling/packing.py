"""Rounds of packed documents: dealt to the data ranks, checked, and made into arrays of the ranks that ask for theirs."""

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jaxlogp import Document, MicroBatch, pack_documents
from jaxlogp.errors import require
from jaxlogp.policy.documents import SAMPLER_COLUMN, row_starts


@dataclass(frozen=True)
class Packing:
    """How documents become rounds. A round is one micro-batch of every data rank.

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

    def deal(self, documents: Iterable[Any]) -> list[deque[Any]]:
        """A queue per rank: runs of `consecutive` documents, dealt in turn."""
        queues: list[deque[Any]] = [deque() for _ in range(self.ranks)]
        for position, document in enumerate(documents):
            queues[position // self.consecutive % self.ranks].append(document)
        return queues

    def take_round(self, queues: list[deque[Document]]) -> "Round":
        """The next round, whose documents leave the queues; a rank without documents gets only padding.

        Raises:
            ValueError: a document longer than a row, one with other columns, or a token id outside of the vocabulary,
              with its document and position.
        """
        return Round(tuple(self._take(queue) for queue in queues), self)

    def rounds(self, documents: Iterable[Document]) -> list["Round"]:
        """All rounds of the documents."""
        queues, rounds = self.deal(documents), []
        while any(queues):
            rounds.append(self.take_round(queues))
        return rounds

    def padding(self) -> "Round":
        """A round without documents."""
        return self.take_round([deque() for _ in range(self.ranks)])

    def starts(self, documents: Iterable[Document]) -> list[tuple[int, int]]:
        """Row and position of the first token of each document of one rank, as many as fit."""
        lengths = (document.tokens.size for document in documents)
        return row_starts(lengths, self.rows, self.row_length, share_rows=self.share_rows)

    def micro_batch(self, documents: Sequence[Document]) -> MicroBatch:
        """NumPy arrays of one rank's documents, which fit."""
        sizes = {"rows": self.rows, "row_length": self.row_length, "share_rows": self.share_rows}
        batch, rest = pack_documents(documents, **sizes, pad_id=self.pad_id, columns=self.columns)
        assert not rest, "documents of a round fit"
        return batch

    def _take(self, queue: deque[Document]) -> tuple[Document, ...]:
        taken = tuple(queue.popleft() for _ in range(len(self.starts(queue))))
        for number, document in enumerate(taken):
            self._check(number, document)
        return taken

    def _check(self, number: int, document: Document) -> None:
        """Of every rank's documents, because all processes have to refuse the same; under jit an id could only give NaN."""
        if document.columns.keys() != set(self.columns) - {SAMPLER_COLUMN}:
            found = f"{sorted(document.columns)} of document {number}"
            require(False, "documents", f"columns {sorted(self.columns)}", found)
        if document.tokens.max() >= self.vocab_size:
            position = int(np.argmax(document.tokens >= self.vocab_size))
            found = f"{document.tokens[position]} in document {number} of a micro-batch, position {position}"
            require(False, "documents", f"token ids in [0, {self.vocab_size})", found)


@dataclass(frozen=True, eq=False)
class Round:
    """One micro-batch of every data rank, the documents of each in order; arrays lack the columns `without`.

    All processes have the documents of all ranks; a process makes arrays only for ranks of which it has a device.
    """

    by_rank: tuple[tuple[Document, ...], ...]
    packing: Packing
    without: frozenset[str] = frozenset()
    _made: dict[int, MicroBatch] = field(default_factory=dict, repr=False)

    @property
    def documents(self) -> Iterator[Document]:
        """All documents, rank by rank."""
        return chain.from_iterable(self.by_rank)

    @property
    def num_documents(self) -> int:
        """Number of documents of all ranks."""
        return sum(map(len, self.by_rank))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all ranks, those of prompts included and padding not."""
        return sum(document.tokens.size for document in self.documents)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Ranks, rows of each, and tokens of a row."""
        return self.packing.ranks, self.packing.rows, self.packing.row_length

    def micro_batch(self, rank: int) -> MicroBatch:
        """The arrays of a rank, made at the first call."""
        if rank not in self._made:
            self._made[rank] = self.packing.micro_batch(self.by_rank[rank])
        made = self._made[rank]
        kept = {name: values for name, values in made.per_token.items() if name not in self.without}
        return dataclasses.replace(made, per_token=kept)

    def leaving_out(self, columns: Iterable[str]) -> "Round":
        """The round without some per-token values."""
        return dataclasses.replace(self, without=self.without | set(columns))

    @property
    def plain(self) -> "Round":
        """The round without the documents' further columns, so that one program scores every round."""
        return self.leaving_out(self.packing.columns)

    def at_labels(self, values: Shaped[np.ndarray, "ranks rows row_length"]) -> list[Shaped[np.ndarray, " labels"]]:
        """The values at the labels of each document, in the order of `documents`."""
        return [values[place] for place in self._labels]

    @cached_property
    def _labels(self) -> list[tuple[int, int, np.ndarray]]:
        """Rank, row and predicting positions of the labels of each document."""
        return [
            (rank, row, start + document.label_positions - 1)
            for rank, documents in enumerate(self.by_rank)
            for document, (row, start) in zip(documents, self.packing.starts(documents), strict=True)
        ]
