"""Cost of the fixed order on 1 and 4 shards, against chunked and against a program that stores the logits.

    python -m benchmarks.studies.invariance_cost            # N=512, H=256, V=8192, fp32, entropy on

All programs are measured in one run, interleaved, so that other load on the machine affects them equally. Ratios are to
``chunked`` on the same number of shards. On CPUs the shards are simulated devices that share the cores.
"""

import os
import sys

if "jax" not in sys.modules:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()

import functools
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks.clock import time_in_turns
from experiments.command_line import run_command
from jaxlogp import linear_log_probs
from jaxlogp.errors import require
from jaxlogp.head import FixedOrderEngine
from jaxlogp.invariance import ReductionOrder

ENGINES = {
    "chunked": "chunked",
    "fixed order, 24 granules": "fixed_order",
    "fixed order, 8 granules": FixedOrderEngine(ReductionOrder(granules=8)),
    "fixed order, 256 rows": FixedOrderEngine(ReductionOrder(row_block=256)),
    "materialised": "reference",
}


@dataclass(frozen=True)
class CostConfig:
    """Options of the benchmark."""

    tokens: int = 512
    """N, number of tokens."""
    hidden_size: int = 256
    """H, size of a hidden state."""
    vocab_size: int = 8192
    """V, size of the vocabulary; divisible by 4."""
    repeats: int = 15
    """Timed repeats of every program; the median is reported."""


def _compiled(
    engine: str | FixedOrderEngine, shards: int, arrays: tuple[jax.Array, ...]
) -> dict[str, jax.stages.Compiled]:
    """The forward pass, and forward with backward, with the vocabulary over so many devices."""
    mesh = jax.make_mesh((shards,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])
    options = {"with_entropy": True, "axis_name": "tensor", "engine": engine, "out_of_vocab": "zero"}

    def loss(hidden, weight, targets):
        values = linear_log_probs(hidden, weight, targets, **options)
        return jnp.sum(values.log_probs) + 0.1 * jnp.sum(values.entropy)

    functions = {
        "forward": (functools.partial(linear_log_probs, **options), P()),
        "both": (jax.value_and_grad(loss, argnums=(0, 1)), (P(), (P(), P("tensor")))),
    }
    return {
        name: jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(P(), P("tensor"), P()), out_specs=out_specs))
        .lower(*arrays)
        .compile()
        for name, (function, out_specs) in functions.items()
    }


def main(config: CostConfig) -> None:
    """Measures all programs and prints the table."""
    require(config.vocab_size % 4 == 0, "--vocab-size", "a multiple of 4", config.vocab_size)
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (config.tokens, config.hidden_size))
    weight = jax.random.normal(keys[1], (config.vocab_size, config.hidden_size)) * 0.05
    arrays = hidden, weight, jax.random.randint(keys[2], (config.tokens,), 0, config.vocab_size)
    programs = {
        (shards, name, part): program
        for shards in (1, 4)
        for name, engine in ENGINES.items()
        for part, program in _compiled(engine, shards, arrays).items()
    }
    calls = {key: (functools.partial(program, *arrays), jax.block_until_ready) for key, program in programs.items()}
    medians, failed = time_in_turns(calls, config.repeats)
    for error in failed.values():
        raise error
    print(
        f"{config}, fp32, entropy on; JAX {jax.__version__}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores\n"
    )
    print("| TP | program | forward | × chunked | forward+backward | × chunked | temporary memory |")
    print("|---|---|---|---|---|---|---|")
    for shards, name in itertools.product((1, 4), ENGINES):
        cells = []
        for each in ("forward", "both"):
            seconds, base = medians[shards, name, each].seconds, medians[shards, "chunked", each].seconds
            cells += [f"{seconds * 1e3:.1f} ms", f"{seconds / base:.2f}"]
        memory = programs[shards, name, "both"].memory_analysis().temp_size_in_bytes / 2**20
        print(f"| {shards} | {name} | {' | '.join(cells)} | {memory:.1f} MiB |")


if __name__ == "__main__":
    run_command(CostConfig, main, program="benchmarks.studies.invariance_cost", description=__doc__)
