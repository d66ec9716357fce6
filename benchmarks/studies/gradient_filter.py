"""The gradient filter's cost in accuracy and gain in time, for peaked and flat policies.

    python -m benchmarks.studies.gradient_filter            # N=1024, H=256, V=32768, fp32, on this machine

A peaked policy is constructed as follows: token v has frequency u_v ~ 1 / rank (Zipf), ids are shuffled, and its row of
the weight is ((log u_v - mean) / 8, r_v) with r_v random of unit length; the hidden state of a position whose context
calls for token x, drawn from u, is (8, k r_x). So z_v = log u_v + k r_x · r_v + constant: the frequencies, shifted
towards x, with random confusions. k is found by bisection so that the mean entropy is as requested. The policy "with a
common part" is the first of these with one random vector of unit length added to every row, which changes no
probability. The flat policy has random logits of standard deviation 0.1. Targets are drawn from the policy itself;
cotangents are g ~ N(0, 1) for log-probs and 0.01 for entropies, as in an on-policy policy gradient. Errors are relative
to the unfiltered gradient: in norm, and the largest entry of the difference over the largest entry. "left out" is the
share of blocks that the filter skips. Times are of forward + backward, interleaved.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.clock import time_in_turns
from experiments.command_line import run_command
from jaxlogp import linear_log_probs
from jaxlogp.errors import require
from jaxlogp.head import ChunkedEngine, GradientFilter, skipped_tiles

# The hidden state's factor for the frequencies; this size keeps that column of the weight as small as the others.
LEVER = np.float32(8.0)


@dataclass(frozen=True)
class GradientFilterConfig:
    """Options of the measurement."""

    tokens: int = 1024
    """N, number of tokens."""
    hidden_size: int = 256
    """H, size of a hidden state."""
    vocab_size: int = 32768
    """V, size of the vocabulary."""
    entropies: tuple[float, ...] = (0.5, 2.0)
    """Mean entropies of the peaked policies, in nats; at least one."""
    thresholds: tuple[float, ...] = (2.0**-8, 2.0**-12, 2.0**-16)
    """Thresholds of the filter."""
    token_chunk: int = 128
    """Tokens per block."""
    vocab_tile: int = 256
    """Vocabulary columns per block."""
    repeats: int = 5
    """Timed repeats of every program; the median is reported."""


@dataclass(frozen=True)
class Policy:
    """Operands of the head, the targets drawn from it and its mean entropy."""

    name: str
    hidden: np.ndarray
    weight: np.ndarray
    targets: np.ndarray
    entropy: float


@dataclass(frozen=True)
class Row:
    """One policy and threshold; None is the unfiltered gradient, to which errors are relative.

    Attributes:
        errors: of the gradient of hidden states, in norm and of the largest entry, then of the weight's.
    """

    policy: str
    threshold: float | None
    skipped: float
    errors: tuple[float, ...]
    seconds: float


def _entropies(logits: np.ndarray) -> np.ndarray:
    shift = logits - logits.max(axis=1, keepdims=True)
    exp = np.exp(shift)
    total = exp.sum(axis=1)
    return np.log(total) - (exp * shift).sum(axis=1) / total


def make_policy(config: GradientFilterConfig, entropy: float | None) -> Policy:
    """Makes a policy with the given mean entropy; None: the flat one.

    Raises:
        ValueError: an entropy that this construction cannot reach.
    """
    rng = np.random.default_rng(0)
    tokens, size, vocab = config.tokens, config.hidden_size, config.vocab_size
    rows = rng.normal(size=(vocab, size)).astype(np.float32)
    if entropy is None:
        name = "flat"
        hidden = rng.normal(size=(tokens, size)).astype(np.float32)
        weight = rows * np.float32(0.1 / size**0.5)
    else:
        name = f"peaked, {entropy:g} nat"
        frequency = 1.0 / rng.permutation(np.arange(1, vocab + 1))
        log_frequency = np.log(frequency / frequency.sum()).astype(np.float32)
        rows = rows[:, 1:] / np.linalg.norm(rows[:, 1:], axis=1, keepdims=True)
        called = rng.choice(vocab, tokens, p=frequency / frequency.sum())
        similarity = rows[called] @ rows.T

        def mean_entropy(pull: float) -> float:
            return _entropies(log_frequency + np.float32(pull) * similarity).mean()

        low, high = 0.0, 60.0
        least, most = mean_entropy(high), mean_entropy(low)
        require(least < entropy < most, "--entropies", f"above {least:.3f} and below {most:.3f}", entropy)
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if mean_entropy(middle) > entropy else (low, middle)
        hidden = np.concatenate([np.full((tokens, 1), LEVER), np.float32(high) * rows[called]], axis=1)
        weight = np.concatenate([((log_frequency - log_frequency.mean()) / LEVER)[:, None], rows], axis=1)
    logits = hidden @ weight.T
    # Drawn by the Gumbel trick.
    targets = np.argmax(logits + rng.gumbel(size=logits.shape).astype(np.float32), axis=1).astype(np.int32)
    return Policy(name, hidden, weight, targets, float(_entropies(logits).mean()))


def with_common_part(policy: Policy) -> Policy:
    """Adds one vector of unit length to every row of the weight, which changes no probability."""
    shared = np.random.default_rng(0).normal(size=policy.weight.shape[1]).astype(np.float32)
    weight = policy.weight + shared / np.linalg.norm(shared)
    return replace(policy, name=f"{policy.name}, common part", weight=weight)


def _gradients(engine: ChunkedEngine, hidden: jax.Array, weight: jax.Array, targets: jax.Array, g: jax.Array):
    def objective(hidden, weight):
        values = linear_log_probs(hidden, weight, targets, with_entropy=True, engine=engine)
        return jnp.sum(values.log_probs * g) + 0.01 * jnp.sum(values.entropy)

    return jax.grad(objective, argnums=(0, 1))(hidden, weight)


def _relative_errors(seen: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    difference = np.abs(np.asarray(seen, np.float64) - exact)
    return float(np.linalg.norm(difference) / np.linalg.norm(exact)), float(difference.max() / np.abs(exact).max())


def measure(config: GradientFilterConfig, policy: Policy) -> list[Row]:
    """Measures every threshold for one policy."""
    g = jax.random.normal(jax.random.key(0), (config.tokens,))
    operands = jnp.asarray(policy.hidden), jnp.asarray(policy.weight), jnp.asarray(policy.targets)
    calls, skipped = {}, {None: 0.0}
    for threshold in (None, *config.thresholds):
        gradient_filter = None if threshold is None else GradientFilter(threshold)
        engine = ChunkedEngine(config.token_chunk, config.vocab_tile, gradient_filter)
        program = jax.jit(functools.partial(_gradients, engine)).lower(*operands, g).compile()
        calls[threshold] = functools.partial(program, *operands, g), jax.block_until_ready
        if threshold is not None:
            blocks = jax.jit(functools.partial(skipped_tiles, engine=engine))(*operands)
            skipped[threshold] = float(blocks.mean())
    medians, failed = time_in_turns(calls, config.repeats)
    for error in failed.values():
        raise error
    d_hidden, d_weight = (np.asarray(x, np.float64) for x in calls[None][0]())
    rows = []
    for threshold, (run, _) in calls.items():
        found = run()
        errors = *_relative_errors(found[0], d_hidden), *_relative_errors(found[1], d_weight)
        rows.append(Row(policy.name, threshold, skipped[threshold], errors, medians[threshold].seconds))
    return rows


def main(config: GradientFilterConfig) -> list[Row]:
    """Measures all policies and thresholds, and prints and returns the table."""
    policies = [make_policy(config, entropy) for entropy in config.entropies]
    policies += [with_common_part(policies[0]), make_policy(config, None)]
    print(f"{config}, fp32, engine chunked; JAX {jax.__version__}, {jax.devices()[0].device_kind}\n")
    print("Mean entropies, in nats:", "; ".join(f"{policy.name}: {policy.entropy:.2f}" for policy in policies), "\n")
    print("| policy | threshold | left out | dHidden, norm | largest | dWeight, norm | largest | time | × off |")
    print("|---|---|---|---|---|---|---|---|---|")
    table = []
    for policy in policies:
        rows = measure(config, policy)
        for row in rows:
            threshold = "off" if row.threshold is None else f"{row.threshold:.1e}"
            errors = " | ".join(f"{error:.1e}" for error in row.errors)
            print(f"| {row.policy} | {threshold} | {row.skipped:.1%} | {errors} ", end="")
            print(f"| {row.seconds * 1e3:.1f} ms | {row.seconds / rows[0].seconds:.2f} |", flush=True)
        table += rows
    return table


if __name__ == "__main__":
    run_command(GradientFilterConfig, main, program="benchmarks.studies.gradient_filter", description=__doc__)
