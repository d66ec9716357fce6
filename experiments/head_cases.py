"""What ``experiments.head_speed`` measures: shapes by model name, inputs, the exact answer for some rows, and a clock."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlogp import linear_log_probs

# (hidden size, vocabulary) of the heads.
MODELS = {
    "qwen3-8b": (4096, 151936),
    "llama-3.1-8b": (4096, 128256),
    "gemma-2-2b": (2304, 256000),
    "qwen3-0.6b": (1024, 151936),
}
# Standard deviation of the logits: random ones of this size are neither flat nor peaked.
SPREAD = 2.0
# Rows whose log-prob and entropy are compared with float64, and rows of the vocabulary converted at a time for it.
ROWS_CHECKED, VOCAB_BLOCK = 64, 16384
# A timed run, and the untimed one before it, last at least this long; a program that took more than PATIENCE seconds in
# all gets no further turns.
SETTLE_SECONDS, PATIENCE_SECONDS = 0.12, 6.0

Program = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class Case:
    """Inputs of one shape, on the default device.

    Attributes:
      label: name for tables and plots.
      hidden: [N, H].
      weight: [V, H].
      targets: [N].
      g_log_probs: upstream gradient of the log-probs, [N].
      g_entropy: upstream gradient of the entropies, [N].
    """

    label: str
    hidden: Float[Array, "tokens hidden"]
    weight: Float[Array, "vocab hidden"]
    targets: Int[Array, " tokens"]
    g_log_probs: Float[Array, " tokens"]
    g_entropy: Float[Array, " tokens"]

    @property
    def rows(self) -> np.ndarray:
        """Indices of the tokens that are compared with float64."""
        tokens = self.hidden.shape[0]
        return np.unique(np.linspace(0, tokens - 1, min(ROWS_CHECKED, tokens)).astype(int))


@dataclass(frozen=True)
class Prepared:
    """A program ready to be timed on one case.

    Attributes:
      forward: log-probs and entropy.
      forward_backward: the same with both gradients.
      wait: returns once what it is given has been computed.
      forward_bytes: temporaries of the forward pass, without arguments and results; None when not known.
      forward_backward_bytes: the same with the backward pass, without the gradients.
      log_probs: of ``case.rows``, None where the program gives none per token.
      entropy: of ``case.rows``, None where the program has none.
    """

    forward: Callable[[], Any]
    forward_backward: Callable[[], Any]
    wait: Callable[[Any], Any]
    forward_bytes: int | None
    forward_backward_bytes: int | None
    log_probs: np.ndarray | None
    entropy: np.ndarray | None


def make_case(label: str, tokens: int, hidden_size: int, vocab_size: int, dtype: str) -> Case:
    """Random inputs whose logits have standard deviation ``SPREAD``."""
    keys = jax.random.split(jax.random.key(0), 5)
    weight = jax.random.normal(keys[1], (vocab_size, hidden_size), jnp.float32) * (SPREAD / hidden_size**0.5)
    return Case(
        label,
        jax.random.normal(keys[0], (tokens, hidden_size), dtype),
        weight.astype(dtype),
        jax.random.randint(keys[2], (tokens,), 0, vocab_size, jnp.int32),
        jax.random.normal(keys[3], (tokens,), jnp.float32),
        0.1 * jax.random.normal(keys[4], (tokens,), jnp.float32),
    )


def exact(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and entropies of ``case.rows`` in float64 NumPy, from the same rounded operands."""
    hidden = np.asarray(case.hidden[case.rows].astype(jnp.float32), np.float64)
    logits = np.concatenate(
        [
            hidden @ np.asarray(case.weight[start : start + VOCAB_BLOCK].astype(jnp.float32), np.float64).T
            for start in range(0, case.weight.shape[0], VOCAB_BLOCK)
        ],
        axis=1,
    )
    logits -= logits.max(axis=1, keepdims=True)
    log_softmax = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    chosen = log_softmax[np.arange(len(logits)), np.asarray(case.targets)[case.rows]]
    return chosen, -(np.exp(log_softmax) * log_softmax).sum(axis=1)


def product(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """One product hidden · weightᵀ, in the dtype of its operands: what every ratio refers to."""
    return jax.lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())))


def materialised(hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a trainer without a fused head does: fp32 logits, log_softmax, gather, entropy."""
    dimensions = (((1,), (1,)), ((), ()))
    logits = jax.lax.dot_general(
        hidden, weight, dimensions, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    log_softmax = jax.nn.log_softmax(logits)
    log_probs = jnp.take_along_axis(log_softmax, targets[:, None], axis=1)[:, 0]
    return log_probs, -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=1)


def engine_program(name: str) -> Program:
    """:func:`jaxlogp.linear_log_probs` with one engine, as a program."""

    def program(hidden, weight, targets):
        result = linear_log_probs(hidden, weight, targets, with_entropy=True, engine=name)
        return result.log_probs, result.entropy

    return program


def prepare_jax(program: Program, case: Case) -> Prepared:
    """Compiles a JAX program, forward and with gradients from the case's upstream ones."""

    def both(hidden, weight, targets, *upstream):
        values, pull = jax.vjp(lambda h, w: program(h, w, targets), hidden, weight)
        return values, pull(upstream)

    operands = case.hidden, case.weight, case.targets
    upstream = case.g_log_probs, case.g_entropy
    forward = jax.jit(program).lower(*operands).compile()
    forward_backward = jax.jit(both).lower(*operands, *upstream).compile()
    log_probs, entropy = forward(*operands)
    return Prepared(
        functools.partial(forward, *operands),
        functools.partial(forward_backward, *operands, *upstream),
        jax.block_until_ready,
        int(forward.memory_analysis().temp_size_in_bytes),
        int(forward_backward.memory_analysis().temp_size_in_bytes),
        np.asarray(log_probs)[case.rows],
        np.asarray(entropy)[case.rows],
    )


def settled_seconds(
    call: Callable[[], Any],
    wait: Callable[[Any], Any] = jax.block_until_ready,
    at_least: float = SETTLE_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of one call once the device's clocks have settled on it: as long untimed before as timed.

    Args:
      call: starts the work; its value is given to ``wait``.
      wait: returns once the work is done.
      at_least: seconds that the untimed run and the timed run last, each.
      clock: seconds since some moment.
    """
    started = clock()
    wait(call())
    once = clock() - started
    repeats = max(1, round(at_least / max(once, 1e-9)))
    # A first call that long has settled the clocks by itself.
    for _ in range(1 if repeats == 1 else 2):
        started = clock()
        for _ in range(repeats):
            out = call()
        wait(out)
        seconds = clock() - started
    return seconds / repeats


def interleaved_medians(
    calls: Mapping[Any, tuple[Callable[[], Any], Callable[[Any], Any]]],
    repeats: int,
    at_least: float = SETTLE_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Any, float]:
    """Median settled seconds of every (call, wait), taken in turns, so that what else happens hits all alike."""
    samples: dict[Any, list[float]] = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    for _ in range(repeats):
        for name, (call, wait) in calls.items():
            if samples[name] and spent[name] > PATIENCE_SECONDS:
                continue
            started = clock()
            samples[name].append(settled_seconds(call, wait, at_least, clock))
            spent[name] += clock() - started
    return {name: statistics.median(values) for name, values in samples.items()}
