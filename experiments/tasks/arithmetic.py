"""Arithmetic on two whole numbers: "37+48=" is answered by "85", and "37?48=" by "<"."""

import random
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from experiments.tasks.protocol import Example, SizedTask


@dataclass(frozen=True)
class Arithmetic(SizedTask):
    """Two numbers of up to `size` digits, uniform in [0, 10^size) and written without leading zeros, around a sign."""

    size: int = 2

    sign: ClassVar[str]

    @property
    def max_prompt_tokens(self) -> int:
        return 2 * self.size + 2

    def candidate(self, generator: random.Random) -> Example:
        left, right = generator.randrange(10**self.size), generator.randrange(10**self.size)
        return Example(f"{left}{self.sign}{right}=", self.answer(left, right))

    @abstractmethod
    def answer(self, left: int, right: int) -> str:
        """Returns the answer to a prompt with these numbers."""


class Addition(Arithmetic):
    """Adds two numbers.

    Example:
        >>> Addition().example(0, "train")
        Example(prompt='36+35=', answer='71', source=None)
    """

    family, sign = "addition", "+"
    alphabet = "0123456789+="

    @property
    def max_answer_tokens(self) -> int:
        """One digit more than a number, for the carry."""
        return self.size + 1

    def answer(self, left: int, right: int) -> str:
        return str(left + right)


class Comparison(Arithmetic):
    """Compares two numbers. Guessing "<" every time is right in almost half of the examples: read rewards with that in mind.

    Example:
        >>> Comparison().example(0, "train")
        Example(prompt='94?46=', answer='>', source=None)
    """

    family, sign = "comparison", "?"
    alphabet = "0123456789?<=>"
    max_answer_tokens = 1

    def answer(self, left: int, right: int) -> str:
        return "<" if left < right else ">" if left > right else "="
