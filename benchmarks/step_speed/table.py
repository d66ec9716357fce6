"""A line of step_speed's table: what was measured, and how it is printed and kept."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.step_speed.step import Rows, model_flops
from experiments.models.decoder_config import DecoderConfig
from experiments.models.mesh import MeshSpec, parse_mesh


@dataclass
class Measured:
    """One line of the table; times are 0 where `why_not` says that nothing ran."""

    program: str
    model: str
    rows: str
    micro_batches: int
    attention: str
    remat: str
    head: str
    param_dtype: str
    optimizer: str
    accumulate: str
    mesh: str = str(MeshSpec())
    support: str = "none"
    milliseconds: float = 0.0
    tokens_per_second: float = 0.0
    mfu: float = 0.0
    mfu_documents: float = 0.0
    state_gib: float = 0.0
    temporaries_gib: float = 0.0
    peak_gib: float = 0.0
    compile_seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    why_not: str | None = None
    spread: float = 0.0
    """Interquartile range of the timed steps over their median."""

    def set_speed(self, shape: DecoderConfig, rows: Rows, num_parameters: int, seconds: float, peak: float) -> None:
        """Time, tokens per second and device, and MFU of a step of `seconds` on devices of `peak` operations per second."""
        # Devices that share the rows of a rank.
        mesh = parse_mesh(self.mesh)
        sharing = mesh.tensor * mesh.sequence
        self.milliseconds, self.tokens_per_second = seconds * 1e3, rows.tokens / seconds / sharing
        self.mfu, self.mfu_documents = (
            model_flops(shape, rows, num_parameters, context) / seconds / peak / sharing
            for context in (rows.length, rows.document)
        )

    def __str__(self) -> str:
        text = (
            f"{self.program:14s} {self.model:13s} {self.rows:>8s} / {self.micro_batches:<2d} {self.attention:8s} "
            f"remat {self.remat:9s} {self.head:9s} {self.param_dtype:8s} {self.optimizer:9s} sums {self.accumulate:8s} "
        )
        text += "" if parse_mesh(self.mesh).num_devices == 1 else f"{self.mesh} "
        text += "" if self.support == "none" else f"support {self.support} "
        if self.why_not is not None:
            return f"{text} {self.why_not}"
        text += (
            f"{self.milliseconds:8.1f} ms {self.tokens_per_second:9,.0f} tokens/s a device  MFU {self.mfu:5.1%} "
            f"({self.mfu_documents:5.1%})  state {self.state_gib:5.2f} GiB  temp {self.temporaries_gib:6.2f} GiB  "
            f"peak {self.peak_gib:6.2f} GiB  "
            f"compiled in {self.compile_seconds:.0f} s"
        )
        parts = ", ".join(f"{part} {milliseconds:.1f}" for part, milliseconds in self.parts.items())
        return f"{text}\n    ms by part: {parts}" if parts else text


def report(row: Measured, out: str | None) -> Measured:
    """Prints a line and appends it to the file `out`, where there is one, as JSON."""
    print(row, flush=True)
    if out is not None:
        with Path(out).open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
    return row
