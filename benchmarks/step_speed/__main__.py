"""Tokens per second, MFU, memory and parts of the trainer's step at the shapes of real models, with random weights.

    python -m benchmarks.step_speed                                     # Qwen3-0.6B, 16 rows of 2048 tokens
    python -m benchmarks.step_speed --rows 16x2048 4x8192 --remat full products --micro-batches 1 4
    python -m benchmarks.step_speed --model qwen3-1.7b llama-3.2-1b --profile
    python -m benchmarks.step_speed --param-dtype float32 bfloat16 --optimizer adamw adafactor muon
    python -m benchmarks.step_speed --support none zipf:128 --no-transformers
    python -m benchmarks.step_speed --mesh "" data=2 fsdp=2 tensor=2 --no-transformers

A step is the trainer's own: gradient sums of its micro-batches (copied to the device; bf16 activations, one-pass head, GRPO
with its metrics), then the update. Where torch and transformers are installed, their step of the same shape comes first,
with Liger's kernels where those are installed too; `benchmarks.step_speed.transformers_step` says what it does. MFU is 6 ·
parameters (an embedding table counts only if it is the head) + causal attention within rows, over --peak; in brackets,
attention within documents. Temporaries are what the compiler reserves for one micro-batch beside parameters, optimizer
state and gradient sums; "peak" is the allocator's, of everything so far. What a GPU has no room for is said and passed
over. "materialised" is the same step with stored logits (engine `reference`).
"""

import gc
import itertools
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace

import jax

from benchmarks.clock import spread
from benchmarks.profiler import gpu_events
from benchmarks.step_speed.parts import milliseconds_by_part
from benchmarks.step_speed.step import RandomSupport, Rows, Step, optimizer_of
from benchmarks.step_speed.table import Measured, report
from benchmarks.step_speed.transformers_step import TransformersConfig, measured_elsewhere
from experiments.command_line import run_command
from experiments.models import decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.models.mesh import make_mesh, parse_mesh
from experiments.models.named_shapes import NAMED_SHAPES
from jaxlogp.errors import require

PROFILED_STEPS = 2
PEER_DTYPES_AND_OPTIMIZER = ("bfloat16", "adamw", "bfloat16")


@dataclass(frozen=True)
class StepSpeedConfig:
    """Options of the benchmark; every combination of the lists is measured."""

    model: tuple[str, ...] = ("qwen3-0.6b",)
    """Shapes: qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, llama-3.2-1b."""
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
    optimizer: tuple[str, ...] = ("adamw",)
    """Optimizers: adamw, adafactor, muon; adamw:bfloat16 keeps the first moment in that dtype, as muon:bfloat16 does."""
    accumulate: tuple[str, ...] = ("float32",)
    """Dtypes of the gradient's sums over micro-batches."""
    support: tuple[str, ...] = ("none",)
    """Ids that log-probs are taken over: none (the whole vocabulary), or LAW:ROOM, random ids, 8 a token on average.
    LAW is zipf or uniform, and ROOM the ids for which a micro-batch has room, per token: 128 in the trainer."""
    mesh: tuple[str, ...] = ("",)
    """Device meshes; every rank of data and fsdp has the rows."""
    layers: int | None = None
    """Layers instead of the model's."""
    loop: bool = False
    """Compile one layer for all, as a loop over them."""
    transformers: bool = True
    """Also the step of transformers, with and without gradient checkpointing."""
    repeats: int = 5
    """Timed steps; the median counts."""
    profile: bool = False
    """Also where the time goes, by part and by kernel."""
    peak: float = 989e12
    """Operations per second that MFU refers to: H100 and H200, dense bf16."""
    out: str | None = None
    """A file for the results as JSON lines, and for the kernels of each profile."""


