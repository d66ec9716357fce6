"""The head on given hidden states, as rows of tables: drift of its engines, masks, and the gradient filter.

The reference is float64 on the same bf16 operands (`experiments.studies.real_model.float64`).
"""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies.gradient_filter import ENTROPY_COTANGENT, policy_gradients, relative_errors
from experiments.studies.real_model.float64 import float64_gradients, float64_head
from experiments.studies.real_model.states import TokenSet
from jaxlogp import (
    ChunkedEngine,
    DriftReport,
    GradientFilter,
    TritonEngine,
    VocabOrder,
    VocabShards,
    drift_report,
    linear_log_probs,
    skipped_tiles,
    vocab_order_by_mean_logit,
    why_not,
)
from jaxlogp.head.hopper.tiles import head_tiles
from jaxlogp.head.registry import ENGINES

REFERENCE_BLOCK = 1024
"""Tokens whose logits the engine `reference` stores at a time."""


@dataclass(frozen=True)
class Drift:
    """One engine on one set of tokens; differences in nats.

    `log_prob` is the library's report of log-probs against float64, `sampler` the same against the sampler's log-probs.
    """

    tokens: str
    engine: str
    log_prob: DriftReport
    entropy_max: float
    entropy_mean: float
    against_reference: float
    sampler: DriftReport | None


@dataclass(frozen=True)
class Masked:
    """One engine with a label on half of the tokens, against the same engine with all labels."""

    engine: str
    tokens: int
    labels: int
    rows_computed: int
    live_values_equal: bool
    live_gradients_equal: bool
    live_largest: float
    masked_zero: bool
    weight_gradient_error: float
    time_ratio: float


@dataclass(frozen=True)
class Filtered:
    """The gradient filter at one threshold (None: off) and order; errors in the Frobenius norm."""

    tokens: str
    order: str
    threshold: float | None
    skipped: float
    hidden_error: float
    weight_error: float
    hidden_float64: float
    weight_float64: float
    seconds: float


def available_engines(hidden: jax.Array, weight: jax.Array) -> dict[str, str | None]:
    """Every engine's name, with the reason why it cannot run here or None."""
    return {name: why_not(engine, hidden, weight) for name, engine in ENGINES.items()}


# ---- drift ----


def drift(tokens: TokenSet, weight: np.ndarray, engines: tuple[str, ...]) -> tuple[list[Drift], float]:
    """Log-probs and entropies of every engine against float64; and the mean entropy."""
    exact, entropy = float64_head(tokens, weight)
    reference = _run("reference", tokens, weight)
    vocab = VocabShards.even(len(weight), 1)
    rows = []
    for engine in engines:
        log_probs, entropies = reference if engine == "reference" else _run(engine, tokens, weight)
        labels = {"vocab": vocab, "backend": engine, "reduction": "one device"}
        sampler = None
        if tokens.sampler_log_probs is not None:
            sampler = drift_report(log_probs, tokens.sampler_log_probs, tokens.targets, **labels)
        errors = np.abs(entropies.astype(np.float64) - entropy)
        report = drift_report(log_probs, exact, tokens.targets, **labels)
        beside = float(np.abs(log_probs - reference[0]).max())
        rows.append(Drift(tokens.name, engine, report, float(errors.max()), float(errors.mean()), beside, sampler))
    return rows, float(entropy.mean())


