"""The benchmark of the fixed order at a small size."""

import functools

import pytest

from benchmarks.clock import time_in_turns
from benchmarks.studies import invariance_cost


@pytest.mark.slow
def test_every_program_has_a_row(monkeypatch, capsys):
    monkeypatch.setattr(invariance_cost, "time_in_turns", functools.partial(time_in_turns, at_least=0.0))
    engines = {"chunked": "chunked", "fixed order": "fixed_order"}
    monkeypatch.setattr(invariance_cost, "ENGINES", engines)
    invariance_cost.main(invariance_cost.CostConfig(tokens=16, hidden_size=8, vocab_size=96, repeats=1))
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[:2] for row in rows[1:]] == [[f"| {shards}", name] for shards in (1, 4) for name in engines]
    assert all(row[3] == row[5] == "1.00" for row in rows[1::2])
