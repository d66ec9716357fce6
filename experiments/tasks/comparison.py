"""Comparison of two whole numbers: "37?48=" is answered by "<"."""

import random
from dataclasses import dataclass
from typing import ClassVar

from experiments.tasks.protocol import Example, SizedTask


@dataclass(frozen=True)
class Comparison(SizedTask):
    """Compares two numbers of up to `size` digits, uniform in [0, 10^size), written without leading zeros.

    Guessing "<" every time is right in almost half of the examples: read rewards with that in mind.

    Example:
        >>> Comparison().example(0, "train")
        Example(prompt='94?46=', answer='>', source=None)
    """

    size: int = 2

    family: ClassVar[str] = "comparison"
    alphabet: ClassVar[str] = "0123456789?<=>"

    @property
    def max_prompt_tokens(self) -> int:
        """Two operands and two signs."""
        return 2 * self.size + 2

    @property
    def max_answer_tokens(self) -> int:
        """One sign."""
        return 1

    def candidate(self, generator: random.Random) -> Example:
        """Draws both operands."""
        left, right = (generator.randrange(10**self.size) for _ in range(2))
        return Example(f"{left}?{right}=", "<" if left < right else ">" if left > right else "=")
