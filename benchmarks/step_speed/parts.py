"""Where the time of a step goes: the profiler's kernels, given to parts by the scopes that their instructions carry."""

import collections
import glob
import gzip
import json
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax

SCOPES = {
    "attention": "attention",
    "projections": "queries, keys, values",
    "feed_forward": "output product and MLP",
    "head": "head and loss",
}
OPTIMIZER = "optimizer"
OTHER = "embedding, sums, other"


def gpu_events(call: Callable[[], Any], repeats: int) -> list[dict[str, Any]]:
    """Kernels and copies on the GPU's streams while ``call`` runs."""
    jax.block_until_ready(call())
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
    complete = [e for e in events if e.get("ph") == "X" and "GPU" in processes.get(e["pid"], "")]
    return [e for e in complete if "Stream" in threads.get((e["pid"], e["tid"]), "")]


def instruction_scopes(module_text: str) -> dict[str, str]:
    """The scope path of every instruction of a compiled module that has one."""
    return dict(re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = .*?op_name=\"([^\"]*)\"", module_text, re.MULTILINE))


def part_of(event: dict[str, Any], scopes: dict[str, str], sums_module: str) -> str:
    """The part of the step that a kernel belongs to."""
    arguments = event.get("args", {})
    if arguments.get("hlo_module", "").partition("(")[0] != sums_module:
        return OPTIMIZER if "applied" in arguments.get("hlo_module", "") else OTHER
    path = scopes.get(arguments.get("hlo_op", ""), "")
    for scope, part in SCOPES.items():
        if re.search(rf"\b{scope}\b", path):
            return part
    return OTHER


def milliseconds_by_part(
    events: list[dict[str, Any]], module_text: str, repeats: int
) -> tuple[dict[str, float], list[tuple[float, int, str, str]]]:
    """Milliseconds of a step by part, and the kernels with the most time: (ms, calls, part, name)."""
    scopes = instruction_scopes(module_text)
    module = re.match(r"HloModule ([\w.-]+)", module_text).group(1)
    parts, kernels, calls = collections.Counter(), collections.Counter(), collections.Counter()
    for event in events:
        part = part_of(event, scopes, module)
        key = (part, re.sub(r"[._]\d+$", "", event["name"]))
        parts[part] += event["dur"] / repeats / 1e3
        kernels[key] += event["dur"] / repeats / 1e3
        calls[key] += 1
    listed = [(ms, calls[key] // repeats, *key) for key, ms in kernels.most_common(40)]
    return dict(parts.most_common()), listed
