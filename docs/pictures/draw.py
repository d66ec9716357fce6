"""Draws the pictures of README.md and the docs:  python docs/pictures/draw.py

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


def draw_box(
    axes, left: float, bottom: float, title: str, detail: str = "", *, size=(1.5, 1.0), ours: bool = False
) -> None:
    """Draws a box with a title and one or two lines below it."""
    width, height = size
    box = FancyBboxPatch(
        (left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.08", linewidth=1.3,
        edgecolor=SAMPLED if ours else FAINT, facecolor="#eaf4f8" if ours else "white",
    )  # fmt: skip
    axes.add_patch(box)
    middle = left + width / 2
    top = bottom + height * (0.72 if detail else 0.5)
    axes.text(middle, top, title, ha="center", va="center", fontsize=10.5, weight="bold", color=INK)
    axes.text(middle, bottom + height * 0.32, detail, ha="center", va="center", fontsize=9, color=INK)


def draw_arrow(axes, start: tuple[float, float], end: tuple[float, float], label: str = "") -> None:
    """Draws an arrow, its label above the middle."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": INK})
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.1
    axes.text(*middle, label, ha="center", va="bottom", fontsize=9, color=INK)


def save(figure, axes, name: str, width: float, height: float) -> None:
    """Writes a picture of boxes."""
    axes.set_xlim(-0.05, width + 0.05)
    axes.set_ylim(-0.08, height + 0.08)
    axes.axis("off")
    figure.savefig(HERE / name, dpi=160, bbox_inches="tight", pad_inches=0.05, facecolor="white")
    plt.close(figure)


def draw_data_flow() -> None:
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
    for index, (name, detail) in enumerate(steps):
        draw_box(axes, 1.75 * index, 0, name, detail, ours=index > 1)
        if index:
            draw_arrow(axes, (1.75 * index - 0.22, 0.5), (1.75 * index - 0.03, 0.5))
    save(figure, axes, "data_flow.png", 10.25, 1)


def draw_denominators() -> None:
    """Draws two micro-batches of different size: the mean of their means, and the mean of all."""
    figure, axes = plt.subplots(figsize=(10, 2.6))
    draw_box(axes, 0, 1.2, "micro-batch 1", "sum 2, count 2", size=(2, 0.9))
    draw_box(axes, 0, 0, "micro-batch 2", "sum 3, count 6", size=(2, 0.9))
    draw_box(axes, 3.4, 1.2, "divide, then average", "(2/2 + 3/6) / 2 = 0.75", size=(2.9, 0.9))
    draw_box(axes, 3.4, 0, "add, then divide", "(2 + 3) / (2 + 6) = 0.625", size=(2.9, 0.9), ours=True)
    for start in (1.65, 0.45):
        for end in (1.65, 0.45):
            draw_arrow(axes, (2.05, start), (3.35, end))
    axes.text(6.5, 1.65, "changes with the split", va="center", fontsize=10, color=INK)
    axes.text(6.5, 0.45, "the same for every split and mesh", va="center", fontsize=10, color=SAMPLED)
    save(figure, axes, "denominators.png", 9.6, 2.1)


def draw_three_log_probs() -> None:
    """Draws when the log-probs of sampler, old and new policy are computed."""
    figure, axes = plt.subplots(figsize=(11, 2.0))
    draw_box(axes, 0, 0.2, "sampler", "while it draws,\nweights of then", size=(2, 1.1))
    draw_box(axes, 4.2, 0.2, "old", "forward pass of the\ntrainer, weights of then", size=(2.4, 1.1))
    draw_box(axes, 8.8, 0.2, "new", "the step's own forward\npass, weights of now", size=(2.4, 1.1), ours=True)
    draw_arrow(axes, (2.05, 0.75), (4.15, 0.75), "drift: rounding")
    draw_arrow(axes, (6.65, 0.75), (8.75, 0.75), "ratio: learning")
    save(figure, axes, "three_log_probs.png", 11.2, 1.5)


def draw_shards() -> None:
    """Draws a head of four vocabulary shards, and what is sent between them."""
    figure, axes = plt.subplots(figsize=(11, 2.7))
    draw_box(axes, 0, 0.75, "hidden", "[tokens, H]\non every rank", size=(1.8, 1.0))
    for rank in range(4):
        bottom = 1.95 - 0.65 * rank
        draw_box(axes, 3, bottom, f"rank {rank}: vocabulary {rank + 1}/4", size=(2.8, 0.5), ours=True)
        draw_arrow(axes, (1.85, 1.25), (2.95, bottom + 0.25))
        draw_arrow(axes, (5.85, bottom + 0.25), (7.15, 1.25))
    draw_box(axes, 7.2, 0.75, "pmax, psum", "max, sum e^z, target:\n[tokens] each", size=(2.2, 1.0))
    draw_arrow(axes, (9.45, 1.25), (10.15, 1.25))
    draw_box(axes, 10.2, 0.75, "log-probs", "the same on\nevery rank", size=(1.7, 1.0))
    save(figure, axes, "shards.png", 11.9, 2.45)


def draw_fixed_order() -> None:
    """Draws one tree of additions that two meshes cut differently."""
    figure, axes = plt.subplots(figsize=(9.5, 2.9))
    for index in range(8):
        draw_box(axes, 0.9 * index, 0, f"g{index}", size=(0.7, 0.45), ours=True)
    level, centers = 0, [0.35 + 0.9 * index for index in range(8)]
    while len(centers) > 1:
        above = [(left + right) / 2 for left, right in zip(centers[::2], centers[1::2], strict=True)]
        for index, center in enumerate(centers):
            axes.plot([center, above[index // 2]], [0.47 + 0.6 * level, 0.47 + 0.6 * (level + 1)], color=FAINT)
        level, centers = level + 1, above
    axes.text(7.3, 0.22, "granules of the vocabulary", va="center", fontsize=10, color=INK)
    axes.text(7.3, 1.75, "one tree of additions:", va="center", fontsize=10, color=INK)
    axes.text(7.3, 1.4, "a rank adds its branches,", va="center", fontsize=10, color=INK)
    axes.text(7.3, 1.05, "then the ranks' sums are added", va="center", fontsize=10, color=INK)
    save(figure, axes, "fixed_order.png", 11.2, 2.35)


if __name__ == "__main__":
    draw_results(HERE / "results.png")
    for draw in (draw_data_flow, draw_denominators, draw_three_log_probs, draw_shards, draw_fixed_order):
        draw()
