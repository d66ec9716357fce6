"""Which log-prob functions keep their bits: a comparison of naive JAX with this library's fast path and fixed order.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m experiments.studies.drift
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m experiments.studies.drift --dtype bfloat16 --write

Every path, and the gradient of its hidden states, is checked with ``jaxlogp.check_invariance``: changes of batch,
position, padding, order, neighbours, chunk, jit and mesh that must not matter. Then a drift report says how far the
log-probs of bf16 operands are from those of fp32 operands, and at which token most. To test another function, call
``check_invariance`` on it.
"""

import functools
import platform
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from experiments.command_line import run_command
from experiments.studies.report import write_report
from jaxlogp import (
    DriftReport,
    FixedOrderEngine,
    InvarianceReport,
    ReductionOrder,
    VocabShards,
    check_invariance,
    drift_report,
    linear_log_probs,
    sharded_linear_log_probs,
)
from jaxlogp.errors import require
from jaxlogp.invariance.check import TokenFunction

FIXED = FixedOrderEngine(ReductionOrder(granules=24, vocab_tile=128, row_block=64))


@dataclass(frozen=True)
class DriftConfig:
    """Options of the comparison."""

    tokens: int = 64
    """Number of tokens."""
    hidden_size: int = 64
    """H, size of a hidden state."""
    vocab_size: int = 1032
    """V, size of the vocabulary; a multiple of the largest of num_shards."""
    dtype: str = "float32"
    """Dtype of hidden states and weight: float32 or bfloat16."""
    num_shards: tuple[int, ...] = (2, 3, 4, 8)
    """Numbers of devices to shard the vocabulary over; divisors of 24."""
    seed: int = 0
    """Seed of hidden states, weight and targets."""
    processes: bool = True
    """Also run the log-probs in two processes with four simulated CPU devices each."""
    write: bool = False
    """Write the tables to benchmarks/results/drift_<device>_<dtype>.md."""


@dataclass(frozen=True)
class Result:
    """The tables: one report per path and per gradient, and the distance of bf16 from fp32."""

    reports: tuple[InvarianceReport, ...]
    rounding: DriftReport
    text: str


def naive(hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    """The computation of a trainer without this library."""
    logits = jnp.dot(hidden, weight.T, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)
    log_softmax = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_softmax, targets[:, None], axis=1)[:, 0]


