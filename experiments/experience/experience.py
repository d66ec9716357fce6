"""What a source gives the trainer, and what it gets: documents, and a policy that draws."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float

from experiments.experience.rollout_metrics import RolloutMetrics
from experiments.models.tokenizer import Tokenizer
from experiments.refusal import Refusal
from experiments.sampling.options import SamplingOptions
from experiments.sampling.policy import Generation
from jaxlogp import Document


class Policy(Protocol):
    """The policy of one step. It ends with the step, whose update takes over the memory of its parameters.

    `version` is the number of documents that the parameters have been trained on, the `versions` of what it draws.
    """

    version: int
    tokenizer: Tokenizer

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        copies: int = 1,
        seed: tuple[int, ...] = (),
        pad_to: tuple[int, int] | None = None,
    ) -> list[Generation]:
        """Draws completions.

        Args:
            copies: completions of each prompt, next to each other in the result.
            seed: with the seed of the run, names the random numbers: the same seed draws the same again.
            pad_to: number of prompts, and of tokens of each, that a program is compiled for. None: both are rounded up to
                powers of two, each of which is compiled once.
        """

    def log_probs(self, documents: Sequence[Document]) -> list[Float[np.ndarray, " labels"]]:
        """Computes log-probs of the labels of each document by the trainer's forward pass, in nats."""

    def reference_log_probs(self, documents: Sequence[Document]) -> list[Float[np.ndarray, " labels"]]:
        """Computes those under the frozen reference; ValueError in a run that keeps none."""


@dataclass(frozen=True)
class Experience:
    """Documents to train on, and the counts of what was drawn for them.

    A `refusal` says why there are none, although data was used up: the step is refused.
    """

    documents: tuple[Document, ...]
    counts: RolloutMetrics = field(default_factory=RolloutMetrics)
    refusal: Refusal | None = None


class ExperienceSource(Protocol):
    """Where documents come from. Between two calls its whole state is what `state` returns."""

    def next(self, policy: Any) -> Experience | Sequence[Document] | None:
        """Returns the next documents, drawn by a `Policy` or taken from elsewhere; None at the end of the data."""

    def state(self) -> dict[str, Any]:
        """Returns JSON values from which `restore` goes on to the same bits."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state."""
