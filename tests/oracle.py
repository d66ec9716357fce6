"""The float64 oracle: every formula of the library, written independently in NumPy.

Nothing here imports JAX or jaxlogp, so a mistake in the library cannot hide in its own tests. Gradients are
the analytic ones; tests/test_oracle.py compares each of them with central finite differences.

Shapes: `hidden [*tokens, H]`, `weight [V, H]`, `logits [*tokens, V]`, `targets`, `mask`, cotangents `[*tokens]`.
All values are nats.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Head(NamedTuple):
    """The scalars of the head: z = softcap(logit_scale * (hidden @ weight.T + bias)) / temperature."""

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None


PLAIN = Head()


class HeadGradients(NamedTuple):
    hidden: np.ndarray
    weight: np.ndarray
    bias: np.ndarray


class PolicyResult(NamedTuple):
    loss: float
    gradient: np.ndarray


def f64(values) -> np.ndarray:
    return np.asarray(values).astype(np.float64)


def full_mask(targets, mask) -> np.ndarray:
    return np.ones(np.shape(targets), bool) if mask is None else np.asarray(mask, bool)


# --- logits, log-probs and entropy -------------------------------------------------------------------------


def raw_logits(hidden, weight, bias=None, head: Head = PLAIN) -> np.ndarray:
    """logit_scale * (hidden @ weight.T + bias), before the soft cap and the temperature."""
    raw = f64(hidden) @ f64(weight).T
    if bias is not None:
        raw = raw + f64(bias)
    return head.logit_scale * raw


def head_logits(hidden, weight, bias=None, head: Head = PLAIN) -> np.ndarray:
    raw = raw_logits(hidden, weight, bias, head)
    if head.softcap is not None:
        raw = head.softcap * np.tanh(raw / head.softcap)
    return raw / head.temperature


def log_sum_exp(logits) -> np.ndarray:
    peak = np.max(logits, axis=-1, keepdims=True)
    return np.log(np.sum(np.exp(logits - peak), axis=-1)) + peak[..., 0]


def softmax(logits) -> np.ndarray:
    return np.exp(logits - log_sum_exp(logits)[..., None])


def one_hot(targets, size: int) -> np.ndarray:
    """One-hot rows; a target outside [0, size) has an all-zero row."""
    return (np.asarray(targets)[..., None] == np.arange(size)).astype(np.float64)


def token_log_probs(logits, targets, mask=None) -> np.ndarray:
    """z[target] - lse(z); exactly 0 where masked and where the target lies on no shard."""
    logits = f64(logits)
    targets = np.asarray(targets)
    covered = full_mask(targets, mask) & (targets >= 0) & (targets < logits.shape[-1])
    safe = np.where(covered, targets, 0)
    clean = np.where(full_mask(targets, mask)[..., None], logits, 0.0)
    chosen = np.take_along_axis(clean, safe[..., None], axis=-1)[..., 0]
    return np.where(covered, chosen - log_sum_exp(clean), 0.0)


def token_entropy(logits, mask=None) -> np.ndarray:
    """lse(z) - sum(p z); the target plays no part in it. Exactly 0 where masked."""
    logits = f64(logits)
    active = full_mask(logits[..., 0], mask)
    clean = np.where(active[..., None], logits, 0.0)
    return np.where(active, log_sum_exp(clean) - np.sum(softmax(clean) * clean, axis=-1), 0.0)


def logits_gradient(logits, targets, log_prob_cotangent, entropy_cotangent=None, mask=None) -> np.ndarray:
    """g_lp (onehot - p) + g_H p (sum(p z) - z); zero rows where masked; no one-hot for an uncovered target."""
    logits = f64(logits)
    active = full_mask(targets, mask)
    clean = np.where(active[..., None], logits, 0.0)
    p = softmax(clean)
    gradient = f64(log_prob_cotangent)[..., None] * (one_hot(targets, logits.shape[-1]) - p)
    if entropy_cotangent is not None:
        mean_logit = np.sum(p * clean, axis=-1, keepdims=True)
        gradient = gradient + f64(entropy_cotangent)[..., None] * p * (mean_logit - clean)
    return np.where(active[..., None], gradient, 0.0)


def scaled_logits_log_probs(logits, targets, mask=None, temperature: float = 1.0):
    """(log_probs, entropy) of given logits at a temperature."""
    scaled = f64(logits) / temperature
    return token_log_probs(scaled, targets, mask), token_entropy(scaled, mask)


def scaled_logits_gradient(logits, targets, log_prob_cotangent, entropy_cotangent=None, mask=None, temperature=1.0):
    """Gradient with respect to the logits as they were given, before the temperature."""
    scaled = f64(logits) / temperature
    return logits_gradient(scaled, targets, log_prob_cotangent, entropy_cotangent, mask) / temperature


def head_log_probs(hidden, weight, targets, mask=None, bias=None, head: Head = PLAIN):
    """(log_probs, entropy) of a linear head; masked rows of hidden never enter."""
    clean = np.where(full_mask(targets, mask)[..., None], f64(hidden), 0.0)
    logits = head_logits(clean, weight, bias, head)
    return token_log_probs(logits, targets, mask), token_entropy(logits, mask)


def head_gradients(
    hidden,
    weight,
    targets,
    log_prob_cotangent,
    entropy_cotangent=None,
    mask=None,
    bias=None,
    head: Head = PLAIN,
    lse_cotangent=0.0,
) -> HeadGradients:
    """Chain rule through temperature, soft cap, scale and the product, summed over tokens for weight and bias."""
    clean = np.where(full_mask(targets, mask)[..., None], f64(hidden), 0.0)
    logits = head_logits(clean, weight, bias, head)
    upstream = logits_gradient(logits, targets, log_prob_cotangent, entropy_cotangent, mask)
    g_lse = np.where(full_mask(targets, mask), lse_cotangent, 0.0)
    return product_gradients(upstream + g_lse[..., None] * softmax(logits), clean, weight, bias, head)


def product_gradients(upstream, clean, weight, bias=None, head: Head = PLAIN) -> HeadGradients:
    """Gradients of the operands from that of the logits; masked rows of hidden are 0."""
    upstream = upstream / head.temperature
    if head.softcap is not None:
        raw = raw_logits(clean, weight, bias, head)
        upstream = upstream * (1.0 - np.tanh(raw / head.softcap) ** 2)
    upstream = upstream * head.logit_scale
    flat = upstream.reshape(-1, upstream.shape[-1])
    return HeadGradients(
        hidden=upstream @ f64(weight), weight=flat.T @ clean.reshape(-1, clean.shape[-1]), bias=flat.sum(axis=0)
    )


# --- divergences of two heads ------------------------------------------------------------------------------


def divergence(logits, reference, kind: str, share: float = 0.5) -> np.ndarray:
    """KL(p || r), KL(r || p), or share KL(r || m) + (1 - share) KL(p || m) with m = share r + (1 - share) p."""
    p, r = softmax(f64(logits)), softmax(f64(reference))
    if kind == "reverse":
        return _kl(p, r)
    if kind == "forward":
        return _kl(r, p)
    mixture = share * r + (1.0 - share) * p
    return share * _kl(r, mixture) + (1.0 - share) * _kl(p, mixture)


def divergence_gradient(logits, reference, kind: str, share: float = 0.5) -> np.ndarray:
    """By the logits: the derivative by each probability, through the Jacobian of softmax."""
    p, r = softmax(f64(logits)), softmax(f64(reference))
    if kind == "reverse":
        by_p = np.log(p / r) + 1.0
    elif kind == "forward":
        by_p = -r / p
    else:
        by_p = (1.0 - share) * np.log(p / (share * r + (1.0 - share) * p))
    return p * (by_p - np.sum(p * by_p, axis=-1, keepdims=True))


def _kl(a, b) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sum(np.where(a > 0.0, a * np.log(a / b), 0.0), axis=-1)


# --- embedding ---------------------------------------------------------------------------------------------


def embedding_gradient(token_ids, cotangent, vocab_size: int) -> np.ndarray:
    """Scatter-add of the cotangent rows into the table's rows."""
    cotangent = f64(cotangent)
    gradient = np.zeros((vocab_size, cotangent.shape[-1]))
    np.add.at(gradient, np.asarray(token_ids).reshape(-1), cotangent.reshape(-1, cotangent.shape[-1]))
    return gradient


