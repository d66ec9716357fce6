"""The comparison of paths at a small size: the fixed order keeps every byte, the others do not."""

import jax
import numpy as np
import pytest

from benchmarks.studies import drift
from jaxlogp.invariance import check


def in_this_process(path, *arrays):
    """The function of two processes on the devices of this one; test_process_split.py starts the processes."""
    module, name = path.split(":")
    assert module == drift.__name__
    return np.asarray(jax.jit(getattr(drift, name))(*arrays))


@pytest.mark.slow
def test_the_fixed_order_path_keeps_every_byte_and_the_others_do_not(monkeypatch, capsys):
    monkeypatch.setattr(check, "run_in_processes", in_this_process)
    reports, rounding = drift.main(drift.DriftConfig(tokens=24, hidden_size=32, vocab_size=264, num_shards=(3,)))
    broken = {report.name: set(report.broken) for report in reports}
    assert len(broken) == 6
    for name, changes in broken.items():
        assert bool(changes) == ("fixed-order" not in name), (name, changes)
        assert ("vocabulary over 3 devices" in changes) == ("fixed-order" not in name)
    of_processes = [r.name for r in reports if any(d.change.startswith("two processes") for d in r.differences)]
    assert of_processes == [name for name in broken if name.endswith("log-probs")]
    assert "two processes of 4 devices" in broken["fast path (chunked), log-probs"]
    assert not any(report.not_run for report in reports) and 0.0 < rounding.max_abs_error < 0.5
    text = capsys.readouterr().out
    assert all(str(table) in text for table in (*reports, rounding))
