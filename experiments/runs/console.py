"""Screen output of a run: its progress, and a summary that is easy to grep.

On a terminal one line is redrawn after every step, and everything else scrolls above it. Anywhere else (a file, a pipe, a
CI log) it is plain text without control codes, with an aligned row for some of the steps.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column as Cell

from experiments.processes import processes
from experiments.runs.folder import metric_of
from experiments.terminal import printable

HEADER_EVERY = 20
ROWS = 40
"""Number of rows by default, off a terminal."""
SILENCE_SECONDS = 7.0
"""Longest time without a line while something is waited for; lowering a kernel may hold up who tells it for 2 s."""
SPEED_SECONDS = 600.0
"""Period that the time left is estimated from: rich's 30 s would give none where steps take as long."""


class Column(NamedTuple):
    """One column of the step rows: the metric it shows, its title, its number format and its width."""

    metric: str
    title: str
    form: str
    width: int

    def text(self, values: Mapping[str, float]) -> str:
        value = metric_of(values, self.metric)
        return "-" if value is None else format(value, self.form)


REWARD = Column("reward_mean", "reward", ".3f", 7)
SPEED = Column("tokens_per_second", "tokens/s", ",.0f", 10)
_ENTROPY = Column("entropy_labelled", "entropy", ".3f", 8)
_GRADIENT = Column("grad_norm", "|gradient|", ".3g", 10)
_DRIFT = Column("drift_max", "max|dlogp|", ".2e", 11)
_DOCUMENTS = Column("num_documents", "docs", ",.0f", 7)
# Means over documents with a label, as in the curves; "equal" is the share of groups whose rewards are all equal.
STEP_COLUMNS = (
    REWARD,
    Column("degenerate_groups", "equal", ".0%", 5),
    _ENTROPY,
    Column("clipped_ratio_fraction_labelled", "clipped", ".2%", 8),
    Column("ratio_new_old_labelled", "ratio", ".4f", 8),
    _DRIFT,
    _DOCUMENTS,
    SPEED,
)
# Of a loss that rewards do not enter.
UNREWARDED_COLUMNS = (
    Column("kl_new_ref_labelled", "KL", ".4f", 8),
    REWARD,
    _ENTROPY,
    _GRADIENT,
    _DRIFT,
    _DOCUMENTS,
    SPEED,
)
SUPERVISED_COLUMNS = (
    Column("loss", "loss", ".4f", 8),
    _GRADIENT,
    Column("learning_rate", "rate", ".2e", 9),
    _DOCUMENTS,
    SPEED,
)


class HeldOut(NamedTuple):
    """A score on held-out documents before and after the run."""

    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.before:.2f} -> {self.after:.2f}"


