"""Time and temporary memory of the head: the engines of ``linear_log_probs`` beside programs that store the logits.

    python -m experiments.head_speed                       # N=2048, H=512, V=32768, fp32, on this machine
    python -m experiments.head_speed --write               # also writes benchmarks/results/head_speed_<device>.{json,md}

Everything is measured in one run: repeats are interleaved, so that what else the machine does hits all programs alike,
and ratios are to ``materialised``, a plain JAX program with log_softmax over stored fp32 logits. Entropy is on, and has a
gradient. Memory is what the compiler reserves for temporaries, without arguments and results.
"""

import dataclasses
import functools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro

from experiments.command_line import errors_in_one_line
from jaxlogp import linear_log_probs
from jaxlogp.errors import require

Program = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
BASELINE = "materialised"


@dataclass(frozen=True)
class HeadSpeedConfig:
    """Options of the benchmark."""

    tokens: int = 2048
    """N, number of tokens."""
    hidden_size: int = 512
    """H, features of a hidden state."""
    vocab_size: int = 32768
    """V, size of the vocabulary."""
    dtype: str = "float32"
    """Dtype of hidden states and weight: float32 or bfloat16."""
    repeats: int = 7
    """Timed repeats of every program; the median counts."""
    write: bool = False
    """Write the table under benchmarks/results."""


@dataclass(frozen=True)
class Row:
    """One program: median seconds, bytes of temporaries, and ratios to the baseline."""

    program: str
    forward_seconds: float
    forward_backward_seconds: float
    forward_bytes: int
    forward_backward_bytes: int
    forward_ratio: float
    forward_backward_ratio: float
    forward_bytes_ratio: float
    forward_backward_bytes_ratio: float


@dataclass(frozen=True)
class Result:
    """The rows and the markdown table of a benchmark."""

    rows: list[Row]
    markdown: str


def materialised(hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a trainer without a fused head does: fp32 logits, log_softmax, gather, entropy."""
    dimensions = (((1,), (1,)), ((), ()))
    logits = jax.lax.dot_general(
        hidden, weight, dimensions, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    log_softmax = jax.nn.log_softmax(logits)
    log_probs = jnp.take_along_axis(log_softmax, targets[:, None], axis=1)[:, 0]
    return log_probs, -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=1)


def _engine(name: str) -> Program:
    def program(hidden, weight, targets):
        result = linear_log_probs(hidden, weight, targets, with_entropy=True, engine=name)
        return result.log_probs, result.entropy

    return program


def _objective(program: Program, targets: jax.Array, hidden: jax.Array, weight: jax.Array) -> jax.Array:
    log_probs, entropy = program(hidden, weight, targets)
    return jnp.sum(log_probs) + 0.1 * jnp.sum(entropy)


def _seconds(compiled: Callable[..., object], *arguments: jax.Array) -> float:
    started = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    return time.perf_counter() - started


def main(config: HeadSpeedConfig) -> Result:
    """Measures all programs and returns the table.

    Raises:
      ValueError: a size that is not positive or an unknown dtype.
    """
    for option in ("tokens", "hidden_size", "vocab_size", "repeats"):
        require(getattr(config, option) > 0, f"--{option.replace('_', '-')}", "a number > 0", getattr(config, option))
    require(config.dtype in ("float32", "bfloat16"), "--dtype", "float32 or bfloat16", config.dtype)
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (config.tokens, config.hidden_size), config.dtype)
    weight = (jax.random.normal(keys[1], (config.vocab_size, config.hidden_size)) * 0.05).astype(config.dtype)
    targets = jax.random.randint(keys[2], (config.tokens,), 0, config.vocab_size)
    compiled = {}
    for name, program in {
        BASELINE: materialised,
        "reference": _engine("reference"),
        "chunked": _engine("chunked"),
    }.items():
        forward = jax.jit(functools.partial(program, targets=targets))
        both = jax.jit(jax.value_and_grad(functools.partial(_objective, program, targets), argnums=(0, 1)))
        compiled[name] = (forward.lower(hidden, weight).compile(), both.lower(hidden, weight).compile())
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in compiled}
    for repeat in range(config.repeats + 1):
        for name, pair in compiled.items():
            for samples, function in zip(times[name], pair, strict=True):
                seconds = _seconds(function, hidden, weight)
                if repeat:
                    samples.append(seconds)
    rows = _rows(compiled, times)
    return Result(rows, _markdown(config, rows))


def _rows(compiled: dict, times: dict) -> list[Row]:
    figures = {
        name: (
            *(statistics.median(samples) for samples in times[name]),
            *(function.memory_analysis().temp_size_in_bytes for function in pair),
        )
        for name, pair in compiled.items()
    }
    base = figures[BASELINE]
    return [
        Row(name, *values, *(value / max(one, 1e-12) for value, one in zip(values, base, strict=True)))
        for name, values in figures.items()
    ]


def _markdown(config: HeadSpeedConfig, rows: list[Row]) -> str:
    device = jax.devices()[0]
    lines = [
        f"N={config.tokens}, H={config.hidden_size}, V={config.vocab_size}, {config.dtype}, entropy on; "
        f"JAX {jax.__version__}, Python {platform.python_version()}, {device.platform} ({device.device_kind}), "
        f"median of {config.repeats}",
        "",
        "| program | forward | × | forward+backward | × | temporary memory, forward | × | forward+backward | × |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.program} | {row.forward_seconds * 1e3:.0f} ms | {row.forward_ratio:.2f} "
            f"| {row.forward_backward_seconds * 1e3:.0f} ms | {row.forward_backward_ratio:.2f} "
            f"| {row.forward_bytes / 2**20:.0f} MiB | {row.forward_bytes_ratio:.3f} "
            f"| {row.forward_backward_bytes / 2**20:.0f} MiB | {row.forward_backward_bytes_ratio:.3f} |"
        )
    return "\n".join(lines)


def write(config: HeadSpeedConfig, result: Result, folder: Path) -> Path:
    """Writes the table and its numbers with the command; returns the markdown file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"head_speed_{jax.devices()[0].platform}.md"
    command = " ".join(["python -m experiments.head_speed", *sys.argv[1:]])
    path.write_text(
        f"# Head: time and temporary memory\n\nCommand: `{command}`\n\n{result.markdown}\n", encoding="utf-8"
    )
    record = {
        "command": command,
        "config": dataclasses.asdict(config),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "rows": [dataclasses.asdict(row) for row in result.rows],
    }
    path.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path


def run_cli(arguments: list[str] | None = None) -> Result:
    """The command line: bad options end in one line on stderr and exit code 2."""
    config = tyro.cli(HeadSpeedConfig, args=arguments, prog="python -m experiments.head_speed", description=__doc__)
    with errors_in_one_line():
        result = main(config)
    print(result.markdown)
    if config.write:
        print(f"written: {write(config, result, Path('benchmarks/results'))}")
    return result


if __name__ == "__main__":
    run_cli()
