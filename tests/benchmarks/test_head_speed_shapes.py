"""The benchmark of the head against one product: exact answers, ratios, programs not run, the time budget."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cases as head_cases
from benchmarks.clock import Timing
from benchmarks.head_speed import __main__ as head_speed
from benchmarks.head_speed import report as head_report
from benchmarks.head_speed import shapes as head_shapes
from benchmarks.head_speed.__main__ import HeadSpeedConfig
from benchmarks.head_speed.peers import JaxPeer, TorchPeer
from benchmarks.head_speed.programs import differentiated, engine_program, materialised

pytestmark = pytest.mark.slow
SMALL = HeadSpeedConfig(
    base="product", tokens=24, hidden_size=16, vocab_size=96, dtype="float32", repeats=1, settle=1e-4, only=("chunked",)
)
OURS = ("materialised", "chunked", "one pass", "one pass, bonus", "known lse")


@pytest.fixture(scope="module")
def shapes():
    config = dataclasses.replace(SMALL, tokens=(24, 40), only=(*OURS, "peers", "hopper"))
    return config, head_speed.main(config)


def reasons(result):
    return {left.program: left for left in result.not_run}


def test_exact_values_and_gradients_against_numpy(monkeypatch):
    """Central differences of a NumPy loss, and a last block of tokens that is shorter than the others."""
    monkeypatch.setattr(head_cases, "TOKEN_BLOCK", 2)
    case = head_cases.make_case("", 3, 4, 7, "float32")
    seen = head_cases.exact(case)
    hidden, weight, g = (np.asarray(x, np.float64) for x in (case.hidden, case.weight, case.g_log_probs))

    def values(hidden, weight):
        logits = hidden @ weight.T
        lse = np.log(np.exp(logits).sum(axis=1))
        p = np.exp(logits - lse[:, None])
        return logits[np.arange(3), case.targets] - lse, -(p * np.log(p)).sum(axis=1), lse

    for got, wanted in zip((seen.log_probs, seen.entropy, seen.lse), values(hidden, weight), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-13)
    bonus = float(np.float32(-head_cases.ENTROPY_BONUS))
    for number, scale in enumerate((0.0, bonus)):

        def loss(hidden, weight, scale=scale):
            log_probs, entropy, _ = values(hidden, weight)
            return (g * log_probs).sum() + scale * entropy.sum()

        for got, place in ((seen.d_hidden[number], 0), (seen.d_weight[number], 1)):
            wanted = np.zeros_like((hidden, weight)[place])
            for index in np.ndindex(*wanted.shape):
                up, down = [hidden.copy(), weight.copy()], [hidden.copy(), weight.copy()]
                up[place][index] += 1e-5
                down[place][index] -= 1e-5
                wanted[index] = (loss(*up) - loss(*down)) / 2e-5
            # Of central differences: h² times third derivatives of size 1, and 1e-16 / h.
            np.testing.assert_allclose(got, wanted, atol=1e-9)


def test_every_program_of_ours_on_every_shape_with_its_errors(shapes):
    config, result = shapes
    assert [(row.program, row.tokens) for row in result.rows] == [(n, t) for t in config.tokens for n in OURS]
    for row in result.rows:
        assert (row.forward_seconds is None) == (row.program in OURS[2:])
        assert math.isclose(row.forward_backward_ratio, row.forward_backward_seconds / row.product_seconds)
        if row.program == "known lse":
            assert row.log_prob_error is None and row.entropy_error is None
        else:
            # fp32 roundings of logits of size about 6.
            assert row.log_prob_error < 1e-5 and row.entropy_error < 1e-5
        assert row.d_hidden_error < 1e-5 and row.d_weight_error < 1e-5
        assert row.forward_backward_bytes > 0 and row.turns == 1


def test_what_was_not_run_is_said_once_with_the_reason(shapes):
    config, result = shapes
    found = reasons(result)
    assert len(found) == len(result.not_run), "one line for all shapes"
    assert found["fixed_order"] == head_report.NotRun("", "fixed_order", "left out by an option")
    assert not found["hopper"].shape and found["hopper"].reason
    for peer in head_shapes.PEERS:
        assert peer.name in found and peer.name in result.markdown.split("Not run:")[1]


def test_ratios_of_known_times(monkeypatch):
    """A product of 2 ms and given times: the figures of the table, and which programs had fewer turns."""

    def known(calls, turns, at_least, after_turn):
        seconds = {("product", ""): 0.002, ("chunked", "forward"): 0.003, ("chunked", "both"): 0.0085}
        assert set(calls) == set(seconds)
        return {name: Timing(seconds[name], 2 if name == ("chunked", "both") else turns) for name in calls}, {}

    monkeypatch.setattr(head_shapes, "time_in_turns", known)
    result = head_speed.main(dataclasses.replace(SMALL, repeats=3))
    (row,) = result.rows
    assert (row.forward_ratio, row.forward_backward_ratio, row.turns) == (1.5, 4.25, 2)
    (line,) = [line for line in result.markdown.splitlines() if line.startswith("| chunked")]
    assert line.startswith("| chunked | 3.00 ms | 1.50 | 8.50 ms | 4.25 |")
    assert line.endswith("| log-probs, entropy; 2 of 3 turns |")
    assert "one product 2.00 ms" in result.markdown


def _broken(message):
    def load():
        raise ImportError(message)

    return load


def _wrong(hidden, weight, targets):
    log_probs, entropy = materialised(hidden, weight, targets)
    return log_probs + 0.5, entropy


def test_peers_that_fail_are_rows_with_the_reason_and_a_wrong_one_shows_its_error(monkeypatch):
    def refuses(hidden, weight, targets):
        raise RuntimeError("no | room\nsecond line")

    peers = (
        JaxPeer("no import", ("jax",), "jax", _broken("libfoo.so"), "nothing"),
        JaxPeer("refuses", ("jax",), "jax", lambda: refuses, "nothing"),
        JaxPeer("off by a half", ("jax",), "jax", lambda: _wrong, "log-probs, entropy"),
        JaxPeer("no entropy", ("jax",), "jax", lambda: lambda *x: (materialised(*x)[0], None), "log-probs, no entropy"),
        JaxPeer("absent", ("no_such_module",), "absent", _broken("never asked"), "nothing"),
    )
    monkeypatch.setattr(head_shapes, "PEERS", peers)
    result = head_speed.main(dataclasses.replace(SMALL, only=("chunked", "peers")))
    rows = {row.program: row for row in result.rows}
    assert list(rows) == ["chunked", "off by a half", "no entropy"]
    assert math.isclose(rows["off by a half"].log_prob_error, 0.5, rel_tol=1e-4)
    # Its gradients are held against those that do not go through the entropy.
    assert rows["no entropy"].entropy_error is None and rows["no entropy"].d_hidden_error < 1e-5
    found = reasons(result)
    assert found["no import"].failed and found["refuses"].failed and not found["absent"].failed
    table = [line for line in result.markdown.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {len(head_report.COLUMNS) + 1}
    assert any(line.startswith("| no import |") and "ImportError: libfoo.so |" in line for line in table)
    assert any(line.startswith("| refuses |") and "RuntimeError: no / room second line |" in line for line in table)
    assert "- absent: not installed" in result.markdown.splitlines()


def test_a_peer_of_pytorch_is_refused_without_a_gpu(monkeypatch):
    monkeypatch.setattr("benchmarks.head_speed.peers._missing", lambda *modules: None)
    peer = TorchPeer("verl", ("verl",), "verl", _broken("never asked"), "log-probs")
    assert peer.why_not() == f"it needs an NVIDIA GPU, the default device is {jax.devices()[0].platform}"


def test_a_program_that_fails_while_it_is_timed_is_a_row_too(monkeypatch):
    real = head_shapes.time_in_turns

    def breaks(calls, *arguments, **options):
        def fails():
            raise RuntimeError("out of memory")

        return real({**calls, ("chunked", "both"): (fails, lambda out: out)}, *arguments, **options)

    monkeypatch.setattr(head_shapes, "time_in_turns", breaks)
    result = head_speed.main(dataclasses.replace(SMALL, only=("chunked", "one pass")))
    assert [row.program for row in result.rows] == ["one pass"]
    assert reasons(result)["chunked"].reason == "failed: RuntimeError: out of memory"


def test_a_program_larger_than_the_device_is_refused_before_it_runs(monkeypatch):
    class Device:
        platform, device_kind = "cpu", "cpu"

        def memory_stats(self):
            return {"bytes_limit": 1000, "bytes_in_use": 990}

    monkeypatch.setattr("benchmarks.head_speed.programs.jax.devices", lambda: [Device()])
    result = head_speed.main(SMALL)
    assert not result.rows and reasons(result)["chunked"].reason.startswith("failed: MemoryError: it needs 0 GiB")


class Clock:
    """A clock that only the measurement of a shape moves, by 30 seconds."""

    now = 100.0

    def __call__(self):
        return self.now

    def measure(self, case, plan):
        self.now += 30.0
        return [], [head_report.NotRun(case.label, "chunked", "left out by an option")]


@pytest.mark.parametrize("budget, begun", [(0.0, 4), (1.0, 1), (60.0, 2), (89.0, 2), (90.0, 3), (120.0, 4)])
def test_time_budget_begins_no_shape_that_would_not_fit_and_says_so(monkeypatch, budget, begun):
    clock, told = Clock(), []
    monkeypatch.setattr(head_shapes, "_measure", clock.measure)
    plan = head_shapes.Plan({"a": (4, 8), "b": (4, 8)}, (2, 3), "float32", 1, (), time_budget=budget)
    rows, not_run = head_shapes.measure_shapes(plan, lambda rows, left: told.append(left), clock=clock)
    labels = [f"{model}, N={number}" for number in (2, 3) for model in "ab"]
    left = {x.shape: x.reason for x in not_run if x.program == head_shapes.EVERY}
    assert rows == [] and list(left) == labels[begun:]
    assert len(told) == 4, "told after every shape"
    assert [x.shape for x in not_run if x.program == "chunked"] == [""], "one line for all that were begun"
    spent = begun * 30
    reason = f"not begun: {spent} s of {budget:.0f} s were spent and the last shape took 30 s"
    assert set(left.values()) <= {reason}
    text = head_report.shapes_markdown(rows, not_run, "float32", 1, {})
    assert all(f"- every program on {label}: {reason}" in text for label in labels[begun:])


def test_a_shape_that_does_not_start_does_not_end_the_run(monkeypatch):
    real = head_shapes.make_case

    def make(label, tokens, *rest):
        if tokens == 24:
            raise MemoryError("operands")
        return real(label, tokens, *rest)

    monkeypatch.setattr(head_shapes, "make_case", make)
    result = head_speed.main(dataclasses.replace(SMALL, tokens=(24, 40)))
    assert [row.tokens for row in result.rows] == [40]
    (failed,) = [left for left in result.not_run if left.failed]
    assert failed.program == head_shapes.EVERY and failed.reason == "failed: MemoryError: operands"


def test_files_are_written_after_every_shape_with_plot_and_versions(shapes, tmp_path, monkeypatch, capsys):
    config, result = shapes
    counts = []
    real = head_speed.write

    def counted(config, result, folder):
        counts.append(len(result.rows))
        return real(config, result, folder)

    def replay(plan, after_shape, started):
        for done in (1, 2):
            after_shape(result.rows[: done * len(OURS)], result.not_run)
        return result.rows, result.not_run

    monkeypatch.setattr(head_speed, "write", counted)
    monkeypatch.setattr(head_speed, "measure_shapes", replay)
    options = ["--base", "product", "--tokens", "24", "40", "--dtype", "float32", "--repeats", "1"]
    options += ["--write", "--folder", str(tmp_path), "--name", "some"]
    head_speed.run_cli(options)
    assert counts == [len(OURS), 2 * len(OURS), 2 * len(OURS)]
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "some.json").read_text(encoding="utf-8"))
    assert record["rows"] == [dataclasses.asdict(row) for row in result.rows]
    assert record["not_run"] == [dataclasses.asdict(left) for left in result.not_run]
    assert record["versions"]["jax"] == jax.__version__ and "jaxlib" in record["versions"]
    assert result.markdown in (tmp_path / "some.md").read_text(encoding="utf-8")
    assert "written: " in capsys.readouterr().out


def test_upstream_gradients_are_the_case_s_own():
    """The policy loss is a loss; its gradients must be those that every other program is asked for."""
    case = head_cases.make_case("", 8, 4, 16, "float32")
    wanted = head_cases.exact(case)
    sampler = jnp.asarray(wanted.log_probs, jnp.float32), jnp.asarray(wanted.lse, jnp.float32)
    arguments = case.hidden, case.weight, case.targets, case.g_log_probs, case.g_entropy, *sampler
    programs = head_shapes.our_programs()
    first = differentiated(engine_program("reference")).both(*arguments)[1]
    for one, other in zip(first, programs["one pass, bonus"].both(*arguments)[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
