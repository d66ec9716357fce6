"""Which log-prob paths keep their bits: naive JAX, this library's fast path and its fixed order.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.studies.drift
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.studies.drift --dtype bfloat16

Every path, and the gradient of its hidden states, is checked with ``jaxlogp.check_invariance``: changes of batch,
position, padding, order, neighbours, chunk, jit, mesh and processes that must not matter. Then a drift report says how
far the log-probs of bf16 operands are from those of fp32 operands, and at which token most.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from experiments.command_line import run_command
from jaxlogp import (
    DriftReport,
    InvarianceReport,
    VocabShards,
    check_invariance,
    drift_report,
    linear_log_probs,
    sharded_linear_log_probs,
)
from jaxlogp.head import FixedOrderEngine
from jaxlogp.invariance import ReductionOrder
from jaxlogp.invariance.check import TokenFunction

FIXED = FixedOrderEngine(ReductionOrder(granules=24, vocab_tile=128, row_block=64))


@dataclass(frozen=True)
class DriftConfig:
    """Options of the comparison."""

    tokens: int = 64
    """Number of tokens, at least 8."""
    hidden_size: int = 64
    """H, size of a hidden state."""
    vocab_size: int = 1032
    """V, size of the vocabulary; a multiple of 8, the devices of two processes, and of num_shards."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of hidden states and weight."""
    num_shards: tuple[int, ...] = (2, 3, 4, 8)
    """Numbers of devices to shard the vocabulary over; divisors of 24."""


def naive(hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes log-probs as a trainer without this library does."""
    logits = jnp.dot(hidden, weight.T, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]


def _on_one_device(engine: object, hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    return linear_log_probs(hidden, weight, targets, engine=engine).log_probs


def _over_devices(engine: object, size: int | None, hidden: jax.Array, weight: jax.Array, targets: jax.Array):
    """Log-probs with the vocabulary over `size` devices; None takes every device of every process."""
    devices = jax.devices()[:size]
    mesh = jax.make_mesh((len(devices),), ("tensor",), axis_types=(AxisType.Auto,), devices=devices)
    return sharded_linear_log_probs(hidden, weight, targets, mesh=mesh, token_axes=(), engine=engine).log_probs


fast_on_all_devices = functools.partial(_over_devices, "chunked", None)
fixed_order_on_all_devices = functools.partial(_over_devices, FIXED, None)
PATHS = {
    "naive JAX": (None, "naive"),
    "fast path (chunked)": ("chunked", "fast_on_all_devices"),
    "fixed-order path": (FIXED, "fixed_order_on_all_devices"),
}
"""Engine of each path, None for none, and its function for all devices of several processes, which takes a name."""


def _hidden_gradient(function: TokenFunction) -> TokenFunction:
    """Makes the gradient of the sum of the log-probs with respect to the hidden states, one row per token."""
    return jax.grad(lambda hidden, weight, targets: jnp.sum(function(hidden, weight, targets)))


def _report(name: str, gradient: bool, data: tuple[jax.Array, ...], sizes: tuple[int, ...]) -> InvarianceReport:
    engine, path = PATHS[name]
    function, sharded = naive, {}
    if engine is not None:
        function = functools.partial(_on_one_device, engine)
        sharded = {size: functools.partial(_over_devices, engine, size) for size in sizes}
    if not gradient:
        options = {"name": f"{name}, log-probs", "path": f"benchmarks.studies.drift:{path}"}
    else:
        function, sharded = _hidden_gradient(function), {size: _hidden_gradient(f) for size, f in sharded.items()}
        options = {"name": f"{name}, hidden gradients"}
    return check_invariance(function, *data, num_shards=sizes, sharded=sharded, **options)


def main(config: DriftConfig) -> tuple[list[InvarianceReport], DriftReport]:
    """Prints and returns a report per path and per gradient, and the distance of bf16 from fp32."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (config.tokens, config.hidden_size))
    weight = jax.random.normal(keys[1], (config.vocab_size, config.hidden_size)) * 3.0 / config.hidden_size**0.5
    targets = jax.random.randint(keys[2], (config.tokens,), 0, config.vocab_size)
    print(f"{config}; JAX {jax.__version__}, {len(jax.devices())} device(s), {jax.devices()[0].device_kind}\n")
    reports = []
    for gradient in (False, True):
        for name in PATHS:
            data = hidden.astype(config.dtype), weight.astype(config.dtype), targets
            reports.append(_report(name, gradient, data, config.num_shards))
            print(f"{reports[-1]}\n", flush=True)
    exact, rounded = (
        linear_log_probs(hidden.astype(dtype), weight.astype(dtype), targets).log_probs
        for dtype in ("float32", "bfloat16")
    )
    rounding = drift_report(rounded, exact, targets, vocab=VocabShards.even(config.vocab_size, 1))
    print(f"bf16 operands against fp32 ones, log-probs\n{rounding}\n\nchanges that made a difference:")
    for report in reports:
        print(f"  {report.name:<40} {len(report.broken):>2} of {len(report.differences) - len(report.not_run)}")
    return reports, rounding


if __name__ == "__main__":
    run_command(DriftConfig, main, program="benchmarks.studies.drift", description=__doc__)
