"""A source of documents that are in memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.experience.experience import Experience
from experiments.experience.order import EpochOrder
from jaxlogp import Document
from jaxlogp.errors import require


class DocumentList:
    """A source of documents in memory, in their order or shuffled anew in every pass.

    The last call returns fewer than `docs_per_call` documents if there are no more. `epochs` of None are passes without end.
    `digest` names these documents: a state of other ones is refused. `seed` is that of the order of each pass; None keeps
    that of the documents.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        *,
        docs_per_call: int,
        epochs: int | None = None,
        digest: str = "",
        seed: int | None = None,
    ) -> None:
        require(len(documents) > 0, "documents", "at least one", "none")
        require(docs_per_call > 0, "docs_per_call", "a number above 0", docs_per_call)
        require(epochs is None or epochs > 0, "epochs", "a number above 0, or None", epochs)
        self.documents, self.digest = tuple(documents), digest
        self._docs_per_call, self._taken = docs_per_call, 0
        self._order = None if seed is None else EpochOrder(len(documents), seed)
        self._end = None if epochs is None else epochs * len(documents)

    def next(self, policy: Any) -> Experience | None:
        """Returns the next documents, which do not depend on the policy; None at the end."""
        stop = self._taken + self._docs_per_call
        stop = stop if self._end is None else min(stop, self._end)
        taken = tuple(self._document(position) for position in range(self._taken, stop))
        self._taken = stop
        return Experience(taken) if taken else None

    def state(self) -> dict[str, Any]:
        return {"taken": self._taken, "digest": self.digest}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state, and raises ValueError if it is of other documents."""
        require(state["digest"] == self.digest, "documents", f"those of digest {state['digest']}", self.digest)
        self._taken = state["taken"]

    def _document(self, position: int) -> Document:
        return self.documents[position % len(self.documents) if self._order is None else self._order[position]]
