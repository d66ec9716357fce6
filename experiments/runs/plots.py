"""The curves of one run, or of several seeds, in one picture: does it learn, does the policy collapse, do sampler and
trainer agree?"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from experiments.runs.files import replace_file

WIDTH, HEIGHT, DPI = 1400, 1200, 100
BLUE, ORANGE, GREY, RED = "#1f5fa8", "#d1661c", "#7a7a7a", "#b00020"
# Below the rounding of fp32 log-probs: exact agreement is drawn here, because a log scale has no zero.
DRIFT_FLOOR = 1e-8
SMOOTH_OVER = 15
MARKERS_UP_TO = 40
# Two flat panels share the lower left corner, because one pair of axes cannot show a share near 0 and a ratio near 1.
MOSAIC = (
    ("accuracy", "reward", "entropy"),
    ("accuracy", "reward", "entropy"),
    ("length", "truncated", "kl"),
    ("length", "truncated", "kl"),
    ("clipped", "drift", "loss"),
    ("ratio", "drift", "loss"),
)

Series = dict[int, float]
"""Values of a metric by step; NaN where it was not finite."""


class Curve(NamedTuple):
    """One line of a panel: the value `metric` in the records of one kind."""

    metric: str
    label: str = ""
    colour: str = BLUE
    kind: str = "train"


class Panel(NamedTuple):
    """One panel: its title, the unit of its axis, its curves, and how the axis behaves."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    limits: tuple[float | None, float | None] = (None, None)
    smooth: bool = False
    log: bool = False
    legend: bool = True


SAMPLED = Curve("exact_match_sampled", "temperature 1", kind="eval")
GREEDY = Curve("exact_match_greedy", "greedy", ORANGE, kind="eval")
STEP_KL = Curve("kl_new_old_labelled", "before and after the updates of a rollout")
FIRST_KL = Curve("kl_reference", "to the first policy", ORANGE, kind="eval")
LARGEST = Curve("drift_max", "largest of a step")
P99 = Curve("p99", "99 % quantile of a report", ORANGE, kind="drift")
FROM_ZERO = (0.0, None)
# "_labelled": means over documents with a label. Those over all documents shrink where truncated ones are masked.
PANELS = {
    "accuracy": Panel("Held-out accuracy", "exact match [share of prompts]", (SAMPLED, GREEDY), limits=(-0.02, 1.02)),
    "reward": Panel("Training reward", "mean reward of a completion", (Curve("reward_mean"),), smooth=True),
    "entropy": Panel("Entropy of the policy", "nats per token", (Curve("entropy_labelled"),), FROM_ZERO),
    "length": Panel(
        "Completion length", "mean tokens", (Curve("completion_length_mean"),), FROM_ZERO, smooth=True, legend=False
    ),
    "truncated": Panel(
        "Truncated completions", "share without end token", (Curve("truncated_share"),), FROM_ZERO, smooth=True
    ),
    "kl": Panel("KL of policies", "nats per token", (STEP_KL, FIRST_KL), FROM_ZERO),
    "clipped": Panel(
        "Clipped tokens",
        "share of tokens",
        (Curve("clipped_ratio_fraction_labelled"),),
        FROM_ZERO,
        smooth=True,
        legend=False,
    ),
    "ratio": Panel("Ratio new / old", "mean ratio", (Curve("ratio_new_old_labelled"),), smooth=True, legend=False),
    "drift": Panel("Sampler against trainer", "|Δ log-prob| [nats]", (LARGEST, P99), log=True),
    "loss": Panel("Policy loss", "loss of a step", (Curve("loss"),), smooth=True),
}


def plot_runs(runs: Sequence[Iterable[Mapping[str, Any]]], path: Path) -> None:
    """Draws the panels into a PNG of 1400 x 1200 pixels.

    Of several runs every one is a thin line, and their mean, at the steps that all of them have, a thick one. A metric
    without values leaves a note in its panel; values that are not finite become gaps and are counted.

    Args:
        runs: of each run the records of metrics.jsonl, each with step, kind and scalars.
        path: the PNG to write.
    """
    records = [list(each) for each in runs]
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.02, hspace=0.02)
    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, layout=layout)
    FigureCanvasAgg(figure)
    for name, axes in figure.subplot_mosaic([list(row) for row in MOSAIC]).items():
        _draw_panel(axes, PANELS[name], records)
    # Without the default stamp, the same metrics give the same bytes.
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    replace_file(path, content.getvalue())


