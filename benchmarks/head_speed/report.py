"""Table and plot of ``benchmarks.head_speed`` when ratios are to one product hidden · weightᵀ."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.cases import ENTROPY_BONUS, SPREAD

COLUMNS = (
    " program ",
    " forward ",
    " × ",
    " forward+backward ",
    " × ",
    " memory, forward ",
    " forward+backward ",
    " error, log-prob ",
    " entropy ",
    " d hidden ",
    " d weight ",
    " gives ",
)
# Field, colour, label, and offset of the bar next to its program's others.
PANELS = (
    ("forward_ratio", "#8fb3d9", "forward", -0.2),
    ("forward_backward_ratio", "#1f5fa8", "forward and backward", 0.2),
)


@dataclass(frozen=True)
class ShapeRow:
    """One program on one shape; None where it has no such figure.

    Attributes:
        shape: label of the shape.
        tokens: N.
        hidden_size: H.
        vocab_size: V.
        program: engine or peer.
        product_seconds: the product of this shape.
        product_by: what computed the product.
        forward_seconds: median of settled runs.
        forward_backward_seconds: the same with both gradients.
        forward_ratio: forward_seconds / product_seconds.
        forward_backward_ratio: forward_backward_seconds / product_seconds.
        forward_bytes: temporaries, without arguments and results.
        forward_backward_bytes: the same with the backward pass.
        log_prob_error: largest absolute error against float64, in nats.
        entropy_error: the same for entropies.
        d_hidden_error: relative error in norm of some rows against float64.
        d_weight_error: the same for the weight.
        turns: number of turns over which the medians were taken.
        gives: what the program computes.
        spread: interquartile range of the ratios of all turns, of forward and backward, over their median.
    """

    shape: str
    tokens: int
    hidden_size: int
    vocab_size: int
    program: str
    product_seconds: float
    product_by: str
    forward_seconds: float | None
    forward_backward_seconds: float
    forward_ratio: float | None
    forward_backward_ratio: float
    forward_bytes: int | None
    forward_backward_bytes: int | None
    log_prob_error: float | None
    entropy_error: float | None
    d_hidden_error: float | None
    d_weight_error: float | None
    turns: int
    gives: str
    spread: float = 0.0


@dataclass(frozen=True)
class NotRun:
    """A program that was not run on a shape ("" means every shape) or failed on it, and why."""

    shape: str
    program: str
    reason: str
    failed: bool = False


def machine() -> str:
    """Versions and device in one line."""
    device = jax.devices()[0]
    return f"one {device.device_kind} ({device.platform}), JAX {jax.__version__}, Python {platform.python_version()}"


def shapes_markdown(
    rows: Sequence[ShapeRow], not_run: Sequence[NotRun], dtype: str, repeats: int, versions: Mapping[str, str]
) -> str:
    """A table for every shape, with programs that failed on it as rows with the reason, then the programs not run."""
    others = ", ".join(f"{name} {number}" for name, number in versions.items() if name != "jax")
    lines = [
        f"{machine()}, {others}; {dtype} operands, logits of σ = {SPREAD:g}, random upstream gradients of log-probs, "
        f"{ENTROPY_BONUS} of entropies; median of {repeats} settled runs in turns. × is time over one "
        f"{product_dtype(dtype)} product hidden · weightᵀ of the same turns; memory excludes arguments and results; "
        "errors are against float64: the largest of log-probs and entropies in nats, of gradients relative in norm on "
        "some rows.",
    ]
    failed = [left for left in not_run if left.failed]
    for shape in dict.fromkeys([row.shape for row in rows] + [left.shape for left in failed]):
        these = [row for row in rows if row.shape == shape]
        head = f"**{shape}**"
        if these:
            first = these[0]
            head += f": H={first.hidden_size}, V={first.vocab_size}; one product {_milliseconds(first.product_seconds)}"
            head += f" ({first.product_by})"
        lines += ["", head, "", "|".join(["", *COLUMNS, ""]), "|---" * len(COLUMNS) + "|"]
        lines += [_line(row, repeats) for row in these]
        lines += [
            f"| {left.program} |{' – |' * (len(COLUMNS) - 2)} {left.reason.replace('|', '/')} |"
            for left in failed
            if left.shape == shape
        ]
    quiet = [left for left in not_run if not left.failed]
    if quiet:
        lines += ["", "Not run:", ""]
        for shape, reason in dict.fromkeys((left.shape, left.reason) for left in quiet):
            names = [left.program for left in quiet if (left.shape, left.reason) == (shape, reason)]
            lines.append(f"- {'; '.join(names)}{f' on {shape}' if shape else ''}: {reason}")
    return "\n".join(lines)


def _line(row: ShapeRow, repeats: int) -> str:
    forward = (_milliseconds(row.forward_seconds), f"{row.forward_ratio:.2f}") if row.forward_ratio else ("–", "–")
    cells = (
        row.program,
        *forward,
        _milliseconds(row.forward_backward_seconds),
        f"{row.forward_backward_ratio:.2f}",
        _size(row.forward_bytes),
        _size(row.forward_backward_bytes),
        *(_error(x) for x in (row.log_prob_error, row.entropy_error, row.d_hidden_error, row.d_weight_error)),
        row.gives + (f"; {row.turns} of {repeats} turns" if row.turns < repeats else ""),
    )
    return f"| {' | '.join(cells)} |"


def product_dtype(dtype: str) -> str:
    """Dtype of the product that counts as 1: bf16 on a GPU, the operands' own elsewhere."""
    return "bfloat16" if jax.devices()[0].platform == "gpu" else dtype


