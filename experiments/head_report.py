"""Table and picture of ``experiments.head_speed`` when ratios are to one product hidden · weightᵀ."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# A color for every program that exists, in the order of tables; others get grey.
COLOURS = {
    "materialised": "#7a7a7a",
    "reference": "#b8b8b8",
    "chunked": "#d1661c",
    "fixed_order": "#e3b23c",
    "hopper": "#1f5fa8",
    "cut-cross-entropy": "#3a8f5c",
    "Liger": "#8a5fb0",
    "Liger CuTe DSL": "#5b2d8a",
    "verl": "#b00020",
    "tokamax": "#2aa4a8",
}


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
      forward_seconds: median of settled runs.
      forward_backward_seconds: the same with both gradients.
      forward_ratio: over product_seconds.
      forward_backward_ratio: over product_seconds.
      forward_bytes: temporaries, without arguments and results.
      forward_backward_bytes: the same with the backward pass.
      log_prob_error: largest absolute error against float64 on some rows, in nats.
      entropy_error: the same for entropies.
    """

    shape: str
    tokens: int
    hidden_size: int
    vocab_size: int
    program: str
    product_seconds: float
    forward_seconds: float
    forward_backward_seconds: float
    forward_ratio: float
    forward_backward_ratio: float
    forward_bytes: int | None
    forward_backward_bytes: int | None
    log_prob_error: float | None
    entropy_error: float | None


@dataclass(frozen=True)
class NotRun:
    """A program that was left out of a shape ("" is every shape), and why."""

    shape: str
    program: str
    reason: str


def machine() -> str:
    """Versions and device in one line."""
    device = jax.devices()[0]
    return f"one {device.device_kind} ({device.platform}), JAX {jax.__version__}, Python {platform.python_version()}"


def shapes_markdown(rows: Sequence[ShapeRow], not_run: Sequence[NotRun], dtype: str, repeats: int) -> str:
    """A table for every shape, then what was not run."""
    lines = [
        f"{machine()}; {dtype} operands, entropy on, random upstream gradients of log-probs and entropy; median of "
        f"{repeats} settled runs. × is time over one {product_dtype(dtype)} product hidden · weightᵀ of the same run; "
        "memory is beside arguments and results; errors are the largest on some rows, in nats, against float64.",
    ]
    for shape in dict.fromkeys(row.shape for row in rows):
        these = [row for row in rows if row.shape == shape]
        first = these[0]
        lines += [
            "",
            f"**{shape}**: N={first.tokens}, H={first.hidden_size}, V={first.vocab_size}; "
            f"one product {_milliseconds(first.product_seconds)}",
            "",
            "| program | forward | × | forward+backward | × | memory, forward | forward+backward "
            "| error, log-prob | entropy |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row.program} | {_milliseconds(row.forward_seconds)} | {row.forward_ratio:.2f} "
            f"| {_milliseconds(row.forward_backward_seconds)} | {row.forward_backward_ratio:.2f} "
            f"| {_size(row.forward_bytes)} | {_size(row.forward_backward_bytes)} "
            f"| {_error(row.log_prob_error)} | {_error(row.entropy_error)} |"
            for row in these
        ]
    if not_run:
        lines += ["", "Not run:", ""]
        lines += [f"- {left.program}{f' on {left.shape}' if left.shape else ''}: {left.reason}" for left in not_run]
    return "\n".join(lines)


def product_dtype(dtype: str) -> str:
    """Dtype of the product that counts as 1: bf16 on a GPU, the operands' own elsewhere."""
    return "bfloat16" if jax.devices()[0].platform == "gpu" else dtype


def plot_ratios(rows: Sequence[ShapeRow], path: Path) -> None:
    """Ratios to the product as bars, one panel forward and one with the backward pass; PNG."""
    shapes = list(dict.fromkeys(row.shape for row in rows))
    programs = list(dict.fromkeys(row.program for row in rows))
    figure = Figure(figsize=(max(8.0, 2.0 + 0.55 * len(shapes) * len(programs)), 8.5), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    width = 0.84 / len(programs)
    panels = (("forward_ratio", "Forward", 1), ("forward_backward_ratio", "Forward and backward", 4))
    for axes, (field, title, floor) in zip(figure.subplots(2, 1), panels, strict=True):
        for index, program in enumerate(programs):
            found = {row.shape: getattr(row, field) for row in rows if row.program == program}
            places = [place for place, shape in enumerate(shapes) if shape in found]
            heights = [found[shapes[place]] for place in places]
            left = np.array(places) + (index - (len(programs) - 1) / 2) * width
            bars = axes.bar(left, heights, 0.92 * width, color=COLOURS.get(program, "#555555"), label=program)
            axes.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=8, padding=2)
        axes.axhline(floor, color="k", linewidth=0.9, linestyle="--")
        axes.set_title(f"{title} (dashed: {floor} product{'s' if floor > 1 else ''})", fontsize=11, loc="left")
        axes.set_yscale("log")
        axes.set_yticks([1, 2, 4, 8, 16, 32, 64, 128], ["1", "2", "4", "8", "16", "32", "64", "128"])
        axes.minorticks_off()
        highest = max(getattr(row, field) for row in rows)
        axes.set_ylim(0.5 * min(floor, *(getattr(row, field) for row in rows)), 1.6 * max(highest, floor))
        axes.set_xticks(range(len(shapes)), shapes)
        axes.set_ylabel("× one product")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(6, len(programs)))
    figure.suptitle(f"Log-probs and entropy; {machine()}", fontsize=10)
    figure.savefig(path)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


def _size(amount: int | None) -> str:
    if amount is None:
        return "–"
    return f"{amount / 2**30:.2f} GiB" if amount >= 2**28 else f"{amount / 2**20:.1f} MiB"


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}"
