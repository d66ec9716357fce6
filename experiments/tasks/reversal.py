"""Reversal of letters: "r:dach=" is answered by "hcad"."""

import random
from dataclasses import dataclass
from typing import ClassVar

from experiments.tasks.protocol import Example, SizedTask

LETTERS = "abcdefghij"


@dataclass(frozen=True)
class Reversal(SizedTask):
    """Writes `size` letters backwards; a letter may occur more than once.

    Example:
        >>> Reversal().example(0, "train")
        Example(prompt='r:jjdb=', answer='bdjj', source=None)
    """

    size: int = 4

    family: ClassVar[str] = "reversal"
    alphabet: ClassVar[str] = LETTERS + "r:="

    @property
    def max_prompt_tokens(self) -> int:
        """The letters and three signs."""
        return self.size + 3

    @property
    def max_answer_tokens(self) -> int:
        """The letters."""
        return self.size

    def candidate(self, generator: random.Random) -> Example:
        """Draws the letters."""
        letters = "".join(generator.choices(LETTERS, k=self.size))
        return Example(f"r:{letters}=", letters[::-1])
