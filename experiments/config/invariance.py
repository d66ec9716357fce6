"""Options of runs whose bits do not depend on the mesh."""

from dataclasses import dataclass

from jaxlogp import ReductionOrder


@dataclass(frozen=True)
class InvarianceConfig:
    """What determines the bits of a run with --invariant: leaves of rows and granules of the vocabulary, not the mesh."""

    leaf_rows: int = 8
    """Rows (documents) that are computed together; schedule.rows is a multiple."""
    granules: int | None = None
    """Parts of the vocabulary that no rank splits; a multiple of the tensor ranks. None takes 24, or 8 below 24 tokens."""
    vocab_tile: int = 512
    """Upper bound of the vocabulary columns of one product, a multiple of 64."""
    row_block: int = 128
    """Tokens of one product of the head, a multiple of 64."""

    def order(self, vocab_size: int, dtype: str) -> ReductionOrder:
        """The numeric identity of the head for a vocabulary of at least 8 tokens."""
        granules = self.granules or (24 if vocab_size >= 24 else 8)
        return ReductionOrder(granules, self.vocab_tile, self.row_block, dtype)
