"""Documents with clipped, unclipped, masked and unlabelled tokens, and every policy loss of `PolicyLoss` in float64.

The formulas are written label by label in NumPy; the library provides only the parameters of a loss.
"""

from typing import NamedTuple

import numpy as np

from jaxlogp import losses
from tests import oracle

SHAPE = (4, 6)
LENGTHS = (5, 1, 7, 4, 7)
DOCUMENTS = len(LENGTHS)
DRIFT = (-0.05, 0.6, 0.6, 0.0, -0.6)  # mean log-ratio: inside the bounds, above them, below them
ADVANTAGES = (1.0, -1.0, 1.0, 1.0, -1.0)
UNLABELLED = 3  # a document of which every token is masked

# Relative to the largest of at most 24 terms, and so Σ|x| is at most 24.
ERROR = oracle.fp32_bound(24.0, 24)


class Case(NamedTuple):
    """Inputs of a policy loss, with garbage at masked places."""

    new: np.ndarray
    old: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray
    ids: np.ndarray
    ref: np.ndarray
    entropy: np.ndarray
    lse: np.ndarray
    penalized: np.ndarray


def case(seed=0, dtype=np.float32):
    """The formulas below start from the same numbers, those of fp32."""
    rng = np.random.default_rng(seed)
    new = rng.normal(-5.0, 1.0, SHAPE).astype(np.float32)
    ids = np.repeat(np.arange(DOCUMENTS, dtype=np.int32), LENGTHS).reshape(SHAPE)
    drift = np.array(DRIFT)[ids]
    old = (new - drift + rng.normal(0.0, 0.15, SHAPE)).astype(np.float32)
    advantages = rng.normal(np.array(ADVANTAGES)[ids], 0.3).astype(np.float32)
    advantages[0, 2] = 0.0
    mask = (rng.random(SHAPE) < 0.7) & (ids != UNLABELLED)
    mask[0, :3] = mask[0, 5] = True  # the latter is the one label of document 1, whose ratio is far above 1
    ref = (new + rng.normal(0.1, 0.5, SHAPE)).astype(np.float32)
    entropy = rng.uniform(0.0, 3.0, SHAPE).astype(np.float32)
    lse = rng.normal(2.0, 1.0, SHAPE).astype(np.float32)
    arrays = [x.astype(dtype) for x in (new, old, advantages, ref, entropy, lse)]
    for values in arrays:
        values[~mask] = rng.choice(np.float32([np.nan, np.inf, -np.inf, 3e38, -3e38]), int((~mask).sum()))
    new, old, advantages, ref, entropy, lse = arrays
    penalized = rng.random(SHAPE) < 0.5
    return Case(new, old, advantages, mask, ids, ref, entropy, lse, penalized)


def with_labels(given, **changes):
    """`given` with the values of the first three labels of document 0 changed: none may be masked."""
    assert given.mask[0, :3].all()
    changed = {name: getattr(given, name).copy() for name in changes}
    for name, value in changes.items():
        changed[name][0, 1] = value
    return given._replace(**changed)


def expected_losses(loss, given, base=None):
    """w_t m_t (-objective + kl_coefficient KL_t - entropy_coefficient H_t + z_loss_coefficient lse_t²
    + drift_coefficient p_t |log r_t|) of each label, [..., labels], in float64.

    `given.new`, `given.entropy` and `given.lse` may have more axes in front. `base` holds the log-probs that gradients
    stop at: those in the importance weights of `StopGradientWeight` and `DivergenceMask`.
    """
    base = given.new if base is None else base
    new, old, base, advantages, ref, entropy, lse = (
        np.asarray(x, np.float64)[..., given.mask]
        for x in (given.new, given.old, base, given.advantages, given.ref, given.entropy, given.lse)
    )
    ids, penalized, result = given.ids[given.mask], given.penalized[given.mask], []
    for i, document in enumerate(ids):
        labels = np.flatnonzero(ids == document)
        group = labels if loss.ratio == "sequence" else [i]
        n, o, frozen, a = (x[..., group].mean(axis=-1) for x in (new, old, base, advantages))
        if loss.log_clip is not None:
            n, frozen = (
                o + _limited(loss.log_clip, x - old, advantages)[..., group].mean(axis=-1) for x in (new, base)
            )
        log_prob = new[..., group].mean(axis=-1)
        ratio, frozen = np.exp(n - o), np.exp(frozen - o)
        if loss.ratio in ("sequence_token", "product"):
            of_document = (base - old)[..., labels]
            frozen = np.exp(of_document.sum(axis=-1) if loss.ratio == "product" else of_document.mean(axis=-1))
            ratio = frozen * np.exp(n - base[..., i])
        label = -_objective(loss.objective, ratio, frozen, log_prob, a, base[..., group].mean(axis=-1))
        if loss.kl_coefficient:
            kl = _kl(loss.kl_estimator, ref[..., i] - new[..., i])
            label = label + loss.kl_coefficient * kl * (np.exp(new[..., i] - old[..., i]) if loss.kl_unbiased else 1.0)
        if loss.z_loss_coefficient:
            label = label + loss.z_loss_coefficient * lse[..., i] ** 2
        label = label + loss.drift_coefficient * penalized[i] * np.abs(new[..., i] - old[..., i])
        bonus = loss.entropy_coefficient * entropy[..., i]
        weights = {"labels": 1.0, "documents": 1.0, "document_mean": 1.0 / len(labels)}
        weights |= {} if loss.length is None else {"constant_length": 1.0 / loss.length}
        weight = weights[loss.reduction]
        token_mean = loss.entropy_weights == "labels" and loss.reduction != "labels"
        bonus_weight = DOCUMENTS / given.mask.sum() if token_mean else weight
        result.append(weight * label - bonus_weight * bonus)
    return np.stack(result, axis=-1)


