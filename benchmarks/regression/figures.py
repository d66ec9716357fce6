"""Figures of the guard: what is kept of a kind of device, and which are worse than that."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxlogp.errors import require

LEAST_CHANGE = 0.02
"""Relative changes up to here are noise, however small the spreads are."""


@dataclass(frozen=True)
class Figure:
    """A number that means the same in every run on one kind of device.

    Attributes:
        part: one of the measured parts.
        name: unique in its part.
        value: positive.
        unit: of the value; empty for a ratio or a share.
        spread: how far the value may be off by chance, relative to it.
        more_is_better: True for speeds and shares.
    """

    part: str
    name: str
    value: float
    unit: str
    spread: float
    more_is_better: bool = False

    def __post_init__(self) -> None:
        require(math.isfinite(self.value) and self.value > 0, f"{self.part}, {self.name}", "a number > 0", self.value)

    def __str__(self) -> str:
        digits = 0 if self.value >= 1000 else 1 if self.value >= 10 else 3 if self.value >= 0.1 else 4
        return f"{self.value:,.{digits}f} {self.unit}".strip() + f" ± {self.spread:.1%}"


class Comparison(NamedTuple):
    """A figure that was measured, or kept, or both; measured over kept; and new, missing, same, better or worse."""

    measured: Figure | None
    kept: Figure | None
    ratio: float | None
    verdict: str

    @property
    def failed(self) -> bool:
        return self.verdict in ("worse", "missing")

    def __str__(self) -> str:
        part, name = next((each.part, each.name) for each in self[:2] if isinstance(each, Figure))
        ratio = "–" if self.ratio is None else f"{self.ratio:.3f}"
        return f"| {part} | {name} | {self.measured or '–'} | {self.kept or '–'} | {ratio} | {self.verdict} |"


def compare(measured: Sequence[Figure], kept: Sequence[Figure], parts: Sequence[str]) -> list[Comparison]:
    """Returns a comparison of each figure of these parts, in the order of measuring; those that are missing come last."""
    before = {(figure.part, figure.name): figure for figure in kept if figure.part in parts}
    found = [_compared(figure, before.pop((figure.part, figure.name), None)) for figure in measured]
    return found + [Comparison(None, figure, None, "missing") for figure in before.values()]


def _compared(measured: Figure, kept: Figure | None) -> Comparison:
    if kept is None:
        return Comparison(measured, None, None, "new")
    ratio = measured.value / kept.value
    if abs(ratio - 1.0) <= max(LEAST_CHANGE, measured.spread, kept.spread):
        return Comparison(measured, kept, ratio, "same")
    return Comparison(measured, kept, ratio, "better" if (ratio > 1.0) == measured.more_is_better else "worse")


def kept_path(folder: Path, device_kind: str) -> Path:
    """Returns the file of a kind of device.

    Example:
        >>> kept_path(Path("results"), "NVIDIA H100 80GB HBM3").name
        'regression_h100.json'
    """
    return folder / f"regression_{device_kind.lower().removeprefix('nvidia ').split()[0]}.json"


def write_figures(path: Path, figures: Sequence[Figure], facts: dict[str, Any]) -> None:
    record = {**facts, "figures": [asdict(figure) for figure in figures]}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_figures(path: Path) -> tuple[list[Figure], dict[str, Any]]:
    """Returns the figures of a file, and the facts about their measurement."""
    record = json.loads(path.read_text(encoding="utf-8"))
    return [Figure(**figure) for figure in record.pop("figures")], record