def _ours(engine: object, hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    return linear_log_probs(hidden, weight, targets, engine=engine).log_probs


def _ours_sharded(engine: object, size: int, hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((size,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])
    options = {"mesh": mesh, "token_axes": (), "engine": engine}
    return sharded_linear_log_probs(hidden, weight, targets, **options).log_probs


def fast_on_all_devices(hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    """The fast path with the vocabulary over every device of every process."""
    return _ours_sharded("chunked", len(jax.devices()), hidden, weight, targets)


def fixed_order_on_all_devices(hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    """The fixed-order path, likewise."""
    return _ours_sharded(FIXED, len(jax.devices()), hidden, weight, targets)


def hidden_gradient(function: TokenFunction) -> TokenFunction:
    """The gradient of the sum of the log-probs with respect to the hidden states, one row per token."""

    def gradient(hidden, weight, targets):
        return jax.grad(lambda hidden: jnp.sum(function(hidden, weight, targets)))(hidden)

    return gradient


def main(config: DriftConfig) -> Result:
    """Runs all paths.

    Raises:
      ValueError: an option out of range.
    """
    require(config.dtype in ("float32", "bfloat16"), "--dtype", "float32 or bfloat16", config.dtype)
    for option, lowest in (("tokens", 8), ("hidden_size", 1), ("vocab_size", 24)):
        value = getattr(config, option)
        require(value >= lowest, f"--{option.replace('_', '-')}", f"at least {lowest}", value)
    for size in config.num_shards:
        fits = size > 1 and 24 % size == 0 and config.vocab_size % size == 0
        require(fits, "--num-shards", f"divisors of 24 and of --vocab-size {config.vocab_size}, above 1", size)
    hidden, weight, targets = _data(config)
    paths = {"fast path (chunked)": "chunked", "fixed-order path": FIXED}
    by_name = dict(zip(paths, ("fast_on_all_devices", "fixed_order_on_all_devices"), strict=True))
    reports = []
    for gradient in (False, True):
        suffix, wrap = ("hidden gradients", hidden_gradient) if gradient else ("log-probs", lambda function: function)
        check = functools.partial(check_invariance, num_shards=config.num_shards)
        split = config.processes and not gradient
        path = "experiments.studies.drift:naive" if split else None
        reports.append(check(wrap(naive), hidden, weight, targets, name=f"naive JAX, {suffix}", path=path))
        for name, engine in paths.items():
            sharded = {size: wrap(functools.partial(_ours_sharded, engine, size)) for size in config.num_shards}
            function = wrap(functools.partial(_ours, engine))
            path = f"experiments.studies.drift:{by_name[name]}" if split else None
            title = f"{name}, {suffix}"
            reports.append(check(function, hidden, weight, targets, name=title, sharded=sharded, path=path))
    rounding = _rounding(config)
    return Result(tuple(reports), rounding, _text(config, reports, rounding))


def _data(config: DriftConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(config.seed), 3)
    hidden = jax.random.normal(keys[0], (config.tokens, config.hidden_size), config.dtype)
    weight = jax.random.normal(keys[1], (config.vocab_size, config.hidden_size)) * 3.0 / config.hidden_size**0.5
    return hidden, weight.astype(config.dtype), jax.random.randint(keys[2], (config.tokens,), 0, config.vocab_size)


def _rounding(config: DriftConfig) -> DriftReport:
    """bf16 against fp32 operands: the disagreement of a sampler and a trainer of different dtypes."""
    hidden, weight, targets = _data(config)
    hidden, weight = hidden.astype(jnp.float32), weight.astype(jnp.float32)
    exact = linear_log_probs(hidden, weight, targets).log_probs
    rounded = linear_log_probs(hidden.astype(jnp.bfloat16), weight.astype(jnp.bfloat16), targets).log_probs
    vocab = VocabShards.even(config.vocab_size, max(config.num_shards, default=1))
    return drift_report(rounded, exact, targets, vocab=vocab, backend="chunked", reduction="one device")


def _text(config: DriftConfig, reports: list[InvarianceReport], rounding: DriftReport) -> str:
    device = jax.devices()[0]
    lines = [
        f"{config.tokens} tokens, H={config.hidden_size}, V={config.vocab_size}, {config.dtype}; JAX {jax.__version__}, "
        f"Python {platform.python_version()}, {len(jax.devices())} {device.platform} device(s), {device.device_kind}",
        "",
        *(f"{report}\n" for report in reports),
        "bf16 operands against fp32 ones, log-probs",
        str(rounding),
        "",
        "changes that made a difference (of those run; not run):",
    ]
    for report in reports:
        ran = len(report.differences) - len(report.not_run)
        lines.append(f"  {report.name:<40} {len(report.broken):>2} of {ran}; {len(report.not_run)}")
    return "\n".join(lines)


def write(config: DriftConfig, result: Result, folder: Path) -> Path:
    """Writes the tables with the command; returns the file."""
    path = folder / f"drift_{jax.devices()[0].platform}_{config.dtype}.md"
    return write_report("drift", path, "Which paths keep their bits", f"```\n{result.text}\n```")


def run_cli(arguments: list[str] | None = None) -> Result:
    """The command line; see `experiments.command_line` for how it ends."""
    return run_command(DriftConfig, _run, program="experiments.studies.drift", description=__doc__, arguments=arguments)


def _run(config: DriftConfig) -> Result:
    result = main(config)
    print(result.text)
    if config.write:
        print(f"written: {write(config, result, Path('benchmarks/results'))}")
    return result


if __name__ == "__main__":
    run_cli()
