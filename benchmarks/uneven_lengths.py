"""Tokens per second of completions whose lengths have a long tail, next to those of equal lengths.

    python -m benchmarks.uneven_lengths                                   # Qwen3-0.6B, 64 rows at a time
    python -m benchmarks.uneven_lengths --rows 32 --completions 256 --mean 60 --longest 512

Lengths are log-normal (the logarithm's standard deviation is 1), of the mean that is asked for and cut at the longest;
each belongs to the random key of its completion. The ways: `equal`, every completion of the mean length; `refilled`, the
next completion in the place of one that has ended (`SamplingOptions.rows`); `narrowed`, as many rows drawn side by side
until the last has ended, narrowed meanwhile, then the next as many. Random weights.
"""

import math
import os
import statistics
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.clock import spread
from benchmarks.sampler_speed import random_model, shape_of
from experiments.command_line import run_command
from experiments.models.mesh import MeshSpec, make_mesh
from experiments.models.named_shapes import NAMED_SHAPES
from experiments.sampling.decoder_sampler import DecoderSampler
from experiments.sampling.options import SamplingOptions
from experiments.sampling.sample_token import CompletionRule
from jaxlogp.errors import require

LENGTH = 2**31 - 1
"""What is folded into a completion's key for its length: no step of a draw."""


@dataclass(frozen=True)
class UnevenLengthsConfig:
    """Options of the benchmark."""

    model: str = "qwen3-0.6b"
    """Shape, as in benchmarks.step_speed."""
    rows: int = 64
    """Completions drawn at a time."""
    completions: int = 1024
    """Completions in all."""
    copies: int = 8
    """Completions of a prompt."""
    prompt: int = 128
    """Tokens of a prompt."""
    mean: int = 200
    """Mean length in tokens."""
    longest: int = 2048
    """The longest a completion may be."""
    layers: int | None = None
    """Layers instead of the model's."""
    repeats: int = 3
    """Timed runs; the median counts."""


@dataclass(frozen=True)
class RuleOfLengths(CompletionRule):
    """Ends each completion at a length of its own, and nowhere else."""

    mean: int = 1
    deviation: float = 1.0

    def next_tokens(self, hidden, head, row_keys, steps, done, *of_rows):
        sampled, _, support = super().next_tokens(hidden, head, row_keys, steps, done, *of_rows)
        normal = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, LENGTH)))(row_keys)
        lengths = self.mean * jnp.exp(self.deviation * normal - self.deviation**2 / 2)
        return sampled, done | (steps + 1 >= jnp.round(lengths)), support


def measure(config: UnevenLengthsConfig, way: str) -> tuple[int, float, float]:
    """Returns the tokens that a way draws, the seconds it takes, and their spread."""
    shape = shape_of(config.model, config.layers)
    model, state = random_model(shape, make_mesh(MeshSpec()))
    options = SamplingOptions(config.longest, 1.0, rows=None if way == "narrowed" else config.rows)
    rule = RuleOfLengths(options, (), 0, config.mean, 0.0 if way == "equal" else 1.0)
    sampler = DecoderSampler(model, rule)
    at_once = config.rows if way == "narrowed" else config.completions
    prompts = np.random.default_rng(0).integers(
        0, shape.vocab_size, (at_once // config.copies, config.prompt), np.int32
    )
    lengths = np.full(len(prompts), config.prompt, np.int32)

    def run() -> int:
        keys = jax.random.split(jax.random.key(0), config.completions // at_once)
        drawn = (sampler(state, prompts, lengths, config.copies, key) for key in keys)
        # A log-prob is 0 after the end.
        return sum(int((samples.log_probs != 0.0).sum()) for samples in drawn)

    tokens, seconds = run(), []
    for _ in range(config.repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return tokens, statistics.median(seconds), spread(seconds)


def main(config: UnevenLengthsConfig) -> dict[str, float]:
    """Prints the table, and returns tokens per second by way.

    Raises:
        ValueError: an option out of range.
    """
    require(config.model in NAMED_SHAPES, "--model", f"one of {', '.join(NAMED_SHAPES)}", config.model)
    together = math.lcm(config.rows, config.copies)
    fits = config.completions % together == 0 and config.rows % config.copies == 0
    expected = f"a multiple of --rows {config.rows}, which --copies {config.copies} divide"
    require(fits, "--completions", expected, config.completions)
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {config}", flush=True)
    print("| way | tokens | seconds | spread | tokens/s | of equal lengths |\n|---|---|---|---|---|---|", flush=True)
    rates: dict[str, float] = {}
    for way in ("equal", "refilled", "narrowed"):
        tokens, seconds, wide = measure(config, way)
        rates[way] = tokens / seconds
        share = rates[way] / rates["equal"]
        print(f"| {way} | {tokens:,} | {seconds:.2f} | {wide:.1%} | {rates[way]:,.0f} | {share:.2f} |", flush=True)
    return rates


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    run_command(UnevenLengthsConfig, main, program="benchmarks.uneven_lengths", description=__doc__)
