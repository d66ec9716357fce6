"""The benchmark of the fixed order: refusals. Its table takes minutes, too long for a test."""

import pytest

from experiments.studies.invariance_cost import run_cli


@pytest.mark.parametrize("arguments", [["--vocab-size", "10"], ["--tokens", "0"], ["--repeats", "-1"]], ids=str)
def test_bad_options_end_in_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        run_cli(arguments)
    assert raised.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {arguments[0]}: expected ")
