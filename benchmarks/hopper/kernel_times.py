"""The head's time by kernel, and how long the GPU waits between kernels; from JAX's profiler.

    python -m benchmarks.hopper.kernel_times [H,V ...]

Each program runs at settled clocks and then four times under the profiler, during whose start the clocks recover: this
shows shares of time, not ratios to the product. "wall" is the time from the start of the first kernel to the end of the
last, "busy" the part in which kernels ran: in the rest the GPU waits for the host.
"""

import collections
import functools
import sys

import jax
import jax.numpy as jnp

from benchmarks.beside_product import cases, product
from benchmarks.clock import settled_seconds
from benchmarks.hopper.one_pass import PROGRAMS, operands
from benchmarks.profiler import gpu_events

REPEATS = 4
# Kernels that take fewer microseconds per call than this are added up.
LEAST = 8.0


def show(name, events):
    total, count = collections.Counter(), collections.Counter()
    for event in events:
        total[event["name"]] += event["dur"] / REPEATS
        count[event["name"]] += 1
    wall = (max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)) / REPEATS
    print(f"  {name}: wall {wall / 1e3:.3f} ms, busy {total.total() / 1e3:.3f} ms")
    for kernel, microseconds in total.most_common():
        if microseconds >= LEAST:
            print(f"    {microseconds / 1e3:8.3f} ms  {count[kernel] / REPEATS:5.1f} times  {kernel[:90]}")
    rest = sum(x for x in total.values() if x < LEAST)
    print(f"    {rest / 1e3:8.3f} ms  rest", flush=True)


def main() -> None:
    for case in cases(sys.argv[1:]):
        arguments = operands(case, jnp.ones(case.targets.shape, bool))
        print(case.label, flush=True)
        for name, program in ({"product": lambda h, w, *_: product(h, w)} | PROGRAMS).items():
            call = functools.partial(jax.jit(program), *arguments)
            settled_seconds(call)
            show(name, gpu_events(call, REPEATS))


if __name__ == "__main__":
    main()
