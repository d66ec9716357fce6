"""The benchmark of completions of uneven lengths, with a tiny model."""

import numpy as np
import pytest

from benchmarks import uneven_lengths
from benchmarks.uneven_lengths import UnevenLengthsConfig
from experiments.models.decoder_config import DecoderConfig
from experiments.models.named_shapes import NAMED_SHAPES

CONFIG = UnevenLengthsConfig(
    model="tiny", rows=8, completions=128, copies=4, prompt=3, mean=5, longest=60, repeats=1, layers=None
)
TINY = DecoderConfig.qwen3(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16
)


@pytest.mark.slow
def test_lengths_have_the_mean_that_is_asked_for(monkeypatch, capsys):
    monkeypatch.setitem(NAMED_SHAPES, "tiny", TINY)
    assert set(uneven_lengths.main(CONFIG)) == {"equal", "refilled", "narrowed"}
    tokens = [int(line.split("|")[2].replace(",", "")) for line in capsys.readouterr().out.splitlines()[3:]]
    assert tokens[0] == 128 * 5
    # A log-normal length deviates by √(e - 1) of its mean; four deviations of the mean of 128, and rounding up to 1.
    bound = 128 * (5 * 4 * (np.e - 1) ** 0.5 / 128**0.5 + 0.5)
    assert all(0 < abs(each - 128 * 5) < bound for each in tokens[1:])


@pytest.mark.bad_input
@pytest.mark.parametrize("completions", [129, 4])
def test_completions_that_do_not_fill_the_rows_are_refused(monkeypatch, completions):
    monkeypatch.setitem(NAMED_SHAPES, "tiny", TINY)
    with pytest.raises(ValueError, match="^--completions: expected a multiple of --rows 8"):
        uneven_lengths.main(UnevenLengthsConfig(model="tiny", rows=8, completions=completions, copies=4))