def expected_sum(loss, given, base=None):
    return expected_losses(loss, given, base).sum(axis=-1)


def sum_error(actual, loss, given):
    """Error of a sum relative to the largest of its terms: the sum itself may cancel."""
    terms = expected_losses(loss, given)
    return abs(float(actual) - terms.sum()) / np.max(np.abs(terms))


def expected_count(loss, given):
    return int(given.mask.sum()) if loss.reduction == "labels" else DOCUMENTS


def expected_gradient(loss, given, name="new", step=1e-5):
    """Central differences of `expected_sum`: what a gradient means, without any condition of a pass.

    Their truncation error is about step² and their rounding error 1e-16 / step, both below 1e-9. No label may lie within
    `step` of a bound.
    """
    base, labels = np.array(given.new, np.float64), np.argwhere(given.mask)
    sums = []
    for sign in (1, -1):
        shifted = np.repeat(np.array(getattr(given, name), np.float64)[None], len(labels), axis=0)
        shifted[np.arange(len(labels)), labels[:, 0], labels[:, 1]] += sign * step
        sums.append(expected_sum(loss, given._replace(**{name: shifted}), base))
    gradient = np.zeros(given.mask.shape)
    gradient[given.mask] = (sums[0] - sums[1]) / (2 * step)
    return gradient


def scaled_error(actual, expected):
    return np.max(np.abs(np.asarray(actual, np.float64) - expected)) / np.max(np.abs(expected))


def _objective(objective, r, frozen, log_prob, a, frozen_log_prob):
    match objective:
        case losses.Clipped(low, high, delta):
            bounded = np.clip(r, 1 - low, 1 + (low if high is None else high))
            value = np.minimum(r * a, bounded * a)
            return np.maximum(value, delta * a) if delta is not None and a < 0 else value
        case losses.StopGradientWeight(largest, smallest):
            return np.clip(frozen, smallest, largest) * a * log_prob
        case losses.DivergenceMask(divergence, low, high, largest):
            p = np.exp(frozen_log_prob)
            q = p / frozen
            if divergence == "tv":
                distance = np.abs(p - q)
            else:
                distance = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
            rises, falls = (a > 0) & (p > q), (a < 0) & (p < q)
            stopped = rises & (distance > (low if high is None else high)) | falls & (distance > low)
            return np.where(stopped, 0.0, np.minimum(frozen, largest)) * a * log_prob
        case losses.SoftGate(positive, negative):
            tau = positive if a > 0 else negative
            return 4 / tau / (1 + np.exp(-tau * (r - 1))) * a
        case losses.GammaWeight(k_positive, decay_positive, k_negative, decay_negative):
            k, decay = (k_positive, decay_positive) if a >= 0 else (k_negative, decay_negative)
            return np.exp(decay) * frozen**k * np.exp(-decay * frozen) * a * log_prob
        case losses.Unclipped():
            return r * a
        case losses.LogLikelihood():
            return a * log_prob
    raise AssertionError(objective)


def _limited(bounds, log_ratios, advantages):
    """One bound for each label, by the sign of its advantage."""
    low, high = np.where(advantages < 0, -bounds[0], -np.inf), np.where(advantages > 0, bounds[1], np.inf)
    return np.clip(log_ratios, low, high)


def _kl(estimator, x):
    return {"k1": -x, "k2": x * x / 2, "k3": np.exp(x) - x - 1}[estimator]