# --- masked reductions -------------------------------------------------------------------------------------


def masked_sum(values, mask) -> float:
    return float(f64(values)[np.asarray(mask, bool)].sum())


def masked_count(mask) -> int:
    return int(np.asarray(mask, bool).sum())


def masked_mean(values, mask) -> float:
    count = masked_count(mask)
    return masked_sum(values, mask) / count if count else 0.0


# --- policy losses -----------------------------------------------------------------------------------------


def _clipped_objective(ratio, advantage, epsilon_low, epsilon_high):
    """min(r A, clip(r) A) and whether the gradient passes (bounds included)."""
    value = np.minimum(ratio * advantage, np.clip(ratio, 1.0 - epsilon_low, 1.0 + epsilon_high) * advantage)
    passes = ((advantage > 0) & (ratio <= 1.0 + epsilon_high)) | ((advantage < 0) & (ratio >= 1.0 - epsilon_low))
    return value, passes


def grpo(log_probs, old_log_probs, advantages, mask, *, epsilon_low=0.2, epsilon_high=0.2, num_labels=None):
    """-(1/D) sum of m min(r A, clip(r) A); D is the label count of the whole step."""
    mask = np.asarray(mask, bool)
    divisor = masked_count(mask) if num_labels is None else num_labels
    difference = np.where(mask, np.where(mask, f64(log_probs), 0.0) - np.where(mask, f64(old_log_probs), 0.0), 0.0)
    advantages = np.where(mask, f64(advantages), 0.0)
    ratio = np.exp(difference)
    value, passes = _clipped_objective(ratio, advantages, epsilon_low, epsilon_high)
    gradient = np.where(mask & passes, -advantages * ratio / divisor, 0.0)
    return PolicyResult(float(-np.where(mask, value, 0.0).sum() / divisor), gradient)


