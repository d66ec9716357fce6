"""The curves of one run, or of several seeds, in one picture: does it learn, does the policy collapse, do sampler and
trainer agree?"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.runs.files import replace_file
from experiments.runs.folder import metric_of

WIDTH, HEIGHT, DPI = 1400, 1200, 100
BLUE, ORANGE, GREY, RED = "#1f5fa8", "#d1661c", "#7a7a7a", "#b00020"
# Below the rounding of fp32 log-probs: exact agreement is drawn here, because a log scale has no zero.
DRIFT_FLOOR = 1e-8
SMOOTH_OVER = 15
MARKERS_UP_TO = 40
COLUMNS = 3
# In inches: a layout that measures every text draws the picture twice.
LEFT, RIGHT, TOP, BOTTOM, BESIDE, BELOW = 0.95, 0.15, 0.55, 0.5, 1.1, 1.0

Series = dict[int, float]
"""Values of a metric by step; NaN where it was not finite."""


class Curve(NamedTuple):
    """One line of a panel: the value `metric` in the records of one kind."""

    metric: str
    label: str | None = None
    colour: str = BLUE
    kind: str = "train"


class Panel(NamedTuple):
    title: str
    unit: str
    curves: tuple[Curve, ...]
    limits: tuple[float, float | None] | None = None
    smooth: bool = False
    log: bool = False


FROM_ZERO = (0.0, None)
# "_labelled": means over documents with a label. Those over all documents shrink where truncated ones are masked.
PANELS = (
    Panel("Held-out accuracy", "exact match [share of prompts]", (
        Curve("exact_match_sampled", "temperature 1", kind="eval"),
        Curve("exact_match_greedy", "greedy", ORANGE, kind="eval"),
    ), limits=(-0.02, 1.02)),
    Panel("Held-out loss", "nats per label", (Curve("held_out_loss", kind="eval"),)),
    Panel("Training reward", "mean reward of a completion", (Curve("reward_mean"),), smooth=True),
    Panel("Entropy of the policy", "nats per token", (Curve("entropy_labelled"),), limits=FROM_ZERO),
    Panel("Completion length", "mean tokens", (Curve("completion_length_mean"),), FROM_ZERO, True),
    Panel("Truncated completions", "share without end token", (Curve("truncated_share"),), FROM_ZERO, True),
    Panel("KL of policies", "nats per token", (
        Curve("kl_new_old_labelled", "before and after the updates of a rollout"),
        Curve("kl_reference", "to the first policy", ORANGE, kind="eval"),
        Curve("kl_new_ref_labelled", "to the reference of the loss", RED),
    ), limits=FROM_ZERO),
    Panel("Clipped tokens", "share of tokens", (Curve("clipped_ratio_fraction_labelled"),), FROM_ZERO, True),
    Panel("Ratio new / old", "mean ratio", (Curve("ratio_new_old_labelled"),), smooth=True),
    Panel("Sampler against trainer", "|Δ log-prob| [nats]", (
        Curve("drift_max", "largest of a step"),
        Curve("p99", "99 % quantile of a report", ORANGE, kind="drift"),
    ), log=True),
    Panel("Loss", "loss of a step", (Curve("loss"),), smooth=True),
)  # fmt: skip


def plot_runs(runs: Sequence[Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draws the records of metrics.jsonl of each run into a PNG of 1400 x 1200 pixels.

    Of several runs every one is a thin line, and their mean, at the steps that all of them have, a thick one. A panel whose
    values are all equal, or all missing, is left out; values that are not finite become gaps and are counted.
    """
    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI)
    panels = [panel for panel in PANELS if _varies(panel, runs)]
    for number, panel in enumerate(panels):
        _draw_panel(_axes(figure, number, math.ceil(len(panels) / COLUMNS)), panel, runs)
    if not panels:
        figure.text(0.5, 0.5, "no values that differ", ha="center", fontsize=14, color=GREY)
    # Without the default stamp, the same metrics give the same bytes.
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    replace_file(path, content.getvalue())


def _axes(figure: Figure, number: int, rows: int) -> Axes:
    """The place of a panel, the first at the top left."""
    wide, high = WIDTH / DPI, HEIGHT / DPI
    row, column = divmod(number, COLUMNS)
    width = (wide - LEFT - RIGHT - (COLUMNS - 1) * BESIDE) / COLUMNS
    height = (high - TOP - BOTTOM - (rows - 1) * BELOW) / rows
    left, bottom = LEFT + column * (width + BESIDE), high - TOP - height - row * (height + BELOW)
    return figure.add_axes((left / wide, bottom / high, width / wide, height / high))


