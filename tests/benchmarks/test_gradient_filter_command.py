"""The measurement of the gradient filter at a small size: policies are as stated, skipped blocks alone cause errors."""

import numpy as np
import pytest

from benchmarks.studies.gradient_filter import GradientFilterConfig, main, make_policy, with_common_part

SMALL = GradientFilterConfig(48, 32, 512, (0.5,), (2.0**-6,), token_chunk=16, vocab_tile=32, repeats=1)


@pytest.mark.slow
def test_policies_and_rows(capsys):
    policy = make_policy(SMALL, 0.5)
    moved = policy.hidden.astype(float) @ (with_common_part(policy).weight - policy.weight).T
    assert policy.entropy == pytest.approx(0.5, abs=0.01)
    assert np.ptp(moved, axis=1).max() < 1e-4 * np.abs(moved).max(), "the same number for every token"
    rows = main(SMALL)
    assert [row.policy for row in rows[::2]] == ["peaked, 0.5 nat", "peaked, 0.5 nat, common part", "flat"]
    for off, filtered in zip(rows[::2], rows[1::2], strict=True):
        assert off.threshold is None and off.errors == (0.0,) * 4
        # It has the same blocks as the unfiltered program: left out or not is all the difference.
        assert (filtered.skipped > 0) == (min(filtered.errors) > 0)
    assert rows[1].skipped > 0
    assert capsys.readouterr().out.count("\n| ") == 1 + len(rows)
