"""A source of documents that are in memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxlogp import Document
from jaxlogp.errors import require


class DocumentList:
    """A source of documents in memory, in their order.

    Args:
        documents: the documents.
        docs_per_call: documents of one call. The last call returns fewer if there are no more.
        epochs: passes over the documents; None for passes without end.
        digest: name of these documents. A state of other ones is refused.

    Raises:
        ValueError: if there is no document, or a number is not positive.
    """

    def __init__(
        self, documents: Sequence[Document], *, docs_per_call: int, epochs: int | None = None, digest: str = ""
    ) -> None:
        require(len(documents) > 0, "documents", "at least one", "none")
        require(docs_per_call > 0, "docs_per_call", "a number above 0", docs_per_call)
        require(epochs is None or epochs > 0, "epochs", "a number above 0, or None", epochs)
        self.documents, self.digest = tuple(documents), digest
        self._docs_per_call, self._taken = docs_per_call, 0
        self._end = None if epochs is None else epochs * len(documents)

    @property
    def exhausted(self) -> bool:
        """Whether no document is left."""
        return self._end is not None and self._taken >= self._end

    def next(self, policy: Any) -> tuple[Document, ...] | None:
        """Returns the next documents, which do not depend on the policy; None at the end."""
        if self.exhausted:
            return None
        stop = self._taken + self._docs_per_call
        stop = stop if self._end is None else min(stop, self._end)
        taken = tuple(self.documents[number % len(self.documents)] for number in range(self._taken, stop))
        self._taken = stop
        return taken

    def state(self) -> dict[str, Any]:
        """Returns the number of documents taken so far, and the digest."""
        return {"taken": self._taken, "digest": self.digest}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state.

        Raises:
            ValueError: if the state is of other documents.
        """
        require(state["digest"] == self.digest, "documents", f"those of digest {state['digest']}", self.digest)
        self._taken = state["taken"]
