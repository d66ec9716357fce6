"""Log-probs of documents under some parameters, by the forward pass that the gradients start from."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
from flax import nnx
from jaxtyping import Float

from experiments.learner.backend import GradientBackend
from experiments.learner.packing import GlobalMicroBatch, Packing
from experiments.refusal import prompt_of, require_finite
from jaxlogp import Document


def log_probs_of(
    documents: Sequence[Document], gradients: GradientBackend, params: nnx.State, packing: Packing
) -> list[Float[np.ndarray, " labels"]]:
    """Returns the log-probs of each document's labels, in nats."""
    return scores_of(documents, functools.partial(gradients.score, params), packing)


def scores_of(
    documents: Sequence[Document], score: Callable[[GlobalMicroBatch], np.ndarray], packing: Packing
) -> list[Float[np.ndarray, " labels"]]:
    """Returns what `score` computes of each round at the labels of each document."""
    found: list[Float[np.ndarray, " labels"]] = []
    for each in packing.rounds(documents):
        found += each.at_labels(score(each))
    return found


def require_finite_scores(
    whose: str, documents: Sequence[Document], scores: list[np.ndarray], name: str = "log-probs"
) -> None:
    """Raises NotFinite if scores of a document are not finite; `name` says what they are."""
    require_finite(f"{name} of the {whose}", scores, lambda number: prompt_of(documents[number]))


def kl_between(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Returns KL(policy ‖ reference) in nats per token, from documents that the policy has sampled.

    The mean of exp(d) - 1 - d with d = log π_reference - log π of each token (k3, never negative).
    """
    pairs = zip(ours, theirs, strict=True)
    log_ratios = np.concatenate([reference.astype(np.float64) - policy for policy, reference in pairs])
    return float(np.mean(np.expm1(log_ratios) - log_ratios))
