"""The cost of the fixed order against chunked and against a program that stores the logits, on 1 and 4 shards.

    python -m experiments.studies.invariance_cost            # N=512, H=256, V=8192, fp32, entropy on
    python -m experiments.studies.invariance_cost --write    # also writes
    benchmarks/results/invariance_cost_<device>.md

All programs are measured in one run, interleaved, so that other load on the machine affects them equally. Ratios are to
``chunked`` on the same number of shards. On CPUs the shards are simulated devices that share the cores.
"""

import os
import sys

if "jax" not in sys.modules:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()

import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from experiments.command_line import run_command
from experiments.studies.report import write_report
from jaxlogp import FixedOrderEngine, ReductionOrder, linear_log_probs
from jaxlogp.errors import require

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
    write: bool = False
    """Write the table under benchmarks/results."""


def programs(engine, config: CostConfig, shards: int, arrays: tuple) -> tuple:
    """The compiled forward, and forward with backward, on ``shards`` vocabulary shards."""
    mesh = jax.make_mesh((shards,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])

    def forward(hidden, weight, targets):
        return linear_log_probs(
            hidden, weight, targets, with_entropy=True, axis_name="tensor", engine=engine, out_of_vocab="zero"
        )

    def both(hidden, weight, targets):
        def objective(hidden, weight):
            found = forward(hidden, weight, targets)
            return jnp.sum(found.log_probs) + 0.1 * jnp.sum(found.entropy)

        return jax.value_and_grad(objective, argnums=(0, 1))(hidden, weight)

    in_specs = P(), P("tensor"), P()
    mapped = (
        jax.shard_map(forward, mesh=mesh, in_specs=in_specs, out_specs=P()),
        jax.shard_map(both, mesh=mesh, in_specs=in_specs, out_specs=(P(), (P(), P("tensor")))),
    )
    return tuple(jax.jit(function).lower(*arrays).compile() for function in mapped)


def main(config: CostConfig) -> str:
    """Measures all programs and returns the table in markdown.

    Raises:
      ValueError: a size that is not positive, or a vocabulary that four shards or the granules cannot divide.
    """
    for option in ("tokens", "hidden_size", "vocab_size", "repeats"):
        require(getattr(config, option) > 0, f"--{option.replace('_', '-')}", "a number > 0", getattr(config, option))
    require(config.vocab_size % 4 == 0, "--vocab-size", "a multiple of 4", config.vocab_size)
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (config.tokens, config.hidden_size))
    weight = jax.random.normal(keys[1], (config.vocab_size, config.hidden_size)) * 0.05
    arrays = (hidden, weight, jax.random.randint(keys[2], (config.tokens,), 0, config.vocab_size))
    compiled = {
        (shards, name): programs(engine, config, shards, arrays)
        for shards in (1, 4)
        for name, engine in ENGINES.items()
    }
    times = {key: ([], []) for key in compiled}
    for repeat in range(config.repeats + 1):
        for key, pair in compiled.items():
            for samples, function in zip(times[key], pair, strict=True):
                started = time.perf_counter()
                jax.block_until_ready(function(*arrays))
                if repeat:
                    samples.append(time.perf_counter() - started)
    return _markdown(config, compiled, times)


def _markdown(config: CostConfig, compiled: dict, times: dict) -> str:
    device = jax.devices()[0]
    lines = [
        f"N={config.tokens}, H={config.hidden_size}, V={config.vocab_size}, fp32, entropy on; JAX {jax.__version__}, "
        f"{platform.machine()} {device.platform}, {os.cpu_count()} cores, median of {config.repeats}",
        "",
        "| TP | program | forward | × chunked | forward+backward | × chunked | temporary memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for (shards, name), pair in compiled.items():
        seconds = [statistics.median(samples) for samples in times[shards, name]]
        base = [statistics.median(samples) for samples in times[shards, "chunked"]]
        memory = pair[1].memory_analysis().temp_size_in_bytes / 2**20
        lines.append(
            f"| {shards} | {name} | {seconds[0] * 1e3:.0f} ms | {seconds[0] / base[0]:.2f} "
            f"| {seconds[1] * 1e3:.0f} ms | {seconds[1] / base[1]:.2f} | {memory:.1f} MiB |"
        )
    return "\n".join(lines)


def run_cli(arguments: list[str] | None = None) -> str:
    """The command line; see `experiments.command_line` for how it ends."""
    return run_command(
        CostConfig, _run, program="experiments.studies.invariance_cost", description=__doc__, arguments=arguments
    )


def _run(config: CostConfig) -> str:
    table = main(config)
    print(table)
    if config.write:
        path = Path("benchmarks/results") / f"invariance_cost_{jax.devices()[0].platform}.md"
        print(f"written: {write_report('invariance_cost', path, 'Cost of the fixed order', table)}")
    return table


if __name__ == "__main__":
    run_cli()
