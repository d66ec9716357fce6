"""A sampler beside the documents of `policy_case`, and corrections in float64, written label by label."""

import dataclasses
import inspect

import numpy as np

from jaxlogp.losses import PRESETS
from tests.losses.policy_case import DOCUMENTS, expected_losses

# Mean log π_old - log μ of each document: sequence weights and token weights on both sides of every bound of the tests.
MISMATCH = (0.15, -0.3, 0.05, 0.0, -0.25)


def sampler(given, seed=0):
    """Log-probs of a sampler near the old policy, at most 0, with garbage where masked."""
    rng = np.random.default_rng(seed + 50)
    drift = rng.normal(np.array(MISMATCH)[given.ids], 0.4)
    values = np.minimum(np.where(given.mask, given.old, 0.0) - drift, 0.0).astype(given.old.dtype)
    values[~given.mask] = rng.choice(np.float32([np.nan, np.inf, -np.inf, 3e38]), int((~given.mask).sum()))
    return values


def loss_of(name, **options):
    """A preset with bounds that its documents meet from both sides."""
    parameters = inspect.signature(PRESETS[name]).parameters
    known = {"length": 8, "epsilon": 0.2, "epsilon_high": 0.2}
    return PRESETS[name](**{key: value for key, value in known.items() if key in parameters}, **options)


def log_weights(given, values):
    """log π_old - log μ of each label, [labels]."""
    return np.float64(given.old[given.mask]) - np.float64(values[given.mask])


def ratios_at(level, given, values):
    """π_old / μ of each label at a level, [labels]."""
    logs, ids = log_weights(given, values), given.ids[given.mask]
    result = []
    for i, document in enumerate(ids):
        of_document = logs[ids == document]
        log_weight = {"token": logs[i], "sequence": of_document.sum(), "geometric": of_document.mean()}[level]
        result.append(np.exp(min(max(log_weight, -20.0), 20.0)))
    return np.array(result)


def weights_of(correction, given, values):
    """The weight of each label, [labels]."""
    ratios = ratios_at(correction.level, given, values)
    if correction.kind == "truncate":
        return np.array([min(w, correction.high) for w in ratios])
    return np.array([w if correction.low <= w <= correction.high else 0.0 for w in ratios])


def slopes(losses_of, given, step=1e-5):
    """d losses_j / d log_probs_i by central differences, [labels, labels]."""
    labels = np.argwhere(given.mask)
    results = []
    for sign in (1, -1):
        shifted = np.repeat(np.array(given.new, np.float64)[None], len(labels), axis=0)
        shifted[np.arange(len(labels)), labels[:, 0], labels[:, 1]] += sign * step
        results.append(losses_of(given._replace(new=shifted)))
    return (results[0] - results[1]) / (2 * step)


def spread(values, given):
    """[labels] as an array of the shape of the mask, 0 where masked."""
    whole = np.zeros(given.mask.shape)
    whole[given.mask] = values
    return whole


class Oracle:
    """The objective and the other parts of a loss apart, each with its slopes: a correction weights the first alone."""

    def __init__(self, loss, given):
        bare = dataclasses.replace(loss, kl_coefficient=0.0, entropy_coefficient=0.0, drift_coefficient=0.0)
        base = np.array(given.new, np.float64)
        objective = lambda case: expected_losses(bare, case, base)  # noqa: E731
        others = lambda case: expected_losses(loss, case, base) - expected_losses(bare, case, base)  # noqa: E731
        self._given = given
        self._objective, self._others = objective(given), others(given)
        self._objective_slopes, self._others_slopes = slopes(objective, given), slopes(others, given)

    def losses(self, weights):
        return weights * self._objective + self._others

    def gradient(self, weights, factors=1.0):
        """Of Σ factors (weights objective + others)."""
        gradient = self._objective_slopes @ (weights * factors) + (self._others_slopes * factors).sum(axis=1)
        return spread(gradient, self._given)


assert len(MISMATCH) == DOCUMENTS


def rejected_by(rejection, given, values):
    """The labels that leave, of the shape of the mask: rule by rule, label by label."""
    new, old, advantages = (np.float64(x[given.mask]) for x in (given.new, given.old, given.advantages))
    mu, ids, logs = np.float64(values[given.mask]), given.ids[given.mask], log_weights(given, values)
    gone = np.zeros(len(ids), bool)
    for i, document in enumerate(ids):
        of = ids == document
        for level in ("token", "sequence", "geometric"):
            bounds = getattr(rejection, level)
            if bounds is not None:
                gone[i] |= not bounds[0] <= ratios_at(level, given, values)[i] <= bounds[1]
        if rejection.veto is not None:
            gone[i] |= bool((np.exp(logs[of]) < rejection.veto).any())
        estimates = {"k1": -logs[of], "k2": logs[of] ** 2 / 2, "k3": np.exp(logs[of]) - logs[of] - 1}
        for name, values_of_document in estimates.items():
            bound = getattr(rejection, name)
            if bound is not None:
                gone[i] |= values_of_document.mean() > bound
        if rejection.negative_kl is not None:
            gone[i] |= advantages[of].mean() < 0 and (old - new)[of].mean() > rejection.negative_kl
        if rejection.probability_gap is not None:
            gap = np.exp(new[i]) - np.exp(mu[i])
            gone[i] |= advantages[i] > 0 and gap > rejection.probability_gap
            gone[i] |= advantages[i] < 0 and gap < -rejection.probability_gap
    return spread(gone, given).astype(bool)