def measure(config: StepSpeedConfig, choice: tuple) -> Measured:
    """Compiles and times one combination."""
    model, rows_text, micro_batches, attention, remat, engine, support, param_dtype, optimizer, accumulate, mesh = (
        choice
    )
    rows = rows_of(config, rows_text, micro_batches)
    options = {"dtype": "bfloat16", "param_dtype": param_dtype, "remat": remat, "attention": attention}
    spec = parse_mesh(mesh)
    shape = replace(shape_of(config, model), **options)
    step = Step(shape, rows, engine, optimizer, accumulate, spec, support_of(support))
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
    batch_rows = spec.ranks * rows.rows // micro_batches
    attended = shape.attention_run(batch_rows, rows.length, make_mesh(spec)).implementation
    head = step.sums.head_run.engine
    named = (model, rows_text, micro_batches, attended, remat, head, param_dtype, optimizer, accumulate, str(spec))
    measured = Measured("jaxlogp", *named, support=support, compile_seconds=compile_seconds, spread=spread(seconds[1:]))
    measured.set_speed(shape, rows, step.num_parameters, median, config.peak)
    measured.state_gib = step.state_bytes / 2**30
    measured.temporaries_gib = program.memory_analysis().temp_size_in_bytes / 2**30
    statistics_of_memory = jax.devices()[0].memory_stats() or {}
    measured.peak_gib = statistics_of_memory.get("peak_bytes_in_use", 0) / 2**30
    if config.profile:
        events = gpu_events(step, PROFILED_STEPS)
        measured.parts, kernels = milliseconds_by_part(events, program.as_text(), PROFILED_STEPS)
        for milliseconds, calls, part, name in kernels:
            print(f"    {milliseconds:8.2f} ms {calls:5d} x  {part:24s} {name[:110]}", flush=True)
    return measured


def rows_of(config: StepSpeedConfig, text: str, micro_batches: int) -> Rows:
    """Rows as they are written: 16x2048."""
    count, length = map(int, text.split("x"))
    return Rows(count, length, config.document, micro_batches)


def support_of(text: str) -> RandomSupport | None:
    """Random supports as they are written: zipf:128; None for none."""
    if text == "none":
        return None
    law, _, room = text.partition(":")
    expected = "none, zipf:ROOM or uniform:ROOM, with a number of ids"
    require(law in ("zipf", "uniform") and room.isdecimal() and int(room) > 0, "--support", expected, text)
    return RandomSupport(law, int(room))


def shape_of(config: StepSpeedConfig, model: str) -> DecoderConfig:
    """Sizes and options of a model by its name."""
    require(model in NAMED_SHAPES, "--model", f"one of {', '.join(NAMED_SHAPES)}", model)
    shape = NAMED_SHAPES[model]
    return shape if config.layers is None else replace(shape, num_layers=config.layers)


def transformers_rows(config: StepSpeedConfig) -> list[Measured]:
    """The step of transformers for every model, rows and number of micro-batches, reporting each as it comes."""
    found = []
    for model, text, micro_batches in itertools.product(config.model, config.rows, config.micro_batches):
        # Its rows are one document each.
        shape, rows = shape_of(config, model), rows_of(config, text, micro_batches)
        rows = replace(rows, document=rows.length)
        for remat in ("none", "full"):
            options = {"layers": config.layers, "checkpointing": remat == "full", "repeats": config.repeats}
            peer = measured_elsewhere(TransformersConfig(model, text, micro_batches, **options))
            shown = (model, text, micro_batches, "sdpa", remat, peer.head, *PEER_DTYPES_AND_OPTIMIZER)
            row = Measured(peer.program, *shown, why_not=peer.why_not, peak_gib=peer.peak_gib)
            if peer.why_not is None:
                row.set_speed(shape, rows, peer.num_parameters, peer.milliseconds / 1e3, config.peak)
            found.append(report(row, config.out))
    return found


def main(config: StepSpeedConfig) -> list[Measured]:
    """Measures every combination, printing each as it comes."""
    if config.profile:
        # A command buffer hides which instruction a kernel belongs to.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    if config.loop:
        decoder.MAX_UNROLLED_LAYERS_ON_GPU = 0
    for model in config.model:
        shape_of(config, model)
    for support in config.support:
        support_of(support)
    for optimizer in config.optimizer:
        optimizer_of(optimizer)
    # Before JAX takes its share of the GPU's memory.
    found = transformers_rows(config) if config.transformers else []
    device = jax.devices()[0]
    print(f"{device.device_kind}, JAX {jax.__version__}", flush=True)
    lists = (
        config.model,
        config.rows,
        config.micro_batches,
        config.attention,
        config.remat,
        config.engine,
        config.support,
    )
    for choice in itertools.product(*lists, config.param_dtype, config.optimizer, config.accumulate, config.mesh):
        # The last step is part of a cycle, through its compiled programs, and its state is large.
        gc.collect()
        try:
            row = measure(config, choice)
        except Exception as error:  # A program without room, or one that cannot run, must not end the rest.
            print(f"{choice} failed: {type(error).__name__}: {str(error)[:400]}", flush=True)
            continue
        found.append(report(row, config.out))
    return found


if __name__ == "__main__":
    # A program is compiled for its memory and text, and found again when it is called.
    with tempfile.TemporaryDirectory() as compiled:
        jax.config.update("jax_compilation_cache_dir", compiled)
        run_command(StepSpeedConfig, main, program="benchmarks.step_speed", description=__doc__)