class RunConsole:
    """Prints a run, on standard output if there is no `stream`; of several processes the first alone does.

    `quiet` prints only warnings and the lines of the summary that are meant for grep. `log_every` is the number of steps
    between two rows off a terminal; None lets the number of rows decide.
    """

    _last_line: ClassVar[float] = time.monotonic()

    def __init__(
        self,
        quiet: bool = False,
        log_every: int | None = None,
        stream: TextIO | None = None,
    ) -> None:
        stream = stream or sys.stdout
        self._quiet = quiet
        self._log_every, self._columns = log_every, STEP_COLUMNS
        # Stated rather than detected: rich would also obey environment variables that force colours into a file.
        self._console = Console(file=stream, force_terminal=stream.isatty(), force_jupyter=False, highlight=False)
        self._console.quiet = not processes().first
        self._redraws = stream.isatty() and not self._console.is_dumb_terminal
        self._lines = 0
        self._advance: Callable[[str, str], None] = lambda note, row: None

    def say(self, text: str) -> None:
        if not self._quiet:
            self._print(text)

    def warn(self, text: str) -> None:
        """Prints one highlighted line, in quiet mode too."""
        self._print(f"WARNING: {text}", style="bold red")

    def begin(self, facts: Mapping[str, str]) -> None:
        width = max(map(len, facts))
        for name, value in facts.items():
            self.say(f"{name + ':':<{width + 1}} {value}")

    @contextlib.contextmanager
    def waiting(self, what: str) -> Generator[None, None, None]:
        """Says what is waited for, while the block runs, whenever no run has printed a line for `SILENCE_SECONDS`."""
        over, started = threading.Event(), time.monotonic()

        def tell() -> None:
            # Several short waits one after the other are one long silence.
            while not over.wait(max(0.01, RunConsole._last_line + SILENCE_SECONDS - time.monotonic())):
                if time.monotonic() - RunConsole._last_line >= SILENCE_SECONDS:
                    self.say(f"{what}: {time.monotonic() - started:.0f} s so far")

        thread = threading.Thread(target=tell, name="waiting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def ending(self, kept: str) -> None:
        """Prints the last line, whatever ended the run: what is on disk, and the command that goes on."""
        self._print(kept)

    @contextlib.contextmanager
    def progress(
        self, label: str, total: int, done: int = 0, rows: int = ROWS, columns: tuple[Column, ...] = STEP_COLUMNS
    ) -> Generator[None, None, None]:
        """Shows the progress of `total` steps while the block runs; a resumed run has `done` some of them already.

        `label` names the redrawn line, which shows the first of `columns`. There are about `rows` rows, unless `log_every`
        says otherwise.
        """
        if self._quiet:
            yield
            return
        self._columns, self._lines = columns, 0
        every = self._log_every or max(1, total // rows)
        with self._bar(label, total, done) if self._redraws else self._rows(total, done, every) as self._advance:
            yield

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the metrics of a step in the block of `progress`."""
        row = f"{step:>6} " + " ".join(column.text(values).rjust(column.width) for column in self._columns)
        first = self._columns[0]
        self._advance(f"{first.title} {first.text(values)}  {SPEED.text(values)} tokens/s", row)

    def summary(self, facts: Mapping[str, str | float], run: Path, held_out: Mapping[str, HeldOut]) -> None:
        """Prints a line for each fact, then the run folder and the held-out scores by name, as `before -> after`."""
        self.begin({name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in facts.items()})
        self._print(f"run folder: {run}")
        for name, score in held_out.items():
            self._print(f"{name}: {score}")

    def _print(self, text: str, style: str | None = None) -> None:
        RunConsole._last_line = time.monotonic()
        # A terminal of another encoding may have no ×.
        encoding = self._console.encoding
        text = printable(text).encode(encoding, "backslashreplace").decode(encoding)
        # Soft wrap, because rich would otherwise break lines at 80 columns in a file; no markup, because samples and
        # paths may contain square brackets.
        self._console.print(text, style=style, markup=False, emoji=False, soft_wrap=True)

    @contextlib.contextmanager
    def _bar(self, label: str, total: int, done: int) -> Generator[Callable[[str, str], None], None, None]:
        def cell() -> Cell:
            # A narrow window cuts the line off, and does not fold it into several.
            return Cell(no_wrap=True, overflow="crop")

        with Progress(
            TextColumn("{task.description}", table_column=cell()),
            BarColumn(20, table_column=cell()),
            MofNCompleteColumn(table_column=cell()),
            TextColumn("{task.fields[note]}", table_column=cell()),
            TimeRemainingColumn(table_column=cell()),
            TextColumn("left", table_column=cell()),
            console=self._console,
            transient=True,
            speed_estimate_period=SPEED_SECONDS,
        ) as bar:
            task = bar.add_task(label, total=total, completed=done, note="")
            yield lambda note, row: bar.update(task, advance=1, note=note)

    @contextlib.contextmanager
    def _rows(self, total: int, done: int, every: int) -> Generator[Callable[[str, str], None], None, None]:
        first, latest = done + 1, ""

        def show(row: str) -> None:
            if self._lines % HEADER_EVERY == 0:
                titles = (f"{column.title:>{column.width}}" for column in self._columns)
                self._print(f"{'step':>6} " + " ".join(titles), style="bold")
            self._lines += 1
            self._print(row)

        def advance(note: str, row: str) -> None:
            nonlocal done, latest
            done += 1
            latest = row
            if done in (first, total) or done % every == 0:
                show(row)
                latest = ""

        try:
            yield advance
        finally:
            # The last step has a row, wherever the phase ends.
            if latest:
                show(latest)
