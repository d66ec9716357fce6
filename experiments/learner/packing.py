"""Rounds of packed documents: dealt to the data ranks, checked, and made into arrays of the ranks that ask for theirs."""

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jaxlogp import Document, MicroBatch, pack_documents
from jaxlogp.errors import require
from jaxlogp.policy.documents import SAMPLER_COLUMN, row_starts


@dataclass(frozen=True)
class Packing:
    """How documents become rounds. A round is one micro-batch of every data rank.

    A micro-batch has `rows` rows of `row_length` tokens, and token ids are in [0, vocab_size). Without `share_rows`,
    documents do not share rows: a rank gets `rows` successive documents. `columns` are names of the documents' further
    columns. `support_capacity` is the number of ids for which a micro-batch has room; None for log-probs of the
    whole vocabulary.
    """

    ranks: int
    rows: int
    row_length: int
    vocab_size: int
    pad_id: int
    share_rows: bool = True
    columns: tuple[str, ...] = ()
    support_capacity: int | None = None

    def round_of(self, documents: Sequence[Document]) -> "GlobalMicroBatch":
        """Returns the round of the first documents, as many as fit; ValueError names one that does not suit the packing."""
        dealt = self._deal(documents)
        # The round ends with the first document that its rank has no room for, so that no later one overtakes it.
        counts = [len(self._starts(documents, numbers)) for numbers in dealt]
        waiting = (numbers[count] for numbers, count in zip(dealt, counts, strict=True) if count < len(numbers))
        end = min(waiting, default=sum(map(len, dealt)))
        for number, document in enumerate(documents[:end]):
            self._check(number, document)
        by_rank = (tuple(number for number in numbers if number < end) for numbers in dealt)
        return GlobalMicroBatch(tuple(documents[:end]), tuple(by_rank), self)

    def rounds(self, documents: Sequence[Document]) -> list["GlobalMicroBatch"]:
        rounds = []
        while documents:
            rounds.append(self.round_of(documents))
            documents = documents[rounds[-1].num_documents :]
        return rounds

    def padding(self) -> "GlobalMicroBatch":
        return self.round_of([])

    def _deal(self, documents: Sequence[Document]) -> list[list[int]]:
        """Returns numbers of documents for each rank, more of them than fit if there are more."""
        if not self.share_rows:
            ends = [min(rank * self.rows, len(documents)) for rank in range(self.ranks + 1)]
            return [list(range(*pair)) for pair in itertools.pairwise(ends)]
        dealt: list[list[int]] = [[] for _ in range(self.ranks)]
        # The next document goes to the rank with the fewest tokens.
        tokens = [(0, rank) for rank in range(self.ranks)]
        for number, document in enumerate(documents):
            held, rank = tokens[0]
            if held >= self.rows * self.row_length:
                break
            dealt[rank].append(number)
            heapq.heapreplace(tokens, (held + document.tokens.size, rank))
        return dealt

    def _starts(self, documents: Sequence[Document], numbers: Iterable[int]) -> list[tuple[int, int]]:
        """Returns row and position of the first token of each document of one rank, as many as fit."""
        return row_starts((documents[number] for number in numbers), **self._sizes)

    @property
    def _sizes(self) -> dict[str, Any]:
        names = ("rows", "row_length", "share_rows", "support_capacity")
        return {name: getattr(self, name) for name in names}

    def _check(self, number: int, document: Document) -> None:
        """Validates a document of any rank, so that all processes raise alike; under jit a bad id could only give NaN."""
        if document.columns.keys() != set(self.columns) - {SAMPLER_COLUMN}:
            found = f"{sorted(document.columns)} of document {number}"
            require(False, "documents", f"columns {sorted(self.columns)}", found)
        if document.tokens.max() >= self.vocab_size:
            position = int(np.argmax(document.tokens >= self.vocab_size))
            found = f"{document.tokens[position]} in document {number} of a micro-batch, position {position}"
            require(False, "documents", f"token ids in [0, {self.vocab_size})", found)
        if document.support is not None and document.support.ids.max(initial=0) >= self.vocab_size:
            found = f"{document.support.ids.max()} in document {number} of a micro-batch"
            require(False, "documents", f"ids in [0, {self.vocab_size}) in each support", found)


@dataclass(frozen=True, eq=False)
class GlobalMicroBatch:
    """One micro-batch of every data rank: documents in their order, and the numbers of those of each rank.

    All processes have the documents of all ranks; a process makes arrays only for ranks of which it has a device. Those of
    the `skipped` ranks add nothing to a sum.
    """

    documents: tuple[Document, ...]
    by_rank: tuple[tuple[int, ...], ...]
    packing: Packing
    skipped: frozenset[int] = frozenset()
    _made: dict[int, MicroBatch] = field(default_factory=dict, repr=False)

    @property
    def num_documents(self) -> int:
        return len(self.documents)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all ranks, those of prompts included and padding not."""
        return sum(document.tokens.size for document in self.documents)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Ranks, rows of each, and tokens of a row."""
        return self.packing.ranks, self.packing.rows, self.packing.row_length

    def micro_batch(self, rank: int) -> MicroBatch:
        """Returns the arrays of a rank, made at the first call."""
        if rank not in self._made:
            packing, documents = self.packing, [self.documents[number] for number in self.by_rank[rank]]
            made, rest = pack_documents(documents, **packing._sizes, pad_id=packing.pad_id, columns=packing.columns)
            assert not rest, "documents of a round fit"
            self._made[rank] = made
        return self._made[rank]

    def at_labels(self, values: Shaped[np.ndarray, "ranks rows row_length"]) -> list[Shaped[np.ndarray, " labels"]]:
        """Returns the values at the labels of each document, in the order of `documents`."""
        return [values[place] for place in self._labels]

    @cached_property
    def _labels(self) -> list[tuple[int, int, np.ndarray]]:
        """Rank, row and predicting positions of the labels of each document."""
        places: dict[int, tuple[int, int, np.ndarray]] = {}
        for rank, numbers in enumerate(self.by_rank):
            for number, (row, start) in zip(numbers, self.packing._starts(self.documents, numbers), strict=True):
                places[number] = rank, row, start + self.documents[number].label_positions - 1
        return [places[number] for number in range(len(self.documents))]
