"""The output of a run: the curves, and the lines on the screen."""

import contextlib
import io
import itertools
import math
import re
import time

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.transforms import Bbox

from experiments import plot
from experiments.config import Config
from experiments.runs import console as console_module
from experiments.runs import plots
from experiments.runs.config_file import save_config
from experiments.runs.console import HEADER_EVERY, SUPERVISED_COLUMNS, HeldOut, RunConsole
from experiments.runs.folder import MetricsWriter, RunFolder
from experiments.runs.plots import plot_runs
from tests.experiments.tiny import refusal

pytestmark = pytest.mark.costly

PAIRS = {"temperature 1": (0.31, 0.83), "greedy": (0.451, 0.919)}


def records(count):
    train = [
        {
            "step": step, "kind": "train", "reward_mean": step / count, "entropy_labelled": 1.0 / (1 + step),
            "clipped_ratio_fraction_labelled": 0.01, "ratio_new_old_labelled": 1.0 + step * 1e-4, "loss": -step * 0.01,
            "drift_max": 10.0**-step if step % 2 else 0.0, "completion_length_mean": 40.0 + step,
            "truncated_share": 0.5 / (1 + step), "kl_new_old_labelled": 1e-6 * step,
        }
        for step in range(count)
    ]  # fmt: skip
    held_out = [{"step": 0, "kind": "eval", "exact_match_sampled": 0.3, "exact_match_greedy": 0.4}]
    return [*train, *held_out]


def kept(monkeypatch, *, drawn):
    """The figures that are saved, so that a test can ask what they show."""
    seen = []

    class Kept(plots.Figure):
        def savefig(self, *args, **kwargs):
            seen.append(self)
            if drawn:
                super().savefig(*args, **kwargs)

    monkeypatch.setattr(plots, "Figure", Kept)
    return seen


@pytest.fixture
def figures(monkeypatch):
    return kept(monkeypatch, drawn=False)


@pytest.fixture
def drawn_figures(monkeypatch):
    return kept(monkeypatch, drawn=True)


def panel(figure, title):
    return next(axes for axes in figure.axes if axes.get_title(loc="left") == f"{title}\n")


def texts(axes):
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(("metrics", "panels"), [([], 0), (records(1), 1), (records(3), 9)])
def test_a_picture_of_the_promised_size_has_the_panels_whose_values_differ(tmp_path, drawn_figures, metrics, panels):
    """Of three steps all but "Clipped tokens", which is constant; of one step the two decodings of the accuracy."""
    plot_runs([metrics], tmp_path / "curves.png")
    picture = imread(tmp_path / "curves.png")
    assert picture.shape[:2] == (1200, 1400)
    (figure,) = drawn_figures
    assert len(figure.axes) == panels and all(axes.get_lines() and axes.get_ylabel() for axes in figure.axes)
    assert bool(figure.texts) == (panels == 0)
    with pytest.raises(StopIteration):
        panel(figure, "Clipped tokens")


def test_titles_do_not_overlap(tmp_path, drawn_figures):
    metrics = records(30)
    for record in metrics:
        for metric in record.keys() - {"step", "kind"}:
            record[metric] *= 1.23456e-7
    metrics += [{"step": step, "kind": "drift", "p99": 1.2345e-7} for step in range(2)]
    plot_runs([metrics], tmp_path / "curves.png")
    (figure,) = drawn_figures
    boxes = []
    for axes in figure.axes:
        left, right = (title.get_window_extent() for title in (axes._left_title, axes._right_title))
        # The second line of the left one is empty.
        boxes += [Bbox.from_extents(left.x0, (left.y0 + left.y1) / 2, left.x1, left.y1), right]
    assert len(boxes) == 18
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_draws_the_values(tmp_path, figures):
    metrics = records(60)
    plot_runs([metrics], tmp_path / "curves.png")
    figure = figures[0]
    each, mean = panel(figure, "Training reward").get_lines()
    np.testing.assert_array_equal(each.get_xdata(), np.arange(60))
    np.testing.assert_array_equal(each.get_ydata(), [record["reward_mean"] for record in metrics[:60]])
    assert mean.get_ydata()[-1] == pytest.approx(np.arange(45, 60).mean() / 60, rel=1e-12)
    sampled, greedy = panel(figure, "Held-out accuracy").get_lines()
    assert (sampled.get_ydata(), greedy.get_ydata()) == ([0.3], [0.4])
    assert panel(figure, "Held-out accuracy").get_title(loc="right") == "last 0.3 / 0.4"


