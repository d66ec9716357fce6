"""Draws the curves of one run, or of several seeds of one, and writes a page about them.

    python -m experiments.plot runs/A --figure a.png
    python -m experiments.plot runs/A runs/B runs/C --figure seeds.png --page seeds.md --title "Three seeds"

Several runs may differ in their seeds alone: each is a thin line, their mean a thick one. Page and figure are made of
what is in the run folders; nothing is measured again.
"""

if __name__ == "__main__":
    # Before the imports, which Ctrl-C ends in one line too.
    from experiments.entry import run_module

    run_module("experiments.plot")

import os
from dataclasses import dataclass
from pathlib import Path

import tyro

from experiments.command_line import run_command
from experiments.runs.files import replace_file
from experiments.runs.page import page, read_runs
from experiments.runs.plots import plot_runs
from experiments.terminal import printable
from jaxlogp.errors import require


@dataclass(frozen=True)
class PlotConfig:
    """Options of figure and page."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run folders."""
    figure: str = "curves.png"
    """PNG to write."""
    page: str | None = None
    """Markdown file to write."""
    title: str = "A run"
    """Heading of the page."""
    samples: int = 3
    """Held-out prompts on the page, each with the completions before and after."""


def main(config: PlotConfig) -> list[Path]:
    """Writes what was asked for; returns the files.

    Raises:
      ValueError: a run folder that cannot be read, runs with different options, or a folder that does not exist.
    """
    require(config.samples >= 0, "--samples", "at least 0", config.samples)
    figure, text = Path(config.figure), None if config.page is None else Path(config.page)
    for option, path in (("--figure", figure), ("--page", text)):
        if path is not None:
            require(path.parent.is_dir(), option, "a file in an existing folder", path)
    runs = read_runs(config.runs)
    plot_runs([run.metrics for run in runs], figure)
    if text is None:
        return [figure]
    relative = Path(os.path.relpath(figure.resolve(), text.resolve().parent)).as_posix()
    written = page(runs, title=config.title, figure=relative, samples=config.samples)
    replace_file(text, written.encode())
    return [figure, text]


def run_cli(arguments: list[str] | None = None) -> list[Path]:
    """The command line; see `experiments.command_line` for how it ends."""

    def run(config: PlotConfig) -> list[Path]:
        written = main(config)
        print(printable("written: " + ", ".join(map(str, written))))
        return written

    return run_command(PlotConfig, run, program="experiments.plot", description=__doc__, arguments=arguments)
