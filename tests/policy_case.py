"""Documents with clipped, unclipped, masked and unlabelled tokens, and the policy losses of contracts D in float64."""

import numpy as np

SHAPE = (4, 6)
LENGTHS = (5, 1, 7, 4, 7)
DOCUMENTS = len(LENGTHS)
DRIFT = (-0.05, 0.6, 0.6, 0.0, -0.6)  # mean log-ratio: inside the bounds, above them, below them
ADVANTAGES = (1.0, -1.0, 1.0, 1.0, -1.0)
UNLABELLED = 3  # a document of which every token is masked
KINDS = [("grpo", "length"), ("gspo", "length"), ("gspo", "document")]

# fp32 rounds a log-ratio of size 1 by 6e-8 and each of at most 24 additions by as much; relative to the largest entry.
ERROR = 3e-6


def case(seed=0):
    """fp32 inputs with garbage at masked places; the float64 formulas below start from the same fp32 numbers."""
    rng = np.random.default_rng(seed)
    new = rng.normal(-2.0, 1.0, SHAPE).astype(np.float32)
    document_ids = np.repeat(np.arange(DOCUMENTS, dtype=np.int32), LENGTHS).reshape(SHAPE)
    drift = np.array(DRIFT)[document_ids]
    old = (new - drift + rng.normal(0.0, 0.15, SHAPE)).astype(np.float32)
    advantages = rng.normal(np.array(ADVANTAGES)[document_ids], 0.3).astype(np.float32)
    advantages[0, 2] = 0.0
    mask = (rng.random(SHAPE) < 0.7) & (document_ids != UNLABELLED)
    mask[0, :3] = True
    for values in (new, old, advantages):
        values[~mask] = rng.choice(np.float32([np.nan, np.inf, -np.inf, 3e38, -3e38]), int((~mask).sum()))
    return new, old, advantages, mask, document_ids


def expected_sum(kind, weighting, new, old, advantages, mask, document_ids, low=0.2, high=0.2):
    """The sum of contracts D in float64, label by label and document by document."""
    total = 0.0
    labels = [tuple(i) for i in np.argwhere(mask)]
    if kind == "grpo":
        groups = [[label] for label in labels]
    else:
        groups = [[label for label in labels if document_ids[label] == d] for d in np.unique(document_ids)]
    for group in groups:
        if not group:
            continue
        size = len(group)
        r = np.exp(sum(np.float64(new[i]) - np.float64(old[i]) for i in group) / size)
        a = sum(np.float64(advantages[i]) for i in group) / size
        weight = size if weighting == "length" else 1
        total -= weight * min(r * a, min(max(r, 1 - low), 1 + high) * a)
    return total


def expected_gradient(kind, weighting, new, old, advantages, mask, document_ids, low=0.2, high=0.2):
    """Its gradient in closed form: the pass condition of contracts D, bounds included."""
    gradient = np.zeros(SHAPE)
    labels = [tuple(i) for i in np.argwhere(mask)]
    for i in labels:
        group = [i] if kind == "grpo" else [j for j in labels if document_ids[j] == document_ids[i]]
        r = np.exp(np.mean([np.float64(new[j]) - np.float64(old[j]) for j in group]))
        a = np.mean([np.float64(advantages[j]) for j in group])
        if (a > 0 and r <= 1 + high) or (a < 0 and r >= 1 - low):
            gradient[i] = -a * r * (1.0 if weighting == "length" else 1 / len(group))
    return gradient


def scaled_error(actual, expected):
    return np.max(np.abs(np.asarray(actual, np.float64) - expected)) / np.max(np.abs(expected))
