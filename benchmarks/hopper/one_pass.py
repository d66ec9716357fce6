"""Gradients in the forward pass and rows without a label, beside the two-step path and one cuBLAS product.

    python benchmarks/hopper/loss_aware.py [H,V ...]

Times are medians of interleaved turns, each at settled clocks (see head.py). "half" has a label on every other token.
"bonus" is an entropy bonus. Errors are relative, those of one pass without a bonus against the two-step path.
"""

import functools
import statistics
import sys

import jax
import jax.numpy as jnp
from head import SHAPES, TOKENS, inputs, seconds

from jaxlogp import linear_log_probs, policy_loss
from jaxlogp.head.hopper import HopperEngine
from jaxlogp.head.policy_loss import linear_policy_gradients

BONUS = 0.01


def relative(a, b):
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def two_steps(hidden, weight, targets, old, advantages, mask, bonus=0.0):
    def objective(hidden, weight):
        values = linear_log_probs(hidden, weight, targets, mask=mask, with_entropy=True, engine=HopperEngine())
        return policy_loss(values.log_probs, old, advantages, mask).sum - bonus * jnp.sum(values.entropy), values

    (d_hidden, d_weight), values = jax.grad(objective, (0, 1), has_aux=True)(hidden, weight)
    return values, d_hidden, d_weight


def one_pass(hidden, weight, targets, old, advantages, mask, bonus=0.0):
    options = {"entropy_coefficient": bonus, "with_entropy": True, "engine": HopperEngine()}
    out = linear_policy_gradients(hidden, weight, targets, old, advantages, mask, **options)
    return out.values, out.hidden, out.weight


def forward(hidden, weight, targets, old, advantages, mask):
    return linear_log_probs(hidden, weight, targets, mask=mask, with_entropy=True, engine=HopperEngine())


def main():
    print(jax.devices()[0].device_kind, "JAX", jax.__version__, flush=True)
    shapes = [tuple(int(x) for x in a.split(",")) for a in sys.argv[1:] if "," in a] or SHAPES
    for hidden_size, vocab in shapes:
        hidden, weight, targets, advantages, noise = inputs(hidden_size, vocab)
        every, half = jnp.ones(TOKENS, bool), jnp.arange(TOKENS) % 2 == 0
        old = linear_log_probs(hidden, weight, targets, engine=HopperEngine()).log_probs + noise
        arguments = hidden, weight, targets, old, advantages
        gemm = jax.jit(lambda h, w: jax.lax.dot_general(h, w, (((1,), (1,)), ((), ()))))
        calls, memory = {"cuBLAS product": functools.partial(gemm, hidden, weight)}, {"cuBLAS product": 0.0}
        results = {}
        with_bonus = functools.partial(one_pass, bonus=BONUS)
        programs = {"forward": forward, "two steps": two_steps, "one pass": one_pass, "one pass, bonus": with_bonus}
        for name, function in programs.items():
            try:
                compiled = jax.jit(function).lower(*arguments, every).compile()
                for label, mask in (("all", every), ("half", half)):
                    results[name, label] = compiled(*arguments, mask)
                    calls[f"{name}, {label}"] = functools.partial(compiled, *arguments, mask)
                    memory[f"{name}, {label}"] = compiled.memory_analysis().temp_size_in_bytes / 2**30
            except Exception as error:  # One that does not compile must not end the run.
                print(f"  {name} failed: {str(error)[:1500]}", flush=True)
        for label in ("all", "half"):
            if ("one pass", label) in results and ("two steps", label) in results:
                (values, *got), (wanted_values, *wanted) = results["one pass", label], results["two steps", label]
                errors = [relative(a, b) for a, b in zip(got, wanted, strict=True)]
                same = bool((values.log_probs == wanted_values.log_probs).all())
                print(
                    f"  {label}: dH, dW differ by {errors[0]:.1e} {errors[1]:.1e}, log-probs bitwise {same}", flush=True
                )
        if ("two steps", "half") in results:
            (some, d_some, _), (whole, d_whole, _) = results["two steps", "half"], results["two steps", "all"]
            same = bool((some.log_probs[half] == whole.log_probs[half]).all())
            same_rows = bool((d_some[half] == d_whole[half]).all())
            print(f"  labels of half equal those of all: log-probs {same}, rows of dH {same_rows}", flush=True)
        results.clear()
        times = {name: [] for name in calls}
        for _ in range(3):
            for name, call in calls.items():
                times[name].append(seconds(call))
        base = statistics.median(times["cuBLAS product"])
        for name, values in times.items():
            median = statistics.median(values)
            row = f"H {hidden_size} V {vocab} {name:21s} {median * 1e3:7.2f} ms  {median / base:.3f} x"
            print(f"{row}  temp {memory[name]:.3f} GiB", flush=True)


if __name__ == "__main__":
    sys.exit(main())
