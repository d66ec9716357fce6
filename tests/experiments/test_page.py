"""The page of several seeds, written from run folders: its numbers, its samples, and what is refused."""

import dataclasses
import json

import pytest

from experiments import plot
from experiments.config import Config
from experiments.runs.config_file import save_config
from experiments.runs.folder import MetricsWriter, RunFolder, Sample
from experiments.runs.page import command, page, read_runs

STEPS = 20
DRIFT = {
    "tokens": 1234, "p50": 0.001, "p90": 0.002, "p99": 0.01, "p99_9": 0.03, "share_outside": 0.0005, "seconds": 6.0,
    "worst_trainer": -1.5, "worst_sampler": -1.25, "worst_owner": 2, "worst_token": "' 42'",
    "worst_context": "'so there are'",
}  # fmt: skip


def write_run(parent, seed, task="word_problems:2", fence="```"):
    """A run of 20 steps whose numbers grow with its seed."""
    folder = RunFolder.create(parent, f"run-{seed}")
    save_config(folder.config, Config(preset="smollm2", task=task, seed=seed, out=str(parent), name=f"run-{seed}"))
    with MetricsWriter(folder) as writer:
        for step in range(STEPS + 1):
            if step in (0, STEPS):
                share = step / STEPS
                writer.write(step, "eval", {
                    "exact_match_sampled": 0.25 + share / 2 + seed / 10, "exact_match_greedy": 0.5 + seed / 10,
                    "completion_length_sampled": 100.0 - 40 * share, "truncated_share_sampled": 0.5 - share / 2,
                    "seconds": 12.0,
                })  # fmt: skip
                samples = [
                    Sample("always wrong", f"{fence} 1", "2", 0.0, {}, 3, True),
                    Sample("learnt", "no idea" if step == 0 else "The answer is 7.", "7", share, {}, 3, True),
                ]
                writer.write_samples(step, "held_out", samples)
            if step:
                values = {
                    "reward_mean": step / STEPS,
                    "step_seconds": 3.0,
                    "rollout_seconds": 1.5,
                    "entropy_labelled": 1.0 / step,
                }
                writer.write(step, "train", {**values, "tokens_per_second": 1000.0 * step})
        writer.write(1, "drift", {"max": 0.05 + seed / 100, **DRIFT})
        writer.write(11, "drift", {"max": 0.04, **DRIFT})
    return str(folder.path)


@pytest.fixture
def folders(tmp_path):
    return [write_run(tmp_path, seed) for seed in (2, 0, 1)]


def test_the_page_of_three_seeds(folders, tmp_path):
    (tmp_path / "docs").mkdir()
    figure, text = tmp_path / "seeds.png", tmp_path / "docs" / "seeds.md"
    arguments = ["--figure", str(figure), "--page", str(text), "--title", "Three seeds", "--samples", "2"]
    assert plot.run_cli([*folders, *arguments]) == [figure, text] and figure.stat().st_size > 10_000
    written = text.read_text(encoding="utf-8")
    lines = written.splitlines()
    assert lines[0] == "# Three seeds" and "![Curves over the optimizer steps](../seeds.png)" in lines
    assert "Preset `smollm2`, task `word_problems:2`, loss `grpo`, 20 optimizer steps, seeds 0, 1, 2." in lines
    rows = [
        "|  | seed 0 | seed 1 | seed 2 | mean |",
        "| exact match, temperature 1 | 0.250 → 0.750 | 0.350 → 0.850 | 0.450 → 0.950 | 0.350 → 0.850 |",
        "| exact match, greedy | 0.500 → 0.500 | 0.600 → 0.600 | 0.700 → 0.700 | 0.600 → 0.600 |",
        "| tokens of a completion, temperature 1 | 100.0 → 60.0 | 100.0 → 60.0 | 100.0 → 60.0 | 100.0 → 60.0 |",
        # Steps 1 to 10 and 11 to 20.
        "| reward | 0.275 → 0.775 | 0.275 → 0.775 | 0.275 → 0.775 | 0.275 → 0.775 |",
        "| seed 1 | 11 | 1,234 | 0.001 | 0.002 | 0.01 | 0.03 | 0.04 | 0.05% |",
        # 20 steps of 3 s, two evaluations and two reports: 60 + 24 + 12 s.
        "| seed 2 | 1.6 | 0.5 | 10,500 | 0 |",
    ]
    assert [row for row in rows if row not in lines] == []
    assert "share truncated, greedy" not in written, "no run has it"
    # Seed 2 has the largest.
    assert "0.07 nats at step 1: ` ' 42' ` after ` 'so there are' `" in written and "shard 2." in written
    assert written.index("no idea") < written.index("The answer is 7.") < written.index("always wrong"), (
        "the learnt one first"
    )
    assert "````text\n``` 1\n````" in written, "a completion cannot close its block"
    assert str(tmp_path) not in written


def test_one_run_has_no_mean(folders):
    text = page(read_runs(folders[:1]), title="One", samples=0)
    assert "|  | seed 2 |\n" in text and "mean" not in text and "## Samples" not in text and "![" not in text
    assert "| entropy [nats per token] | 0.293 → 0.067 |" in text


def test_a_command_is_shown_without_its_machine():
    seen = [
        "/opt/bin/python",
        "-m",
        "experiments.grpo",
        "--preset",
        "smollm2",
        "--out=/x",
        "--name",
        "a",
        "--model.path",
        "/m/b c",
    ]
    assert command(seen) == "python -m experiments.grpo --preset smollm2 --model.path 'b c'"


@pytest.mark.bad_input
def test_bad_input_ends_in_one_line(folders, tmp_path, capsys):
    other = write_run(tmp_path, 5, task="addition:2")
    for arguments, words in [
        ([folders[0], other], f"runs: expected runs that differ in their seeds alone, got {other} with another task"),
        ([folders[0], "--page", str(tmp_path / "no" / "a.md")], "--page: expected a file in an existing folder, got"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            plot.run_cli([*arguments, "--figure", str(tmp_path / "a.png")])
        lines = capsys.readouterr().err.strip().splitlines()
        assert stopped.value.code == 2 and len(lines) == 1 and lines[0].startswith(f"error: {words}"), lines
    assert not (tmp_path / "a.png").exists()


def test_runs_are_sorted_by_seed_and_may_have_been_resumed(folders):
    RunFolder.open(folders[0]).record_resume(10)
    runs = read_runs(folders)
    assert [run.config["seed"] for run in runs] == [0, 1, 2] and len(runs[2].env["resumes"]) == 1
    assert json.dumps(dataclasses.asdict(runs[0])), "plain values"
