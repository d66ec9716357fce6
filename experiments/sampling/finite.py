"""Numbers that are not finite, with the documents that they were found in."""

from collections.abc import Sequence

import numpy as np

from experiments.tasks.tokenizer import Tokenizer

NAMED = 3
"""Documents that a sentence names; the others are counted."""
SHOWN = 100
"""Characters of a prompt that it shows."""


class NotFinite(ValueError):
    """Numbers of some documents that cannot be trained on.

    Args:
        what: the numbers, such as "log-probs of the sampler".
        prompts: tokens of the prompt of each such document, by its number.
    """

    def __init__(self, what: str, prompts: dict[int, list[int]]) -> None:
        super().__init__(f"{what}: expected finite numbers, got others in {len(prompts)} documents")
        self.what, self.prompts = what, prompts

    def sentence(self, tokenizer: Tokenizer) -> str:
        """What is not finite, and in which documents."""
        named = ", ".join(
            f"document {number} (prompt {tokenizer.decode(prompt)[:SHOWN]!r})"
            for number, prompt in list(self.prompts.items())[:NAMED]
        )
        more = len(self.prompts) - NAMED
        return f"{self.what} not finite in {named}" + (f" and {more} more" if more > 0 else "")


def require_finite(what: str, values: Sequence[np.ndarray], prompts: Sequence[list[int]]) -> None:
    """Checks values of documents, one array each.

    Raises:
        NotFinite: some are not.
    """
    if values and not np.isfinite(np.concatenate(values)).all():
        found = (number for number, each in enumerate(values) if not np.isfinite(each).all())
        raise NotFinite(what, {number: prompts[number] for number in found})
