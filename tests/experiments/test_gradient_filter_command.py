"""The measurement of the gradient filter: what its table says of a small case, and refusals."""

import pytest

from experiments.gradient_filter import GradientFilterConfig, main, run_cli


def test_the_table_of_a_small_case():
    config = GradientFilterConfig(
        tokens=64, hidden_size=32, vocab_size=1024, entropies=(0.5,), thresholds=(2.0**-8,), token_chunk=16, vocab_tile=64,
        repeats=1,
    )  # fmt: skip
    result = main(config)
    by = {(row.policy, row.order, row.threshold): row for row in result.rows}
    assert len(by) == len(result.rows) == 3 * (1 + 2)
    off, unordered, ordered = (row for row in result.rows if row.policy == "peaked, 0.5 nat")
    assert (off.threshold, off.skipped, off.hidden_error, off.weight_error) == (None, 0.0, 0.0, 0.0)
    # Sorting by mean logit is what finds blocks to leave out; what is left out is small but not nothing.
    assert ordered.skipped > unordered.skipped and ordered.skipped > 0.3
    assert 0.0 < ordered.hidden_error < 0.05
    assert result.markdown.count("\n| peaked, 0.5 nat |") == 3


@pytest.mark.parametrize(
    "arguments",
    [["--tokens", "0"], ["--thresholds", "1.5"], ["--dtype", "int8"], ["--entropies", "99"]],
    ids=str,
)
def test_bad_options_end_in_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        run_cli(["--vocab-size", "256", *arguments])
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
