"""Time and temporary memory of the head: the engines of ``linear_log_probs`` and other programs for the same function.

    python -m benchmarks.head_speed                       # N=2048, H=512, V=32768, fp32, on this machine
    python -m benchmarks.head_speed --write               # also writes benchmarks/results/head_speed_<device>.{json,md}
    python -m benchmarks.head_speed --model all --tokens 8192 --write      # heads of real models, for a GPU

Everything is measured in one run: repeats are interleaved, so that other load on the machine affects all programs
equally. On the CPU ratios are to ``materialised``, a plain JAX program with log_softmax over stored fp32 logits. On a
GPU, or with ``--model``, they are to one bf16 product hidden · weightᵀ by cuBLAS, each run is timed at settled clocks
(after an untimed run of the same length), installed peers are measured too, errors against float64 are given with the
times, and files are written after every shape. Entropy is on, and has a gradient, where a program has one. Memory is
what the compiler reserves for temporaries, without arguments and results; for PyTorch it is the peak of its allocator
without these.
"""

import dataclasses
import functools
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.cases import MODELS
from benchmarks.clock import SETTLE_SECONDS
from benchmarks.head_speed.peers import versions
from benchmarks.head_speed.programs import Program, engine_program, materialised
from benchmarks.head_speed.report import NotRun, ShapeRow, plot_ratios, shapes_markdown
from benchmarks.head_speed.shapes import Plan, measure_shapes, our_names, peer_names
from experiments.command_line import run_command
from jaxlogp.errors import require

BASELINE = "materialised"


@dataclass(frozen=True)
class HeadSpeedConfig:
    """Options of the benchmark."""

    tokens: int | tuple[int, ...] = 2048
    """N, number of tokens; may be several with ratios to the product."""
    hidden_size: int = 512
    """H, size of a hidden state."""
    vocab_size: int = 32768
    """V, size of the vocabulary."""
    model: tuple[str, ...] = ()
    """Heads by name instead of H and V: qwen3-8b, llama-3.1-8b, gemma-2-2b, qwen3-0.6b, or all."""
    dtype: str = "auto"
    """Dtype of hidden states and weight: float32 or bfloat16; auto is bfloat16 for ratios to the product."""
    base: str = "auto"
    """Base of the ratios: materialised or product; auto is the product on a GPU and with --model."""
    only: tuple[str, ...] = ()
    """Programs to measure where ratios are to the product: names, ours, peers; all by default."""
    skip: tuple[str, ...] = ()
    """Programs to exclude from these."""
    repeats: int = 7
    """Timed repeats of every program; the median is reported."""
    settle: float = SETTLE_SECONDS
    """Seconds that each program runs untimed, and then again timed, in a turn, where ratios are to the product."""
    time_budget: float = 0.0
    """Seconds after which no further shape is begun, where ratios are to the product; 0 means no limit."""
    threads: int = 16
    """Programs compiled at the same time, where ratios are to the product; at most one per core."""
    write: bool = False
    """Write the table under --folder."""
    folder: str = "benchmarks/results"
    """Where files are written."""
    name: str = ""
    """Name of the files; by default head_speed_<device>."""


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
    """The rows and the markdown table of a benchmark, and which programs were not run."""

    rows: list[Row] | list[ShapeRow]
    markdown: str
    not_run: tuple[NotRun, ...] = ()


_engine = engine_program


def _objective(program: Program, targets: jax.Array, hidden: jax.Array, weight: jax.Array) -> jax.Array:
    log_probs, entropy = program(hidden, weight, targets)
    return jnp.sum(log_probs) + 0.1 * jnp.sum(entropy)


def _seconds(compiled: Callable[..., object], *arguments: jax.Array) -> float:
    started = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    return time.perf_counter() - started


def main(config: HeadSpeedConfig, after_shape: Callable[[Result], None] = lambda result: None) -> Result:
    """Measures all programs and returns the table.

    Args:
        config: options.
        after_shape: called with all results so far after every shape, where ratios are to the product.

    Raises:
        ValueError: a size that is not positive, or an unknown dtype, model, base or program.
    """
    started = time.monotonic()
    config = _checked(config)
    return _against_materialised(config) if config.base == BASELINE else _against_product(config, after_shape, started)


