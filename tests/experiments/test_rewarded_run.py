"""Whole runs with several rewards and masked completions."""

import json

import pytest

from experiments.loop.run import train
from tests.experiments.tiny import tiny, train_records

pytestmark = pytest.mark.slow


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
