"""Log-probs on the sampler's support against the full head: times, temporaries and errors of one run.

    python -m benchmarks.support_speed                                     # three shapes, on a GPU
    python -m benchmarks.support_speed --shapes 64,32 --vocab-size 500 --engine chunked --support-engines support
    python -m benchmarks.support_speed --shapes 8192,4096 --ids zipf --profile 20
    python -m benchmarks.support_speed --ids zipf --beside                 # one product and masked logits too

Supports are random, of the sizes that a sampler with top-p keeps: 45 % of the tokens have a single id, the median is 2, the
mean 8 and the 99th percentile 80. All programs compute log-probs, and with backward the gradients of hidden states and
weight in their dtypes; ratios are to the full head on the same operands. Times are medians of interleaved turns.

The bound is the time to move, at the bandwidth of a copy in the same run, what must be moved: in each pass a row of the
weight for every id, and the hidden states; with backward also both gradients, the dense one of the weight among them.

Masked logits are the formula by which trainers elsewhere use a recorded support: all V logits in the operands' dtype, -inf
outside of the support, and their log-softmax in fp32, as plain JAX in chunks of tokens.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from benchmarks.beside_product import PRODUCT, compile_or_say, compile_product, product
from benchmarks.clock import Timing, copy_bandwidth, time_in_turns
from benchmarks.profiler import gpu_events, print_slowest
from experiments.command_line import run_command
from jaxlogp import Support, linear_log_probs
from jaxlogp.errors import require
from jaxlogp.head.support.ids import tokens_of_places

MOST_IDS = 1024
FULL_HEAD = "full head"
MASKED = "masked logits"
# Tokens whose masked logits are computed at a time; where there are more, the backward computes them again.
MASKED_TOKENS = 8192
PARTS = ("forward", "forward+backward")
# Tokens whose hidden gradient, and rows whose weight gradient, are compared with float64.
ROWS_CHECKED = 64
# Calls that are profiled.
PROFILED = 5
# Ids whose float64 logits are computed at a time.
ID_BLOCK = 4096


@dataclass(frozen=True)
class SupportSpeedConfig:
    """Options of the benchmark; every shape is measured with every law of the ids."""

    shapes: tuple[str, ...] = ("8192,1024", "8192,4096", "32768,1024")
    """N,H: number of tokens and size of a hidden state."""
    vocab_size: int = 151936
    """V, size of the vocabulary."""
    ids: tuple[str, ...] = ("zipf", "uniform")
    """Laws of the ids: zipf, or uniform, which names the most rows of the weight."""
    spare: float = 0.25
    """Capacity of the support beyond its ids, as a share of them."""
    engine: str = "hopper"
    """Engine of the full head."""
    support_engines: tuple[str, ...] = ("support", "support_kernels")
    """Engines of the support."""
    dtype: str = "bfloat16"
    """Dtype of hidden states and weight."""
    repeats: int = 5
    """Timed turns of every program; the median is reported."""
    profile: int = 0
    """How many of the slowest kernels of forward + backward on the support to list, for each of its engines."""
    beside: bool = False
    """Also time one product of hidden states and weight, and masked logits."""


@dataclass(frozen=True)
class Case:
    """Operands on the default device.

    Attributes:
        hidden: [N, H].
        weight: [V, H].
        targets: [N].
        g: upstream gradient of the log-probs, [N].
        support: ids of every token, its target first.
    """

    hidden: jax.Array
    weight: jax.Array
    targets: jax.Array
    g: jax.Array
    support: Support


@dataclass(frozen=True)
class Measured:
    """A program of one case.

    Attributes:
        shape: (N, H).
        ids: law of the ids.
        program: the full head, or the engine of the support.
        part: one of ``PARTS``.
        seconds: median of a call.
        ratio: seconds divided by those of the full head.
        bound_seconds: see the module; None for what is not an engine of the support.
        temporaries: bytes of the compiled program beside arguments and results; None for one product.
        spread: interquartile range of the ratios of all turns over their median.
    """

    shape: tuple[int, int]
    ids: str
    program: str
    part: str
    seconds: float
    ratio: float
    bound_seconds: float | None
    temporaries: int | None
    spread: float


def draw_counts(rng: np.random.Generator, tokens: int, most: int) -> np.ndarray:
    """Draws the number of ids of each token."""
    tail = 1 + np.maximum(np.floor(np.exp(rng.normal(1.9, 1.16, tokens))), 1)
    return np.where(rng.random(tokens) < 0.45, 1, np.minimum(tail, most)).astype(np.int64)


def draw_ids(rng: np.random.Generator, counts: np.ndarray, vocab_size: int, law: str) -> np.ndarray:
    """Draws the ids of all tokens, distinct in each."""
    token = np.repeat(np.arange(counts.size), counts)
    shuffled = rng.permutation(vocab_size)

    def draw(count: int) -> np.ndarray:
        if law == "uniform":
            return rng.integers(0, vocab_size, count)
        # The integer part of V^u for a uniform u has a probability of about 1 / (rank log V).
        return shuffled[np.floor(vocab_size ** rng.random(count)).astype(np.int64) - 1]

    ids = draw(token.size)
    while True:
        order = np.lexsort((ids, token))
        twice = order[1:][(np.diff(ids[order]) == 0) & (np.diff(token[order]) == 0)]
        if not twice.size:
            return ids
        ids[twice] = draw(twice.size)


def make_case(config: SupportSpeedConfig, shape: tuple[int, int], law: str) -> Case:
    """Random operands whose logits have a standard deviation of 2."""
    tokens, hidden_size = shape
    rng = np.random.default_rng(0)
    counts = draw_counts(rng, tokens, min(MOST_IDS, config.vocab_size // 8))
    ids = draw_ids(rng, counts, config.vocab_size, law)
    support = Support.from_counts(counts, ids, capacity=int((1.0 + config.spare) * ids.size))
    targets = ids[np.cumsum(counts) - counts].astype(np.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    weight = jax.random.normal(keys[1], (config.vocab_size, hidden_size), config.dtype) * (2.0 / hidden_size**0.5)
    return Case(
        jax.random.normal(keys[0], shape, config.dtype),
        weight.astype(config.dtype),
        jnp.asarray(targets),
        jax.random.normal(keys[2], (tokens,), jnp.float32),
        jax.tree.map(jnp.asarray, support),
    )


def masked_log_probs(
    hidden: jax.Array, weight: jax.Array, targets: jax.Array, support: Support, chunk: int
) -> jax.Array:
    """Computes log-probs on the support from all logits, `chunk` tokens at a time."""
    tokens, (vocab_size, _) = len(targets), weight.shape
    chunk = min(chunk, tokens)
    token = tokens_of_places(jnp.cumsum(support.counts, dtype=jnp.int32), len(support.ids))

    def of_chunk(operands: tuple[jax.Array, ...]) -> jax.Array:
        start, hidden, targets = operands
        # Places of other tokens are beyond the last row, and are dropped.
        row = jnp.where(token < start, chunk, token - start)
        kept = jnp.zeros((chunk, vocab_size), bool).at[row, support.ids].set(True, mode="drop")
        logits = jnp.where(kept, product(hidden, weight).astype(jnp.float32), -jnp.inf)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]

    if tokens == chunk:
        return of_chunk((jnp.int32(0), hidden, targets))
    require(tokens % chunk == 0, "tokens", f"a multiple of {chunk}", tokens)
    chunks = jnp.arange(0, tokens, chunk), hidden.reshape(-1, chunk, hidden.shape[1]), targets.reshape(-1, chunk)
    return jax.lax.map(jax.checkpoint(of_chunk), chunks).reshape(tokens)


def programs(
    case: Case, engine: str, support_engines: tuple[str, ...], masked_tokens: int | None = None
) -> dict[tuple[str, str], tuple[Callable, tuple]]:
    """Functions and operands of the full head and of each engine on the support, by program and part.

    Masked logits of so many tokens at a time are among them if `masked_tokens` is not None.
    """

    def forward(engine, hidden, weight, targets, g, support):
        if engine == MASKED:
            return masked_log_probs(hidden, weight, targets, support, masked_tokens)
        return linear_log_probs(hidden, weight, targets, support=support, engine=engine).log_probs

    def both(engine, hidden, weight, targets, g, support):
        log_probs, pull_back = jax.vjp(lambda h, w: forward(engine, h, w, targets, None, support), hidden, weight)
        return log_probs, pull_back(g)

    on_support = support_engines if masked_tokens is None else (*support_engines, MASKED)
    choices = {FULL_HEAD: (engine, None), **{name: (name, case.support) for name in on_support}}
    return {
        (name, part): (
            functools.partial(function, choice),
            (case.hidden, case.weight, case.targets, case.g, support),
        )
        for name, (choice, support) in choices.items()
        for part, function in zip(PARTS, (forward, both), strict=True)
    }


def bytes_moved(case: Case, part: str) -> int:
    """Fewest bytes that a pass on the support reads and writes: see the module."""
    (tokens, hidden_size), width = case.hidden.shape, case.hidden.dtype.itemsize
    ids = int(jnp.sum(case.support.counts))
    rows = ids + tokens
    if part == "forward":
        return width * hidden_size * rows
    return width * hidden_size * (2 * rows + tokens + case.weight.shape[0])


class Expected(NamedTuple):
    """Float64 values and gradients of a case.

    Attributes:
        log_probs: [N].
        tokens: the tokens whose hidden gradients are compared.
        rows: the rows whose weight gradients are compared.
        d_hidden: gradients of these tokens' hidden states.
        d_weight: gradients of these rows.
        named: bool [V], True for rows that a support names.
    """

    log_probs: np.ndarray
    tokens: np.ndarray
    rows: np.ndarray
    d_hidden: np.ndarray
    d_weight: np.ndarray
    named: np.ndarray


def float64_values(case: Case) -> Expected:
    """Computes all log-probs, and some rows of both gradients, in float64."""
    operands = np.asarray(case.hidden), np.asarray(case.weight)
    counts = np.asarray(case.support.counts)
    ids = np.asarray(case.support.ids)[: counts.sum()]
    starts, token = np.cumsum(counts) - counts, np.repeat(np.arange(counts.size), counts)
    z = _float64_logits(case, ids, token)
    largest = np.maximum.reduceat(z, starts)
    lse = np.log(np.add.reduceat(np.exp(z - largest[token]), starts)) + largest
    target = np.arange(ids.size) == starts[token]
    dz = np.asarray(case.g, np.float64)[token] * (target - np.exp(z - lse[token]))

    tokens = np.unique(np.linspace(0, counts.size - 1, ROWS_CHECKED).astype(int))
    often, occurrences = np.unique(ids, return_counts=True)
    # The rows that occur most have the longest sums.
    rows = often[np.argsort(-occurrences)[:ROWS_CHECKED]]
    sums = []
    for names, others, table, wanted in (
        (token, ids, operands[1], tokens),
        (ids, token, operands[0], rows),
    ):
        entries = [np.flatnonzero(names == name) for name in wanted]
        sums.append(np.stack([dz[e] @ table[others[e]].astype(np.float64) for e in entries]))
    named = np.zeros(case.weight.shape[0], bool)
    named[often] = True
    return Expected(z[starts] - lse, tokens, rows, *sums, named)


def float64_errors(expected: Expected, outputs: tuple) -> tuple[float, float, float]:
    """Compares values and gradients on the support with float64.

    Returns:
        The largest error of a log-prob in nats, and the errors of some rows of both gradients, relative in norm.
    """
    log_probs, (d_hidden, d_weight) = outputs
    value_error = np.abs(np.asarray(log_probs) - expected.log_probs).max()
    filled = ~expected.named & np.asarray(jnp.any(d_weight != 0.0, axis=1))
    found = f"others in {filled.sum()} rows"
    require(not filled.any(), "gradient of weight", "0 in rows that no support names", found)
    seen = (np.asarray(x, np.float64) for x in (d_hidden[expected.tokens], d_weight[expected.rows]))
    wanted = expected.d_hidden, expected.d_weight
    gradient_errors = (np.linalg.norm(s - w) / np.linalg.norm(w) for s, w in zip(seen, wanted, strict=True))
    return float(value_error), *map(float, gradient_errors)


def _float64_logits(case: Case, ids: np.ndarray, token: np.ndarray) -> np.ndarray:
    """Computes the logit of each id in float64 on the default device."""

    @jax.jit
    def logits(hidden: jax.Array, weight: jax.Array, rows: jax.Array, others: jax.Array) -> jax.Array:
        return jnp.sum(hidden[others].astype(jnp.float64) * weight[rows].astype(jnp.float64), axis=1)

    padding = -ids.size % ID_BLOCK
    blocks = (np.pad(x, (0, padding)).reshape(-1, ID_BLOCK) for x in (ids, token))
    with jax.enable_x64(True):
        found = [np.asarray(logits(case.hidden, case.weight, *block)) for block in zip(*blocks, strict=True)]
    return np.concatenate(found)[: ids.size]


def measure(
    config: SupportSpeedConfig, shape: tuple[int, int], law: str, bytes_per_second: float
) -> tuple[list[Measured], str]:
    """Compiles, checks and times the programs of one case; returns them with a line about the case."""
    case = make_case(config, shape, law)
    functions = programs(case, config.engine, config.support_engines, MASKED_TOKENS if config.beside else None)
    compiled = compile_or_say(functions)
    engines = (config.engine, *config.support_engines)
    require(len(compiled) == len(functions), "--engine and --support-engines", "engines that run here", engines)
    calls = {key: functools.partial(compiled[key], *operands) for key, (_, operands) in functions.items()}
    expected = float64_values(case)
    checked = (*config.support_engines, MASKED) if config.beside else config.support_engines
    errors = [_errors_of_engine(expected, name, calls[name, PARTS[1]]) for name in checked]
    if config.beside:
        calls[PRODUCT, PARTS[0]], _ = compile_product(case.hidden, case.weight)
    medians, failed = time_in_turns({key: (call, jax.block_until_ready) for key, call in calls.items()}, config.repeats)
    for error in failed.values():
        raise error
    for name in config.support_engines if config.profile else ():
        print(f"  {name}, N = {shape[0]}, H = {shape[1]}, {law}:")
        print_slowest(gpu_events(calls[name, PARTS[1]], PROFILED), config.profile, PROFILED)
    counts = np.asarray(case.support.counts)
    ids = np.asarray(case.support.ids)[: counts.sum()]
    note = (
        f"N = {shape[0]}, H = {shape[1]}, {law}: {counts.mean():.1f} ids a token (median {np.median(counts):.0f}, "
        f"99th percentile {np.percentile(counts, 99):.0f}, {np.mean(counts == 1):.0%} one), {np.unique(ids).size} rows "
        f"named; errors against float64: {'; '.join(errors)}"
    )
    return [_measured(shape, law, key, compiled, medians, case, bytes_per_second) for key in calls], note


def _errors_of_engine(expected: Expected, name: str, call: Callable[[], tuple]) -> str:
    """Describes the errors of an engine on the support, and whether two calls have the same bits."""
    first, second = call(), call()
    log_prob, hidden, weight = float64_errors(expected, first)
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    # The bits, because equal numbers may differ in the sign of a zero.
    same = all(bool(_same_bits(one, other)) for one, other in pairs)
    bits = "the same bits twice" if same else "other bits in a second call"
    return f"{name}: log-probs {log_prob:.1e}, dH {hidden:.1e}, dW {weight:.1e}, {bits}"


@jax.jit
def _same_bits(one: jax.Array, other: jax.Array) -> jax.Array:
    kind = {2: jnp.uint16, 4: jnp.uint32}[one.dtype.itemsize]
    return jnp.all(jax.lax.bitcast_convert_type(one, kind) == jax.lax.bitcast_convert_type(other, kind))


def _measured(
    shape: tuple[int, int],
    law: str,
    key: tuple[str, str],
    compiled: dict[tuple[str, str], Compiled],
    medians: dict[tuple[str, str], Timing],
    case: Case,
    bytes_per_second: float,
) -> Measured:
    program, part = key
    timing, full = medians[key], medians[FULL_HEAD, part]
    return Measured(
        shape,
        law,
        program,
        part,
        timing.seconds,
        timing.seconds / full.seconds,
        None if program in (FULL_HEAD, MASKED, PRODUCT) else bytes_moved(case, part) / bytes_per_second,
        None if program == PRODUCT else compiled[key].memory_analysis().temp_size_in_bytes,
        timing.ratio_spread(full),
    )


def main(config: SupportSpeedConfig) -> list[Measured]:
    """Measures all cases and prints the table."""
    shapes = [tuple(int(size) for size in shape.split(",")) for shape in config.shapes]
    for law in config.ids:
        require(law in ("zipf", "uniform"), "--ids", "zipf or uniform", law)
    bytes_per_second = copy_bandwidth()
    device = jax.devices()[0].device_kind
    print(f"{device}, JAX {jax.__version__}, {bytes_per_second / 1e12:.2f} TB/s measured; V = {config.vocab_size}")
    results, notes = [], []
    for shape, law in itertools.product(shapes, config.ids):
        found, note = measure(config, shape, law, bytes_per_second)
        results += found
        notes.append(note)
    print("\n| N, H | ids | program | pass | time | × full head | bound | of the bound | temporaries |")
    print("|---|---|---|---|---|---|---|---|---|")
    for one in results:
        bound = ("–", "–")
        if one.bound_seconds is not None:
            bound = f"{one.bound_seconds * 1e3:.3f} ms", f"{one.seconds / one.bound_seconds:.1f} ×"
        temporaries = "–" if one.temporaries is None else f"{one.temporaries / 2**30:.3f} GiB"
        print(
            f"| {one.shape[0]}, {one.shape[1]} | {one.ids} | {one.program} | {one.part} | {one.seconds * 1e3:.3f} ms "
            f"| {one.ratio:.4f} | {' | '.join(bound)} | {temporaries} |"
        )
    print()
    for note in notes:
        print(f"- {note}")
    return results


if __name__ == "__main__":
    run_command(SupportSpeedConfig, main, program="benchmarks.support_speed", description=__doc__)
