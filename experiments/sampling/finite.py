"""Numbers that are not finite, with the documents that they were found in."""

from collections.abc import Callable, Sequence

import numpy as np

from experiments.tasks.tokenizer import Tokenizer
from jaxlogp import Document

NAMED = 3
"""Documents that a sentence names; the others are counted."""
SHOWN = 100
"""Characters of a prompt that it shows."""


class NotFinite(ValueError):
    """Numbers of some documents, such as "log-probs of the sampler", that cannot be trained on, with their prompts."""

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


def require_finite(what: str, values: Sequence[np.ndarray], prompt: Callable[[int], list[int]]) -> None:
    """Checks values of documents, one array each, for what they are in fp32; `prompt` has the tokens of a document's prompt.

    Raises:
        NotFinite: some are not.
    """
    if values and not _finite(np.concatenate(values)):
        raise NotFinite(what, {number: prompt(number) for number, each in enumerate(values) if not _finite(each)})


def prompt_of(document: Document) -> list[int]:
    """Returns the tokens before the first label; all of a document without labels."""
    end = document.label_positions[0] if document.num_labels else document.tokens.size
    return document.tokens[:end].tolist()


def _finite(values: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(values.astype(np.float32, copy=False)).all())
