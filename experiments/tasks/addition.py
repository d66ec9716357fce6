"""Addition of two whole numbers: "37+48=" is answered by "85"."""

import random
from dataclasses import dataclass
from typing import ClassVar

from experiments.tasks.protocol import Example, SizedTask


@dataclass(frozen=True)
class Addition(SizedTask):
    """Adds two numbers of up to `size` digits, uniform in [0, 10^size), written without leading zeros.

    Example:
        >>> Addition().example(0, "train")
        Example(prompt='36+35=', answer='71', source=None)
    """

    size: int = 2

    family: ClassVar[str] = "addition"
    alphabet: ClassVar[str] = "0123456789+="

    @property
    def max_prompt_tokens(self) -> int:
        """Two operands and two signs."""
        return 2 * self.size + 2

    @property
    def max_answer_tokens(self) -> int:
        """One digit more than an operand, for the carry."""
        return self.size + 1

    def candidate(self, generator: random.Random) -> Example:
        """Draws both operands."""
        left, right = (generator.randrange(10**self.size) for _ in range(2))
        return Example(f"{left}+{right}=", str(left + right))