def test_several_runs_are_thin_lines_with_a_thick_mean(tmp_path, figures):
    """The second run is shorter, and broken at step 2."""
    first, second = records(40), records(36)
    for record in second:
        record["loss"] = record.get("loss", 0.0) + 1.0
        if record["kind"] == "eval":
            record["exact_match_sampled"] = 0.5
    second[2]["entropy_labelled"] = math.nan
    plot_runs([first, second], tmp_path / "curves.png")
    one, other, mean = panel(figures[0], "Entropy of the policy").get_lines()
    assert len(one.get_xdata()) == 40 and len(other.get_xdata()) == 36
    np.testing.assert_array_equal(mean.get_xdata(), np.arange(36))
    wanted = [math.nan if step == 2 else 1.0 / (1 + step) for step in range(36)]
    np.testing.assert_allclose(mean.get_ydata(), wanted, rtol=1e-15)
    assert mean.get_linewidth() > one.get_linewidth() == other.get_linewidth()
    assert "1 not finite, left out" in texts(panel(figures[0], "Entropy of the policy"))
    loss = panel(figures[0], "Loss").get_lines()
    # The mean of the last 15 common steps, 21 to 35, of -0.01 step and 1 - 0.01 step.
    assert loss[2].get_ydata()[-1] == pytest.approx(0.5 - 0.28, rel=1e-12)
    assert panel(figures[0], "Held-out accuracy").get_title(loc="right") == "last 0.4 / 0.4"


def test_drift_has_a_log_scale_with_a_floor(tmp_path, figures):
    plot_runs([records(13)], tmp_path / "curves.png")
    axes = panel(figures[0], "Sampler against trainer")
    assert axes.get_yscale() == "log"
    (line,) = axes.get_lines()
    assert min(line.get_ydata()) == plots.DRIFT_FLOOR == axes.get_ylim()[0] * 2
    assert any("1e-08" in text for text in texts(axes))


def test_values_that_are_not_finite_are_gaps_and_counted(tmp_path, figures):
    metrics = records(5)
    metrics[1]["loss"], metrics[2]["loss"], metrics[2]["drift_max"] = math.nan, math.inf, math.nan
    metrics[3]["entropy_labelled"] = None
    for record in metrics:
        record["clipped_ratio_fraction_labelled"] = math.nan
    plot_runs([metrics], tmp_path / "curves.png")
    loss = panel(figures[0], "Loss")
    np.testing.assert_array_equal(loss.get_lines()[0].get_ydata(), [0, np.nan, np.nan, -0.03, -0.04])
    assert texts(loss) == ["2 not finite, left out"]
    assert panel(figures[0], "Entropy of the policy").get_lines()[0].get_xdata().tolist() == [0, 1, 2, 4]
    assert texts(panel(figures[0], "Clipped tokens")) == ["5 not finite, left out", "no data"]


