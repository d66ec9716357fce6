"""Tokens per second of the sampler, and how near it is to the memory bound, at the shapes of real models, random weights.

    python -m benchmarks.sampler_speed                                    # Qwen3-0.6B, 64 and 256 rows
    python -m benchmarks.sampler_speed --model qwen3-1.7b --rows 128 --copies 16 --profile 20
    python -m benchmarks.sampler_speed --weights activations int8         # beside matrices rounded to 8 bits
    python -m benchmarks.sampler_speed --mesh data=1 data=2 tensor=2      # rows are those of a data and fsdp rank

All rows draw all their tokens (there is no end token). The time of a step is that of a whole run less that of reading the
prompts and drawing one token, by the number of steps in between. Its bound is the time to read, at the bandwidth that a
copy of 4 GiB reaches in the same run, all matrices once, the head's among them, every row's own keys and values, and each
prompt's once, as the rows of a group share it; on a mesh, what one device has of them.
"""

import itertools
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from benchmarks.clock import copy_bandwidth, spread
from benchmarks.profiler import gpu_events, print_slowest
from experiments.command_line import run_command
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.models.mesh import make_mesh, parse_mesh
from experiments.models.named_shapes import NAMED_SHAPES
from experiments.models.sharding import parameter_shardings
from experiments.sampling.decoder_sampler import DecoderSampler
from experiments.sampling.options import SamplingOptions
from experiments.sampling.sample_token import CompletionRule
from experiments.sampling.sampler import SampledModel
from jaxlogp.errors import require


@dataclass(frozen=True)
class SamplerSpeedConfig:
    """Options of the benchmark; every combination of models, meshes, rows and weights is measured."""

    model: tuple[str, ...] = ("qwen3-0.6b",)
    """Shapes, as in benchmarks.step_speed."""
    rows: tuple[int, ...] = (64, 256)
    """Completions drawn at a time by every data and fsdp rank."""
    copies: int = 8
    """Completions of a prompt."""
    prompt: int = 128
    """Tokens of a prompt."""
    new_tokens: int = 512
    """Tokens of a completion."""
    attention: str = "auto"
    """auto, or einsum for the cache without a kernel."""
    param_dtype: str = "float32"
    """Dtype of the parameters; activations are bfloat16 on a GPU, float32 elsewhere."""
    mesh: tuple[str, ...] = ("data=1",)
    """Device meshes, without sequence ranks."""
    top_p: float = 1.0
    """Draw among the likeliest tokens of this probability only."""
    top_k: int | None = None
    """Draw among this many likeliest tokens only."""
    temperature: float = 1.0
    """Divisor of the logits: random weights have flat ones, and below 1 top-p keeps fewer tokens."""
    record_support: bool = False
    """With --top-p or --top-k: record the ids that each token is drawn from."""
    weights: tuple[str, ...] = ("activations",)
    """Matrices of a step: in the activations' dtype, or rounded to int8."""
    layers: int | None = None
    """Layers instead of the model's."""
    repeats: int = 3
    """Timed runs; the median counts."""
    profile: int = 0
    """How many of the slowest kernels to list."""
    out: str | None = None
    """A file for the results as JSON lines."""


@dataclass
class Measured:
    """One line of the table; milliseconds are those of a step of all rows."""

    model: str
    mesh: str
    rows: int
    weights: str
    attention: str
    milliseconds: float
    bound_milliseconds: float
    tokens_per_second: float
    share_of_bound: float
    prefill_milliseconds: float
    compile_seconds: float
    peak_gib: float
    spread: float
    """Interquartile range of the timed runs over their median."""


def bytes_of_step(shape: DecoderConfig, config: SamplerSpeedConfig, rows: int, tensor: int, weights: str) -> float:
    """What a device, one of so many tensor ranks, has to read in a step in the middle of a completion, in bytes."""
    # Whole where the ranks do not divide it.
    of_vocab, of_heads = (tensor if size % tensor == 0 else 1 for size in (shape.vocab_size, shape.num_kv_heads))
    width = jnp.dtype(shape.dtype).itemsize
    of_weight = jnp.dtype("int8" if weights == "int8" else shape.dtype).itemsize
    per_layer = shape.hidden_size * (
        2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim + 3 * shape.intermediate_size
    )
    matrices = shape.num_layers * per_layer / tensor + shape.vocab_size * shape.hidden_size / of_vocab
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    tokens = rows * config.new_tokens / 2 + rows / config.copies * config.prompt
    return of_weight * matrices + width * per_token / of_heads * tokens


