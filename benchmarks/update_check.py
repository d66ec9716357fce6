"""What the check of an update costs: an optimizer step as the trainer makes it, and without the check.

    python -m benchmarks.update_check                                     # Qwen3-0.6B, every optimizer

The trainer applies an update only where loss, gradient norm, every new parameter and every new number of the optimizer's
state are finite. Of AdamW it computes them twice, so that what is checked need not be kept; of the others once, and checks
what is to be stored ("kept"); see `experiments.training.update`. "none" checks loss and gradient norm alone.
"""

import os
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.clock import time_in_turns
from experiments.command_line import run_command
from experiments.config import OptimizerConfig
from experiments.models.decoder import Decoder
from experiments.models.named_shapes import NAMED_SHAPES
from experiments.training.optimizers import OPTIMIZERS
from experiments.training.soundness import Soundness
from experiments.training.sums import MicroSums
from experiments.training.update import Update
from jaxlogp import PolicyMetricTerms, StepSums, WeightedSum


@dataclass(frozen=True)
class UpdateCheckConfig:
    """Options of the benchmark."""

    model: str = "qwen3-0.6b"
    """A shape of experiments.models.named_shapes."""
    layers: int | None = None
    """Layers instead of the model's."""
    optimizer: tuple[str, ...] = tuple(OPTIMIZERS)
    """Optimizers to measure."""
    param_dtype: str = "float32"
    """Dtype of the parameters."""
    turns: int = 5
    """Timed runs of each; the median counts."""


class _Unchecked(Update):
    """Checks loss and gradient norm alone."""

    def _soundness(self, loss, norm, trees) -> Soundness:
        return Soundness(
            jnp.isfinite(loss), jnp.isfinite(norm), *(jnp.ones(len(jax.tree.leaves(tree)), bool) for tree in trees)
        )


KINDS = {"twice": (Update, True), "kept": (Update, False), "none": (_Unchecked, False)}
"""A class, and whether its optimizer is taken for an elementwise one."""


def measure(config: UpdateCheckConfig, name: str) -> dict[str, tuple[float, float]]:
    """Seconds of an update, and GiB of its temporaries, by kind of check."""
    changes = {} if config.layers is None else {"num_layers": config.layers}
    shape = replace(NAMED_SHAPES[config.model], param_dtype=config.param_dtype, **changes)
    params = nnx.state(nnx.jit(lambda: Decoder(shape, rngs=nnx.Rngs(0)))())
    gradients = jax.tree.map(lambda x: jnp.full(x.shape, 1e-3, jnp.float32), params)
    one = WeightedSum(jnp.float32(1.0), jnp.float32(1.0))
    step = MicroSums(StepSums.of(gradients, one, PolicyMetricTerms({})), jnp.float32(0.0))
    results = {}
    for kind, (make, elementwise) in KINDS.items():
        optimizer = OptimizerConfig(name=name, learning_rate=1e-6).optimizer(100)
        optimizer.elementwise = elementwise
        update = make(optimizer, lambda tree: tree)
        held = [update.init(jax.tree.map(jnp.copy, params))]

        def call(update=update, held=held):
            held[0], applied = update(held[0], step)
            return applied

        jax.block_until_ready(call())
        memory = update._apply.lower(held[0], step).compile().memory_analysis()
        timings, failed = time_in_turns({kind: (call, jax.block_until_ready)}, config.turns)
        if failed:
            raise failed[kind]
        results[kind] = timings[kind].seconds, memory.temp_size_in_bytes / 2**30
    return results


def main(config: UpdateCheckConfig) -> None:
    """Prints the table, a line as soon as it is measured."""
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {config.model}, {config.param_dtype} parameters")
    print("| optimizer | no check, ms | computed twice, ms | ratio | checked as kept, ms | ratio | temporaries, GiB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in config.optimizer:
        found = measure(config, name)
        (none, _), (twice, _), (kept, _) = (found[kind] for kind in ("none", "twice", "kept"))
        memory = ", ".join(f"{found[kind][1]:.2f}" for kind in ("none", "twice", "kept"))
        print(
            f"| {name} | {none * 1e3:.2f} | {twice * 1e3:.2f} | {twice / none:.2f} | {kept * 1e3:.2f} "
            f"| {kept / none:.2f} | {memory} |",
            flush=True,
        )


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    run_command(UpdateCheckConfig, main, program="benchmarks.update_check", description=__doc__)
