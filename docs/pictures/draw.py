"""Draws the pictures of README.md:  python docs/pictures/draw.py

The scores are those of benchmarks/results/default_runs_cpu.md and smollm2_h200.md, three seeds each.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

HERE = Path(__file__).parent
SAMPLED, GREEDY, INK, FAINT = "#0b6e99", "#d9730d", "#24292f", "#8c959f"
# Held-out exact match at each stage, one row per seed.
RUNS = {
    "Addition, from scratch\n(two CPU cores, about 5 minutes)": (
        ("warm start", "1000 steps\nof GRPO"),
        {
            "sampled": ((0.41, 0.87), (0.37, 0.80), (0.37, 0.94)),
            "greedy": ((0.69, 0.90), (0.60, 0.82), (0.57, 0.95)),
        },
    ),
    "Word problems, SmolLM2-135M\n(one H200, 8 minutes)": (
        ("as published", "15 supervised\nsteps", "640 steps\nof GRPO"),
        {
            "sampled": ((0.012, 0.262, 0.725), (0.012, 0.301, 0.729), (0.012, 0.277, 0.756)),
            "greedy": ((0.035, 0.422, 0.758), (0.035, 0.441, 0.766), (0.035, 0.428, 0.783)),
        },
    ),
}


def draw_results(path: Path) -> None:
    """Draws the held-out accuracy of both runs before and after training."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for panel, (title, (stages, scores)) in zip(panels, RUNS.items(), strict=True):
        for (kind, seeds), color in zip(scores.items(), (SAMPLED, GREEDY), strict=True):
            for seed in seeds:
                panel.plot(stages, seed, color=color, marker="o", markersize=4, linewidth=1.5, alpha=0.6)
            last = sum(seed[-1] for seed in seeds) / len(seeds)
            offset = 0.03 if kind == "greedy" else -0.03
            panel.annotate(
                f"{kind} {last:.2f}", (len(stages) - 1, last + offset), xytext=(9, 0), textcoords="offset points",
                color=color, va="center",
            )  # fmt: skip
        panel.set_title(title, fontsize=10, color=INK)
        panel.set_ylim(0, 1)
        panel.margins(x=0.1)
        panel.set_xlim(-0.2, len(stages) - 1 + 0.22 * len(stages))
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#eaeef2")
    panels[0].set_ylabel("held-out exact match")
    figure.savefig(path, dpi=160)
    plt.close(figure)


def draw_data_flow(path: Path) -> None:
    """Draws the way from tokens to the one division."""
    steps = (
        ("tokens", "documents packed\ninto rows"),
        ("hidden", "[tokens, H]\nyour model's body"),
        ("log-probs", "and entropy; no\n[tokens, V] logits"),
        ("loss, metrics", "sums and counts\nper rank"),
        ("psum, add", "over ranks and\nmicro-batches"),
        ("divide once", "by the totals of\nthe whole step"),
    )
    figure, axes = plt.subplots(figsize=(12.5, 1.6))
    width, gap = 1.5, 0.25
    for index, (name, detail) in enumerate(steps):
        ours = index > 1
        left = index * (width + gap)
        box = FancyBboxPatch(
            (left, 0), width, 1, boxstyle="round,pad=0,rounding_size=0.08", linewidth=1.3,
            edgecolor=SAMPLED if ours else FAINT, facecolor="#eaf4f8" if ours else "white",
        )  # fmt: skip
        axes.add_patch(box)
        axes.text(left + width / 2, 0.72, name, ha="center", va="center", fontsize=10.5, weight="bold", color=INK)
        axes.text(left + width / 2, 0.32, detail, ha="center", va="center", fontsize=9, color=INK)
        if index:
            start = left - gap + 0.03
            axes.annotate("", (left - 0.03, 0.5), (start, 0.5), arrowprops={"arrowstyle": "->", "color": INK})
    axes.set_xlim(-0.05, len(steps) * (width + gap) - gap + 0.05)
    axes.set_ylim(-0.08, 1.08)
    axes.axis("off")
    figure.savefig(path, dpi=160, bbox_inches="tight", pad_inches=0.05, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    draw_results(HERE / "results.png")
    draw_data_flow(HERE / "data_flow.png")
