"""Log-probs of documents under some parameters, by the forward pass that the gradients start from."""

from collections.abc import Sequence

import numpy as np
from flax import nnx
from jaxtyping import Float

from experiments.learner.backend import GradientBackend
from experiments.learner.packing import Packing
from experiments.refusal import prompt_of, require_finite
from jaxlogp import Document


def log_probs_of(
    documents: Sequence[Document], gradients: GradientBackend, params: nnx.State, packing: Packing
) -> list[Float[np.ndarray, " labels"]]:
    """Returns the log-probs of each document's labels, in nats."""
    found: list[Float[np.ndarray, " labels"]] = []
    for each in packing.rounds(documents):
        found += each.at_labels(gradients.score(params, each))
    return found


def require_finite_scores(whose: str, documents: Sequence[Document], log_probs: list[np.ndarray]) -> None:
    """Raises NotFinite if log-probs of a document are not finite."""
    require_finite(f"log-probs of the {whose}", log_probs, lambda number: prompt_of(documents[number]))


def kl_between(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Returns KL(policy ‖ reference) in nats per token, from documents that the policy has sampled.

    The mean of exp(d) - 1 - d with d = log π_reference - log π of each token (k3, never negative).
    """
    pairs = zip(ours, theirs, strict=True)
    log_ratios = np.concatenate([reference.astype(np.float64) - policy for policy, reference in pairs])
    return float(np.mean(np.expm1(log_ratios) - log_ratios))
