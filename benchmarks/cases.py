"""Inputs of the benchmarks: shapes by model name, random operands, and the exact answer in float64."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# (hidden size, vocabulary) of the heads; only their shapes, no soft cap.
MODELS = {
    "qwen3-8b": (4096, 151936),
    "llama-3.1-8b": (4096, 128256),
    "gemma-2-2b": (2304, 256000),
    "qwen3-0.6b": (1024, 151936),
}
# Standard deviation of the logits: random logits of this size are neither flat nor peaked.
SPREAD = 2.0
# Weight of the entropy in the loss, negative as an upstream gradient; the same for every token, so that functions that
# compute the loss themselves can be compared too.
ENTROPY_BONUS = 0.01
# Tokens whose hidden gradient, and (half from each end) rows of the vocabulary whose weight gradient, are compared.
ROWS_CHECKED, COLUMNS_CHECKED = 64, 64
# Number of tokens whose float64 logits are stored at a time.
TOKEN_BLOCK = 512


@dataclass(frozen=True)
class Case:
    """Inputs of one shape, on the default device.

    Attributes:
        label: name for tables and plots.
        hidden: [N, H].
        weight: [V, H].
        targets: [N].
        g_log_probs: upstream gradient of the log-probs, [N].
        g_entropy: upstream gradient of the entropies, [N], equal for all tokens.
    """

    label: str
    hidden: Float[Array, "tokens hidden"]
    weight: Float[Array, "vocab hidden"]
    targets: Int[Array, " tokens"]
    g_log_probs: Float[Array, " tokens"]
    g_entropy: Float[Array, " tokens"]

    @property
    def rows(self) -> np.ndarray:
        """Tokens whose hidden gradient is compared with float64."""
        tokens = self.hidden.shape[0]
        return np.unique(np.linspace(0, tokens - 1, min(ROWS_CHECKED, tokens)).astype(int))

    @property
    def columns(self) -> np.ndarray:
        """Rows of the vocabulary whose weight gradient is compared with float64."""
        vocab, half = self.weight.shape[0], COLUMNS_CHECKED // 2
        return np.unique(np.r_[0 : min(half, vocab), max(vocab - half, 0) : vocab])


@dataclass(frozen=True)
class Exact:
    """The answer in float64, from the same rounded operands.

    Attributes:
        log_probs: [N].
        entropy: [N].
        lse: log Σ e^z, [N].
        d_hidden: gradient of ``case.rows`` through the log-probs only, and through both.
        d_weight: gradient of ``case.columns``, likewise.
    """

    log_probs: np.ndarray
    entropy: np.ndarray
    lse: np.ndarray
    d_hidden: tuple[np.ndarray, np.ndarray]
    d_weight: tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Outputs:
    """The results of a program; None where it has no such result.

    Attributes:
        log_probs: [N].
        entropy: [N].
        d_hidden: gradient of ``case.rows``.
        d_weight: gradient of ``case.columns``.
        through_entropy: whether the gradients are those through both log-probs and entropy.
    """

    log_probs: np.ndarray | None
    entropy: np.ndarray | None
    d_hidden: np.ndarray | None
    d_weight: np.ndarray | None
    through_entropy: bool


@dataclass(frozen=True)
class Errors:
    """Largest absolute errors of values in nats, relative errors of gradients in norm; None without a result."""

    log_prob: float | None
    entropy: float | None
    d_hidden: float | None
    d_weight: float | None


def make_case(label: str, tokens: int, hidden_size: int, vocab_size: int, dtype: str) -> Case:
    """Random inputs whose logits have standard deviation ``SPREAD``."""
    keys = jax.random.split(jax.random.key(0), 4)
    weight = jax.random.normal(keys[1], (vocab_size, hidden_size), jnp.float32) * (SPREAD / hidden_size**0.5)
    return Case(
        label,
        jax.random.normal(keys[0], (tokens, hidden_size), dtype),
        weight.astype(dtype),
        jax.random.randint(keys[2], (tokens,), 0, vocab_size, jnp.int32),
        jax.random.normal(keys[3], (tokens,), jnp.float32),
        jnp.full((tokens,), -ENTROPY_BONUS, jnp.float32),
    )


def exact(case: Case) -> Exact:
    """Values of every token and gradients of ``case.rows`` and ``case.columns``, in float64 on the default device."""
    with jax.enable_x64(True):
        hidden, weight = case.hidden.astype(jnp.float64), case.weight.astype(jnp.float64)
        g = case.g_log_probs.astype(jnp.float64), case.g_entropy.astype(jnp.float64)
        tokens, rows, columns = hidden.shape[0], jnp.asarray(case.rows), jnp.asarray(case.columns)
        blocks = [slice(start, start + TOKEN_BLOCK) for start in range(0, tokens, TOKEN_BLOCK)]
        values = [_values(hidden[b], weight, case.targets[b]) for b in blocks]
        log_probs, lse, mean = (jnp.concatenate(parts) for parts in zip(*values, strict=True))
        some = case.targets[rows], lse[rows], mean[rows], *(x[rows] for x in g)
        every = jnp.arange(weight.shape[0])
        d_hidden = [dz @ weight for dz in _logit_gradients(hidden[rows] @ weight.T, every, *some)]
        columns_of = _logit_gradients(hidden @ weight[columns].T, columns, case.targets, lse, mean, *g)
        d_weight = [dz.T @ hidden for dz in columns_of]
        return Exact(
            *(np.asarray(x) for x in (log_probs, lse - mean, lse)),
            *(tuple(np.asarray(x) for x in pair) for pair in (d_hidden, d_weight)),
        )


@jax.jit
def _values(hidden: Array, weight: Array, targets: Array) -> tuple[Array, Array, Array]:
    """Log-probs, log Σ e^z and Σ p z of some tokens."""
    logits = hidden @ weight.T
    lse = jax.nn.logsumexp(logits, axis=1)
    mean = jnp.sum(jnp.exp(logits - lse[:, None]) * logits, axis=1)
    return jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0] - lse, lse, mean


@jax.jit
def _logit_gradients(
    logits: Array, ids: Array, targets: Array, lse: Array, mean: Array, g_log_probs: Array, g_entropy: Array
) -> tuple[Array, Array]:
    """Gradient of the logits whose columns have these ids: through log-probs only, and through entropies too."""
    p = jnp.exp(logits - lse[:, None])
    # d log p_t / dz_v = 1[v = t] - p_v and dH / dz_v = p_v (Σ p z - z_v).
    first = g_log_probs[:, None] * ((ids[None, :] == targets[:, None]) - p)
    return first, first + g_entropy[:, None] * p * (mean[:, None] - logits)


def errors(outputs: Outputs, wanted: Exact) -> Errors:
    """How far a program's outputs are from the exact ones."""
    gradients = int(outputs.through_entropy)
    return Errors(
        _largest(outputs.log_probs, wanted.log_probs),
        _largest(outputs.entropy, wanted.entropy),
        _relative(outputs.d_hidden, wanted.d_hidden[gradients]),
        _relative(outputs.d_weight, wanted.d_weight[gradients]),
    )


def _largest(seen: Any, wanted: np.ndarray) -> float | None:
    return None if seen is None else float(np.max(np.abs(np.asarray(seen, np.float64) - wanted)))


def _relative(seen: Any, wanted: np.ndarray) -> float | None:
    if seen is None:
        return None
    return float(np.linalg.norm(np.asarray(seen, np.float64) - wanted) / np.linalg.norm(wanted))
