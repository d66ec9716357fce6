"""The trial that compares two commits: it sees what differs, and its runs end and are read."""

import re

import pytest

from benchmarks.trials import same_as


def test_every_difference_has_a_line():
    base = {"loss": "1.0", "entropy": "2.0", "checkpoint 1: w": ("float32", (1,), b"abcd")}
    mine = {"loss": "1.5", "checkpoint 1: w": ("float32", (1,), b"abce"), "kl": "0.0"}
    assert same_as.differences(base, base) == []
    assert same_as.differences(mine, base) == [
        "loss: 1.0 -> 1.5",
        "entropy: only at BASE",
        "checkpoint 1: w: arrays differ",
        "kl: only here",
    ]


@pytest.mark.slow
def test_a_commit_is_the_same_as_itself(capsys, monkeypatch, cheap_processes):
    monkeypatch.setattr("sys.argv", ["same_as", "HEAD", "--at", "HEAD", "--only", "plain"])
    with pytest.raises(SystemExit) as end:
        same_as.main()
    assert end.value.code == 0
    assert re.fullmatch(r"plain: \d{3,4} values are equal\n", capsys.readouterr().out)
