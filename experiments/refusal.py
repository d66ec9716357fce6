"""Why a step is refused: what is not finite, and the documents that it was found in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from experiments.models.tokenizer import Tokenizer
from jaxlogp import Document

NAMED = 3
"""Documents that a sentence names; the others are counted."""
SHOWN = 100
"""Characters of a prompt that it shows."""


@dataclass(frozen=True)
class Refusal:
    """What a step is refused for, such as "parameters not finite in lm_head", and the prompts of the documents that it was
    found in, by their numbers."""

    what: str
    prompts: Mapping[int, list[int]] = field(default_factory=dict)

    def explained_by(self, fault: str | None) -> "Refusal":
        """Returns why a step is refused whose documents are not finite: of parameters with a `fault`, no log-prob is."""
        return self if fault is None else Refusal(fault)

    def sentence(self, tokenizer: Tokenizer) -> str:
        if not self.prompts:
            return self.what
        named = ", ".join(
            f"document {number} (prompt {tokenizer.decode(prompt)[:SHOWN]!r})"
            for number, prompt in list(self.prompts.items())[:NAMED]
        )
        more = len(self.prompts) - NAMED
        return f"{self.what} in {named}" + (f" and {more} more" if more > 0 else "")


class NotFinite(ValueError):
    """Numbers of some documents cannot be trained on."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.what} in {len(refusal.prompts)} documents")
        self.refusal = refusal


def require_finite(what: str, values: Sequence[np.ndarray], prompt: Callable[[int], list[int]]) -> None:
    """Raises NotFinite if fp32 does not hold values of documents, one array each; `prompt` has the tokens of a prompt."""
    if values and not _finite(np.concatenate(values)):
        prompts = {number: prompt(number) for number, each in enumerate(values) if not _finite(each)}
        raise NotFinite(Refusal(f"{what} not finite", prompts))


def prompt_of(document: Document) -> list[int]:
    """Returns the tokens before the first label; all of a document without labels."""
    end = document.label_positions[0] if document.num_labels else document.tokens.size
    return document.tokens[:end].tolist()


def _finite(values: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(values.astype(np.float32, copy=False)).all())
