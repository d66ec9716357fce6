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