def test_the_same_metrics_give_the_same_bytes(tmp_path):
    for name in ("a.png", "b.png"):
        plot_runs([records(3)], tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def write_run(parent, seed, task="addition"):
    folder = RunFolder.create(parent, f"run-{seed}")
    save_config(folder.config, Config(task=task, seed=seed, out=str(parent), name=folder.path.name))
    with MetricsWriter(folder) as writer:
        for step in range(3):
            writer.write(step, "train", {"loss": float(step + seed)})
    return str(folder.path)


def test_the_command_plots_seeds_of_one_run_alone(tmp_path, figures, capsys):
    runs = [write_run(tmp_path, seed) for seed in (2, 0)]
    figure = tmp_path / "seeds.png"
    assert plot.run_cli([*runs, "--figure", str(figure)]) == figure
    assert capsys.readouterr().out == f"written: {figure}\n"
    losses = [line.get_ydata() for line in panel(figures[0], "Loss").get_lines()]
    np.testing.assert_array_equal(losses, [[2, 3, 4], [0, 1, 2], [1, 2, 3]])
    other = write_run(tmp_path, 5, task="addition:2")
    differs = f"runs: expected runs that differ in their seeds alone, got {other} with another task"
    nowhere = [runs[0], "--figure", str(tmp_path / "no" / "a.png")]
    for arguments, words in (
        ([runs[0], other], differs),
        (nowhere, "--figure: expected a file in an existing folder, got"),
    ):
        assert refusal(capsys, plot, ["--figure", str(tmp_path / "a.png"), *arguments]).startswith(words)
    assert not (tmp_path / "a.png").exists()


STEP = {"reward_mean": 0.3123, "entropy_labelled": 1.25, "clipped_ratio_fraction_labelled": 0.0123}
STEP |= {"ratio_new_old_labelled": 1.0, "drift_max": 3.2e-6}


def print_a_run(console, tmp_path):
    with console.progress("warm start", total=23, rows=10, columns=SUPERVISED_COLUMNS):
        for step in range(1, 24):
            console.step(step, {"loss": 1.0})
    console.warn("[red]step 20 is damaged[/red]")
    with console.progress("training", total=HEADER_EVERY + 1):
        for step in range(1, HEADER_EVERY + 2):
            console.step(step, {**STEP, "entropy_labelled": math.nan} if step == 2 else STEP)
    held_out = {f"held-out exact match ({how})": HeldOut(*pair) for how, pair in PAIRS.items()}
    console.summary({"head [x]": "chunked", "seconds": 12.3456789}, tmp_path, held_out)


def last_lines(tmp_path):
    scores = ("temperature 1): 0.31 -> 0.83", "greedy): 0.45 -> 0.92")
    return [f"run folder: {tmp_path}", *(f"held-out exact match ({each}" for each in scores)]


def test_lines_in_a_file_are_plain_aligned_and_end_with_the_scores(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    stream = io.StringIO()
    print_a_run(RunConsole(stream=stream), tmp_path)
    text = stream.getvalue()
    assert re.fullmatch(r"[\n\x20-\x7e]*", text)
    lines = text.splitlines()
    assert lines[-3:] == last_lines(tmp_path)
    starts = [line.split() for line in lines[: lines.index("WARNING: [red]step 20 is damaged[/red]")]]
    assert starts[0] == ["step", "loss", "|gradient|", "rate", "docs", "tokens/s"]
    assert starts[1:] == [[str(step), "1.0000", "-", "-", "-", "-"] for step in (1, *range(2, 23, 2), 23)]
    assert not any("training" in line for line in lines)
    assert "WARNING: [red]step 20 is damaged[/red]" in lines
    assert any("head [x]" in line for line in lines)
    headers = [line for line in lines if line.startswith("  step  reward")]
    first = lines.index(headers[0])
    assert len(headers) == 2 and lines[first + HEADER_EVERY + 1] == headers[1]
    rows = lines[first : first + HEADER_EVERY + 3]
    assert {len(row) for row in rows} == {len(headers[0])}
    assert rows[1].split() == ["1", "0.312", "-", "1.250", "1.23%", "1.0000", "3.20e-06", "-", "-"]
    assert rows[2].split()[3] == "nan"


def shown_steps(text):
    return [int(row.split()[0]) for row in text.splitlines() if re.match(r" *\d+ ", row)]


def print_steps(console, total, done=0, until=None):
    with console.progress("GRPO", total, done=done):
        for step in range(done + 1, (until or total) + 1):
            console.step(step, STEP)
            if step % 333 == 0:
                console.warn(f"step {step} is refused: loss not finite")


@pytest.mark.parametrize(
    ("log_every", "done", "until", "steps"),
    [
        (None, 0, None, [1, *range(25, 1001, 25)]), (1, 0, None, [*range(1, 1001)]), (400, 0, None, [1, 400, 800, 1000]),
        # A resumed run has rows of the same steps; one that is interrupted, or whose data end, has a row of its last.
        (None, 930, None, [931, 950, 975, 1000]), (None, 0, 60, [1, 25, 50, 60]), (None, 0, 50, [1, 25, 50]),
    ],
)  # fmt: skip
def test_rows_off_a_terminal_are_few_and_warnings_are_all_there(log_every, done, until, steps):
    stream = io.StringIO()
    print_steps(RunConsole(log_every=log_every, stream=stream), 1000, done, until)
    assert shown_steps(stream.getvalue()) == steps
    refused = [step for step in (333, 666, 999) if done < step <= (until or 1000)]
    assert re.findall(r"WARNING: step (\d+) is refused", stream.getvalue()) == [str(step) for step in refused]


def test_a_long_wait_is_not_silent(monkeypatch):
    """Quiet runs are, and so is a short wait, also one that an exception ends."""
    monkeypatch.setattr(console_module, "SILENCE_SECONDS", 0.02)
    stream, silent = io.StringIO(), io.StringIO()
    until = time.monotonic() + 20.0
    with RunConsole(stream=stream).waiting("compiling"), RunConsole(quiet=True, stream=silent).waiting("compiling"):
        while stream.getvalue().count("\n") < 2 and time.monotonic() < until:
            time.sleep(0.01)
    told = stream.getvalue().splitlines()
    assert len(told) >= 2 and all(re.fullmatch(r"compiling: \d+ s so far", each) for each in told)
    monkeypatch.setattr(console_module, "SILENCE_SECONDS", 9.0)
    with contextlib.suppress(KeyboardInterrupt), RunConsole(stream=silent).waiting("compiling"):
        raise KeyboardInterrupt
    assert stream.getvalue().splitlines() == told and not silent.getvalue()


def test_short_waits_after_one_another_are_one_silence(monkeypatch):
    monkeypatch.setattr(console_module, "SILENCE_SECONDS", 0.4)
    console = RunConsole(stream=(stream := io.StringIO()))
    console.say("begins")
    for number in range(10):
        with console.waiting(f"part {number}"):
            time.sleep(0.1)
    assert 1 <= stream.getvalue().count(" s so far") <= 3


def test_the_last_step_before_an_error_has_a_row():
    console = RunConsole(stream=(stream := io.StringIO()))
    with pytest.raises(KeyboardInterrupt), console.progress("GRPO", 1000):
        for step in (1, 2, 3):
            console.step(step, STEP)
        raise KeyboardInterrupt
    assert shown_steps(stream.getvalue()) == [1, 3]


def test_quiet_prints_warnings_and_the_scores_only(tmp_path):
    stream = io.StringIO()
    print_a_run(RunConsole(quiet=True, log_every=1, stream=stream), tmp_path)
    assert stream.getvalue().splitlines() == ["WARNING: [red]step 20 is damaged[/red]", *last_lines(tmp_path)]


class Terminal(io.TextIOWrapper):
    """A terminal of an encoding; what was written to it."""

    def __init__(self, encoding="utf-8"):
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)

    def isatty(self):
        return True

    def text(self):
        return self.buffer.getvalue().decode(self.encoding)


@pytest.fixture
def xterm(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


def test_a_terminal_gets_one_line_that_is_redrawn(tmp_path, xterm):
    stream = Terminal()
    console = RunConsole(stream=stream)
    print_steps(console, 1000)
    text = stream.text()
    assert "\r\x1b[2K" in text and text.count("\n") < 30, "a line is redrawn in place"
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "1000/1000 reward 0.312  - tokens/s 0:00:00 left" in plain and shown_steps(plain) == []
    assert plain.count("WARNING: step") == 3
    print_a_run(console, tmp_path)
    assert stream.text().splitlines()[-3:] == last_lines(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
@pytest.mark.parametrize("columns", ["1", "2", "7", "33", "79", "500"])
def test_windows_of_any_width_and_terminals_of_any_encoding(tmp_path, xterm, monkeypatch, columns, encoding):
    monkeypatch.setenv("COLUMNS", columns)
    stream = Terminal(encoding)
    console = RunConsole(stream=stream)
    console.say("64 prompts × 8 …")
    print_steps(console, 1000)
    assert "64 prompts" in stream.text() and ("×" in stream.text()) == (encoding != "ascii")
    assert stream.text().count("\n") < 40, "the line is cut, not folded"


def test_a_terminal_without_control_codes_gets_rows(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    print_steps(RunConsole(stream=stream), 1000)
    assert len(shown_steps(stream.text())) == 41
