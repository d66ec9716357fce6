"""Sorting of digits: "s:4132=" is answered by "1234"."""

import random
from dataclasses import dataclass
from typing import ClassVar

from experiments.tasks.protocol import Example, SizedTask

DIGITS = "0123456789"


@dataclass(frozen=True)
class Sorting(SizedTask):
    """Sorts `size` digits in ascending order; a digit may occur more than once.

    Example:
        >>> Sorting().example(0, "train")
        Example(prompt='s:6953=', answer='3569', source=None)
    """

    size: int = 4

    family: ClassVar[str] = "sorting"
    alphabet: ClassVar[str] = DIGITS + "s:="

    @property
    def max_prompt_tokens(self) -> int:
        """The digits and three signs."""
        return self.size + 3

    @property
    def max_answer_tokens(self) -> int:
        """The digits."""
        return self.size

    def candidate(self, generator: random.Random) -> Example:
        """Draws the digits."""
        digits = generator.choices(DIGITS, k=self.size)
        return Example(f"s:{''.join(digits)}=", "".join(sorted(digits)))
