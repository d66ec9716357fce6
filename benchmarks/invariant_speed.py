"""Bits and times of training runs with `--invariant`, beside the plain ones, at the shapes of real models, random weights.

    python -m benchmarks.invariant_speed --layers 4                        # one device
    python -m benchmarks.invariant_speed --layers 4 --mesh data=1 data=2 tensor=2 fsdp=2
    python -m benchmarks.invariant_speed --mesh data=2 --distributed ...      # in two processes, as docs/scaling.md says

Every mesh is trained on without and with `--invariant`, whose micro-batches are leaves. Times are those of the fastest step
after the first, which compiles: of a rollout, and of the rest of the step. The state (parameters and those of the optimizer)
is compared by a digest of its bytes. With `--parts`, one more step says what its time went to.
"""

import dataclasses
import gc
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from experiments.command_line import run_command
from experiments.config import (
    Config,
    DriftConfig,
    EvaluationConfig,
    InvarianceConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    ScheduleConfig,
    WarmStartConfig,
)
from experiments.distributed import ProcessOptions
from experiments.loop.assemble import Setup, assemble
from experiments.loop.feed import DocumentFeed
from experiments.loop.loop import take_step
from experiments.models.named_shapes import NAMED_SHAPES
from experiments.processes import processes
from experiments.runs.folder import metric_of
from experiments.tasks import Completion, Example, Rewards
from experiments.tasks.rewards import rewards_of
from jaxlogp.errors import require


@dataclass(frozen=True)
class InvariantSpeedConfig(ProcessOptions):
    """Options of the benchmark."""

    model: str = "qwen3-0.6b"
    """A shape of experiments.models.named_shapes."""
    layers: int | None = None
    """Layers instead of the model's."""
    mesh: tuple[str, ...] = ("data=1",)
    """Device meshes."""
    rows: int = 16
    """Rows of a micro-batch of the plain run."""
    dtype: str = "auto"
    """Dtype of activations and head; auto is bfloat16 on a GPU."""
    remat: str = "auto"
    """What layers keep for the backward pass; auto is what runs of this size choose: products on a GPU, none on a CPU."""
    prompts: int = 4
    """Prompts of a rollout, which is a step."""
    generations: int = 8
    """Completions of a prompt."""
    new_tokens: int = 64
    """Tokens of a completion, nearly always all of them: random weights end none."""
    steps: int = 3
    """Optimizer steps of every run."""
    invariance: InvarianceConfig = dataclasses.field(default_factory=InvarianceConfig)
    plain: bool = True
    """Measure the plain runs too."""
    invariant: bool = True
    """Measure the runs with --invariant."""
    parts: bool = False
    """Print how long the parts of a step take."""
    out: str | None = None
    """A file for the results as JSON lines."""


@dataclass
class Measured:
    """One run."""

    mode: str
    mesh: str
    rows: int
    rollout_seconds: float
    rest_seconds: float
    first_seconds: float
    drift: float
    head: str
    digest: str
    peak_gib: float
    losses: list[float]
    leaves: dict[str, str]


def digest_of(tree: Any) -> str:
    """Twelve hexadecimal digits of the bytes of all leaves in their order."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.ascontiguousarray(np.asarray(leaf)).tobytes())
    return found.hexdigest()[:12]


def digests_of(tree: Any) -> dict[str, str]:
    """`digest_of` every leaf, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): digest_of(leaf) for path, leaf in leaves}


def options_of(config: InvariantSpeedConfig, mesh: str, *, invariant: bool) -> Config:
    """A run without warm start, evaluation or checkpoints, whose steps are rollouts."""
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    remat = config.remat
    if remat == "auto" and jax.default_backend() == "gpu":
        remat = "products"
    return Config(
        task="word_problems:2",
        mesh=mesh,
        invariant=invariant,
        model=ModelConfig(name=_shape_name(config), dtype=dtype, remat=remat),
        warm_start=WarmStartConfig(max_steps=0),
        rollout=RolloutConfig(
            prompts_per_rollout=config.prompts,
            num_generations=config.generations,
            max_new_tokens=config.new_tokens,
        ),
        schedule=ScheduleConfig(steps=config.steps, docs_per_step=0, rows=None if invariant else config.rows),
        optimizer=OptimizerConfig(learning_rate=1e-5),
        evaluation=EvaluationConfig(every=0, num_prompts=1, kl=False),
        drift=DriftConfig(every=0),
        **({"invariance": config.invariance} if invariant else {}),
    )


def _shape_name(config: InvariantSpeedConfig) -> str:
    if config.layers is None:
        return config.model
    name = f"{config.model}, {config.layers} layers"
    NAMED_SHAPES[name] = dataclasses.replace(NAMED_SHAPES[config.model], num_layers=config.layers)
    return name