def _run(engine: str, tokens: TokenSet, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    function = jax.jit(functools.partial(linear_log_probs, with_entropy=True, engine=engine))
    count = len(tokens.targets)
    block = REFERENCE_BLOCK if engine == "reference" else count
    head = jnp.asarray(weight)
    pieces = []
    for start in range(0, count, block):
        hidden, targets = (jnp.asarray(x[start : start + block]) for x in (tokens.hidden, tokens.targets))
        values = function(hidden, head, targets)
        pieces.append([np.asarray(x) for x in (values.log_probs, values.entropy)])
    log_probs, entropies = (np.concatenate(x) for x in zip(*pieces, strict=True))
    return log_probs, entropies


# ---- masks ----


def rows_computed(engine: str, live: int, tokens: int, hidden_size: int) -> int:
    """Rows of the logits that the forward computes: engines with kernels skip whole row tiles, the others none."""
    if engine == "hopper":
        config = head_tiles(hidden_size).forward
        grain = config.rows * config.cluster
    elif engine == "triton":
        grain = TritonEngine().head_tiles().forward.rows
    else:
        return tokens
    return -(-live // grain) * grain


def masked(tokens: TokenSet, weight: np.ndarray, engine: str, seed: int, repeats: int) -> Masked:
    """Half of the tokens lose their label: their hidden states are NaN and their targets -100, which must not matter."""
    count = len(tokens.targets)
    rng = np.random.default_rng(seed)
    live = np.zeros(count, bool)
    live[rng.permutation(count)[: count // 2]] = True
    g = rng.normal(size=count).astype(np.float32)
    hidden = np.where(live[:, None], tokens.hidden, np.asarray(np.nan, tokens.hidden.dtype))
    targets = np.where(live, tokens.targets, -100).astype(np.int32)
    run = jax.jit(functools.partial(_values_and_gradients, engine))
    every = [jnp.asarray(x) for x in (tokens.hidden, weight, tokens.targets, g, np.ones(count, bool))]
    half = [jnp.asarray(x) for x in (hidden, weight, targets, g, live)]
    packed = [jnp.asarray(x) for x in (tokens.hidden[live], weight, tokens.targets[live], g[live], live[live])]
    full, seen, alone = ([np.asarray(x) for x in run(*operands)] for operands in (every, half, packed))
    # Values and hidden gradients have one row per token; the weight gradient, the last, sums over tokens.
    differences = [_largest(a[live], b[live]) for a, b in zip(full[:3], seen[:3], strict=True)]
    return Masked(
        engine,
        count,
        int(live.sum()),
        rows_computed(engine, int(live.sum()), count, weight.shape[1]),
        float(np.max(differences[:2])) == 0.0,
        differences[2] == 0.0,
        float(np.max(differences)),
        not any(x[~live].astype(np.float32).any() for x in seen[:3]),
        relative_errors(seen[3], alone[3].astype(np.float64))[0],
        _time_ratio(run, half, every, repeats),
    )


def _values_and_gradients(engine, hidden, weight, targets, g, mask):
    def objective(hidden, weight):
        result = linear_log_probs(hidden, weight, targets, mask=mask, with_entropy=True, engine=engine)
        return jnp.sum(result.log_probs * g) + ENTROPY_COTANGENT * jnp.sum(result.entropy), result

    (_, result), gradients = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(hidden, weight)
    return result.log_probs, result.entropy, *gradients


def _largest(one: np.ndarray, other: np.ndarray) -> float:
    """Largest difference; NaN if any value is NaN, which never counts as a match."""
    return float(np.abs(one.astype(np.float64) - other.astype(np.float64)).max())


def _time_ratio(run: Callable, half: list, every: list, repeats: int) -> float:
    times: dict[str, list[float]] = {"half": [], "every": []}
    for _ in range(repeats):
        for name, operands in (("half", half), ("every", every)):
            times[name].append(_seconds(run, operands)[0])
    return statistics.median(times["half"]) / statistics.median(times["every"])


def _seconds(run: Callable, operands: list) -> tuple[float, tuple]:
    started = time.perf_counter()
    result = jax.block_until_ready(run(*operands))
    return time.perf_counter() - started, result


# ---- gradient filter ----


def filtered(
    tokens: TokenSet,
    weight: np.ndarray,
    others: TokenSet | None,
    *,
    thresholds: tuple[float, ...],
    token_chunk: int,
    vocab_tile: int,
    seed: int,
    repeats: int,
) -> list[Filtered]:
    """The unfiltered gradient, then every order and threshold.

    Args:
        tokens: the tokens to measure on.
        weight: bf16 [V, H].
        others: tokens whose mean logits give another order, like one fixed before training; or None.
        thresholds: thresholds of the filter.
        token_chunk: tokens per block.
        vocab_tile: vocabulary columns per block.
        seed: seed of the cotangents.
        repeats: timed runs, of which the median is reported.
    """
    g = np.random.default_rng(seed).normal(size=len(tokens.targets)).astype(np.float32)
    exact = float64_gradients(tokens, weight, g.astype(np.float64))
    engines = {None: ChunkedEngine(token_chunk, vocab_tile)}
    engines |= {one: ChunkedEngine(token_chunk, vocab_tile, GradientFilter(one)) for one in thresholds}
    unfiltered, rows = None, []
    for name, order in _orders(tokens, weight, others).items():
        # Renumbered once and not timed, as a training run does before its first step.
        places = order.places(jnp.asarray(tokens.targets))
        operands = [jnp.asarray(tokens.hidden), order.rows(jnp.asarray(weight)), places, jnp.asarray(g)]
        for threshold in (None, *thresholds) if unfiltered is None else thresholds:
            timed = [_seconds(_gradient_program(engines[threshold]), operands) for _ in range(repeats + 1)]
            d_hidden, d_weight = (np.asarray(x, np.float64) for x in timed[0][1])
            found = d_hidden, d_weight[order.place]
            unfiltered = found if unfiltered is None else unfiltered
            errors = [
                relative_errors(a, b)[0] for truth in (unfiltered, exact) for a, b in zip(found, truth, strict=True)
            ]
            share = 0.0 if threshold is None else float(_count_program(engines[threshold])(*operands[:3]).mean())
            # The first run may compile.
            seconds = statistics.median(one for one, _ in timed[1:])
            rows.append(Filtered(tokens.name, name, threshold, share, *errors, seconds))
    return rows


# Cached, so that sets of equal sizes and the orders of one set share compiled programs.
@functools.cache
def _gradient_program(engine: ChunkedEngine) -> Callable:
    return jax.jit(functools.partial(policy_gradients, engine))


@functools.cache
def _count_program(engine: ChunkedEngine) -> Callable:
    return jax.jit(functools.partial(skipped_tiles, engine=engine))


def _orders(tokens: TokenSet, weight: np.ndarray, others: TokenSet | None) -> dict[str, VocabOrder]:
    """The tokenizer's own numbering, and by mean logit."""
    orders = {"of the tokenizer": VocabOrder(np.arange(len(weight)))}
    sources = {"by mean logit": tokens}
    if others is not None:
        sources[f"by mean logit of {others.name}"] = others
    for name, source in sources.items():
        orders[name] = VocabOrder(vocab_order_by_mean_logit(jnp.asarray(source.hidden), jnp.asarray(weight)))
    return orders


def spread_blocks(tokens: TokenSet, count: int, block: int) -> TokenSet:
    """About `count` tokens of a set: whole blocks of adjacent tokens, as a filter sees them, spread evenly over the set."""
    starts = np.arange(0, max(len(tokens.targets) - block, 0) + 1, block)
    chosen = starts[np.unique(np.linspace(0, len(starts) - 1, max(count // block, 1)).astype(int))]
    which = np.concatenate([np.arange(start, min(start + block, len(tokens.targets))) for start in chosen])
    sampled = None if tokens.sampler_log_probs is None else tokens.sampler_log_probs[which]
    return TokenSet(tokens.name, tokens.hidden[which], tokens.targets[which], sampled)