def series_of(records: Iterable[Mapping[str, Any]], metric: str, kind: str = "train") -> Series:
    """The values of a metric by step; NaN where one is not finite, nothing where there is none."""
    chosen = [record for record in records if record["kind"] == kind and record.get(metric) is not None]
    values = {record["step"]: float(record[metric]) for record in chosen}
    return {step: value if math.isfinite(value) else math.nan for step, value in values.items()}


def mean_series(runs: Sequence[Series]) -> Series:
    """The mean over runs at the steps that all of them have.

    Example:
        >>> mean_series([{1: 1.0, 2: 3.0}, {2: 4.0, 3: 0.0}])
        {2: 3.5}
    """
    common = [step for step in runs[0] if all(step in run for run in runs)] if runs else []
    return {step: math.fsum(run[step] for run in runs) / len(runs) for step in common}


def _draw_panel(axes: Axes, panel: Panel, runs: list[list[Mapping[str, Any]]]) -> None:
    axes.set_title(panel.title, fontsize=14, loc="left")
    axes.set_ylabel(panel.unit, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    lost, latest = 0, []
    for curve in panel.curves:
        drawn = [found for records in runs if (found := series_of(records, curve.metric, curve.kind))]
        lost += sum(math.isnan(value) for each in drawn for value in each.values())
        mean = mean_series(drawn)
        finite = [value for value in mean.values() if math.isfinite(value)]
        if not finite:
            continue
        latest.append(f"{finite[-1]:.4g}")
        if len(drawn) == 1:
            _draw_run(axes, panel, curve, drawn[0])
        else:
            _draw_runs(axes, panel, curve, drawn)
    if lost:
        note = f"{lost} not finite, left out"
        axes.text(0.98, 0.03, note, transform=axes.transAxes, ha="right", fontsize=10, color=RED)
    if latest:
        axes.set_title(f"last {' / '.join(latest)}", fontsize=11, loc="right", color=GREY)
        _scale(axes, panel)
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", fontsize=13, color=GREY)
        axes.set(xticks=[], yticks=[])


def _draw_run(axes: Axes, panel: Panel, curve: Curve, run: Series) -> None:
    steps, shown = list(run), _shown(panel, run)
    if panel.smooth and len(steps) > 2 * SMOOTH_OVER:
        axes.plot(steps, shown, color=curve.colour, linewidth=0.8, alpha=0.35, label="each step")
        mean = _trailing_mean(shown)
        axes.plot(steps, mean, color=curve.colour, linewidth=2.0, label=f"mean of {SMOOTH_OVER} steps")
    else:
        marker = "o" if len(steps) <= MARKERS_UP_TO else None
        label = curve.label or None
        axes.plot(steps, shown, color=curve.colour, linewidth=1.6, marker=marker, markersize=4, label=label)


def _draw_runs(axes: Axes, panel: Panel, curve: Curve, runs: list[Series]) -> None:
    mean = mean_series(runs)
    smooth = panel.smooth and len(mean) > 2 * SMOOTH_OVER
    for run in (*runs, mean):
        shown = _shown(panel, run)
        shown = _trailing_mean(shown) if smooth else shown
        if run is mean:
            label = curve.label or f"mean of {len(runs)} runs"
            axes.plot(list(run), shown, color=curve.colour, linewidth=2.2, label=label)
        else:
            axes.plot(list(run), shown, color=curve.colour, linewidth=0.8, alpha=0.45)


def _shown(panel: Panel, run: Series) -> list[float]:
    if not panel.log:
        return list(run.values())
    return [value if math.isnan(value) else max(value, DRIFT_FLOOR) for value in run.values()]


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
