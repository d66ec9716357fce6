"""The gradient filter's cost in accuracy and gain in time, for peaked and flat policies and two vocabulary orders.

    python -m experiments.studies.gradient_filter            # N=1024, H=256, V=32768, fp32, on this machine
    python -m experiments.studies.gradient_filter --write    # also writes
    benchmarks/results/gradient_filter_<device>.md

A peaked policy is constructed as follows: token v has frequency u_v ~ 1 / rank (Zipf), ids are shuffled, and its row of
the weight is ((log u_v - mean) / 8, r_v) with r_v random of unit length; the hidden state of a position whose context
calls for token x, drawn from u, is (8, k r_x). So z_v = log u_v + k r_x · r_v + constant: the frequencies, shifted
towards x, with random confusions. k is found by bisection so that the mean entropy is as requested. The policy "with a
common part" is the first of these with one random vector of unit length added to every row, which changes no
probability. The flat policy has random logits of standard deviation 0.1. Targets are drawn from the policy itself;
cotangents are g ~ N(0, 1) for log-probs and 0.01 for entropies, as in an on-policy policy gradient. Errors are relative
to the unfiltered gradient: in norm, and the largest entry of the difference over the largest entry. Times are of
forward + backward, interleaved.
"""

import dataclasses
import functools
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.command_line import run_command
from experiments.studies.report import write_report
from jaxlogp import (
    ChunkedEngine,
    GradientFilter,
    VocabOrder,
    linear_log_probs,
    skipped_tiles,
    vocab_order_by_mean_logit,
)
from jaxlogp.errors import require

ENTROPY_COTANGENT = 0.01
FLAT = "flat"
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
    """Mean entropies of the peaked policies, in nats."""
    thresholds: tuple[float, ...] = (2.0**-8, 2.0**-12, 2.0**-16)
    """Thresholds of the filter."""
    token_chunk: int = 128
    """Tokens per block."""
    vocab_tile: int = 256
    """Vocabulary columns per block."""
    dtype: str = "float32"
    """Dtype of hidden states and weight: float32 or bfloat16."""
    repeats: int = 5
    """Timed repeats of every program; the median is reported."""
    seed: int = 0
    """Seed of the policies."""
    write: bool = False
    """Write the table under benchmarks/results."""


@dataclass(frozen=True)
class Row:
    """One policy, vocabulary order and threshold; errors relative to the unfiltered gradient."""

    policy: str
    order: str
    threshold: float | None
    skipped: float
    hidden_error: float
    hidden_largest: float
    weight_error: float
    weight_largest: float
    seconds: float
    ratio: float


@dataclass(frozen=True)
class Result:
    """The rows and the markdown table of a measurement."""

    rows: list[Row]
    markdown: str


@dataclass(frozen=True)
class Policy:
    """Operands of the head, the targets drawn from it and its mean entropy."""

    name: str
    hidden: jax.Array
    weight: jax.Array
    targets: jax.Array
    entropy: float


def _entropies(logits: np.ndarray) -> np.ndarray:
    shift = logits - logits.max(axis=1, keepdims=True)
    exp = np.exp(shift)
    total = exp.sum(axis=1)
    return np.log(total) - (exp * shift).sum(axis=1) / total


