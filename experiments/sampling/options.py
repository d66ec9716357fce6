"""Options of a completion."""

import math
from dataclasses import dataclass

from jaxlogp.errors import require


def narrows(top_k: int | None, top_p: float, min_p: float) -> bool:
    """Returns whether these filters leave some tokens that are not drawn at all."""
    return top_k is not None or top_p < 1.0 or min_p > 0.0


@dataclass(frozen=True)
class SamplingOptions:
    """How a policy draws: tokens from softmax(logits / temperature), and when it ends.

    Attributes:
        max_new_tokens: largest number of tokens, end token included.
        temperature: divisor of the logits; None for that of the run, which the trainer divides by.
        greedy: take the most likely token, the lowest id among equals.
        greedy_last: do so in the last of the copies of each prompt.
        top_k: draw among this many most likely tokens only, and ties with the last of them; None for all.
        top_p: of these, draw among the fewest most likely whose probabilities (renormalized after top_k) sum to at least
            this, and ties with the last of them; 1 for all.
        min_p: draw among tokens at least this many times as likely as the most likely one; 0 for all.
        stop: texts each of which ends a completion.
        record_support: record the ids that each token is drawn from, and its log-prob over these. Where top_k, top_p and
            min_p leave more than there is room for (`experiments.sampling.support`), it draws among the most likely of them.
        support_room: ids a token, on average over a completion, for which there is room.
        rows: completions drawn at a time by each data rank, where the next takes the place of one that has ended; None for
            all at once.
    """

    max_new_tokens: int
    temperature: float | None = None
    greedy: bool = False
    greedy_last: bool = False
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    record_support: bool = False
    support_room: int = 128
    rows: int | None = None

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 1, "max_new_tokens", "at least 1", self.max_new_tokens)
        is_divisor = self.temperature is None or 0.0 < self.temperature < math.inf
        require(is_divisor, "temperature", "a positive, finite number", self.temperature)
        require(self.top_k is None or self.top_k >= 1, "top_k", "at least 1, or None", self.top_k)
        require(0.0 < self.top_p <= 1.0, "top_p", "a number above 0, at most 1", self.top_p)
        require(0.0 <= self.min_p <= 1.0, "min_p", "a number in [0, 1]", self.min_p)
        require(all(self.stop), "stop", "texts of at least one character", "an empty one")
        require(self.support_room >= 1, "support_room", "at least 1", self.support_room)
        require(self.rows is None or self.rows >= 1, "rows", "at least 1, or None", self.rows)
        expected = "False without top_k, top_p or min_p, where it is the whole vocabulary"
        require(self.filters or not self.record_support, "record_support", expected, True)

    @property
    def filters(self) -> bool:
        """Whether some tokens are not drawn at all."""
        return narrows(self.top_k, self.top_p, self.min_p)
