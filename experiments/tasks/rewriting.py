"""Signs written in another order: "r:dach=" is answered by "hcad", backwards, and "s:4132=" by "1234", sorted."""

import random
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from experiments.tasks.protocol import Example, SizedTask

LETTERS, DIGITS = "abcdefghij", "0123456789"


@dataclass(frozen=True)
class Rewriting(SizedTask):
    """Writes `size` signs in another order; a sign may occur more than once."""

    size: int = 4

    signs: ClassVar[str]
    letter: ClassVar[str]

    @property
    def max_prompt_tokens(self) -> int:
        """The signs, and three of the form."""
        return self.size + 3

    @property
    def max_answer_tokens(self) -> int:
        """The signs."""
        return self.size

    def candidate(self, generator: random.Random) -> Example:
        """Draws the signs."""
        drawn = "".join(generator.choices(self.signs, k=self.size))
        return Example(f"{self.letter}:{drawn}=", self.rewritten(drawn))

    @staticmethod
    @abstractmethod
    def rewritten(drawn: str) -> str:
        """The answer."""


@dataclass(frozen=True)
class Reversal(Rewriting):
    """Writes `size` letters backwards.

    Example:
        >>> Reversal().example(0, "train")
        Example(prompt='r:jjdb=', answer='bdjj', source=None)
    """

    family: ClassVar[str] = "reversal"
    signs: ClassVar[str] = LETTERS
    letter: ClassVar[str] = "r"
    alphabet: ClassVar[str] = LETTERS + "r:="

    @staticmethod
    def rewritten(drawn: str) -> str:
        """Backwards."""
        return drawn[::-1]


@dataclass(frozen=True)
class Sorting(Rewriting):
    """Sorts `size` digits in ascending order.

    Example:
        >>> Sorting().example(0, "train")
        Example(prompt='s:6953=', answer='3569', source=None)
    """

    family: ClassVar[str] = "sorting"
    signs: ClassVar[str] = DIGITS
    letter: ClassVar[str] = "s"
    alphabet: ClassVar[str] = DIGITS + "s:="

    @staticmethod
    def rewritten(drawn: str) -> str:
        """In ascending order."""
        return "".join(sorted(drawn))
