"""Columns of documents that the trainer's own forward pass computes before training on them.

`rescored`: old log-probs as the trainer computes them; the sampler's stay for the drift metric, and log-sum-exp and
entropies are kept for a strictly on-policy step. `with_reference`: log-probs under a frozen reference.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from flax import nnx

from experiments.refusal import prompt_of, require_finite
from experiments.sampling.packing import Packing, Round
from experiments.training.sums import GradientSums
from jaxlogp import Document
from jaxlogp.policy.documents import SAMPLER_COLUMN

RESCORED_COLUMNS = (SAMPLER_COLUMN, "lse", "entropy")
REFERENCE_COLUMN = "ref_log_probs"
ON_POLICY_COLUMNS = ("lse", "entropy")


def rescored(documents: list[Document], sums: GradientSums, params: nnx.State, packing: Packing) -> list[Document]:
    """Documents with the trainer's log-probs as the old ones, and `RESCORED_COLUMNS`.

    Raises:
        NotFinite: log-probs.
    """
    scores = list(_scores(documents, sums, params, packing))
    _require_finite("log-probs of the trainer", documents, scores)
    result = []
    for document, (log_probs, entropy, lse) in zip(documents, scores, strict=True):
        result.append(_with(document, {"lse": lse, "entropy": entropy}, old_log_probs=log_probs))
    return result


def with_reference(
    documents: list[Document], sums: GradientSums, params: nnx.State, packing: Packing
) -> list[Document]:
    """Documents with the log-probs of their completions under the reference's parameters.

    Raises:
        NotFinite: log-probs.
    """
    scores = list(_scores(documents, sums, params, packing))
    _require_finite("log-probs of the reference", documents, scores)
    return [_with(document, {REFERENCE_COLUMN: each[0]}) for document, each in zip(documents, scores, strict=True)]


def kl_to(
    reference: nnx.State, documents: list[Document], sums: GradientSums, params: nnx.State, packing: Packing
) -> float:
    """KL(policy ‖ reference) in nats per token, from documents that the policy has sampled: the mean of
    exp(d) - 1 - d with d = log π_reference - log π of each token (k3, never negative)."""
    pairs = zip(*(_scores(documents, sums, each, packing) for each in (reference, params)), strict=True)
    log_ratios = np.concatenate([theirs[0].astype(np.float64) - ours[0] for theirs, ours in pairs])
    return float(np.mean(np.expm1(log_ratios) - log_ratios))


def on_policy(rounds: list[Round], documents_seen: int) -> bool:
    """Whether all documents were scored with exactly the parameters that are about to be updated."""
    return all(np.all(document.versions == documents_seen) for each in rounds for document in each.documents)


def _require_finite(what: str, documents: list[Document], scores: list[tuple[np.ndarray, ...]]) -> None:
    require_finite(what, [np.concatenate(each) for each in scores], lambda number: prompt_of(documents[number]))


def _with(document: Document, columns: dict[str, np.ndarray], **changes: np.ndarray) -> Document:
    return dataclasses.replace(document, columns={**document.columns, **columns}, **changes)


def _scores(
    documents: list[Document], sums: GradientSums, params: nnx.State, packing: Packing
) -> Iterator[tuple[np.ndarray, ...]]:
    """Log-probs, entropies and log-sum-exps of each document's completion."""
    packing = dataclasses.replace(packing, columns=tuple(documents[0].columns) if documents else ())
    for each in packing.rounds(documents):
        scores = sums.score(params, each)
        yield from zip(*(each.at_labels(column) for column in scores), strict=True)
