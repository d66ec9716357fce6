"""The guard for speed: its rules, its file, the console of a start, and its parts at a small size."""

import dataclasses
import functools
import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import sampler_speed, support_speed
from benchmarks.clock import time_in_turns
from benchmarks.head_speed import shapes as head_shapes
from benchmarks.regression import __main__ as regression
from benchmarks.regression import parts, start
from benchmarks.regression.figures import Figure, compare, kept_path, read_figures
from experiments.loop import plan
from experiments.models.decoder_config import DecoderConfig
from experiments.models.named_shapes import NAMED_SHAPES

TINY = parts.Sizes(
    tokens=24,
    heads=((16, 300), (8, 400)),
    engine="chunked",
    dtype="float32",
    model="tiny",
    rows="2x40",
    sampler_rows=(8, 16),
    prompt=4,
    new_tokens=6,
    turns=2,
    settle=0.001,
)
SHAPE = DecoderConfig.qwen3(
    vocab_size=320, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8
)
CONSOLE = """\
  2.0 task:       word_problems:2, endless training examples, 512 distinct held-out prompts
  3.0 run folder: /tmp/runs/a
 12.5 compiling the programs of a step, a rollout and an evaluation: 9 s so far
 21.0 memory per device: 22.0 GiB (state 6.7 GiB)
 30.0 step 1: 9 s so far
 31.0 first optimizer step computed; so far tracing 1.0 s, lowering 2.0 s, compiling 9.0 s
 40.5   step  reward   equal
 40.5      1   0.415      0%
 41.0     10   0.415      0%
 50.0 step 2: saving a checkpoint
"""


@pytest.fixture
def tiny_and_quick(monkeypatch):
    monkeypatch.setitem(NAMED_SHAPES, "tiny", SHAPE)
    for module in (parts, sampler_speed):
        monkeypatch.setattr(module, "copy_bandwidth", lambda: 1e9)
    for module in (head_shapes, support_speed):
        quick = functools.partial(time_in_turns, at_least=0.0)
        monkeypatch.setattr(module, "time_in_turns", lambda calls, turns, *_, quick=quick, **__: quick(calls, turns))


def figure(value, spread=0.0, *, more=False, part="step", name="speed"):
    return Figure(part, name, value, "s", spread, more)


@pytest.mark.parametrize(
    "value, spread, kept_spread, verdict",
    [
        (101.9, 0.0, 0.0, "same"),
        (102.1, 0.0, 0.0, "more"),
        (97.9, 0.0, 0.0, "less"),
        (104.0, 0.05, 0.0, "same"),
        (104.0, 0.0, 0.05, "same"),
        (106.0, 0.05, 0.05, "more"),
        (94.0, 0.05, 0.05, "less"),
    ],
)
@pytest.mark.parametrize("more_is_better", [False, True])
def test_a_change_counts_outside_both_spreads_and_beyond_two_percent(
    value, spread, kept_spread, verdict, more_is_better
):
    measured, kept = (
        figure(number, width, more=more_is_better) for number, width in ((value, spread), (100.0, kept_spread))
    )
    (found,) = compare([measured], [kept], ["step"])
    words = {"same": "same", "more": ("worse", "better")[more_is_better], "less": ("better", "worse")[more_is_better]}
    assert found.verdict == words[verdict] and found.failed == (found.verdict == "worse")
    assert found.ratio == pytest.approx(value / 100.0)


def test_figures_are_paired_by_part_and_name_and_only_measured_parts_can_miss_one():
    kept = [figure(1.0, name="gone"), figure(1.0), figure(1.0, part="head"), figure(1.0, part="start")]
    measured = [figure(1.0, name="unheard"), figure(1.0, part="head"), figure(1.0)]
    found = compare(measured, kept, ["head", "step"])
    assert [each.verdict for each in found] == ["new", "same", "same", "missing"]
    assert [each.failed for each in found] == [False, False, False, True]
    assert str(found[0]) == "| step | unheard | 1.000 s ± 0.0% | – | – | new |"
    assert str(found[3]) == "| step | gone | – | 1.000 s ± 0.0% | – | missing |"


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_what_is_no_measurement_is_refused(value):
    with pytest.raises(ValueError, match="step, speed: expected a number > 0"):
        figure(value)


def run(monkeypatch, folder, results, **options):
    """Runs the guard with figures, or an exception, in the place of each part."""

    def part_of(result):
        def measure(sizes):
            if isinstance(result, Exception):
                raise result
            return result

        return measure

    monkeypatch.setattr(regression, "PARTS", {name: part_of(result) for name, result in results.items()})
    config = regression.RegressionConfig(folder=str(folder), parts=tuple(results))
    return regression.main(dataclasses.replace(config, **options), TINY)


@pytest.mark.costly
def test_what_is_kept_is_compared_with_from_then_on(monkeypatch, tmp_path, capsys):
    good = {"head": [figure(2.0, 0.01, part="head")], "step": [figure(100.0, more=True)]}
    assert run(monkeypatch, tmp_path, good)
    assert "kept: nothing of this device" in capsys.readouterr().out and not list(tmp_path.iterdir())
    assert run(monkeypatch, tmp_path, good, keep=True, commit="abc1234")
    (path,) = tmp_path.iterdir()
    assert path.name == "regression_cpu.json"
    figures, facts = read_figures(path)
    assert figures == good["head"] + good["step"]
    assert facts["git"]["revision"] == "abc1234" and facts["device"] == "cpu"
    assert {"started", "command", "versions"} <= set(facts)
    before = path.read_bytes()
    assert run(monkeypatch, tmp_path, good) and path.read_bytes() == before
    assert "commit abc1234" in capsys.readouterr().out
    slow = {**good, "step": [figure(97.0, more=True)]}
    assert not run(monkeypatch, tmp_path, slow)
    assert "| 97.0 s ± 0.0% | 100.0 s ± 0.0% | 0.970 | worse |" in capsys.readouterr().out
    assert run(monkeypatch, tmp_path, slow, parts=("head",))


