"""The head in float64 NumPy, written from the formulas, for given hidden states and weight.

z = hidden · weightᵀ, log p = z - lse(z), H = -Σ p log p, and for cotangents g and g_H of log-probs and entropies
dz = g (onehot - p) - g_H p (log p + H).

Shapes: N tokens, H hidden features, V vocabulary entries.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from experiments.studies.gradient_filter import ENTROPY_COTANGENT
from experiments.studies.real_model.states import TokenSet

BLOCK = 256
"""Number of tokens whose logits are stored at a time."""


def _log_p(hidden: np.ndarray, weight: Float[np.ndarray, "V H"]) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Blocks of tokens: their positions, their hidden states, and log p [tokens, V]."""
    for start in range(0, len(hidden), BLOCK):
        block = hidden[start : start + BLOCK].astype(np.float64)
        logits = block @ weight.T
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        yield slice(start, start + len(block)), block, logits


def float64_head(tokens: TokenSet, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and entropies [N] of the bf16 operands."""
    log_probs, entropies = [], []
    for which, _, log_p in _log_p(tokens.hidden, weight.astype(np.float64)):
        log_probs.append(log_p[np.arange(len(log_p)), tokens.targets[which]])
        entropies.append(-np.einsum("tv,tv->t", np.exp(log_p), log_p))
    return np.concatenate(log_probs), np.concatenate(entropies)


def float64_gradients(
    tokens: TokenSet, weight: np.ndarray, g: Float[np.ndarray, " N"]
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of hidden states and weight for cotangents g of the log-probs and 0.01 of the entropies."""
    wide = weight.astype(np.float64)
    d_hidden, d_weight = [], np.zeros(wide.shape)
    for which, block, log_p in _log_p(tokens.hidden, wide):
        p = np.exp(log_p)
        entropy = -np.einsum("tv,tv->t", p, log_p)
        factor = g[which] + ENTROPY_COTANGENT * entropy
        dz = -p * (factor[:, None] + ENTROPY_COTANGENT * log_p)
        dz[np.arange(len(dz)), tokens.targets[which]] += g[which]
        d_hidden.append(dz @ wide)
        d_weight += dz.T @ block
    return np.concatenate(d_hidden), d_weight
