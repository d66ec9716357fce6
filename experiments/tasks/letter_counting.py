"""Counting of letters: "a:bacadabb=" asks how many a there are and is answered by "3"."""

import random
from dataclasses import dataclass
from typing import ClassVar

from experiments.tasks.protocol import Example, SizedTask

LETTERS = "abcd"


@dataclass(frozen=True)
class LetterCounting(SizedTask):
    """Counts one of four letters in a word of `size` random letters; the count may be zero.

    Example:
        >>> LetterCounting().example(1, "train")
        Example(prompt='c:bbadcdaa=', answer='1', source=None)
    """

    size: int = 8

    family: ClassVar[str] = "letter_counting"
    alphabet: ClassVar[str] = LETTERS + "0123456789:="

    @property
    def max_prompt_tokens(self) -> int:
        """The word, the letter and two signs."""
        return self.size + 3

    @property
    def max_answer_tokens(self) -> int:
        """Digits of the largest count, that of a word of one letter repeated."""
        return len(str(self.size))

    def candidate(self, generator: random.Random) -> Example:
        """Draws the letter and the word."""
        letter = generator.choice(LETTERS)
        word = "".join(generator.choices(LETTERS, k=self.size))
        return Example(f"{letter}:{word}=", str(word.count(letter)))
