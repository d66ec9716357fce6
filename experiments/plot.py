"""Draws the curves of one run, or of several seeds: each seed as a thin line, and their mean as a thick one.

python -m experiments.plot runs/A runs/B runs/C --figure seeds.png
"""

if __name__ == "__main__":
    # Before the imports, which Ctrl-C ends in one line too.
    from experiments.entry import run_module

    run_module("experiments.plot")

from dataclasses import dataclass
from pathlib import Path

import tyro

from experiments.command_line import run_command
from experiments.runs.config_file import read_config
from experiments.runs.folder import RunFolder, read_metrics
from experiments.runs.plots import plot_runs
from experiments.terminal import printable
from jaxlogp.errors import require

MAY_DIFFER = ("seed", "name", "out", "quiet", "log_every")
"""Options in which the runs of one figure may differ."""


@dataclass(frozen=True)
class PlotConfig:
    """Options of the figure."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run folders."""
    figure: str = "curves.png"
    """PNG file to write."""


def main(config: PlotConfig) -> Path:
    """Writes the figure and returns its path."""
    figure = Path(config.figure)
    is_file = figure.parent.is_dir() and figure.name != "" and not figure.is_dir()
    require(is_file, "--figure", "a file in an existing folder", figure)
    require(figure.suffix.lower() in ("", ".png"), "--figure", "a PNG file, named .png", figure)
    require(len(config.runs) > 0, "runs", "at least one run folder", "none")
    folders = [RunFolder.open(run) for run in config.runs]
    first, *others = [read_config(folder.config) for folder in folders]
    for run, options in zip(config.runs[1:], others, strict=True):
        differ = [name for name in first if name not in MAY_DIFFER and options.get(name) != first[name]]
        require(not differ, "runs", "runs that differ in their seeds alone", f"{run} with another {', '.join(differ)}")
    runs = [read_metrics(folder.metrics).records for folder in folders]
    for run, records in zip(config.runs, runs, strict=True):
        require(any(record["kind"] == "train" for record in records), "run", "one with optimizer steps", run)
    plot_runs(runs, figure)
    return figure


def run_cli(arguments: list[str] | None = None) -> Path:
    def run(config: PlotConfig) -> Path:
        figure = main(config)
        print(printable(f"written: {figure}"))
        return figure

    return run_command(PlotConfig, run, program="experiments.plot", description=__doc__, arguments=arguments)
