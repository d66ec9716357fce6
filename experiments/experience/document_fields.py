"""Names and dtypes of the values of stored documents."""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Shaped

from jaxlogp.errors import require

NEEDED = ("tokens", "labels")
LOG_PROBS = ("sampler_log_probs", "old_log_probs")
OPTIONAL = {"advantages": 0.0, "versions": 0, "reward": 0.0}
"""Further values of a document, by name, with what stands for a missing one."""
SUPPORT = ("support_ids", "support_counts")
KEYS = (*NEEDED, *LOG_PROBS, *OPTIONAL, *SUPPORT)
OFFSETS = "offsets"
INT32_MAX = int(np.iinfo(np.int32).max)


def check_names(found: Iterable[str], needed: Sequence[str], known: Sequence[str]) -> None:
    missing, unknown = sorted(set(needed) - set(found)), sorted(set(found) - set(known))
    require(not missing, "keys", ", ".join(needed), f"none named {', '.join(missing)}")
    require(not unknown, "keys", f"none but {', '.join(known)}", ", ".join(unknown))


def check_support_names(found: Iterable[str]) -> bool:
    """Returns whether there is a support, and raises ValueError if there is half of one."""
    known = [name for name in SUPPORT if name in found]
    require(len(known) != 1, "keys", " and ".join(SUPPORT), f"{' '.join(known)} alone")
    return bool(known)


def as_bool(labels: Shaped[np.ndarray, " length"]) -> Bool[np.ndarray, " length"]:
    """Returns labels of 0 and 1 as booleans, and raises ValueError for others."""
    wrong = labels[(labels != 0) & (labels != 1)]
    require(not wrong.size, "labels", "0 or 1 for each token", wrong[:1])
    return labels.astype(np.bool_)


def as_float32(name: str, values: Shaped[np.ndarray, " labels"]) -> Float[np.ndarray, " labels"]:
    """Returns values rounded to fp32, and raises ValueError if one is not finite there."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    wrong = values[~np.isfinite(rounded)]
    require(not wrong.size, name, "finite numbers that fp32 holds", wrong[:1])
    return rounded
