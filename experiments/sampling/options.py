"""Options of a completion."""

import math
from dataclasses import dataclass

from jaxlogp.errors import is_integer, is_number, require


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
        int8_weights: multiply by matrices that are rounded to 8 bits, a scale for every output; prompts are read with the
            matrices as they are. Log-probs are those of this model, and differ from a trainer's by more.
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
    int8_weights: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "support_room", "rows"):
            value, may_be_none = getattr(self, name), name in ("top_k", "rows")
            expected = f"an integer of at least 1{', or None' if may_be_none else ''}"
            require((is_integer(value) and value >= 1) or (may_be_none and value is None), name, expected, repr(value))
        temperature, top_p, min_p = self.temperature, self.top_p, self.min_p
        is_divisor = temperature is None or (is_number(temperature) and 0.0 < temperature < math.inf)
        require(is_divisor, "temperature", "a positive, finite number, or None", repr(temperature))
        require(is_number(top_p) and 0.0 < top_p <= 1.0, "top_p", "a number above 0, at most 1", repr(top_p))
        require(is_number(min_p) and 0.0 <= min_p <= 1.0, "min_p", "a number in [0, 1]", repr(min_p))
        are_texts = isinstance(self.stop, tuple) and all(isinstance(each, str) and each for each in self.stop)
        require(are_texts, "stop", "a tuple of texts of at least one character", repr(self.stop))
        expected = "False without top_k, top_p or min_p, where it is the whole vocabulary"
        require(self.filters or not self.record_support, "record_support", expected, True)

    @property
    def filters(self) -> bool:
        """Whether some tokens are not drawn at all."""
        return narrows(self.top_k, self.top_p, self.min_p)
