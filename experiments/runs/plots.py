"""The curves of a run in one picture: is it learning, is the policy collapsing, do sampler and trainer agree?"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

WIDTH, HEIGHT, DPI = 1400, 900, 100
BLUE, ORANGE, GREY, RED = "#1f5fa8", "#d1661c", "#7a7a7a", "#b00020"
# Below the rounding of fp32 log-probs: exact agreement is drawn here, because a log scale has no zero.
DRIFT_FLOOR = 1e-8
SMOOTH_OVER = 15
MARKERS_UP_TO = 40
# Two flat panels share the lower left corner, because one pair of axes cannot show a share near 0 and a ratio near 1.
MOSAIC = (
    ("reward", "accuracy", "entropy"),
    ("reward", "accuracy", "entropy"),
    ("clipped", "drift", "loss"),
    ("ratio", "drift", "loss"),
)


class Curve(NamedTuple):
    """One line of a panel: the value `metric` in the records of one kind."""

    metric: str
    label: str = ""
    colour: str = BLUE


class Panel(NamedTuple):
    """One panel: its title, the unit of its axis, its curves, and how the axis behaves."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    kind: str = "train"
    limits: tuple[float | None, float | None] = (None, None)
    smooth: bool = False
    log: bool = False
    legend: bool = True


SAMPLED = Curve("exact_match_sampled", "temperature 1")
GREEDY = Curve("exact_match_greedy", "greedy", ORANGE)
PANELS = {
    "reward": Panel("Training reward", "mean reward of a completion", (Curve("reward_mean"),), smooth=True),
    "accuracy": Panel(
        "Held-out accuracy", "exact match [share of prompts]", (SAMPLED, GREEDY), kind="eval", limits=(-0.02, 1.02)
    ),
    "entropy": Panel("Entropy of the policy", "nats per token", (Curve("entropy"),), limits=(0.0, None)),
    "clipped": Panel(
        "Clipped tokens",
        "share of tokens",
        (Curve("clipped_ratio_fraction"),),
        limits=(0.0, None),
        smooth=True,
        legend=False,
    ),
    "ratio": Panel("Ratio new / old", "mean ratio", (Curve("ratio_new_old"),), smooth=True, legend=False),
    "drift": Panel("Sampler against trainer", "max |Δ log-prob| [nats]", (Curve("drift_max"),), log=True),
    "loss": Panel("Policy loss", "loss of a step", (Curve("loss"),), smooth=True),
}


def plot_curves(metrics: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draws the panels into a PNG of 1400 x 900 pixels.

    A metric without values leaves a note in its panel; values that are not finite become gaps and are counted.

    Args:
        metrics: records of metrics.jsonl, each with step, kind and scalars.
        path: the PNG to write.
    """
    records = list(metrics)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.02, hspace=0.02)
    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, layout=layout)
    FigureCanvasAgg(figure)
    for name, axes in figure.subplot_mosaic([list(row) for row in MOSAIC]).items():
        _draw_panel(axes, PANELS[name], [record for record in records if record["kind"] == PANELS[name].kind])
    # Without the default stamp, the same metrics give the same bytes.
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw_panel(axes: Axes, panel: Panel, records: list[Mapping[str, Any]]) -> None:
    axes.set_title(panel.title, fontsize=14, loc="left")
    axes.set_ylabel(panel.unit, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    lost, latest = 0, []
    for curve in panel.curves:
        chosen = [record for record in records if record.get(curve.metric) is not None]
        values = [float(record[curve.metric]) for record in chosen]
        finite = [value for value in values if math.isfinite(value)]
        lost += len(values) - len(finite)
        if finite:
            latest.append(f"{finite[-1]:.4g}")
            _draw_curve(axes, panel, curve, [record["step"] for record in chosen], values)
    if lost:
        note = f"{lost} not finite, left out"
        axes.text(0.98, 0.03, note, transform=axes.transAxes, ha="right", fontsize=10, color=RED)
    if latest:
        axes.set_title(f"last {' / '.join(latest)}", fontsize=11, loc="right", color=GREY)
        _scale(axes, panel)
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", fontsize=13, color=GREY)
        axes.set(xticks=[], yticks=[])


def _draw_curve(axes: Axes, panel: Panel, curve: Curve, steps: list[int], values: list[float]) -> None:
    shown = [value if math.isfinite(value) else math.nan for value in values]
    if panel.log:
        shown = [value if math.isnan(value) else max(value, DRIFT_FLOOR) for value in shown]
    if panel.smooth and len(steps) > 2 * SMOOTH_OVER:
        axes.plot(steps, shown, color=curve.colour, linewidth=0.8, alpha=0.35, label="each step")
        mean = _trailing_mean(shown)
        axes.plot(steps, mean, color=curve.colour, linewidth=2.0, label=f"mean of {SMOOTH_OVER} steps")
    else:
        marker = "o" if len(steps) <= MARKERS_UP_TO else None
        label = curve.label or None
        axes.plot(steps, shown, color=curve.colour, linewidth=1.6, marker=marker, markersize=4, label=label)


def _scale(axes: Axes, panel: Panel) -> None:
    axes.grid(True, alpha=0.25)
    axes.set_xlabel("step", fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.ticklabel_format(axis="both", useOffset=False)
    first, last = axes.dataLim.intervalx
    if first == last:
        axes.set_xlim(first - 1, last + 1)
    low, high = panel.limits
    smallest, largest = axes.dataLim.intervaly
    if panel.log:
        axes.set_yscale("log")
        axes.set_ylim(DRIFT_FLOOR / 2, largest * 3)
        if smallest <= DRIFT_FLOOR:
            note = f"agreement below {DRIFT_FLOOR:.0e}"
            axes.text(0.02, 0.03, note, transform=axes.transAxes, fontsize=10, color=GREY)
    elif low is not None:
        axes.set_ylim(low, (largest * 1.08 or 1.0) if high is None else high)
    if panel.legend and axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", frameon=False, fontsize=10)


def _trailing_mean(values: list[float]) -> list[float]:
    means = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - SMOOTH_OVER) : end] if math.isfinite(value)]
        means.append(math.fsum(window) / len(window) if window else math.nan)
    return means
