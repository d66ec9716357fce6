"""The benchmark of the head, at a size that takes seconds: programs agree, ratios are as stated, files are complete."""

import dataclasses
import json
import math
import statistics

import jax
import numpy as np
import pytest

from benchmarks import cases as head_cases
from benchmarks.head_speed import __main__ as head_speed
from benchmarks.head_speed import shapes as head_shapes
from benchmarks.head_speed.__main__ import HeadSpeedConfig

pytestmark = pytest.mark.costly

SMALL = HeadSpeedConfig(tokens=512, hidden_size=16, vocab_size=8192, repeats=3)


@pytest.fixture(scope="module")
def result():
    return head_speed.main(SMALL)


def test_the_programs_compute_the_same_thing():
    """A ratio between programs that differ in what they compute would mean nothing. float64 NumPy decides."""
    keys = jax.random.split(jax.random.key(1), 3)
    hidden, weight = jax.random.normal(keys[0], (8, 16)), jax.random.normal(keys[1], (40, 16))
    targets = jax.random.randint(keys[2], (8,), 0, 40)
    logits = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T
    lse = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) + logits.max(1, keepdims=True)
    log_softmax = logits - lse
    expected = log_softmax[np.arange(8), targets], -(np.exp(log_softmax) * log_softmax).sum(1)
    programs = (head_speed.materialised, head_speed._engine("reference"), head_speed._engine("chunked"))
    for program in programs:
        for seen, wanted in zip(program(hidden, weight, targets), expected, strict=True):
            # A few fp32 roundings of logits of size about 16: 16 * 2^-24 * a few.
            np.testing.assert_allclose(seen, wanted, rtol=1e-5, atol=1e-5)


def test_rows_ratios_and_memory(result):
    assert [row.program for row in result.rows] == ["materialised", "reference", "chunked"]
    base = result.rows[0]
    for row in result.rows:
        assert row.forward_seconds > 0 and row.forward_backward_seconds > 0
        for figure, ratio in (
            ("forward_seconds", "forward_ratio"),
            ("forward_backward_seconds", "forward_backward_ratio"),
            ("forward_bytes", "forward_bytes_ratio"),
            ("forward_backward_bytes", "forward_backward_bytes_ratio"),
        ):
            assert math.isclose(getattr(row, ratio), getattr(row, figure) / getattr(base, figure)), (row.program, ratio)
    logits_bytes = SMALL.tokens * SMALL.vocab_size * 4
    chunked = result.rows[2]
    assert base.forward_bytes >= logits_bytes, "the baseline is meant to store the logits"
    assert chunked.forward_bytes < logits_bytes and chunked.forward_backward_bytes < logits_bytes


def test_times_are_medians_without_the_warm_up(monkeypatch):
    """A clock that is given: the first, slow call of every program must not count, and the median must be taken."""
    calls = {}

    def seconds(compiled, *arguments):
        calls[compiled] = calls.get(compiled, 0) + 1
        return {1: 1e6, 2: 9.0, 3: 2.0, 4: 1.0}[calls[compiled]]

    monkeypatch.setattr(head_speed, "_seconds", seconds)
    rows = head_speed.main(dataclasses.replace(SMALL, tokens=8, vocab_size=32)).rows
    assert set(calls.values()) == {SMALL.repeats + 1}
    assert {row.forward_seconds for row in rows} == {statistics.median([9.0, 2.0, 1.0])}
    assert {row.forward_backward_ratio for row in rows} == {1.0}


def test_written_files_hold_the_table_the_numbers_and_the_versions(result, tmp_path):
    markdown = head_speed.write(SMALL, result, tmp_path / "results")
    assert result.markdown in markdown.read_text(encoding="utf-8")
    record = json.loads(markdown.with_suffix(".json").read_text(encoding="utf-8"))
    assert record["config"] == json.loads(json.dumps(dataclasses.asdict(SMALL)))
    assert set(record) == {"command", "config", "jax", "python", "device", "rows"}
    assert record["rows"] == [dataclasses.asdict(row) for row in result.rows]
    assert record["jax"] == jax.__version__ and record["python"] and record["device"]
    table = [line for line in result.markdown.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(result.rows)
    assert {line.count("|") for line in table} == {10}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "options, words",
    [
        (["--tokens", "0"], "--tokens: expected a number > 0, got 0"),
        (["--repeats", "-1"], "--repeats: expected a number > 0, got -1"),
        (["--tokens", "8", "0"], "--tokens: expected a number > 0, got 0"),
        (["--base", "gemm"], "--base: expected materialised or product, got gemm"),
        (
            ["--tokens", "8", "9", "--base", "materialised"],
            "--tokens: expected one number with --base materialised, got 8 9",
        ),
        (["--model", "gpt"], f"--model: expected all or one of {sorted(head_cases.MODELS)}, got gpt"),
        (
            ["--skip", "cudnn"],
            f"--skip: expected one of {['ours', 'peers', *head_shapes.our_names(), *head_shapes.peer_names()]}, got cudnn",
        ),
        (["--settle", "0"], "--settle: expected a number > 0, got 0.0"),
        (["--time-budget", "-1"], "--time-budget: expected a number >= 0, got -1.0"),
        (["--dtype", "float16"], "--dtype: expected float32 or bfloat16, got float16"),
    ],
)
def test_bad_options_end_in_one_line_and_exit_code_2(options, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        head_speed.run_cli(options)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.strip() == f"error: {words}"
