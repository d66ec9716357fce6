"""Drift report: the distance between the log-probs of two implementations, and the token at which they differ most.

Runs on the host, on known values: a report is read by a person or written to a log, not differentiated.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxlogp._arrays import AnyArray
from jaxlogp._vocab import VocabShards
from jaxlogp.errors import describe, is_concrete, require, require_floating, require_integer, require_mask

SMALLEST_REFERENCE = 1e-12
"""Minimum denominator of relative errors, in nats."""
RATIO_RANGE = (0.9, 1.1)
QUANTILES = (0.5, 0.9, 0.99, 0.999)


class DriftReport(NamedTuple):
    """Candidate against reference log-probs over the active tokens, with errors in float64.

    Errors, quantiles and the worst token are over the tokens with two finite values; `num_non_finite` counts the others, and
    `first_non_finite` is the index of the first. Without active tokens errors are 0.0; if no active token is finite, errors
    are NaN. In both cases the fields of the worst token are None.

    Attributes:
        max_abs_error: largest |candidate - reference|, nats.
        mean_abs_error: mean |candidate - reference|, nats.
        max_rel_error: largest |candidate - reference| / max(|reference|, 1e-12).
        mean_rel_error: mean |candidate - reference| / max(|reference|, 1e-12).
        active_count: number of tokens that the mask selects, finite or not.
        worst_flat_index: position of the largest absolute error in the flattened array; the first of several equal ones.
        worst_index: the same position as an index into the array.
        worst_token_id: target id at the worst token; None without targets, like the two fields below.
        worst_owner: vocabulary shard that owns this id.
        worst_owner_range: ids of that shard, end exclusive.
        worst_candidate: value of the candidate at the worst token, nats.
        worst_reference: value of the reference at the worst token, nats.
        worst_signed_error: candidate - reference at the worst token, nats.
        tp_size: number of vocabulary shards; None if they are not known.
        backend: label of the implementation that computed the candidate.
        reduction: label of the reduction of the candidate over shards.
        candidate_dtype: dtype in which the candidate is computed.
        reference_dtype: dtype in which the reference is computed.
        num_non_finite: number of active tokens with a NaN or infinite value on either side.
        first_non_finite: index of the first such token, or None.
        abs_error_quantiles: (p50, p90, p99, p99.9) of the absolute error, nats.
        share_outside: share of the finite active tokens whose ratio exp(candidate - reference) is outside [0.9, 1.1].
    """

    max_abs_error: float
    mean_abs_error: float
    max_rel_error: float
    mean_rel_error: float
    active_count: int
    worst_flat_index: int | None
    worst_index: tuple[int, ...] | None
    worst_token_id: int | None
    worst_owner: int | None
    worst_owner_range: tuple[int, int] | None
    worst_candidate: float | None
    worst_reference: float | None
    worst_signed_error: float | None
    tp_size: int | None
    backend: str
    reduction: str
    candidate_dtype: str
    reference_dtype: str
    num_non_finite: int
    first_non_finite: tuple[int, ...] | None
    abs_error_quantiles: tuple[float, float, float, float]
    share_outside: float

    def __str__(self) -> str:
        """Returns a few lines of text; non-finite values come first."""
        lines, shards = [], "" if self.tp_size is None else f", {self.tp_size} vocabulary shards"
        if self.num_non_finite:
            lines.append(f"NOT FINITE: {self.num_non_finite} active tokens, the first at {self.first_non_finite}")
        lines += [
            f"{self.active_count} active tokens{shards}, {self.backend}, {self.reduction},"
            f" {self.candidate_dtype} against {self.reference_dtype}",
            f"|error| max {self.max_abs_error:.3g}, mean {self.mean_abs_error:.3g}, p50 / p90 / p99 / p99.9 "
            + " / ".join(f"{value:.3g}" for value in self.abs_error_quantiles)
            + " nats",
            f"relative error max {self.max_rel_error:.3g}, mean {self.mean_rel_error:.3g};"
            f" ratio outside [0.9, 1.1]: {self.share_outside:.2%}",
        ]
        if self.worst_index is not None:
            owned = f"id {self.worst_token_id} of shard {self.worst_owner} {self.worst_owner_range}, "
            values = f"{self.worst_candidate:.9g} against {self.worst_reference:.9g}"
            owned = "" if self.worst_token_id is None else owned
            lines.append(f"worst token {self.worst_index}: {owned}{values}")
        return "\n".join(lines)


def drift_report(
    candidate: Float[AnyArray, "*tokens"],
    reference: Float[AnyArray, "*tokens"],
    targets: Int[AnyArray, "*tokens"] | None = None,
    mask: Bool[AnyArray, "*tokens"] | None = None,
    *,
    vocab: VocabShards | None = None,
    backend: str = "unnamed",
    reduction: str = "unnamed",
    candidate_dtype: str | None = None,
    reference_dtype: str | None = None,
) -> DriftReport:
    """Compares the log-probs of a candidate (a trainer, say) with those of a reference (a sampler).

    Args:
        candidate: [*tokens], log-probs in nats.
        reference: [*tokens], log-probs of the same targets, in nats.
        targets: [*tokens], integer ids of the whole vocabulary; anything at masked tokens. None if they are not known: the
            worst token then has no id and no owner.
        mask: [*tokens], bool, False where a token does not count; None for all tokens.
        vocab: the vocabulary shards of the candidate; None without targets.
        backend: label of the implementation that computed the candidate.
        reduction: label of the reduction of the candidate over shards.
        candidate_dtype: dtype in which the candidate is computed; None for that of its log-probs.
        reference_dtype: dtype in which the reference is computed; None for that of its log-probs.

    Returns:
        The report.

    Raises:
        ValueError: if a shape or dtype differs from the above, an active id is outside the vocabulary, or an array is
            traced.

    Example:
        >>> import numpy as np
        >>> new, old = np.float32([-1.0, -2.5, -3.0]), np.float32([-1.0, -2.0, -3.0])
        >>> report = drift_report(new, old, np.array([4, 9, 0]), vocab=VocabShards.even(10, 2))
        >>> report.max_abs_error, report.worst_index, report.worst_token_id, report.worst_owner
        (0.5, (1,), 9, 1)

    References:
        RL-Align/RL-Kernel pull request 103, whose 18 fields come first; non-finite counts, quantiles and the share of
        ratios are additions, because a mean hides the tail.
    """
    active = _check(candidate, reference, targets, mask, vocab)
    ours, theirs = (np.asarray(x).astype(np.float64).reshape(-1) for x in (candidate, reference))
    finite = active & np.isfinite(ours) & np.isfinite(theirs)
    broken = np.flatnonzero(active & ~finite)
    # Differences outside `finite` are never read, and may be inf - inf.
    signed = np.where(finite, ours, 0.0) - np.where(finite, theirs, 0.0)
    error = np.abs(signed)[finite]
    relative = error / np.maximum(np.abs(theirs[finite]), SMALLEST_REFERENCE)
    some = error.size > 0
    nothing = float("nan") if active.any() else 0.0
    worst = int(np.flatnonzero(finite)[np.argmax(error)]) if some else None
    shape = candidate.shape
    return DriftReport(
        max_abs_error=float(error.max()) if some else nothing,
        mean_abs_error=float(error.mean()) if some else nothing,
        max_rel_error=float(relative.max()) if some else nothing,
        mean_rel_error=float(relative.mean()) if some else nothing,
        active_count=int(active.sum()),
        **_worst_token(worst, shape, targets, ours, theirs, vocab),
        tp_size=None if vocab is None else vocab.num_shards,
        backend=backend,
        reduction=reduction,
        candidate_dtype=candidate_dtype or str(candidate.dtype),
        reference_dtype=reference_dtype or str(reference.dtype),
        num_non_finite=len(broken),
        first_non_finite=_index(int(broken[0]), shape) if len(broken) else None,
        abs_error_quantiles=tuple(float(q) for q in np.quantile(error, QUANTILES))
        if some
        else (nothing,) * len(QUANTILES),
        share_outside=_share_outside(signed[finite]) if some else nothing,
    )


def _worst_token(
    flat: int | None,
    shape: tuple[int, ...],
    targets: Int[AnyArray, "*tokens"] | None,
    candidate: Float[np.ndarray, " tokens"],
    reference: Float[np.ndarray, " tokens"],
    vocab: VocabShards | None,
) -> dict[str, object]:
    names = ("flat_index", "index", "token_id", "owner", "owner_range", "candidate", "reference", "signed_error")
    if flat is None:
        return {f"worst_{name}": None for name in names}
    token_id = owner = owned = None
    if targets is not None:
        token_id = int(np.asarray(targets).reshape(-1)[flat])
        owner = next(rank for rank, (start, end) in enumerate(vocab.ranges) if start <= token_id < end)
        owned = vocab.ranges[owner]
    ours, theirs = float(candidate[flat]), float(reference[flat])
    values = (flat, _index(flat, shape), token_id, owner, owned, ours, theirs, ours - theirs)
    return {f"worst_{name}": value for name, value in zip(names, values, strict=True)}


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, shape))


def _share_outside(log_ratio: Float[np.ndarray, " tokens"]) -> float:
    # In logarithms: exp of a large log-ratio would overflow.
    low, high = np.log(RATIO_RANGE)
    return float(np.mean((log_ratio < low) | (log_ratio > high)))


def _check(
    candidate: Float[AnyArray, "*tokens"],
    reference: Float[AnyArray, "*tokens"],
    targets: Int[AnyArray, "*tokens"] | None,
    mask: Bool[AnyArray, "*tokens"] | None,
    vocab: VocabShards | None,
) -> Bool[np.ndarray, " tokens"]:
    """Returns the flat mask of active tokens."""
    require_floating(candidate, "candidate")
    require_floating(reference, "reference")
    shape = candidate.shape
    require(reference.shape == shape, "reference", f"shape {shape} of candidate", describe(reference))
    if targets is not None:
        require_integer(targets, "targets")
        require(targets.shape == shape, "targets", f"shape {shape} of candidate", describe(targets))
    ok = isinstance(vocab, VocabShards) or (vocab is None and targets is None)
    require(ok, "vocab", "a VocabShards, or None without targets", describe(vocab))
    if mask is not None:
        require_mask(mask, shape)
    named = {"candidate": candidate, "reference": reference, "targets": targets, "mask": mask}
    for name, value in named.items():
        require(is_concrete(value), name, "known values (a report is made outside of jax.jit)", "a traced array")
    active = np.ones(shape, bool) if mask is None else np.asarray(mask)
    if targets is None:
        return active.reshape(-1)
    ids = np.asarray(targets)
    bad = active & ((ids < 0) | (ids >= vocab.vocab_size))
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        require(False, "targets", f"active ids in [0, {vocab.vocab_size})", f"{ids[first]} at position {first}")
    return active.reshape(-1)