def _draw(logits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One token per row, drawn by the Gumbel trick."""
    return np.argmax(logits + rng.gumbel(size=logits.shape).astype(logits.dtype), axis=1).astype(np.int32)


def make_policy(config: GradientFilterConfig, entropy: float | None) -> Policy:
    """A policy with the given mean entropy, or the flat one.

    Raises:
      ValueError: an entropy that this construction cannot reach.
    """
    rng = np.random.default_rng(config.seed)
    tokens, size, vocab = config.tokens, config.hidden_size, config.vocab_size
    rows = rng.normal(size=(vocab, size)).astype(np.float32)
    if entropy is None:
        hidden = rng.normal(size=(tokens, size)).astype(np.float32)
        weight, name = rows * np.float32(0.1 / size**0.5), FLAT
    else:
        frequency = 1.0 / rng.permutation(np.arange(1, vocab + 1))
        log_frequency = np.log(frequency / frequency.sum()).astype(np.float32)
        rows = rows[:, 1:] / np.linalg.norm(rows[:, 1:], axis=1, keepdims=True)
        called = rng.choice(vocab, tokens, p=frequency / frequency.sum())
        similarity = rows[called] @ rows.T
        low, high = 0.0, 60.0
        reachable = _entropies(log_frequency + np.float32(high) * similarity).mean()
        expected = f"entropies above {reachable:.3f} and below {_entropies(log_frequency[None])[0]:.3f}"
        require(reachable < entropy < _entropies(log_frequency[None])[0], "--entropies", expected, entropy)
        for _ in range(20):
            middle = (low + high) / 2
            flatter = _entropies(log_frequency + np.float32(middle) * similarity).mean() > entropy
            low, high = (middle, high) if flatter else (low, middle)
        hidden = np.concatenate([np.full((tokens, 1), LEVER), np.float32(high) * rows[called]], axis=1)
        column = (log_frequency - log_frequency.mean()) / LEVER
        weight, name = np.concatenate([column[:, None], rows], axis=1), f"peaked, {entropy:g} nat"
    logits = hidden @ weight.T
    arrays = jnp.asarray(hidden, config.dtype), jnp.asarray(weight, config.dtype), jnp.asarray(_draw(logits, rng))
    return Policy(name, *arrays, float(_entropies(logits).mean()))


def with_common_part(policy: Policy) -> Policy:
    """The same policy with one vector of unit length added to every row of the weight."""
    shared = np.random.default_rng(0).normal(size=policy.weight.shape[1])
    shared = jnp.asarray(shared / np.linalg.norm(shared), policy.weight.dtype)
    return dataclasses.replace(policy, name=f"{policy.name}, common part", weight=policy.weight + shared)


def policy_gradients(engine: ChunkedEngine, hidden, weight, targets, g):
    """Gradients of hidden states and weight for cotangents g of the log-probs and 0.01 of the entropies."""

    def objective(hidden, weight):
        result = linear_log_probs(hidden, weight, targets, with_entropy=True, engine=engine)
        return jnp.sum(result.log_probs * g) + ENTROPY_COTANGENT * jnp.sum(result.entropy)

    return jax.grad(objective, argnums=(0, 1))(hidden, weight)


def relative_errors(seen: jax.Array, exact: np.ndarray) -> tuple[float, float]:
    """|seen - exact| / |exact|: in the Frobenius norm, and of the largest entries."""
    difference = np.asarray(seen, np.float64) - exact
    return float(np.linalg.norm(difference) / np.linalg.norm(exact)), float(
        np.abs(difference).max() / np.abs(exact).max()
    )


def _measure(config: GradientFilterConfig, policy: Policy) -> list[Row]:
    plain = ChunkedEngine(config.token_chunk, config.vocab_tile)
    filtered = {
        threshold: ChunkedEngine(config.token_chunk, config.vocab_tile, GradientFilter(threshold))
        for threshold in config.thresholds
    }
    identity = VocabOrder(np.arange(config.vocab_size))
    orders = {
        "shuffled": identity,
        "by mean logit": VocabOrder(vocab_order_by_mean_logit(policy.hidden, policy.weight)),
    }
    g = jax.random.normal(jax.random.key(config.seed), (config.tokens,))
    programs, operands = {}, {}
    for name, order in orders.items():
        # Renumbered once and not timed, as a training run does before its first step.
        operands[name] = policy.hidden, order.rows(policy.weight), order.places(policy.targets), g
        engines = filtered if name != "shuffled" else {None: plain, **filtered}
        for threshold, engine in engines.items():
            function = jax.jit(functools.partial(policy_gradients, engine))
            programs[name, threshold] = function.lower(*operands[name]).compile()
    seconds: dict = {key: [] for key in programs}
    results = {}
    for repeat in range(config.repeats + 1):
        for key, program in programs.items():
            started = time.perf_counter()
            results[key] = jax.block_until_ready(program(*operands[key[0]]))
            if repeat:
                seconds[key].append(time.perf_counter() - started)
    medians = {key: statistics.median(samples) for key, samples in seconds.items()}
    base = medians["shuffled", None]
    exact = [np.asarray(x, np.float64) for x in results["shuffled", None]]
    rows = []
    for (name, threshold), (d_hidden, d_weight) in results.items():
        share = 0.0
        if threshold is not None:
            counting = functools.partial(skipped_tiles, engine=filtered[threshold])
            share = float(jax.jit(counting)(*operands[name][:3]).mean())
        errors = *relative_errors(d_hidden, exact[0]), *relative_errors(d_weight, exact[1][orders[name].order])
        time_of = medians[name, threshold]
        rows.append(Row(policy.name, name, threshold, share, *errors, time_of, time_of / base))
    return rows


def main(config: GradientFilterConfig) -> Result:
    """Measures all policies, orders and thresholds and returns the table.

    Raises:
      ValueError: a size that is not positive, an unknown dtype, a threshold outside [0, 1) or an entropy out of reach.
    """
    for option in ("tokens", "vocab_size", "token_chunk", "vocab_tile", "repeats"):
        require(getattr(config, option) > 0, f"--{option.replace('_', '-')}", "a number > 0", getattr(config, option))
    require(config.hidden_size > 1, "--hidden-size", "a number > 1", config.hidden_size)
    require(config.dtype in ("float32", "bfloat16"), "--dtype", "float32 or bfloat16", config.dtype)
    require(len(config.entropies) > 0, "--entropies", "at least one", config.entropies)
    policies = [make_policy(config, entropy) for entropy in config.entropies]
    policies += [with_common_part(policies[0]), make_policy(config, None)]
    rows = [row for policy in policies for row in _measure(config, policy)]
    return Result(rows, _markdown(config, policies, rows))


def threshold_label(threshold: float | None) -> str:
    """The threshold, written as a power of 2 if it is one."""
    if threshold is None:
        return "off"
    exponent = np.log2(threshold) if threshold > 0 else 0.5
    return f"2^{int(exponent)}" if exponent == int(exponent) else f"{threshold:g}"


def _markdown(config: GradientFilterConfig, policies: list[Policy], rows: list[Row]) -> str:
    device = jax.devices()[0]
    lines = [
        f"N={config.tokens}, H={config.hidden_size}, V={config.vocab_size}, {config.dtype}, blocks of "
        f"{config.token_chunk} tokens × {config.vocab_tile} columns, engine chunked; JAX {jax.__version__}, "
        f"NumPy {np.__version__}, Python {platform.python_version()}, {device.platform} ({device.device_kind}), "
        f"median of {config.repeats}",
        "",
        "Mean entropies, in nats: " + "; ".join(f"{policy.name}: {policy.entropy:.2f}" for policy in policies),
        "",
        "| policy | vocabulary | threshold | blocks left out | dHidden error, norm | largest | dWeight error, norm "
        "| largest | forward+backward | × unfiltered |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        errors = row.hidden_error, row.hidden_largest, row.weight_error, row.weight_largest
        cells = " | ".join("0" if row.threshold is None else f"{error:.1e}" for error in errors)
        lines.append(
            f"| {row.policy} | {row.order} | {threshold_label(row.threshold)} | {row.skipped:.1%} | {cells} "
            f"| {row.seconds * 1e3:.0f} ms | {row.ratio:.2f} |"
        )
    return "\n".join(lines)


def write(result: Result, folder: Path) -> Path:
    """Writes the table with the command; returns the file."""
    path = folder / f"gradient_filter_{jax.devices()[0].platform}.md"
    return write_report("gradient_filter", path, "Gradient filter: error, blocks left out, time", result.markdown)


def run_cli(arguments: list[str] | None = None) -> Result:
    """The command line; see `experiments.command_line` for how it ends."""
    return run_command(
        GradientFilterConfig,
        _run,
        program="experiments.studies.gradient_filter",
        description=__doc__,
        arguments=arguments,
    )


def _run(config: GradientFilterConfig) -> Result:
    result = main(config)
    print(result.markdown)
    if config.write:
        print(f"written: {write(result, Path('benchmarks/results'))}")
    return result


if __name__ == "__main__":
    run_cli()
