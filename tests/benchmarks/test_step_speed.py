"""What step_speed reads off a compiled module and a profile, and its count of operations."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.step_speed import __main__ as step_speed
from benchmarks.step_speed import transformers_step
from benchmarks.step_speed.parts import OPTIMIZER, OTHER, SCOPES, instruction_scopes, milliseconds_by_part
from benchmarks.step_speed.step import RandomSupport, Rows, Step, model_flops, packed_rounds
from benchmarks.step_speed.table import Measured
from experiments.models.named_shapes import NAMED_SHAPES

MODULE = """HloModule jit__of_micro_batch, entry_computation_layout={()}
ENTRY %main {
  %gemm.1 = f32[2]{0} custom-call(), metadata={op_name="jit(f)/transpose(jvp(feed_forward))/dot_general" id=3}
  ROOT %fusion.2 = f32[2]{0} fusion(), metadata={op_name="jit(f)/attention/exp"}
  %copy.3 = f32[2]{0} copy()
}
"""


def event(name, microseconds, op="", module="jit__of_micro_batch(7)"):
    return {"name": name, "dur": microseconds, "args": {"hlo_op": op, "hlo_module": module}}


def test_kernels_belong_to_the_scope_of_their_instruction():
    assert instruction_scopes(MODULE)["fusion.2"] == "jit(f)/attention/exp"
    events = [
        event("gemm_1", 4000, "gemm.1"),
        event("gemm_2", 2000, "gemm.1"),
        event("fused", 1000, "fusion.2"),
        event("copy", 500, "copy.3"),
        event("adam", 3000, "loop", "jit__applied"),
        event("memset", 100, "", ""),
    ]
    parts, kernels = milliseconds_by_part(events, MODULE, repeats=2)
    expected = {SCOPES["feed_forward"]: 3.0, OPTIMIZER: 1.5, SCOPES["attention"]: 0.5, OTHER: 0.3}
    assert {name: round(ms, 9) for name, ms in parts.items()} == expected
    assert kernels[0] == (3.0, 1, SCOPES["feed_forward"], "gemm")


def test_rows_are_packed_as_asked_and_every_slot_but_first_ones_has_a_label():
    rows = Rows(rows=4, length=50, document=20, micro_batches=2)
    rounds = packed_rounds(rows, vocab_size=30)
    assert [each.shape for each in rounds] == [(1, 2, 50)] * 2
    # Documents of 20, 20 and 10 tokens in every row.
    assert [each.num_documents for each in rounds] == [6, 6]
    assert all(int(np.sum(each.micro_batch(0).mask)) == 2 * (50 - 3) for each in rounds)


@pytest.mark.costly
@pytest.mark.parametrize(("optimizer", "narrow"), [("adamw", 0), ("adamw:bfloat16", 1)])
def test_an_optimizer_is_named_with_the_dtype_of_its_first_moment(optimizer, narrow):
    tiny = replace(NAMED_SHAPES["qwen3-0.6b"], vocab_size=32, hidden_size=16, intermediate_size=16, num_layers=1)
    step = Step(tiny, Rows(1, 8, 8, 1), "reference", optimizer)
    kept = sum(leaf.size for leaf in jax.tree.leaves(step.state) if leaf.dtype == jnp.bfloat16)
    assert kept == narrow * step.num_parameters


def test_every_label_is_drawn_from_its_support_and_the_room_is_that_of_the_micro_batch():
    rows = Rows(rows=4, length=50, document=20, micro_batches=2)
    for each in packed_rounds(rows, vocab_size=300, support=RandomSupport("zipf", room=20)):
        batch = each.micro_batch(0)
        assert batch.support.ids.shape == (2 * 50 * 20,)
        counts = np.asarray(batch.support.counts)
        np.testing.assert_array_equal(counts > 0, batch.mask)
        starts = np.cumsum(counts.reshape(-1)) - counts.reshape(-1)
        labels = np.asarray(batch.mask).reshape(-1)
        np.testing.assert_array_equal(batch.support.ids[starts[labels]], batch.targets[batch.mask])
        old = batch.per_token["old_log_probs"][batch.mask]
        np.testing.assert_allclose(old, -np.log(counts[batch.mask]), rtol=1e-6)
        assert 1 < counts[batch.mask].mean() < 20


def test_operations_of_the_published_shape():
    config = NAMED_SHAPES["qwen3-0.6b"]
    rows = Rows(rows=16, length=2048, document=700, micro_batches=1)
    # 6 operations a parameter and token, and 12 · layers · heads · features · (T / 2) for causal attention.
    by_hand = 16 * 2048 * (6 * 596_049_920 + 12 * 28 * 16 * 128 * 1024)
    assert model_flops(config, rows, 596_049_920, 2048) == by_hand
    # Nothing is multiplied by a table that is not the head.
    untied = replace(config, tie_embeddings=False)
    assert model_flops(untied, rows, 596_049_920 + 151_936 * 1024, 2048) == by_hand


def test_what_is_not_installed_is_a_line_of_the_table(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(transformers_step.importlib.util, "find_spec", lambda name: None)
    out = tmp_path / "rows.jsonl"
    rows = step_speed.transformers_rows(step_speed.StepSpeedConfig(out=str(out)))
    assert [(row.remat, row.why_not) for row in rows] == [(each, "torch is not installed") for each in ("none", "full")]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(
        line.startswith("transformers ") and "torch is not installed" in line for line in lines
    )
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize(("mesh", "sharing"), [("data=2", 1), ("fsdp=2", 1), ("sequence=2,tensor=3", 6)])
def test_speed_is_that_of_each_device(mesh, sharing):
    measured = Measured(*["p"] * 3, 1, *["q"] * 6, mesh=mesh)
    measured.set_speed(NAMED_SHAPES["qwen3-0.6b"], Rows(4, 512, 100, 1), 1000, 0.5, 989e12)
    # Ranks of data and fsdp have rows of their own, others share them.
    assert measured.tokens_per_second == 4 * 512 / 0.5 / sharing


def test_a_peer_is_counted_with_its_own_parameters_and_whole_rows(monkeypatch):
    peer = transformers_step.Peer(program="p 1.0", head="Liger", milliseconds=500.0, peak_gib=40.0, num_parameters=1000)
    monkeypatch.setattr(step_speed, "measured_elsewhere", lambda config: peer)
    config = step_speed.StepSpeedConfig(rows=("4x512",), layers=2, document=100)
    row, _ = step_speed.transformers_rows(config)
    assert row.tokens_per_second == 4 * 512 / 0.5 and row.peak_gib == 40.0
    by_hand = 4 * 512 * (6 * 1000 + 12 * 2 * 16 * 128 * 256) / 0.5 / 989e12
    np.testing.assert_allclose([row.mfu, row.mfu_documents], by_hand)
    assert "Liger" in str(row) and "MFU" in str(row)


@pytest.mark.bad_input
@pytest.mark.parametrize("support", ["zipf", "normal:8", "zipf:0", "uniform:some", "none:3"])
def test_a_support_that_is_none_ends_before_anything_is_measured(support):
    with pytest.raises(ValueError, match="^--support: expected none, zipf:ROOM or uniform:ROOM, with a number of ids"):
        step_speed.main(step_speed.StepSpeedConfig(support=(support,), transformers=False))


@pytest.mark.bad_input
@pytest.mark.parametrize("optimizer", ["adam", "adamw:", "adamw:float16", "adafactor:bfloat16"])
def test_an_optimizer_that_is_none_ends_before_anything_is_measured(optimizer):
    expected = "^--optimizer: expected one of adamw, adafactor, muon, adamw:bfloat16, muon:bfloat16, got "
    with pytest.raises(ValueError, match=expected):
        step_speed.main(step_speed.StepSpeedConfig(optimizer=(optimizer,), transformers=False))


@pytest.mark.bad_input
def test_a_shape_without_a_name_ends_before_anything_is_measured():
    with pytest.raises(ValueError, match="^--model: expected one of qwen3-0.6b, .*, llama-3.2-1b, got gpt2"):
        step_speed.main(step_speed.StepSpeedConfig(model=("gpt2",)))