def test_every_kept_file_has_all_parts_and_says_where_it_comes_from():
    folder = Path(regression.__file__).parents[1] / "results"
    files = sorted(folder.glob("regression_*.json"))
    assert files
    for path in files:
        figures, facts = read_figures(path)
        assert {each.part for each in figures} == set(parts.PARTS)
        assert kept_path(folder, facts["device"]) == path
        assert facts["git"]["revision"] and facts["started"] and "benchmarks.regression" in facts["command"]


@pytest.mark.costly
def test_a_part_that_fails_does_not_end_the_others_and_nothing_is_kept(monkeypatch, tmp_path, capsys):
    results = {"head": ValueError("no room"), "step": [figure(1.0)]}
    assert not run(monkeypatch, tmp_path, results, keep=True)
    shown = capsys.readouterr().out
    assert "head failed: ValueError: no room" in shown and "| step | speed | 1.000 s" in shown
    assert not list(tmp_path.iterdir())


def test_options_are_checked_before_anything_is_measured(monkeypatch, tmp_path):
    results = {"head": AssertionError(), "step": AssertionError()}
    with pytest.raises(ValueError, match=r"--parts: expected one of head, step, got stop"):
        run(monkeypatch, tmp_path, results, parts=("stop",))
    with pytest.raises(ValueError, match=r"--keep: expected all parts, got step"):
        run(monkeypatch, tmp_path, results, parts=("step",), keep=True)


def recorded():
    return [(float(line[:5]), line[6:]) for line in CONSOLE.splitlines()]


def test_moments_of_a_start_are_read_off_the_console():
    found = start.read_start(recorded(), ended=52.0)
    # From 30.0 to 40.5: the line at 31.0 is not the run's own.
    assert found == start.Start(
        {
            "memory line printed": 21.0,
            "first step computed": 31.0,
            "first step logged": 40.5,
            "process ended": 52.0,
            "longest silence": 10.5,
        },
        "step 1: 9 s so far",
    )
    assert start.read_start(recorded(), ended=70.0).silent_after == "step 2: saving a checkpoint"
    with pytest.raises(ValueError, match="expected a line '     1 ', got 7 others"):
        start.read_start(recorded()[:7], ended=52.0)


def test_the_console_of_a_process_is_timed_and_its_failure_raises():
    lines = "\n".join(line for _, line in recorded())
    program = f"import sys, time; print({lines!r}); sys.stdout.flush(); time.sleep(0.3); sys.exit(int(sys.argv[1]))"
    found = start.run_timed([sys.executable, "-c", program, "0"])
    assert found.silent_after == "step 2: saving a checkpoint" and 0.3 < found.seconds["longest silence"] < 3.0
    assert 0.0 < found.seconds["first step computed"] < found.seconds["process ended"] - 0.3
    with pytest.raises(ValueError, match="start of a run: expected exit code 0, got 3"):
        start.run_timed([sys.executable, "-c", program, "3"])


def test_a_run_says_once_when_its_first_step_is_computed(monkeypatch, capsys):
    monkeypatch.setattr(start.loop, "take_step", lambda *given, **options: print("a step") or (given, options))
    monkeypatch.setattr(start.grpo, "run_cli", lambda: [start.loop.take_step(1, drift=n) for n in range(3)])
    start.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(";")[0] for line in lines] == ["a step", start.COMPUTED, "a step", "a step"]
    assert lines[1].endswith("so far tracing 0.0 s, lowering 0.0 s, compiling 0.0 s")


def test_rewards_of_a_group_differ():
    assert len({start.differing_reward(None, "") for _ in range(4)}) == 4
    command = start.start_command(parts.START, "kept")
    assert command[-2:] == ["--reward.functions", "benchmarks.regression.start:differing_reward"]


@pytest.mark.costly
def test_head_and_support(tiny_and_quick):
    found = parts.measure_head(TINY)
    assert [each.name for each in found] == [
        "forward + backward, (24, 16, 300)",
        "one pass, (24, 16, 300)",
        "forward + backward, (24, 8, 400)",
        "one pass, (24, 8, 400)",
        "support / full head, forward + backward, (24, 8)",
    ]
    with pytest.raises(ValueError, match="head: expected hopper to run here, got 2 rows"):
        parts.measure_head(dataclasses.replace(TINY, engine="hopper"))


@pytest.mark.costly
def test_step_and_sampler(tiny_and_quick, monkeypatch, capsys):
    # A step of the sampler is a difference of two times, which under load may be below 0. The second is shorter here.
    clock = map(math.sqrt, itertools.count())
    monkeypatch.setattr(sampler_speed, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    found = parts.measure_step(TINY) + parts.measure_sampler(TINY)
    assert [each.name for each in found] == [
        "tiny, 2x40: speed",
        "tiny, 2x40: share of the peak",
        *(f"tiny, {rows} rows: {what}" for rows in (8, 16) for what in ("step", "share of the memory bound")),
    ]
    assert [each.more_is_better for each in found] == [True, True, False, True, False, True]
    assert "recomputation in the backward pass: none" in capsys.readouterr().out
    # As on a GPU, whose memory has a limit.
    monkeypatch.setattr(plan, "device_limit", lambda devices: 2**33)
    assert parts.default_remat(TINY) == "products"
    assert json.dumps([dataclasses.asdict(each) for each in found])
