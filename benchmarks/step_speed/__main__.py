"""Tokens per second, MFU, memory and parts of the trainer's step at the shapes of real models, with random weights.

    python -m benchmarks.step_speed                                     # Qwen3-0.6B, 16 rows of 2048 tokens
    python -m benchmarks.step_speed --rows 16x2048 4x8192 --remat full products --micro-batches 1 4
    python -m benchmarks.step_speed --model qwen3-1.7b llama-3.2-1b --profile

A step is the trainer's own: gradient sums of its micro-batches (bf16 activations, one-pass head, GRPO with its metrics),
then AdamW. MFU is 6 · parameters + causal attention within rows, over --peak; in brackets, attention within documents.
Temporaries are what the compiler reserves for one micro-batch beside parameters, optimizer state and gradient sums; "peak"
is the allocator's, of everything so far. What a GPU has no room for is said and passed over.
"materialised" is the same step with stored logits (engine `reference`).
"""

import itertools
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jax

from benchmarks.profiler import gpu_events
from benchmarks.step_speed.parts import milliseconds_by_part
from benchmarks.step_speed.step import MODELS, Rows, Step, model_flops
from experiments.command_line import errors_in_one_line
from experiments.models import decoder

PROFILED_STEPS = 2


@dataclass(frozen=True)
class StepSpeedConfig:
    """Options of the benchmark; every combination of the lists is measured."""

    model: tuple[str, ...] = ("qwen3-0.6b",)
    """Shapes: qwen3-0.6b, qwen3-1.7b, llama-3.2-1b."""
    rows: tuple[str, ...] = ("16x2048",)
    """Rows by tokens of a row."""
    document: int = 700
    """Tokens of a document."""
    micro_batches: tuple[int, ...] = (1,)
    """Micro-batches of a step."""
    attention: tuple[str, ...] = ("auto",)
    """Implementations of attention."""
    remat: tuple[str, ...] = ("full",)
    """What layers keep: none, full, attention, products."""
    engine: tuple[str, ...] = ("auto",)
    """Engines of the head; reference stores the logits."""
    param_dtype: tuple[str, ...] = ("float32",)
    """Dtypes of the parameters."""
    layers: int | None = None
    """Layers instead of the model's."""
    loop: bool = False
    """Compile one layer for all, as a loop over them."""
    repeats: int = 5
    """Timed steps; the median counts."""
    profile: bool = False
    """Also where the time goes, by part and by kernel."""
    peak: float = 989e12
    """Operations per second that MFU refers to: H100 and H200, dense bf16."""
    out: str | None = None
    """A file for the results as JSON lines, and for the kernels of each profile."""


@dataclass
class Measured:
    """One line of the table."""

    model: str
    rows: str
    micro_batches: int
    attention: str
    remat: str
    head: str
    param_dtype: str
    milliseconds: float = 0.0
    tokens_per_second: float = 0.0
    mfu: float = 0.0
    mfu_documents: float = 0.0
    temporaries_gib: float = 0.0
    peak_gib: float = 0.0
    compile_seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)


def measure(config: StepSpeedConfig, choice: tuple) -> Measured:
    """Compiles and times one combination."""
    model, rows_text, micro_batches, attention, remat, engine, param_dtype = choice
    count, length = map(int, rows_text.split("x"))
    rows = Rows(count, length, config.document, micro_batches)
    changes = {} if config.layers is None else {"num_layers": config.layers}
    shape = MODELS[model](dtype="bfloat16", param_dtype=param_dtype, remat=remat, attention=attention, **changes)
    step = Step(shape, rows, engine)
    started = time.perf_counter()
    program = step.micro_batch_program()
    compile_seconds = time.perf_counter() - started
    jax.block_until_ready(step())
    seconds = []
    for _ in range(config.repeats + 1):
        started = time.perf_counter()
        jax.block_until_ready((step(), step.state))
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[1:])
    run = shape.attention_run(count // micro_batches, length)
    head = step.sums.head_run.engine
    measured = Measured(model, rows_text, micro_batches, run.implementation, remat, head, param_dtype)
    measured.compile_seconds = compile_seconds
    measured.milliseconds = median * 1e3
    measured.tokens_per_second = rows.tokens / median
    mfu = [model_flops(shape, rows, step.num_parameters, n) / median / config.peak for n in (length, config.document)]
    measured.mfu, measured.mfu_documents = mfu
    measured.temporaries_gib = program.memory_analysis().temp_size_in_bytes / 2**30
    statistics_of_memory = jax.devices()[0].memory_stats() or {}
    measured.peak_gib = statistics_of_memory.get("peak_bytes_in_use", 0) / 2**30
    if config.profile:
        events = gpu_events(step, PROFILED_STEPS)
        measured.parts, kernels = milliseconds_by_part(events, program.as_text(), PROFILED_STEPS)
        for milliseconds, calls, part, name in kernels:
            print(f"    {milliseconds:8.2f} ms {calls:5d} x  {part:24s} {name[:110]}", flush=True)
    return measured


def line(row: Measured) -> str:
    """A row of the printed table."""
    text = (
        f"{row.model:13s} {row.rows:>8s} / {row.micro_batches:<2d} {row.attention:8s} remat {row.remat:9s} "
        f"{row.head:9s} {row.param_dtype:8s} {row.milliseconds:8.1f} ms {row.tokens_per_second:9,.0f} tokens/s  "
        f"MFU {row.mfu:5.1%} ({row.mfu_documents:5.1%})  temp {row.temporaries_gib:6.2f} GiB  "
        f"peak {row.peak_gib:6.2f} GiB  compiled in {row.compile_seconds:.0f} s"
    )
    parts = ", ".join(f"{part} {milliseconds:.1f}" for part, milliseconds in row.parts.items())
    return f"{text}\n    ms by part: {parts}" if parts else text


def main(config: StepSpeedConfig) -> list[Measured]:
    """Measures every combination, printing each as it comes."""
    if config.profile:
        # A command buffer hides which instruction a kernel belongs to.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    if config.loop:
        decoder.MAX_UNROLLED_LAYERS_ON_GPU = 0
    device = jax.devices()[0]
    print(f"{device.device_kind}, JAX {jax.__version__}", flush=True)
    found = []
    lists = (config.model, config.rows, config.micro_batches, config.attention, config.remat, config.engine)
    for choice in itertools.product(*lists, config.param_dtype):
        try:
            row = measure(config, choice)
        except Exception as error:  # A program without room, or one that cannot run, must not end the rest.
            print(f"{choice} failed: {type(error).__name__}: {str(error)[:400]}", flush=True)
            continue
        print(line(row), flush=True)
        found.append(row)
        if config.out is not None:
            with Path(config.out).open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    return found


if __name__ == "__main__":
    import tyro

    # A program is compiled for its memory and text, and found again when it is called.
    with errors_in_one_line(), tempfile.TemporaryDirectory() as compiled:
        jax.config.update("jax_compilation_cache_dir", compiled)
        main(tyro.cli(StepSpeedConfig, description=__doc__))
