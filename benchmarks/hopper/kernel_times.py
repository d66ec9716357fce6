"""The head's time by kernel, and how long the GPU waits between kernels; from JAX's profiler.

    python -m benchmarks.hopper.kernel_times [H,V ...]

Each program runs at settled clocks and then four times under the profiler, during whose start the clocks recover: this
shows shares of time, not ratios to the product. "wall" is the time from the start of the first kernel to the end of the
last, "busy" the part in which kernels ran: in the rest the GPU waits for the host.
"""

import collections
import functools
import glob
import gzip
import json
import sys
import tempfile

import jax
import jax.numpy as jnp

from benchmarks.beside_product import cases, product
from benchmarks.clock import settled_seconds
from benchmarks.hopper.one_pass import PROGRAMS, operands

REPEATS = 4
# Kernels that take fewer microseconds per call than this are added up.
LEAST = 8.0


def gpu_events(call):
    """Complete events of the GPU's streams while ``call`` runs REPEATS times, in microseconds."""
    settled_seconds(call)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(REPEATS):
                out = call()
            jax.block_until_ready(out)
        (path,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
    named = [e for e in events if e.get("ph") == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    complete = [e for e in events if e.get("ph") == "X"]
    on_gpu = [e for e in complete if "GPU" in processes.get(e["pid"], "")]
    found = [e for e in on_gpu if "Stream" in threads.get((e["pid"], e["tid"]), "")]
    if not found:
        raise RuntimeError(f"no kernel of a GPU among {len(complete)} events of {sorted(set(processes.values()))}")
    return found


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
            show(name, gpu_events(functools.partial(jax.jit(program), *arguments)))


if __name__ == "__main__":
    main()
