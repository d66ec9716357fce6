"""Labels of a step that learn, or whose drift is penalized, chosen among all of its labels before the first micro-batch.

`LossConfig.selection` makes a `Selection`, and the learner scores all documents of the step for it under the present
parameters. So a quantile, a mean and a draw do not depend on how the step is divided into micro-batches and ranks. The
choices are those of `jaxlogp.policy.selection`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxlogp import Document, clip_cov_advantages, entropy_threshold, high_covariance_labels, high_entropy_advantages
from jaxlogp.errors import require

PENALIZED_COLUMN = "penalized"


@dataclass(frozen=True)
class Selection(ABC):
    """A choice among all labels of a step, by their entropies with `reads_entropy`, otherwise by their log-probs.

    `column` is the column of the documents that marks the chosen labels with 1; without one, the advantages of labels that
    are not to learn become 0.
    """

    reads_entropy: ClassVar[bool] = False
    column: ClassVar[str | None] = None

    @abstractmethod
    def choose(
        self,
        advantages: Float[np.ndarray, " labels"],
        scores: Float[np.ndarray, " labels"],
        mask: Bool[np.ndarray, " labels"],
        key: jax.Array,
    ) -> Array:
        """Returns the advantages, or what marks the labels in `column`, for all labels of the step."""

    def __call__(
        self, documents: Sequence[Document], scores: Sequence[Float[np.ndarray, " labels"]], key: jax.Array
    ) -> list[Document]:
        """Returns all documents of a step with the choice in them; scores are in nats, and each step has a new key."""
        sizes = [document.num_labels for document in documents]
        spread = [np.broadcast_to(each.advantages, size) for each, size in zip(documents, sizes, strict=True)]
        mask = label_mask(sum(sizes))
        chosen = self.choose(padded_labels(spread, mask), padded_labels(scores, mask), mask, key)
        parts = np.split(np.asarray(chosen, np.float32)[mask], np.cumsum(sizes)[:-1])
        return [self._marked(document, part) for document, part in zip(documents, parts, strict=True)]

    def fraction(self, documents: Sequence[Document]) -> float | None:
        """Returns the share of labels that learn (whose advantage is not 0), or that are marked; None without labels."""
        values = [each.advantages if self.column is None else each.columns[self.column] for each in documents]
        chosen = np.concatenate([np.ravel(value) != 0.0 for value in values])
        return float(chosen.mean()) if chosen.size else None

    def _marked(self, document: Document, chosen: Float[np.ndarray, " labels"]) -> Document:
        if self.column is None:
            return replace(document, advantages=chosen)
        return replace(document, columns={**document.columns, self.column: chosen})


@dataclass(frozen=True)
class TopEntropy(Selection):
    """Only labels of the highest entropy learn, this share of all labels; ValueError if it is out of range."""

    top_entropy: float
    reads_entropy = True

    def __post_init__(self) -> None:
        require(0.0 < self.top_entropy <= 1.0, "top_entropy", "a number in (0, 1]", self.top_entropy)

    def choose(self, advantages, scores, mask, key) -> Array:
        del key
        threshold = entropy_threshold(scores, mask, share=self.top_entropy)
        return high_entropy_advantages(advantages, scores, mask, threshold=threshold)


@dataclass(frozen=True)
class ClipCov(Selection):
    """Clip-Cov: a few random labels between two bounds of the covariance do not learn; ValueError if out of range."""

    cov_share: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0

    def __post_init__(self) -> None:
        _check_share(self.cov_share)
        require(self.cov_low < self.cov_high, "cov_low", f"a number below cov_high = {self.cov_high}", self.cov_low)

    def choose(self, advantages, scores, mask, key) -> Array:
        bounds = {"share": self.cov_share, "low": self.cov_low, "high": self.cov_high}
        return clip_cov_advantages(advantages, scores, mask, key=key, **bounds)


@dataclass(frozen=True)
class KlCov(Selection):
    """KL-Cov: labels of the largest covariance are penalized, this share of all labels; ValueError if out of range."""

    cov_share: float = 2e-4
    column = PENALIZED_COLUMN

    def __post_init__(self) -> None:
        _check_share(self.cov_share)

    def choose(self, advantages, scores, mask, key) -> Array:
        del key
        return high_covariance_labels(scores, advantages, mask, share=self.cov_share)


SELECTIONS: dict[str, type[Selection]] = {"clip_cov": ClipCov, "kl_cov": KlCov}
"""The choices that belong to algorithms, by `Algorithm.selection`; their fields are options of `LossConfig`."""


def _check_share(share: float) -> None:
    require(0.0 < share <= 1.0, "cov_share", "a number in (0, 1]", share)


def label_mask(labels: int) -> Bool[np.ndarray, " labels"]:
    """Returns a mask with so many labels in front, padded to the next power of two.

    The library's functions are compiled for each shape, and steps differ in their number of labels.
    """
    return np.arange(1 << max(labels - 1, 0).bit_length()) < labels


def padded_labels(values: Sequence[np.ndarray], mask: Bool[np.ndarray, " labels"]) -> Float[np.ndarray, " labels"]:
    """Joins the values of the labels of each document, as fp32 with 0 where masked."""
    padded = np.zeros(mask.shape, np.float32)
    padded[mask] = np.concatenate(values)
    return padded
