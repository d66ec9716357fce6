"""The comparison of paths: the fixed order keeps every byte, the others do not, and changes not run are reported."""

import jax
import numpy as np
import pytest

from experiments.studies import drift
from experiments.studies.drift import DriftConfig
from jaxlogp.invariance import check


def in_this_process(path, *arrays):
    """The function of two processes on the devices of this one; test_process_split.py starts the processes."""
    module, name = path.split(":")
    assert module == drift.__name__
    return np.asarray(jax.jit(getattr(drift, name))(*arrays))


@pytest.fixture(scope="module")
def result():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "run_in_processes", in_this_process)
        return drift.main(DriftConfig(tokens=24, hidden_size=32, vocab_size=264, num_shards=(3,)))


@pytest.mark.slow
def test_the_fixed_order_path_keeps_every_byte_and_the_others_do_not(result):
    broken = {report.name: set(report.broken) for report in result.reports}
    assert len(broken) == 6
    for name, changes in broken.items():
        assert bool(changes) == ("fixed-order" not in name), (name, changes)
    assert all("vocabulary over 3 devices" in changes for name, changes in broken.items() if "fixed-order" not in name)
    of_processes = [r.name for r in result.reports if any(d.change.startswith("two processes") for d in r.differences)]
    assert of_processes == [r.name for r in result.reports if r.name.endswith("log-probs")]
    assert "two processes of 4 devices" in broken["fast path (chunked), log-probs"]
    assert not any(report.not_run for report in result.reports)


@pytest.mark.slow
def test_the_text_holds_every_table_and_the_worst_token(result):
    for report in result.reports:
        assert str(report) in result.text
    assert str(result.rounding) in result.text and 0.0 < result.rounding.max_abs_error < 0.5


@pytest.mark.slow
def test_the_file_holds_the_tables(result, tmp_path):
    config = DriftConfig()
    path = drift.write(config, result, tmp_path)
    assert path.name == "drift_cpu_float32.md" and result.text in path.read_text(encoding="utf-8")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "options, words",
    [
        (["--tokens", "3"], "--tokens: expected at least 8, got 3"),
        (["--dtype", "float16"], "--dtype: expected float32 or bfloat16, got float16"),
        (["--num-shards", "5"], "--num-shards: expected divisors of 24 and of --vocab-size 1032, above 1, got 5"),
    ],
)
def test_bad_options_end_in_one_line_and_exit_code_2(options, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        drift.run_cli(options)
    assert stopped.value.code == 2 and capsys.readouterr().err.strip() == f"error: {words}"
