"""A source of worked examples: prompts of a task with their answers."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.experience.experience import Experience, Policy
from experiments.experience.prompts import PromptStream, encode_answer, encode_prompt
from experiments.models.tokenizer import Tokenizer
from experiments.tasks import Example
from jaxlogp import Document


class WorkedExamples:
    """Gives prompts with their answers as documents, whose labels are the answer and an end token."""

    def __init__(self, prompts: PromptStream, prompt_tokens: int, docs_per_call: int) -> None:
        self._prompts, self._prompt_tokens, self._docs_per_call = prompts, prompt_tokens, docs_per_call

    def next(self, policy: Policy) -> Experience | None:
        """Returns the next documents, which depend on the policy's tokenizer alone; None at the end."""
        examples = self._prompts.take(self._docs_per_call)
        documents = tuple(self._document(policy.tokenizer, example) for example in examples)
        return Experience(documents) if documents else None

    def state(self) -> dict[str, Any]:
        return {"prompts": self._prompts.cursor}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._prompts.cursor = state["prompts"]

    def _document(self, tokenizer: Tokenizer, example: Example) -> Document:
        prompt = encode_prompt(tokenizer, example, self._prompt_tokens)
        answer = encode_answer(tokenizer, example)
        return Document.of_completion(np.array(prompt, np.int32), np.array(answer, np.int32))
