"""Time and temporary memory of the head: the engines of ``linear_log_probs`` beside other programs of the same function.

    python -m experiments.head_speed                       # N=2048, H=512, V=32768, fp32, on this machine
    python -m experiments.head_speed --write               # also writes benchmarks/results/head_speed_<device>.{json,md}
    python -m experiments.head_speed --model all --tokens 8192 --write      # heads of real models, for a GPU

Everything is measured in one run: repeats are interleaved, so that what else the machine does hits all programs alike.
On the CPU ratios are to ``materialised``, a plain JAX program with log_softmax over stored fp32 logits. On a GPU, or with
``--model``, they are to one product hidden · weightᵀ, each run is timed at settled clocks (as long untimed before it), and
errors against float64 stand beside the times. Entropy is on, and has a gradient. Memory is what the compiler reserves for
temporaries, without arguments and results.
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
from experiments.head_cases import MODELS, Program, engine_program, materialised, product
from experiments.head_peers import PEERS
from experiments.head_report import NotRun, ShapeRow, plot_ratios, shapes_markdown
from experiments.head_shapes import measure_shapes, program_names
from jaxlogp.errors import require

BASELINE = "materialised"


@dataclass(frozen=True)
class HeadSpeedConfig:
    """Options of the benchmark."""

    tokens: int | tuple[int, ...] = 2048
    """N, number of tokens; several with ratios to the product."""
    hidden_size: int = 512
    """H, features of a hidden state."""
    vocab_size: int = 32768
    """V, size of the vocabulary."""
    model: tuple[str, ...] = ()
    """Heads by name instead of H and V: qwen3-8b, llama-3.1-8b, gemma-2-2b, qwen3-0.6b, or all."""
    dtype: str = "auto"
    """Dtype of hidden states and weight: float32 or bfloat16; auto is bfloat16 for ratios to the product."""
    base: str = "auto"
    """What ratios are to: materialised or product; auto is the product on a GPU and with --model."""
    skip: tuple[str, ...] = ()
    """Programs to leave out where ratios are to the product."""
    repeats: int = 7
    """Timed repeats of every program; the median counts."""
    write: bool = False
    """Write the table under benchmarks/results."""


@dataclass(frozen=True)
class Row:
    """One program: median seconds, bytes of temporaries, and ratios to the baseline and to one product."""

    program: str
    forward_seconds: float
    forward_backward_seconds: float
    forward_bytes: int
    forward_backward_bytes: int
    forward_ratio: float
    forward_backward_ratio: float
    forward_bytes_ratio: float
    forward_backward_bytes_ratio: float
    forward_product_ratio: float
    forward_backward_product_ratio: float


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


def main(config: HeadSpeedConfig) -> Result:
    """Measures all programs and returns the table.

    Raises:
      ValueError: a size that is not positive, or an unknown dtype, model, base or program.
    """
    config = _checked(config)
    return _against_product(config) if config.base == "product" else _against_materialised(config)


def _checked(config: HeadSpeedConfig) -> HeadSpeedConfig:
    """The options with every "auto" decided and ``tokens`` a tuple."""
    tokens = config.tokens if isinstance(config.tokens, tuple) else (config.tokens,)
    require(len(tokens) > 0, "--tokens", "at least one number", "none")
    for number in tokens:
        require(number > 0, "--tokens", "a number > 0", number)
    for option in ("hidden_size", "vocab_size", "repeats"):
        require(getattr(config, option) > 0, f"--{option.replace('_', '-')}", "a number > 0", getattr(config, option))
    require(config.dtype in ("auto", "float32", "bfloat16"), "--dtype", "float32 or bfloat16", config.dtype)
    require(config.base in ("auto", BASELINE, "product"), "--base", f"{BASELINE} or product", config.base)
    for name in config.model:
        require(name in MODELS or name == "all", "--model", f"all or one of {sorted(MODELS)}", name)
    for name in config.skip:
        require(name in program_names(), "--skip", f"one of {program_names()}", name)
    on_gpu = jax.devices()[0].platform == "gpu"
    base = ("product" if config.model or on_gpu else BASELINE) if config.base == "auto" else config.base
    if base == BASELINE:
        require(not config.model, "--model", f"no names with --base {BASELINE}", " ".join(config.model))
        require(len(tokens) == 1, "--tokens", f"one number with --base {BASELINE}", " ".join(map(str, tokens)))
    dtype = ("bfloat16" if base == "product" else "float32") if config.dtype == "auto" else config.dtype
    models = tuple(MODELS) if "all" in config.model else tuple(dict.fromkeys(config.model))
    return dataclasses.replace(config, tokens=tokens, model=models, dtype=dtype, base=base)


def _against_product(config: HeadSpeedConfig) -> Result:
    explicit = {f"H={config.hidden_size}, V={config.vocab_size}": (config.hidden_size, config.vocab_size)}
    shapes = {name: MODELS[name] for name in config.model} or explicit
    rows, not_run = measure_shapes(shapes, config.tokens, config.dtype, config.repeats, config.skip)
    return Result(rows, shapes_markdown(rows, not_run, config.dtype, config.repeats), not_run)


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
    functions = {**compiled, "product": (jax.jit(product).lower(hidden, weight).compile(),)}
    times: dict[str, tuple[list[float], ...]] = {name: tuple([] for _ in these) for name, these in functions.items()}
    for repeat in range(config.repeats + 1):
        for name, these in functions.items():
            for samples, function in zip(times[name], these, strict=True):
                seconds = _seconds(function, hidden, weight)
                if repeat:
                    samples.append(seconds)
    one_product = statistics.median(times.pop("product")[0])
    rows = _rows(compiled, times, one_product)
    return Result(rows, _markdown(config, rows, one_product))


def _rows(compiled: dict, times: dict, one_product: float) -> list[Row]:
    figures = {
        name: (
            *(statistics.median(samples) for samples in times[name]),
            *(function.memory_analysis().temp_size_in_bytes for function in pair),
        )
        for name, pair in compiled.items()
    }
    base = figures[BASELINE]
    return [
        Row(
            name,
            *values,
            *(value / max(one, 1e-12) for value, one in zip(values, base, strict=True)),
            *(seconds / max(one_product, 1e-12) for seconds in values[:2]),
        )
        for name, values in figures.items()
    ]


def _markdown(config: HeadSpeedConfig, rows: list[Row], one_product: float) -> str:
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
    ratios = "; ".join(
        f"{row.program} {row.forward_product_ratio:.2f} and {row.forward_backward_product_ratio:.2f}" for row in rows
    )
    lines += [
        "",
        f"As × of one product hidden · weightᵀ ({one_product * 1e3:.0f} ms), forward and with backward: {ratios}.",
    ]
    return "\n".join(lines)


def _stem(config: HeadSpeedConfig) -> str:
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"head_speed_{device.device_kind.lower().removeprefix('nvidia ').replace(' ', '_')}"
    return "head_speed_cpu_product" if config.base == "product" else "head_speed_cpu"


def write(config: HeadSpeedConfig, result: Result, folder: Path) -> Path:
    """Writes the table, its numbers and, with ratios to the product, a plot; returns the markdown file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_stem(_checked(config))}.md"
    command = " ".join(["python -m experiments.head_speed", *sys.argv[1:]])
    text = f"# Head: time and temporary memory\n\nCommand: `{command}`\n\n{result.markdown}\n"
    if _checked(config).base == "product" and result.rows:
        plot_ratios(result.rows, path.with_suffix(".png"))
        text += f"\n![Time over one product]({path.stem}.png)\n"
    path.write_text(text, encoding="utf-8")
    record = {
        "command": command,
        "config": dataclasses.asdict(config),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "peers": {peer.name: peer.version() for peer in PEERS if peer.why_not() is None},
        "rows": [dataclasses.asdict(row) for row in result.rows],
        "not_run": [dataclasses.asdict(left) for left in result.not_run],
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
