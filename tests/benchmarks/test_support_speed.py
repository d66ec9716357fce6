"""The benchmark of log-probs on a support: its random supports, its float64 values and its table, at a small size."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import support_speed
from benchmarks.clock import time_in_turns
from benchmarks.support_speed import SupportSpeedConfig

CONFIG = SupportSpeedConfig(
    shapes=("48,16",),
    vocab_size=400,
    engine="chunked",
    support_engines=("support",),
    dtype="float32",
    repeats=1,
)


def test_supports_have_the_sizes_that_are_promised():
    counts = support_speed.draw_counts(np.random.default_rng(1), 100_000, 1024)
    assert abs(np.mean(counts == 1) - 0.45) < 0.01 and np.median(counts) == 2
    assert 7.5 < counts.mean() < 8.5 and 70 < np.percentile(counts, 99) < 85 and counts.max() <= 1024


@pytest.mark.parametrize("law", ["zipf", "uniform"])
def test_ids_of_a_token_are_distinct_and_have_their_law(law):
    counts = np.full(300, 40)
    ids = support_speed.draw_ids(np.random.default_rng(2), counts, 200, law)
    assert ids.min() >= 0 and ids.max() < 200
    assert all(np.unique(row).size == 40 for row in ids.reshape(300, 40))
    _, occurrences = np.unique(ids, return_counts=True)
    # 300 tokens name each of 200 ids 60 times on average; by Zipf's law nearly all name the likeliest.
    assert (occurrences.max() > 250) == (law == "zipf")


@pytest.fixture
def untimed(monkeypatch):
    monkeypatch.setattr(support_speed, "time_in_turns", functools.partial(time_in_turns, at_least=0.0))
    monkeypatch.setattr(support_speed, "copy_bandwidth", lambda: 1e9)


@pytest.mark.costly
def test_every_program_has_a_row_and_errors_are_those_of_fp32(untimed, capsys):
    found = support_speed.main(CONFIG)
    assert [(one.ids, one.program, one.part) for one in found] == [
        (law, program, part)
        for law in CONFIG.ids
        for program in ("full head", "support")
        for part in ("forward", "forward+backward")
    ]
    assert all(one.ratio == 1.0 for one in found if one.program == "full head")
    case = support_speed.make_case(CONFIG, (48, 16), "uniform")
    ids = int(case.support.counts.sum())
    rows = {"forward": ids + 48, "forward+backward": 2 * (ids + 48) + 48 + 400}
    for one in found[-2:]:
        assert one.bound_seconds * 1e9 == pytest.approx(4 * 16 * rows[one.part])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| 48, 16 | ") for line in lines) == len(found)
    notes = [line for line in lines if "errors against float64" in line]
    parts = [part.split() for note in notes for part in note.split("support: ")[1].split(",")]
    assert [part for part in parts if part[0] == "the"] == 2 * [["the", "same", "bits", "twice"]]
    values = [float(part[-1]) for part in parts if part[0] != "the"]
    assert len(values) == 6 and max(values) < 1e-5


@pytest.mark.costly
def test_one_product_and_masked_logits_have_rows_beside_the_support(untimed, capsys):
    found = support_speed.main(dataclasses.replace(CONFIG, ids=("zipf",), beside=True))
    rows = [(one.program, one.part, one.bound_seconds is None) for one in found[4:]]
    masked = [("masked logits", part, True) for part in ("forward", "forward+backward")]
    assert rows == [*masked, ("one product", "forward", True)]
    assert "; masked logits: log-probs " in capsys.readouterr().out


@pytest.mark.parametrize("chunk", [48, 16])
def test_masked_logits_give_the_values_and_gradients_on_the_support(chunk):
    case = support_speed.make_case(CONFIG, (48, 16), "zipf")
    function, operands = support_speed.programs(case, "chunked", (), chunk)["masked logits", "forward+backward"]
    errors = support_speed.float64_errors(support_speed.float64_values(case), jax.jit(function)(*operands))
    assert max(errors) < 1e-5


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_wrong_values_and_gradients_are_seen(broken):
    case = support_speed.make_case(CONFIG, (48, 16), "zipf")
    function, operands = support_speed.programs(case, "chunked", ("support",))["support", "forward+backward"]
    log_probs, (d_hidden, d_weight) = jax.jit(function)(*operands)
    outputs = [log_probs, d_hidden, d_weight]
    outputs[broken] = outputs[broken] * 1.01
    expected = support_speed.float64_values(case)
    errors = support_speed.float64_errors(expected, (outputs[0], tuple(outputs[1:])))
    assert [error > 1e-3 for error in errors] == [index == broken for index in range(3)]
    with pytest.raises(ValueError, match="expected 0 in rows that no support names"):
        support_speed.float64_errors(expected, (log_probs, (d_hidden, d_weight + jnp.float32(1e-6))))