def gspo(
    log_probs,
    old_log_probs,
    advantages,
    mask,
    document_ids,
    num_documents: int,
    *,
    epsilon_low=0.2,
    epsilon_high=0.2,
    weighting: str = "length",
    total_documents=None,
) -> PolicyResult:
    """-(1/M) sum over documents of w_d min(R_d A_d, clip(R_d) A_d); w_d is N_d ("length") or 1 ("document")."""
    mask, document_ids = np.asarray(mask, bool), np.asarray(document_ids)
    log_probs, old_log_probs, advantages = f64(log_probs), f64(old_log_probs), f64(advantages)
    divisor = num_documents if total_documents is None else total_documents
    loss, gradient = 0.0, np.zeros(mask.shape)
    for document in range(num_documents):
        labels = mask & (document_ids == document)
        length = int(labels.sum())
        if length == 0:
            continue
        ratio = np.exp((log_probs[labels] - old_log_probs[labels]).sum() / length)
        advantage = advantages[labels].mean()
        document_weight = {"length": float(length), "document": 1.0}[weighting]
        value, passes = _clipped_objective(ratio, advantage, epsilon_low, epsilon_high)
        loss -= document_weight * float(value) / divisor
        if passes:
            gradient[labels] = -document_weight * advantage * ratio / length / divisor
    return PolicyResult(loss, gradient)


# --- comparison --------------------------------------------------------------------------------------------


def fp32_bound(magnitude, terms: int):
    """Returns the largest difference of two fp32 sums of `terms` numbers whose absolute values sum to at most `magnitude`.

    In any order each is off by at most terms · 2^-24 · Σ|x|, and so it is where the numbers are products, rounded or
    fused (Higham, Accuracy and Stability, 2002, section 4.2). A positive sum is off by this share of itself, for a
    magnitude of 1.
    """
    return 2 * terms * 2.0**-24 * magnitude


def relative_error(actual, expected) -> float:
    """Norm of the difference over the norm of the expected array; infinite when anything is not finite."""
    actual, expected = f64(actual), f64(expected)
    if actual.shape != expected.shape:
        raise AssertionError(f"shapes differ: {actual.shape} against {expected.shape}")
    if not np.all(np.isfinite(actual)):
        return float("inf")
    scale = np.linalg.norm(expected)
    return float(np.linalg.norm(actual - expected) / (scale if scale > 0 else 1.0))


def scaled_error(actual, expected) -> float:
    """Largest absolute error measured against max(1, |expected|); infinite when anything is not finite."""
    actual, expected = f64(actual), f64(expected)
    if actual.shape != expected.shape:
        raise AssertionError(f"shapes differ: {actual.shape} against {expected.shape}")
    if not np.all(np.isfinite(actual)):
        return float("inf")
    return float(np.max(np.abs(actual - expected) / np.maximum(1.0, np.abs(expected)), initial=0.0))
