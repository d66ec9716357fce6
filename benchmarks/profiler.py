"""What ran on the GPU, from JAX's profiler."""

import glob
import gzip
import json
import tempfile
from collections.abc import Callable
from typing import Any

import jax


def gpu_events(call: Callable[[], Any], repeats: int) -> list[dict[str, Any]]:
    """Complete events of the GPU's streams while ``call``, which has run before, runs ``repeats`` times; microseconds.

    Raises:
        RuntimeError: nothing ran on a GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
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


def print_slowest(events: list[dict[str, Any]], most: int, steps: int) -> None:
    """Prints microseconds and calls a step of the kernels that take the longest.

    Args:
        events: events of :func:`gpu_events`.
        most: number of kernels to print.
        steps: number of steps during which the events were recorded.
    """
    durations: dict[str, list[float]] = {}
    for event in events:
        durations.setdefault(event["name"], []).append(event["dur"])
    for name, taken in sorted(durations.items(), key=lambda item: -sum(item[1]))[:most]:
        print(f"    {sum(taken) / steps:8.1f} us a step  {len(taken) / steps:6.1f} x  {name[:90]}")
