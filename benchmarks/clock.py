"""Timing of the benchmarks: settled runs, interleaved, so that other load affects all programs equally.

A GPU lowers its clocks under load, so a call is timed only after the same call has run equally long untimed; and a
median over turns spread over the whole measurement is not affected by a disturbance in one of them.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# A timed run, and the untimed one before it, last at least this long; a program that took more than PATIENCE_SECONDS in
# total gets no further turns.
SETTLE_SECONDS, PATIENCE_SECONDS = 0.12, 5.0

Call = tuple[Callable[[], Any], Callable[[Any], Any]]


class Timing(NamedTuple):
    """Median seconds of one call over ``turns`` turns, and those of each turn."""

    seconds: float
    turns: int
    samples: tuple[float, ...] = ()

    def ratio_spread(self, base: "Timing") -> float:
        """Returns the spread of the ratios to another call in the same turns."""
        return spread([ours / others for ours, others in zip(self.samples, base.samples, strict=False)])


def spread(values: Sequence[float]) -> float:
    """Returns the interquartile range divided by the median; 0 for fewer than two values.

    Example:
        >>> spread([9.0, 10.0, 11.0])
        0.1
    """
    if len(values) < 2:
        return 0.0
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / median


def settled_seconds(
    call: Callable[[], Any],
    wait: Callable[[Any], Any] = jax.block_until_ready,
    at_least: float = SETTLE_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of one call once the device's clocks have settled: it runs untimed for as long as it is timed.

    Args:
        call: starts the work; its value is passed to ``wait``.
        wait: returns once the work is done.
        at_least: duration of the untimed and of the timed run, in seconds each.
        clock: seconds since some moment.
    """
    started = clock()
    wait(call())
    once = clock() - started
    repeats = max(1, round(at_least / max(once, 1e-9)))
    # A first call of that length has settled the clocks by itself.
    for _ in range(1 if repeats == 1 else 2):
        started = clock()
        for _ in range(repeats):
            out = call()
        wait(out)
        seconds = clock() - started
    return seconds / repeats


def time_in_turns(
    calls: Mapping[Hashable, Call],
    turns: int,
    at_least: float = SETTLE_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
    after_turn: Callable[[int], None] = lambda turn: None,
) -> tuple[dict[Hashable, Timing], dict[Hashable, Exception]]:
    """Settled runs of every (call, wait), interleaved: medians, and the exceptions of those that failed.

    Args:
        calls: by name.
        turns: number of turns; a call that fails gets no further ones, nor does one that has taken ``PATIENCE_SECONDS``.
        at_least: see :func:`settled_seconds`.
        clock: seconds since some moment.
        after_turn: called with the number of every finished turn, from 1.
    """
    samples: dict[Hashable, list[float]] = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    failed: dict[Hashable, Exception] = {}
    for turn in range(turns):
        for name, (call, wait) in calls.items():
            if name in failed or (samples[name] and spent[name] > PATIENCE_SECONDS):
                continue
            started = clock()
            try:
                samples[name].append(settled_seconds(call, wait, at_least, clock))
            except Exception as error:  # One program that runs out of memory must not end the run.
                failed[name] = error
            spent[name] += clock() - started
        after_turn(turn + 1)
    medians = {
        name: Timing(statistics.median(values), len(values), tuple(values))
        for name, values in samples.items()
        if name not in failed
    }
    return medians, failed


def copy_bandwidth() -> float:
    """Measures how many bytes per second a copy reads and writes."""
    size = 2**30 if jax.default_backend() == "gpu" else 2**26
    add = jax.jit(lambda x: x + 1)
    x = jnp.zeros(size, jnp.float32)
    jax.block_until_ready(add(x))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready([add(x) for _ in range(4)])
        seconds.append((time.perf_counter() - started) / 4)
    return 2 * x.nbytes / statistics.median(seconds)