def shape_of(name: str, layers: int | None, **changes: str) -> DecoderConfig:
    """A named shape with activations of this device's dtype, and so many layers if a number is given."""
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    fewer = {} if layers is None else {"num_layers": layers}
    return replace(NAMED_SHAPES[name], dtype=dtype, **fewer, **changes)


def random_model(shape: DecoderConfig, mesh: Mesh) -> tuple[SampledModel, nnx.State]:
    """A model of this shape on the mesh, and its random parameters."""
    graph, state = nnx.split(nnx.jit(lambda: Decoder(shape, rngs=nnx.Rngs(0), mesh=mesh))())
    return SampledModel(graph, mesh), jax.device_put(state, parameter_shardings(state, mesh))


def measure(config: SamplerSpeedConfig, choice: tuple[str, str, int, str], bytes_per_second: float) -> Measured:
    """Compiles and times one combination of model, mesh, rows and weights."""
    name, mesh_text, rows, weights = choice
    spec = parse_mesh(mesh_text)
    require(spec.sequence == 1, "--mesh", "no sequence ranks: a step has one token of a row", mesh_text)
    mesh = make_mesh(spec)
    require(rows % config.copies == 0, "--rows", f"a multiple of --copies {config.copies}", rows)
    options = {"attention": config.attention, "param_dtype": config.param_dtype}
    shape = shape_of(name, config.layers, **options)
    model, state = random_model(shape, mesh)
    count = spec.ranks * rows // config.copies
    prompts = np.random.default_rng(0).integers(0, shape.vocab_size, (count, config.prompt), np.int32)
    lengths = np.full(len(prompts), config.prompt, np.int32)

    def run(new_tokens: int) -> None:
        filters = {"top_k": config.top_k, "top_p": config.top_p, "record_support": config.record_support}
        how = {"temperature": config.temperature, "int8_weights": weights == "int8"}
        options = SamplingOptions(new_tokens, **how, **filters)
        sampler = DecoderSampler(model, CompletionRule(options, eos_ids=(), pad_id=0))
        sampler(state, prompts, lengths, config.copies, jax.random.key(0))

    def seconds(new_tokens: int) -> tuple[float, float, float]:
        """Median of a run, the first one, and the spread of the others."""
        taken = []
        for _ in range(config.repeats + 1):
            started = time.perf_counter()
            run(new_tokens)
            taken.append(time.perf_counter() - started)
        return statistics.median(taken[1:]), taken[0], spread(taken[1:])

    (whole, first, wide), (prefill, first_prefill, _) = seconds(config.new_tokens), seconds(1)
    step = (whole - prefill) / (config.new_tokens - 1)
    bound = bytes_of_step(shape, config, rows, spec.tensor, weights) / bytes_per_second
    if config.profile:
        print_slowest(gpu_events(lambda: run(33), 1), config.profile, 32 * spec.num_devices)
    return Measured(
        name,
        mesh_text,
        rows,
        weights,
        shape.cached_attention_run(mesh).implementation,
        step * 1e3,
        bound * 1e3,
        spec.ranks * rows / step,
        bound / step,
        prefill * 1e3,
        first + first_prefill,
        (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30,
        wide,
    )


def main(config: SamplerSpeedConfig) -> list[Measured]:
    """Prints the table, a line as soon as it is measured.

    Raises:
        ValueError: an option out of range.
    """
    for name in config.model:
        require(name in NAMED_SHAPES, "--model", f"one of {', '.join(NAMED_SHAPES)}", name)
    for weights in config.weights:
        require(weights in ("activations", "int8"), "--weights", "activations or int8", weights)
    bytes_per_second = copy_bandwidth()
    device = jax.devices()[0].device_kind
    print(f"{device}, JAX {jax.__version__}, {bytes_per_second / 1e12:.2f} TB/s measured", flush=True)
    print(
        "| model | mesh | rows a rank | weights | attention | ms a step | bound | of it | tokens/s | prompts, ms | peak "
        "| compiling |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    results = []
    for choice in itertools.product(config.model, config.mesh, config.rows, config.weights):
        got = measure(config, choice, bytes_per_second)
        results.append(got)
        print(
            f"| {got.model} | {got.mesh} | {got.rows} | {got.weights} | {got.attention} | {got.milliseconds:.2f} "
            f"| {got.bound_milliseconds:.2f} | {got.share_of_bound:.0%} | {got.tokens_per_second:,.0f} "
            f"| {got.prefill_milliseconds:.0f} | {got.peak_gib:.1f} GiB | {got.compile_seconds:.0f} s |",
            flush=True,
        )
        if config.out:
            with open(config.out, "a") as file:
                file.write(json.dumps(asdict(got)) + "\n")
    return results


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    run_command(SamplerSpeedConfig, main, program="benchmarks.sampler_speed", description=__doc__)
