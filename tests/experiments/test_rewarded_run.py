"""Whole runs with several rewards, masked completions and a chat template, by way of the command line and of Python."""

import json

import pytest

from experiments import grpo
from experiments.loop.run import train
from tests.experiments.tiny import tiny, train_records
from tests.experiments.tiny_directory import write_tiny_directory
from tests.oracle import fp32_bound

pytestmark = pytest.mark.slow
SIZES = ["--rollout.prompts-per-rollout", "4", "--rollout.num-generations", "4", "--schedule.docs-per-step", "16"]
SIZES += ["--schedule.steps", "2", "--evaluation.num-prompts", "4", "--checkpoint.every", "0", "--quiet"]


def shorter(example, completion):
    return -completion.num_tokens


def right(example, completion):
    return completion == example.answer


@pytest.mark.parametrize("invariant", [False, True])
def test_functions_with_weights_and_masked_completions(tmp_path, invariant):
    """One token is an end, or cut: the labels that are left are end tokens."""
    options = {"schedule": {"steps": 2, "row_length": 8}, "warm_start": {"max_steps": 2}}
    rollout = {"mask_truncated": True, "max_new_tokens": 1, "rescore": True}
    config = tiny(tmp_path, "a", rollout=rollout, invariant=invariant, **options)
    result = train(config, reward=[(right, 1.0), (shorter, 0.5)])
    for record in train_records(result):
        assert record["num_tokens"] == 64 - record["truncated_completions"] == 64 * (1 - record["truncated_share"])
        assert record["num_documents"] == 64 and record["completion_length_mean"] == 1.0
        assert record["update_applied"] == 1 and record["reward/shorter"] == -1.0
        assert record["reward_mean"] == record["reward/right"] - 0.5, "multiples of a 64th: sums are exact"
    samples = [json.loads(line) for line in result.run.samples.read_text().splitlines()]
    for sample in samples:
        assert sample["rewards"] == {"right": sample["reward"] + 0.5, "shorter": -1.0} and sample["num_tokens"] == 1
        # The text of an end token alone is empty, as is that of any other special token.
        assert sample["completion"] == "" or not sample["ended"]
    evaluations = [record for record in result.metrics if record["kind"] == "eval"]
    assert len(samples) == 16 * len(evaluations) > 0
    for record in evaluations:
        assert record["reward_sampled"] == record["exact_match_sampled"] - 0.5


def test_word_problems_by_the_chat_template_on_the_command_line(tmp_path):
    pytest.importorskip("safetensors", reason="the extra hf is not installed")
    pytest.importorskip("tokenizers", reason="the extra hf is not installed")
    path = write_tiny_directory(tmp_path / "model", "smollm2", num_hidden_layers=1)
    arguments = ["--model.path", str(path), "--task", "word_problems:2", "--rollout.max-new-tokens", "4"]
    arguments += ["--data.instruction", "End with the number.", "--reward.functions", "correct", "ended", "short"]
    arguments += ["--reward.weights", "1", "0.5", "0.25", "--reward.length", "2", "--rollout.mask-truncated"]
    result = grpo.run_cli([*SIZES, *arguments, "--out", str(tmp_path), "--name", "a"])
    assert result.run.path == tmp_path / "a"
    for record in train_records(result):
        parts = [record[f"reward/{name}"] for name in ("correct", "ended", "short")]
        # Means of 16 rewards of three parts.
        weighted = parts[0] + 0.5 * parts[1] + 0.25 * parts[2]
        assert record["reward_mean"] == pytest.approx(weighted, abs=fp32_bound(8.0, 16 + 3)) and parts[2] < 0.0
        assert 1.0 <= record["completion_length_mean"] <= 4.0
    assert "End with the number." in result.run.samples.read_text()
    resumed = grpo.run_cli(["--resume", str(result.run.path), "--schedule.steps", "3", "--quiet"])
    assert resumed.before == result.before and resumed.setup.rewards.names == ("correct", "ended", "short")
