"""What a training step takes on many GPUs, on paper: FLOPs that are divided, bytes that are sent.

    python -m benchmarks.scaling_model

    step = (T - U) / tensor + U                               compute; U is what every tensor rank does for itself
         + (3 fsdp-parts of the parameters + 2 data-parts of what fsdp left) / speed
         + 4 all-reduces a layer of the residual stream over tensor / speed
         - optimizer · (1 - 1 / (fsdp · tensor))

T is one GPU's step on the same rows a rank. Under fsdp parameters are gathered for the forward and again for the backward,
and their gradients scattered: three times (n - 1) / n of their bytes. Over data gradients are all-reduced: twice. Nothing is
taken to be hidden behind compute, so that larger models, whose layers hide more, do better than here. One constant is
fitted: the speed of NVLink, to the point data=2. U is an estimate, and the speed between hosts an assumption. All else is
measured or counted.
"""

import math
from typing import NamedTuple

NVLINK = 294e9
"""Bytes a second that a GPU sends to those of its host, from data=2 of benchmarks/results/step_scaling_h200.md."""
NETWORK = 40e9
"""The same to another host: 400 Gbit/s a GPU, four fifths of it. Assumed."""
MEMORY = 4.3e12
"""Bytes a second of an H200's memory."""
HOST = 8
"""GPUs of a host."""
ELEMENTWISE = 20
"""Times that norms, rotations and residual sums of a layer read or write its residual stream in a step; an estimate."""


class Shape(NamedTuple):
    """A model and the tokens of one rank of data and fsdp.

    Attributes:
      parameters: P, held and sent in fp32.
      layers: L.
      hidden: H, features of the residual stream, sent in bf16.
      tokens: N a rank.
      step: seconds of a step on one GPU.
      optimizer: seconds of them that the update takes.
    """

    parameters: float
    layers: int
    hidden: int
    tokens: int
    step: float
    optimizer: float = 5.3e-3


QWEN_SHORT = Shape(0.596e9, 28, 1024, 16 * 2048, 0.3229)
QWEN_LONG = Shape(0.596e9, 28, 1024, 4 * 8192, 0.2906)
LLAMA_8B = Shape(8.03e9, 32, 4096, 4 * 8192, 8.03e9 * 6 * 4 * 8192 / (0.5 * 989e12), 0.071)
"""On paper alone: half of an H200's bf16 FLOPs, AdamW at the speed of memory."""


class Mesh(NamedTuple):
    """Sizes of the axes."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        """Of the mesh."""
        return math.prod(self)

    def __str__(self) -> str:
        return ", ".join(f"{axis}={size}" for axis, size in self._asdict().items() if size > 1)


def step_seconds(shape: Shape, mesh: Mesh) -> float:
    """A step on a mesh; neighbours along tensor, then fsdp, are on one host where they fit."""
    residual = 2.0 * shape.tokens * shape.hidden
    alone = ELEMENTWISE * shape.layers * residual / MEMORY
    compute = (shape.step - alone) / mesh.tensor + alone if mesh.tensor > 1 else shape.step
    held = 4.0 * shape.parameters / mesh.tensor
    sent = 3.0 * held * part(mesh.fsdp) / speed(mesh.tensor * mesh.fsdp)
    sent += 2.0 * held / mesh.fsdp * part(mesh.data) / speed(mesh.devices)
    sent += 4.0 * shape.layers * 2.0 * residual * part(mesh.tensor) / speed(mesh.tensor)
    return compute + sent - shape.optimizer * (1.0 - 1.0 / (mesh.fsdp * mesh.tensor))


def part(ranks: int) -> float:
    """Of an array that ranks hold shards of, what each of them receives."""
    return (ranks - 1) / ranks


def speed(neighbours: int) -> float:
    """Bytes a second within a group of this many neighbouring GPUs."""
    return NVLINK if neighbours <= HOST else NETWORK


def of_linear(shape: Shape, mesh: Mesh) -> float:
    """Speed a device over that of one GPU: tensor ranks share the tokens of one rank."""
    return shape.step / (step_seconds(shape, mesh) * mesh.tensor)


def state_bytes(shape: Shape, mesh: Mesh) -> float:
    """Parameters and AdamW's two moments on one device, in fp32."""
    return 12.0 * shape.parameters / (mesh.fsdp * mesh.tensor)


def head_seconds(one: float, gradient: float, ranks: int) -> float:
    """The head's forward and backward over vocabulary shards: products divided, the hidden gradient all-reduced.

    Args:
      one: seconds on one GPU.
      gradient: bytes of the hidden gradient in fp32.
      ranks: vocabulary shards.
    """
    return one / ranks + 2.0 * gradient * part(ranks) / NVLINK


class Point(NamedTuple):
    """A measured time, beside the one on paper."""

    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative, of the prediction."""
        return self.predicted / self.measured - 1.0


MEASURED = (
    (QWEN_SHORT, Mesh(data=2), 0.3310),
    (QWEN_SHORT, Mesh(fsdp=2), 0.3403),
    (QWEN_SHORT, Mesh(tensor=2), 0.2036),
    (QWEN_LONG, Mesh(fsdp=2), 0.3031),
)
"""benchmarks/results/step_scaling_h200.md."""
MEASURED_HEAD = (
    ("H = 4096", 61.06e-3, 8192 * 4096 * 4.0, {2: 31.36e-3, 4: 16.35e-3}),
    ("H = 1024", 15.70e-3, 8192 * 1024 * 4.0, {2: 8.19e-3, 4: 4.54e-3}),
)
"""benchmarks/results/head_tensor_parallel_log.md: seconds of one GPU, bytes of the hidden gradient, seconds of several."""
FARTHER = (
    ("Qwen3-0.6B, 16 x 2048", QWEN_SHORT, (Mesh(data=8), Mesh(data=8, fsdp=8), Mesh(data=64, fsdp=8))),
    ("8B, 4 x 8192", LLAMA_8B, (Mesh(fsdp=8), Mesh(data=8, fsdp=8), Mesh(data=64, fsdp=8), Mesh(data=64, tensor=8))),
)


def points() -> list[Point]:
    """Every measured point."""
    steps = [Point(f"step, {mesh}", seconds, step_seconds(shape, mesh)) for shape, mesh, seconds in MEASURED]
    heads = [
        Point(f"head, {name}, {ranks} GPUs", seconds, head_seconds(one, size, ranks))
        for name, one, size, several in MEASURED_HEAD
        for ranks, seconds in several.items()
    ]
    return steps + heads


def main() -> None:
    """The command line."""
    print("| | measured | on paper | error |\n|---|---|---|---|")
    for point in points():
        times = f"{1e3 * point.measured:.1f} ms | {1e3 * point.predicted:.1f} ms"
        print(f"| {point.name} | {times} | {100 * point.error:+.1f} % |")
    print("\n| model, rows a rank | mesh | GPUs | step | of linear | state a device |\n|---|---|---|---|---|---|")
    for name, shape, meshes in FARTHER:
        for mesh in meshes:
            numbers = f"{1e3 * step_seconds(shape, mesh):.0f} ms | {of_linear(shape, mesh):.2f}"
            print(f"| {name} | {mesh} | {mesh.devices} | {numbers} | {state_bytes(shape, mesh) / 2**30:.1f} GiB |")


if __name__ == "__main__":
    main()
