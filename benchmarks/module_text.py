"""Facts from the text of a compiled module: its collectives, and elementwise multiplications of an array."""

import re

import numpy as np

COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
BITS = {"pred": 8, "f16": 16, "bf16": 16, "f32": 32, "s32": 32, "u32": 32, "f64": 64, "s64": 64}


def collectives(text: str) -> str:
    """Name, number and bytes of every kind of collective in a compiled module."""
    found: dict[str, list[int]] = {}
    for result, name in re.findall(rf"= (\(?[^=()]*(?:\([^=()]*\)[^=()]*)*\)?) ({COLLECTIVES})(?:-start)?\(", text):
        shapes = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", result)
        sizes = [BITS.get(kind, 32) // 8 * np.prod([int(n) for n in dims.split(",") if n]) for kind, dims in shapes]
        found.setdefault(name, []).append(int(sum(sizes)))
    listed = [f"{len(sizes)} {name} ({', '.join(f'{n:,}' for n in sizes)} bytes)" for name, sizes in found.items()]
    return "; ".join(listed) or "no collective"


def multiplications(text: str, shape: tuple[int, ...]) -> int:
    """How often a compiled module multiplies arrays of a shape elementwise, inside fusions too."""
    return len(re.findall(rf"= \w+\[{','.join(map(str, shape))}\]\S* multiply\(", text))
