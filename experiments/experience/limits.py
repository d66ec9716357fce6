"""Limits of a run to the documents of a file."""

from dataclasses import dataclass

from jaxlogp import Document


@dataclass(frozen=True)
class Limits:
    """Largest documents that a run can train on, in tokens and by their ids, which are below `vocab_size`; None for any."""

    row_length: int | None = None
    vocab_size: int | None = None

    def check(self, document: Document) -> Document:
        """Returns the document; ValueError with the reason alone if it is longer than a row or has a larger id."""
        length = document.tokens.size
        if self.row_length is not None and length > self.row_length:
            raise ValueError(f"expected at most {self.row_length} tokens, the length of a row, got {length}")
        largest = int(document.tokens.max())
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise ValueError(f"expected ids below {self.vocab_size}, the size of the vocabulary, got {largest}")
        return document


NO_LIMITS = Limits()
