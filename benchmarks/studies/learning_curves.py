"""Draws held-out exact match over the steps of runs, a panel per group: learning curves of algorithms or treatments.

    python -m benchmarks.studies.learning_curves --figure curves.png runs/grpo-0 runs/grpo-1 runs/gspo-0

A group is what a folder's name has before the last hyphen. Its runs are seeds: thin lines, and a thick one of their mean.
"""

import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import tyro
from matplotlib.figure import Figure

from experiments.command_line import run_command
from experiments.runs.folder import read_metrics

MOST_COLUMNS = 4


@dataclass(frozen=True)
class LearningCurvesConfig:
    """Options of the figure."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run folders, named GROUP-SEED."""
    figure: str = "learning_curves.png"
    """PNG file to write."""
    kind: str = "eval"
    """Kind of the records that are drawn, eval or train."""
    metric: str = "exact_match_sampled"
    """Metric of these records."""


Values = dict[int, float]
"""Values of a metric by step."""


def read_groups(config: LearningCurvesConfig) -> dict[str, list[Values]]:
    """Reads the seeds of each group."""
    groups: dict[str, list[Values]] = defaultdict(list)
    for run in map(Path, config.runs):
        records = read_metrics(run / "metrics.jsonl").records
        chosen = [each for each in records if each["kind"] == config.kind]
        groups[run.name.rpartition("-")[0]].append({each["step"]: each[config.metric] for each in chosen})
    return groups


def mean_of(seeds: list[Values]) -> Values:
    """Returns the mean at the steps that all seeds have."""
    common = [step for step in seeds[0] if all(step in values for values in seeds)]
    return {step: statistics.fmean(values[step] for values in seeds) for step in common}


def main(config: LearningCurvesConfig) -> Path:
    """Writes the figure and returns its path."""
    groups = read_groups(config)
    rows = -(-len(groups) // MOST_COLUMNS)
    columns = -(-len(groups) // rows)
    figure = Figure(figsize=(2.6 * columns, 2.1 * rows), dpi=100, layout="constrained")
    for number, (name, seeds) in enumerate(groups.items(), start=1):
        axes = figure.add_subplot(rows, columns, number)
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_ylim(0.0, 1.0)
        axes.grid(True, alpha=0.25)
        for values in seeds:
            axes.plot(list(values), list(values.values()), color="tab:blue", linewidth=0.8, alpha=0.5)
        mean = mean_of(seeds)
        axes.plot(list(mean), list(mean.values()), color="tab:blue", linewidth=2.0)
    path = Path(config.figure)
    figure.savefig(path, metadata={"Software": None})
    return path


if __name__ == "__main__":
    run_command(LearningCurvesConfig, main, program="benchmarks.studies.learning_curves", description=__doc__)