def plot_ratios(rows: Sequence[ShapeRow], path: Path) -> None:
    """Ratios to the product as bars, one panel per shape, forward and with the backward pass; PNG."""
    shapes = list(dict.fromkeys(row.shape for row in rows))
    programs = list(dict.fromkeys(row.program for row in rows))
    across = min(len(shapes), 4)
    down = -(-len(shapes) // across)
    figure = Figure(
        figsize=(2.4 + 3.3 * across, 1.4 + down * (0.8 + 0.42 * len(programs))), dpi=100, layout="constrained"
    )
    FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, sharey=True, squeeze=False)
    highest = max(max(row.forward_backward_ratio, row.forward_ratio or 0.0) for row in rows)
    for axes, shape in zip(panels.flat, shapes, strict=False):
        found = {row.program: row for row in rows if row.shape == shape}
        for field, colour, label, offset in PANELS:
            ratios = {
                place: ratio
                for place, program in enumerate(programs)
                if program in found and (ratio := getattr(found[program], field)) is not None
            }
            places = [place + offset for place in ratios]
            bars = axes.barh(places, list(ratios.values()), 0.38, color=colour, label=label)
            axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios.values()], fontsize=8, padding=2)
        for floor in (1, 4):
            axes.axvline(floor, color="k", linewidth=0.8, linestyle="--", zorder=0)
        axes.set_xscale("log")
        ticks = [2**power for power in range(0, 11, 2 if highest > 64 else 1)]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlim(0.7, 2.2 * max(highest, 4))
        axes.set_yticks(range(len(programs)), programs)
        axes.set_ylim(len(programs) - 0.4, -0.6)
        axes.set_title(shape, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels.flat[len(shapes) :]:
        axes.set_visible(False)
    figure.supxlabel("time, × one product (dashed: 1 and 4)", fontsize=10)
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=9)
    figure.suptitle(machine(), fontsize=10, x=0.01, ha="left")
    figure.savefig(path)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


def _size(amount: int | None) -> str:
    if amount is None:
        return "–"
    return f"{amount / 2**30:.2f} GiB" if amount >= 2**28 else f"{amount / 2**20:.1f} MiB"


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}"