def _varies(panel: Panel, runs: Sequence[Sequence[Mapping[str, Any]]]) -> bool:
    series = [_series(records, curve) for curve in panel.curves for records in runs]
    # NaN differs from everything, itself included, and its panel tells how many there are.
    values = [value for each in series for value in each.values()]
    return any(value != values[0] for value in values)


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    # The empty second line has room for the latest values at its right.
    axes.set_title(f"{panel.title}\n", fontsize=14, loc="left")
    axes.set_ylabel(panel.unit, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    lost, latest = 0, []
    for curve in panel.curves:
        drawn = [series for records in runs if (series := _series(records, curve))]
        lost += sum(math.isnan(value) for series in drawn for value in series.values())
        common = [step for step in drawn[0] if all(step in series for series in drawn)] if drawn else []
        mean = {step: math.fsum(series[step] for series in drawn) / len(drawn) for step in common}
        finite = [value for value in mean.values() if math.isfinite(value)]
        if finite:
            latest.append(f"{finite[-1]:.4g}")
            _draw_curve(axes, panel, curve, drawn, mean)
    if lost:
        note = f"{lost} not finite, left out"
        axes.text(0.98, 0.03, note, transform=axes.transAxes, ha="right", fontsize=10, color=RED)
    if latest:
        axes.set_title(f"last {' / '.join(latest)}", fontsize=11, loc="right", color=GREY)
        _scale(axes, panel)
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", fontsize=13, color=GREY)
        axes.set(xticks=[], yticks=[])


def _series(records: Iterable[Mapping[str, Any]], curve: Curve) -> Series:
    found = {each["step"]: metric_of(each, curve.metric) for each in records if each["kind"] == curve.kind}
    values = {step: float(value) for step, value in found.items() if value is not None}
    return {step: value if math.isfinite(value) else math.nan for step, value in values.items()}


def _draw_curve(axes: Axes, panel: Panel, curve: Curve, runs: list[Series], mean: Series) -> None:
    smooth = panel.smooth and len(mean) > 2 * SMOOTH_OVER
    several = len(runs) > 1

    def plot(series: Series, smoothed: bool, **style: Any) -> None:
        # The maximum of NaN and a number is the first of them.
        values = [max(value, DRIFT_FLOOR) if panel.log else value for value in series.values()]
        axes.plot(list(series), _trailing_mean(values) if smoothed else values, color=curve.colour, **style)

    if several or smooth:
        for run in runs:
            plot(run, several and smooth, linewidth=0.8, alpha=0.4, label=None if several else "each step")
    over = f"{len(runs)} runs" if several else f"{SMOOTH_OVER} steps"
    label = curve.label or (f"mean of {over}" if several or smooth else None)
    marker = "o" if len(mean) <= MARKERS_UP_TO and not several else None
    plot(mean, smooth, linewidth=2.0, marker=marker, markersize=4, label=label)


def _scale(axes: Axes, panel: Panel) -> None:
    axes.grid(True, alpha=0.25)
    axes.set_xlabel("step", fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.ticklabel_format(axis="both", useOffset=False)
    first, last = axes.dataLim.intervalx
    if first == last:
        axes.set_xlim(first - 1, last + 1)
    smallest, largest = axes.dataLim.intervaly
    if panel.log:
        axes.set_yscale("log")
        axes.set_ylim(DRIFT_FLOOR / 2, largest * 3)
        if smallest <= DRIFT_FLOOR:
            note = f"agreement below {DRIFT_FLOOR:.0e}"
            axes.text(0.02, 0.03, note, transform=axes.transAxes, fontsize=10, color=GREY)
    elif panel.limits is not None:
        low, high = panel.limits
        axes.set_ylim(low, largest * 1.08 or 1.0 if high is None else high)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", frameon=False, fontsize=9)


def _trailing_mean(values: list[float]) -> list[float]:
    means = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - SMOOTH_OVER) : end] if math.isfinite(value)]
        means.append(math.fsum(window) / len(window) if window else math.nan)
    return means