def _in_turn() -> Rewards:
    """Rewards that differ within a group, by the number of the completion: random weights answer nothing, and without a
    difference there is no gradient."""
    numbers = itertools.count(processes().index, processes().count)

    def in_turn(example: Example, completion: Completion) -> float:
        del example, completion
        return float(next(numbers) % 3)

    return rewards_of(in_turn)


def measure(config: InvariantSpeedConfig, mesh: str, *, invariant: bool) -> Measured:
    """Trains, and times the steps."""
    setup = assemble(options_of(config, mesh, invariant=invariant), rewards=_in_turn())
    feed, records, seconds = setup.feed(), [], []
    for _ in range(config.steps):
        started = time.perf_counter()
        done = take_step(setup, feed)
        assert done is not None and done[0].refusal is None, done
        jax.block_until_ready(setup.learner.state)
        records.append(done[0].metrics)
        seconds.append((done[1].rollout_seconds, time.perf_counter() - started))
    later = seconds[1:] or seconds
    rollout, rest = min(drawn for drawn, _ in later), min(whole - drawn for drawn, whole in later)
    drift = max(metric_of(record, "drift_max") for record in records)
    run = setup.learner.gradients.head_run
    engine = "" if run is None else run.engine
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30
    first = seconds[0][1]
    mode = "invariant" if invariant else "plain"
    digest = digest_of(setup.learner.state)
    losses = [float(record["loss"]) for record in records]
    leaves = digests_of(setup.learner.state.params)
    if config.parts and invariant:
        print_parts(setup, feed)
    return Measured(mode, mesh, setup.sizes.rows, rollout, rest, first, drift, engine, digest, peak, losses, leaves)


def print_parts(setup: Setup, feed: DocumentFeed) -> None:
    """One more step, waiting for every part: the time of each."""
    spent: dict[str, list[float]] = {}

    def timed(name: str, function: Callable) -> Callable:
        def call(*args):
            started = time.perf_counter()
            result = jax.block_until_ready(function(*args))
            spent.setdefault(name, []).append(time.perf_counter() - started)
            return result

        return call

    sums: Any = setup.learner.gradients
    programs = sums._programs
    objects = ((programs, ("load", "body", "head", "head_vjp")), (sums, ("_loss", "_leaf", "_add")))
    for owner, names in objects:
        for name in names:
            setattr(owner, name, timed(name.strip("_"), getattr(owner, name)))
    setup.learner._update = timed("update", setup.learner._update)
    started, done = time.perf_counter(), take_step(setup, feed)
    assert done is not None, "the task is endless"
    rollout, step = done[1].rollout_seconds, time.perf_counter() - started
    print(f"    one step, waiting for every part: rollout {rollout:.3f} s of {step:.3f} s")
    for name, taken in sorted(spent.items(), key=lambda item: -sum(item[1])):
        print(f"    {sum(taken):8.3f} s  {len(taken):5d} x {np.median(taken) * 1e3:9.2f} ms  {name}")


def main(config: InvariantSpeedConfig) -> list[Measured]:
    """Prints the table, a line as soon as it is measured.

    Raises:
        ValueError: an option out of range.
    """
    require(config.model in NAMED_SHAPES, "--model", f"one of {', '.join(NAMED_SHAPES)}", config.model)
    config.join(None)
    _say(f"{jax.device_count()} x {jax.devices()[0].device_kind}, JAX {jax.__version__}, {_shape_name(config)}")
    _say("| run | mesh | rows | head | rollout, s | rest of the step, s | first step, s | drift | state | peak |")
    _say("|---|---|---|---|---|---|---|---|---|---|")
    results = []
    for mesh in config.mesh:
        for invariant in [False] * config.plain + [True] * config.invariant:
            got = measure(config, mesh, invariant=invariant)
            gc.collect()
            results.append(got)
            _say(
                f"| {got.mode} | {mesh} | {got.rows} | {got.head} | {got.rollout_seconds:.3f} | {got.rest_seconds:.3f} "
                f"| {got.first_seconds:.1f} | {got.drift:.3g} | {got.digest} | {got.peak_gib:.1f} GiB |"
            )
            if config.out and processes().first:
                with open(config.out, "a") as file:
                    file.write(json.dumps(dataclasses.asdict(got)) + "\n")
    processes().finish()
    return results


def _say(line: str) -> None:
    """Prints a line, once for all processes."""
    if processes().first:
        print(line, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    run_command(InvariantSpeedConfig, main, program="benchmarks.invariant_speed", description=__doc__)
