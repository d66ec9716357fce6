"""Where the time of a step goes: the profiler's kernels, given to parts by the scopes that their instructions carry."""

import collections
import re
from typing import Any

SCOPES = {
    "attention": "attention",
    "projections": "queries, keys, values",
    "feed_forward": "output product and MLP",
    "head": "head and loss",
}
OPTIMIZER = "optimizer"
OTHER = "embedding, sums, other"


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
