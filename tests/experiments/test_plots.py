"""The output of a run: the curves, and the lines on the screen."""

import io
import math
import re

import numpy as np
import pytest
from matplotlib.image import imread

from experiments import plot
from experiments.config import Config
from experiments.runs import plots
from experiments.runs.config_file import save_config
from experiments.runs.console import HEADER_EVERY, HeldOut, RunConsole
from experiments.runs.folder import MetricsWriter, RunFolder
from experiments.runs.plots import plot_runs

pytestmark = pytest.mark.costly


def records(count):
    train = [
        {
            "step": step,
            "kind": "train",
            "reward_mean": step / count,
            "entropy_labelled": 1.0 / (1 + step),
            "clipped_ratio_fraction_labelled": 0.01,
            "ratio_new_old_labelled": 1.0 + step * 1e-4,
            "drift_max": 10.0**-step if step % 2 else 0.0,
            "loss": -step * 0.01,
            "completion_length_mean": 40.0 + step,
            "truncated_share": 0.5 / (1 + step),
            "kl_new_old_labelled": 1e-6 * step,
        }
        for step in range(count)
    ]
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
    return next(axes for axes in figure.axes if axes.get_title(loc="left") == title)


def texts(axes):
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(
    "metrics", [[], records(1), records(3), records(60)[:7]], ids=["none", "one", "few", "no eval"]
)
def test_writes_a_picture_of_the_promised_size(tmp_path, drawn_figures, metrics):
    plot_runs([metrics], tmp_path / "curves.png")
    picture = imread(tmp_path / "curves.png")
    assert picture.shape[:2] == (1200, 1400)
    assert len(drawn_figures[0].axes) == 10
    drawn = {record["kind"] for record in metrics}
    for axes in drawn_figures[0].axes:
        kind = "eval" if axes.get_title(loc="left") == "Held-out accuracy" else "train"
        assert bool(axes.get_lines()) == (kind in drawn)
        assert (texts(axes) == ["no data"]) == (kind not in drawn)
        assert axes.get_ylabel()


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
    loss = panel(figures[0], "Policy loss").get_lines()
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
    loss = panel(figures[0], "Policy loss")
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
    losses = [line.get_ydata() for line in panel(figures[0], "Policy loss").get_lines()]
    np.testing.assert_array_equal(losses, [[2, 3, 4], [0, 1, 2], [1, 2, 3]])
    other = write_run(tmp_path, 5, task="addition:2")
    differs = f"runs: expected runs that differ in their seeds alone, got {other} with another task"
    for arguments, words in [
        ([runs[0], other], differs),
        ([runs[0], "--figure", str(tmp_path / "no" / "a.png")], "--figure: expected a file in an existing folder, got"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            plot.run_cli(["--figure", str(tmp_path / "a.png"), *arguments])
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert stopped.value.code == 2 and line.startswith(f"error: {words}"), line
    assert not (tmp_path / "a.png").exists()


STEP = {
    "reward_mean": 0.3123,
    "entropy_labelled": 1.25,
    "clipped_ratio_fraction_labelled": 0.0123,
    "ratio_new_old_labelled": 1.0,
    "drift_max": 3.2e-6,
}


def print_a_run(console, tmp_path):
    with console.progress("warm start", total=23) as advance:
        for _ in range(23):
            advance("loss 1.0")
    console.warn("[red]step 20 is damaged[/red]")
    with console.progress("training", total=HEADER_EVERY + 1, lines=False) as advance:
        for step in range(HEADER_EVERY + 1):
            console.step(step, {**STEP, "entropy_labelled": math.nan} if step == 1 else STEP)
            advance()
    held_out = {"temperature 1": HeldOut(0.31, 0.83), "greedy": HeldOut(0.451, 0.919)}
    console.summary({"head [x]": "chunked", "seconds": 12.3456789}, tmp_path, held_out)


def last_lines(tmp_path):
    return [
        f"run folder: {tmp_path}",
        "held-out exact match (temperature 1): 0.31 -> 0.83",
        "held-out exact match (greedy): 0.45 -> 0.92",
    ]


def test_lines_in_a_file_are_plain_aligned_and_end_with_the_scores(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    stream = io.StringIO()
    print_a_run(RunConsole(stream=stream), tmp_path)
    text = stream.getvalue()
    assert re.fullmatch(r"[\n\x20-\x7e]*", text)
    lines = text.splitlines()
    assert lines[-3:] == last_lines(tmp_path)
    assert [line for line in lines if line.startswith("warm start")][-1] == "warm start 23/23 loss 1.0"
    assert len([line for line in lines if line.startswith("warm start")]) == 8
    assert not any(line.startswith("training") for line in lines)
    assert "WARNING: [red]step 20 is damaged[/red]" in lines
    assert any("head [x]" in line for line in lines)
    headers = [line for line in lines if line.startswith("  step")]
    first = lines.index(headers[0])
    assert len(headers) == 2 and lines[first + HEADER_EVERY + 1] == headers[1]
    rows = lines[first : first + HEADER_EVERY + 3]
    assert {len(row) for row in rows} == {len(headers[0])}
    assert rows[1].split() == ["0", "0.312", "-", "1.250", "1.23%", "1.0000", "3.20e-06", "-", "-"]
    assert rows[2].split()[3] == "nan"


def test_quiet_prints_warnings_and_the_scores_only(tmp_path):
    stream = io.StringIO()
    print_a_run(RunConsole(quiet=True, stream=stream), tmp_path)
    assert stream.getvalue().splitlines() == ["WARNING: [red]step 20 is damaged[/red]", *last_lines(tmp_path)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_and_the_same_last_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    print_a_run(RunConsole(stream=stream), tmp_path)
    text = stream.getvalue()
    assert "\x1b[" in text and "23/23" in text
    assert text.splitlines()[-3:] == last_lines(tmp_path)
