"""Documents without effect: those whose advantages are all exactly 0 are counted, and not computed.

Their gradient is exactly 0 where the loss has no other part. What a step says of all its documents is taken from them here;
what needs the policy's log-probs is known of the computed ones alone, and its name begins with "computed/"; None if there
are none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxlogp import Document
from jaxlogp.policy.metrics import METRICS

COMPUTED = "computed/"


def has_effect(document: Document) -> bool:
    return bool(np.any(document.advantages))


def of_all(
    metrics: Mapping[str, Any], documents: Sequence[Document], count: int, version: int
) -> dict[str, float | int | None]:
    """Returns the metrics of a step from those of its computed documents; `count` is the divisor of the loss of all."""
    known = _known(documents, version) | {"loss_count": count}
    found: dict[str, float | int | None] = {}
    for name, value in metrics.items():
        if name in known:
            found[name] = known[name]
        elif name in METRICS and METRICS[name].divisor == "loss_count":
            # The others add 0.
            found[name] = value * metrics["loss_count"] / max(count, 1)
        else:
            # The means of no document would be 0.
            found[COMPUTED + name] = None if metrics.get("num_documents") == 0 else value
    counts = {name: metrics[name] for name in ("num_documents", "num_tokens") if name in metrics}
    return found | {COMPUTED + name: value for name, value in counts.items()}


def _known(documents: Sequence[Document], version: int) -> dict[str, float | int | None]:
    labelled = [document for document in documents if document.num_labels]
    # One, or one for each label.
    advantages, starts, sizes = _joined([document.advantages for document in labelled])
    total = float((np.add.reduceat(advantages, starts) / sizes).sum()) if labelled else 0.0
    versions, starts, _ = _joined([document.versions if np.size(document.versions) else 0 for document in documents])
    staleness = version - np.minimum.reduceat(versions, starts)
    return {
        "num_documents": len(documents),
        "num_documents_labelled": len(labelled),
        "num_tokens": sum(document.num_labels for document in labelled),
        "num_rewards": len(documents),
        "num_stalenesses": len(documents),
        "advantage": total / len(documents),
        "advantage_labelled": total / max(len(labelled), 1),
        "max_advantage": float(advantages.max(initial=-np.inf)),
        "min_advantage": float(advantages.min(initial=np.inf)),
        **_statistics("reward", np.array([each.reward for each in documents], np.float32)),
        **_statistics("staleness", staleness),
    }


def _joined(values: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns numbers, each one or several, in one float64 array; where each begins, and how many they are."""
    arrays = [np.ravel(value) for value in values]
    sizes = np.array([array.size for array in arrays], np.int64)
    return np.concatenate([*arrays, []]), np.cumsum(sizes) - sizes, sizes


def _statistics(name: str, values: np.ndarray) -> dict[str, float]:
    reduced = {"mean": np.mean(values, dtype=np.float64), "max": np.max(values), "min": np.min(values)}
    return {f"{name}_{what}": float(value) for what, value in reduced.items()}
