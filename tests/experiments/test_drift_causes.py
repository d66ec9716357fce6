"""The study of drift by its causes: its decoder is the library's with no rounding, and near its bf16 arithmetic with all."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.decoder_config import DecoderConfig
from experiments.models.parameters import abstract_decoder
from experiments.studies import drift_causes
from experiments.studies.drift_causes import ROUNDINGS, by_decoding, by_rows, rounded, rounded_graph
from tests.experiments.tiny_gguf import write_tiny_gguf

CONFIG = DecoderConfig(
    vocab_size=40, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
NUMBERS = np.random.default_rng(0)
SCORED = (
    NUMBERS.integers(0, 40, (3, 6)).astype(np.int32),
    np.array([6, 2, 4], np.int32),
    NUMBERS.integers(0, 40, (3, 5)).astype(np.int32),
)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(
        lambda leaf: rounded(jnp.asarray(0.2 * NUMBERS.normal(size=leaf.shape), jnp.float32), True),
        abstract_decoder(CONFIG)[1],
    )


def test_without_roundings_it_is_the_decoder_itself(params):
    wanted = np.asarray(by_rows(abstract_decoder(CONFIG)[0], params, *SCORED))
    np.testing.assert_array_equal(by_rows(rounded_graph(CONFIG, ()), params, *SCORED), wanted)
    # A few hundred fp32 roundings of numbers near 1.
    np.testing.assert_allclose(by_decoding(rounded_graph(CONFIG, ()), params, *SCORED), wanted, atol=2e-5, rtol=0)


def test_with_all_roundings_it_is_a_bf16_decoder_up_to_roundings_that_tip(params):
    narrow = dataclasses.replace(CONFIG, dtype="bfloat16")
    theirs = np.asarray(by_rows(abstract_decoder(narrow)[0], params, *SCORED))
    ours = np.asarray(by_rows(rounded_graph(CONFIG, tuple(ROUNDINGS)), params, *SCORED))
    exact = np.asarray(by_rows(rounded_graph(CONFIG, ()), params, *SCORED))
    assert np.abs(ours - exact).max() > 1e-3
    assert np.abs(ours - theirs).max() < np.abs(theirs - exact).max()


@pytest.mark.slow
def test_every_place_changes_something(params):
    exact = np.asarray(by_rows(rounded_graph(CONFIG, ()), params, *SCORED))
    for place in ROUNDINGS:
        places = (place, "attention") if place == "probabilities" else (place,)
        base = exact if place != "probabilities" else by_rows(rounded_graph(CONFIG, ("attention",)), params, *SCORED)
        assert np.any(np.asarray(by_rows(rounded_graph(CONFIG, places), params, *SCORED)) != base), place


@pytest.mark.slow
def test_the_command_prints_a_row_a_variant(tmp_path, capsys):
    model = write_tiny_gguf(tmp_path / "tiny.gguf").path
    options = ["--prompts", "2", "--new-tokens", "3", "--variants", "all", "none"]
    table = drift_causes.run_cli(["--model", str(model), *options])
    # A second table is about the tokens' surprise.
    variants, explained = table.split("\n- residual:")
    assert "| log-prob, nats | tokens |" in explained
    rows = [line.split(" | ")[0] for line in variants.splitlines() if line.startswith("| ")]
    assert rows[1:] == ["| dtype bfloat16, residual auto", "| dtype bfloat16, residual float32", "| all", "| none"]
    assert table in capsys.readouterr().out


@pytest.mark.bad_input
@pytest.mark.parametrize("options", [["--prompts", "0"], ["--variants", "most"]])
def test_bad_options_are_refused_in_one_line(options, capsys):
    with pytest.raises(SystemExit) as stopped:
        drift_causes.run_cli(["--model", "nowhere", *options])
    lines = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code == 2 and len(lines) == 1 and options[0] in lines[0]
