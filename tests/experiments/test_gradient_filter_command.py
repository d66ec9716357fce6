"""The measurement of the gradient filter, at a size that takes seconds: policies are as stated, errors 0 without skips."""

import numpy as np
import pytest

from experiments.studies import gradient_filter
from experiments.studies.gradient_filter import GradientFilterConfig

SMALL = GradientFilterConfig(
    tokens=48, hidden_size=32, vocab_size=512, entropies=(0.5,), thresholds=(2.0**-6,), token_chunk=16, vocab_tile=32,
    repeats=1,
)  # fmt: skip


def test_policies_have_the_entropy_that_was_asked_for():
    for wanted in (0.5, 2.0):
        policy = gradient_filter.make_policy(SMALL, wanted)
        logits = np.asarray(policy.hidden, np.float64) @ np.asarray(policy.weight, np.float64).T
        probs = np.exp(logits - logits.max(axis=1, keepdims=True))
        probs /= probs.sum(axis=1, keepdims=True)
        assert -np.sum(probs * np.log(probs), axis=1).mean() == pytest.approx(wanted, abs=0.01)
        assert policy.entropy == pytest.approx(wanted, abs=0.01)
        shared = gradient_filter.with_common_part(policy)
        moved = np.asarray(policy.hidden, np.float64) @ np.asarray(shared.weight, np.float64).T - logits
        assert np.ptp(moved, axis=1).max() < 1e-4 * np.abs(moved).max(), "the same number for every token"


@pytest.mark.slow
def test_rows_and_table(tmp_path):
    result = gradient_filter.main(SMALL)
    assert [(row.order, row.threshold) for row in result.rows[:3]] == [
        ("shuffled", None),
        ("shuffled", 2.0**-6),
        ("by mean logit", 2.0**-6),
    ]
    policies = ["peaked, 0.5 nat", "peaked, 0.5 nat, common part", "flat"]
    assert [row.policy for row in result.rows[::3]] == policies
    for off, *on in zip(result.rows[::3], result.rows[1::3], result.rows[2::3], strict=True):
        assert (off.skipped, off.hidden_error, off.weight_error, off.ratio) == (0.0, 0.0, 0.0, 1.0)
        for row in on:
            assert 0 <= row.skipped < 1 and row.seconds > 0
            # The first, unordered, has the same blocks as the unfiltered program: left out or not is all the difference.
            if row.order == "shuffled":
                assert (row.skipped > 0) == (row.weight_error > 0)
    assert result.rows[2].skipped > result.rows[1].skipped, "the order by mean logit must be seen"
    path = gradient_filter.write(result, tmp_path)
    assert result.markdown in path.read_text(encoding="utf-8") and "jax" in result.markdown.lower()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "options, words",
    [
        (["--tokens", "0"], "--tokens: expected a number > 0, got 0"),
        (["--hidden-size", "1"], "--hidden-size: expected a number > 1, got 1"),
        (["--dtype", "float16"], "--dtype: expected float32 or bfloat16, got float16"),
        (["--entropies", "99"], "--entropies: expected entropies above"),
        (["--thresholds", "1.5"], "threshold: expected a Python number in [0, 1), got float 1.5"),
    ],
)
def test_bad_options_end_in_one_line_and_exit_code_2(options, words, capsys):
    small = ["--vocab-size", "64", "--tokens", "8", "--repeats", "1"]
    with pytest.raises(SystemExit) as stopped:
        gradient_filter.run_cli([*small, *options])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.strip().startswith(f"error: {words}")


def test_errors_are_those_of_numpy():
    seen, exact = np.array([[1.0, 2.0], [0.0, 4.0]]), np.array([[1.0, 2.5], [0.0, 3.0]])
    norm, largest = gradient_filter.relative_errors(seen, exact)
    assert norm == pytest.approx(np.sqrt(1.25 / (1 + 6.25 + 9))) and largest == pytest.approx(1 / 3)
