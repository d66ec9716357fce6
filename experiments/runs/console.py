"""Screen output of a run: a progress bar, one aligned line per step, and a summary that is easy to grep.

On a terminal the lines scroll above a progress bar. Anywhere else (a file, a pipe, a CI log) the same lines are plain
text without control codes, and the bar becomes one line per tenth of the work.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.runs.processes import processes
from experiments.terminal import printable

HEADER_EVERY = 20
REPORTS_PER_PHASE = 10


class Column(NamedTuple):
    """One column of the step lines: the metric it shows, its title, its number format and its width."""

    metric: str
    title: str
    form: str
    width: int


# Means over documents with a label, as in the curves; "equal" is the share of groups whose rewards are all equal.
STEP_COLUMNS = (
    Column("reward_mean", "reward", ".3f", 7),
    Column("degenerate_groups", "equal", ".0%", 5),
    Column("entropy_labelled", "entropy", ".3f", 8),
    Column("clipped_ratio_fraction_labelled", "clipped", ".2%", 8),
    Column("ratio_new_old_labelled", "ratio", ".4f", 8),
    Column("drift_max", "max|dlogp|", ".2e", 11),
    Column("num_documents", "docs", ",.0f", 7),
    Column("tokens_per_second", "tokens/s", ",.0f", 10),
)


class HeldOut(NamedTuple):
    """A score on held-out documents before and after the run, in [0, 1]."""

    before: float
    after: float


class RunConsole:
    """Prints a run to a stream, standard output when None; of several processes the first alone does.

    A quiet one prints only warnings and the lines of the summary that are meant for grep.
    """

    def __init__(self, quiet: bool = False, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        self._quiet = quiet
        self._terminal = stream.isatty()
        # Stated rather than detected: rich would also obey environment variables that force colours into a file.
        self._console = Console(file=stream, force_terminal=self._terminal, force_jupyter=False, highlight=False)
        self._console.quiet = not processes().first
        self._lines = 0

    def say(self, text: str) -> None:
        """Prints one line of text."""
        if not self._quiet:
            self._print(text)

    def warn(self, text: str) -> None:
        """Prints one highlighted line, in quiet mode too."""
        self._print(f"WARNING: {text}", style="bold red")

    def begin(self, facts: Mapping[str, str]) -> None:
        """Prints a line for each fact."""
        width = max(map(len, facts))
        for name, value in facts.items():
            self.say(f"{name:<{width}}  {value}")

    def ending(self, kept: str) -> None:
        """Prints the last line, whatever ended the run: what is on disk, and the command that goes on."""
        self._print(kept)

    @contextlib.contextmanager
    def progress(self, label: str, total: int, done: int = 0, lines: bool = True) -> Iterator[Callable[..., None]]:
        """Shows the progress of `total` steps while the block runs, of which a restored run has `done` some already.

        Yields a function to call after every step; its text (may be empty) is shown after the count. Without `lines`
        nothing is printed off a terminal, where `step` prints anyway.
        """
        if self._quiet or not self._terminal:
            yield self._counter(label, total, done) if lines else lambda note="": None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[note]}"), console=self._console, transient=True) as bar:
            task = bar.add_task(label, total=total, completed=done, note="")
            yield lambda note="": bar.update(task, advance=1, note=note)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Prints the line of one step; a metric that is not in `values` shows as a dash."""
        if self._quiet:
            return
        if self._lines % HEADER_EVERY == 0:
            titles = (f"{column.title:>{column.width}}" for column in STEP_COLUMNS)
            self._print(f"{'step':>6} " + " ".join(titles), style="bold")
        self._lines += 1
        cells = []
        for column in STEP_COLUMNS:
            value = values.get(column.metric)
            cells.append(("-" if value is None else format(value, column.form)).rjust(column.width))
        self._print(f"{step:>6} " + " ".join(cells))

    def summary(self, facts: Mapping[str, str | float], run: Path, held_out: Mapping[str, HeldOut]) -> None:
        """Prints a line for each fact, then the run folder and the held-out scores by decoding, as `before -> after`."""
        self.begin({name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in facts.items()})
        self._print(f"run folder: {run}")
        for decoding, score in held_out.items():
            self._print(f"held-out exact match ({decoding}): {score.before:.2f} -> {score.after:.2f}")

    def _print(self, text: str, style: str | None = None) -> None:
        # Soft wrap, because rich would otherwise break lines at 80 columns in a file; no markup, because samples and
        # paths may contain square brackets.
        self._console.print(printable(text), style=style, markup=False, emoji=False, soft_wrap=True)

    def _counter(self, label: str, total: int, done: int) -> Callable[..., None]:
        every = max(1, math.ceil(total / REPORTS_PER_PHASE))

        def advance(note: str = "") -> None:
            nonlocal done
            done += 1
            if done % every == 0 or done == total:
                self.say(f"{label} {done}/{total} {note}".rstrip())

        return advance