def _checked(config: HeadSpeedConfig) -> HeadSpeedConfig:
    """The options with every "auto" decided, ``tokens`` a tuple and ``only`` the names to measure."""
    tokens = config.tokens if isinstance(config.tokens, tuple) else (config.tokens,)
    require(len(tokens) > 0, "--tokens", "at least one number", "none")
    for number in tokens:
        require(number > 0, "--tokens", "a number > 0", number)
    for option in ("hidden_size", "vocab_size", "repeats", "settle", "threads"):
        require(getattr(config, option) > 0, f"--{option.replace('_', '-')}", "a number > 0", getattr(config, option))
    require(config.time_budget >= 0, "--time-budget", "a number >= 0", config.time_budget)
    require(config.dtype in ("auto", "float32", "bfloat16"), "--dtype", "float32 or bfloat16", config.dtype)
    require(config.base in ("auto", BASELINE, "product"), "--base", f"{BASELINE} or product", config.base)
    for name in config.model:
        require(name in MODELS or name == "all", "--model", f"all or one of {sorted(MODELS)}", name)
    on_gpu = jax.devices()[0].platform == "gpu"
    base = ("product" if config.model or on_gpu else BASELINE) if config.base == "auto" else config.base
    if base == BASELINE:
        require(not config.model, "--model", f"no names with --base {BASELINE}", " ".join(config.model))
        require(len(tokens) == 1, "--tokens", f"one number with --base {BASELINE}", " ".join(map(str, tokens)))
    dtype = ("bfloat16" if base == "product" else "float32") if config.dtype == "auto" else config.dtype
    models = tuple(MODELS) if "all" in config.model else tuple(dict.fromkeys(config.model))
    only = _named(config)
    return dataclasses.replace(config, tokens=tokens, model=models, dtype=dtype, base=base, only=only, skip=())


def _named(config: HeadSpeedConfig) -> tuple[str, ...]:
    """Names of --only without those of --skip, in the order of tables."""
    ours, peers = our_names(), peer_names()
    groups = {"ours": ours, "peers": peers, **{name: [name] for name in (*ours, *peers)}}
    chosen: dict[str, set[str]] = {}
    for option in ("only", "skip"):
        for name in getattr(config, option):
            require(name in groups, f"--{option}", f"one of {list(groups)}", name)
        chosen[option] = {name for group in getattr(config, option) for name in groups[group]}
    wanted = chosen["only"] or {*ours, *peers}
    return tuple(name for name in (*ours, *peers) if name in wanted and name not in chosen["skip"])


def _against_product(config: HeadSpeedConfig, after_shape: Callable[[Result], None], started: float) -> Result:
    explicit = {f"H={config.hidden_size}, V={config.vocab_size}": (config.hidden_size, config.vocab_size)}
    shapes = {name: MODELS[name] for name in config.model} or explicit
    options = config.settle, config.time_budget, config.threads
    plan = Plan(shapes, config.tokens, config.dtype, config.repeats, config.only, *options)

    def result(rows, not_run):
        return Result(list(rows), shapes_markdown(rows, not_run, config.dtype, config.repeats, versions()), not_run)

    return result(*measure_shapes(plan, lambda *so_far: after_shape(result(*so_far)), started))


def _against_materialised(config: HeadSpeedConfig) -> Result:
    (tokens,) = config.tokens
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, config.hidden_size), config.dtype)
    weight = (jax.random.normal(keys[1], (config.vocab_size, config.hidden_size)) * 0.05).astype(config.dtype)
    targets = jax.random.randint(keys[2], (tokens,), 0, config.vocab_size)
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
        f"N={config.tokens[0]}, H={config.hidden_size}, V={config.vocab_size}, {config.dtype}, entropy on; "
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


def _stem(config: HeadSpeedConfig) -> str:
    device = jax.devices()[0]
    if config.name:
        return config.name
    if device.platform != "cpu":
        return f"head_speed_{device.device_kind.lower().removeprefix('nvidia ').replace(' ', '_')}"
    return "head_speed_cpu_product" if config.base == "product" else "head_speed_cpu"


def write(config: HeadSpeedConfig, result: Result, folder: Path) -> Path:
    """Writes the table, its numbers and, with ratios to the product, a plot; returns the markdown file."""
    folder.mkdir(parents=True, exist_ok=True)
    checked = _checked(config)
    path = folder / f"{_stem(checked)}.md"
    command = f"python -m benchmarks.head_speed {shlex.join(sys.argv[1:])}".strip()
    text = f"# Head: time and temporary memory\n\nCommand: `{command}`\n\n{result.markdown}\n"
    if checked.base == "product" and result.rows:
        plot_ratios(result.rows, path.with_suffix(".png"))
        text += f"\n![Time over one product]({path.stem}.png)\n"
    path.write_text(text, encoding="utf-8")
    record = {
        "command": command,
        "config": dataclasses.asdict(config),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "rows": [dataclasses.asdict(row) for row in result.rows],
    }
    if checked.base == "product":
        record |= {"versions": versions(), "not_run": [dataclasses.asdict(left) for left in result.not_run]}
    path.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path


def run_cli(arguments: list[str] | None = None) -> Result:
    """The command line; see `experiments.command_line` for how it ends."""
    return run_command(HeadSpeedConfig, _run, program="benchmarks.head_speed", description=__doc__, arguments=arguments)


def _run(config: HeadSpeedConfig) -> Result:
    # Read when the device is opened, which has not happened yet: PyTorch's peers need a share of the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    def keep(result: Result) -> None:
        if config.write:
            print(f"written: {write(config, result, Path(config.folder))}", flush=True)

    result = main(config, keep)
    print(result.markdown)
    keep(result)
    return result


if __name__ == "__main__":
    run_cli()
