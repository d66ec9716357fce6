"""What a run chooses to fit into a device: what a policy of recomputation keeps, and what is tried one after the other."""

import dataclasses
import weakref

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from experiments.config import Config, apply_changes
from experiments.experience import prompts
from experiments.loop import memory, plan
from experiments.loop.found import Found
from experiments.loop.memory import MemoryNeed
from experiments.loop.plan import FROM_LEAST, kept_bytes
from experiments.loop.run import set_up
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig
from experiments.runs.config_file import load_config
from tests.experiments.tiny import TINY, tiny

SHAPE = DecoderConfig.qwen3(
    vocab_size=24, hidden_size=32, intermediate_size=80, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8
)
ROWS, LENGTH = 2, 64


def residual_bytes(decoder):
    """Bytes of all that the backward pass of the body takes over from its forward pass."""
    graph, params = nnx.split(Decoder(decoder, rngs=nnx.Rngs(0)))
    tokens = jnp.zeros((ROWS, LENGTH), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)

    def body(params):
        return nnx.merge(graph, params).hidden_states(tokens, positions, tokens)

    backward = jax.eval_shape(lambda params: jax.vjp(body, params)[1], params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))


@pytest.mark.parametrize(("dtype", "residual"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "float32")])
def test_what_layers_keep_is_what_jax_saves(dtype, residual):
    """Beside it are tables, masks and parameters, the same with every policy."""
    plain = dataclasses.replace(SHAPE, dtype=dtype, residual_dtype=residual, attention="chunked")
    shapes = [dataclasses.replace(plain, remat=policy) for policy in FROM_LEAST]
    beside = {residual_bytes(each) - kept_bytes(each, each.remat, ROWS * LENGTH) for each in shapes}
    assert len(beside) == 1 and beside.pop() > 0


def set_up_with(tmp_path, monkeypatch, limit, needs=(), **changes):
    """Sets up a run where a device has so many bytes; its programs need one after the other what `needs` says."""
    for module in (plan, memory):
        monkeypatch.setattr(module, "device_limit", lambda devices: limit)
    told = iter(needs)
    monkeypatch.setattr(memory, "memory_need", lambda setup, **options: next(told, MemoryNeed(1)))
    run = set_up(tiny(tmp_path, "run", quiet=False, **{"model": {"remat": "auto"}} | changes))
    run.lock.release()
    assert next(told, None) is None
    kept, made = load_config(run.folder.config, Config), run.setup
    assert kept.model.remat == made.config.model.remat == made.model.decoder.remat
    assert kept.schedule.rows == made.config.schedule.rows in (None, made.sizes.rows)
    assert kept.rollout.rows == made.config.rollout.rows
    return made


def said(capsys):
    """Each plan, and each remedy, that was told."""
    lines = capsys.readouterr().out.splitlines()
    plans = [each.partition(" (")[0] for each in lines if "recomputation in the backward" in each or "rows (" in each]
    plans = [each.replace("recomputation in the backward pass: ", "") for each in plans]
    return plans, [each.partition("; trying ")[2] for each in lines if "; trying " in each]


GIB = 2**30
PARTS = ("micro-batch", "update", "rollout", "evaluation")
MICRO_BATCH, UPDATE, ROLLOUT, EVALUATION = (
    MemoryNeed(GIB, dict.fromkeys(PARTS, GIB) | {part: 4 * GIB}) for part in PARTS
)
BOTH = ROLLOUT._replace(parts={**ROLLOUT.parts, **{"micro-batch": 7 * GIB, "evaluation": 6 * GIB}})
LESS = "a plan that needs less"


@pytest.mark.parametrize(("limit", "policy"), [(None, "none"), (10**9, "products"), (3 * 10**5, "full")])
def test_the_least_that_is_expected_to_fit_is_taken_kept_and_said(tmp_path, monkeypatch, capsys, limit, policy):
    made = set_up_with(tmp_path, monkeypatch, limit)
    assert made.config.model.remat == policy and made.config.schedule.rows == 16
    assert said(capsys) == ([] if limit is None else [policy], [])


def test_rows_are_fewer_where_no_recomputation_is_expected_to_fit(tmp_path, monkeypatch, capsys):
    """Of 340 KiB three quarters may be taken: beside 233 of state there is room for 4 rows of 4 KiB, not for 8."""
    made = set_up_with(tmp_path, monkeypatch, 340 * 2**10, schedule={"rows": None})
    assert (made.config.model.remat, made.config.schedule.rows) == ("full", 4)
    assert said(capsys) == (["micro-batches of 4 rows, full"], [])


@pytest.mark.costly
def test_what_does_not_fit_is_compiled_again_with_less(tmp_path, monkeypatch, capsys):
    """What did not fit is gone before the next is made, and the prompts are encoded once for all of them.

    Of 64 completions there is room for three quarters, which are 32; then for a half of these.
    """
    needs, before, assemble = [MICRO_BATCH, ROLLOUT, BOTH, MICRO_BATCH], [], Found.assemble

    def assemble_alone(found):
        assert not [each for each in before if each() is not None]
        setup = assemble(found)
        before.extend(map(weakref.ref, (setup, setup.learner)))
        return setup

    encoded, longest = [], prompts.longest_prompt
    monkeypatch.setattr(prompts, "longest_prompt", lambda *given: encoded.append(given) or longest(*given))
    monkeypatch.setattr(Found, "assemble", assemble_alone)
    made = set_up_with(tmp_path, monkeypatch, 4 * GIB, needs, schedule={"rows": None})
    assert (made.config.model.remat, made.config.schedule.rows, made.config.rollout.rows) == ("full", 16, 16)
    at_a_time = "{} completions at a time on each data rank"
    plans = ["products", "attention", "full", "micro-batches of 16 rows, full"]
    assert said(capsys) == (plans, [LESS, at_a_time.format(32), f"{LESS} and {at_a_time.format(16)}", LESS])
    assert len(encoded) == 1


@pytest.mark.costly
@pytest.mark.parametrize(("most", "policy"), [(12 * GIB, "products"), (80 * 2**10, "attention"), (1, "full")])
def test_an_invariant_run_chooses_by_its_sizes_alone(tmp_path, monkeypatch, capsys, most, policy):
    """Or it would have other bits on a device with other memory."""
    monkeypatch.setattr(plan, "MOST_OF_A_LEAF", most)
    for limit in (4 * GIB, 3 * 10**5):
        made = set_up_with(tmp_path / str(limit), monkeypatch, limit, invariant=True)
        assert made.config.model.remat == policy
        assert said(capsys) == ([policy], [])


@pytest.mark.costly
def test_what_options_name_stays(tmp_path, monkeypatch, capsys):
    named = {"model": {"remat": "attention"}, "schedule": {"rows": None}}
    made = set_up_with(tmp_path / "remat", monkeypatch, 4 * GIB, [MICRO_BATCH], **named)
    assert (made.config.model.remat, made.config.schedule.rows) == ("attention", 16)
    assert said(capsys) == (["micro-batches of 16 rows"], [LESS])
    made = set_up_with(tmp_path / "rows", monkeypatch, 4 * GIB, [MICRO_BATCH])
    assert (made.config.model.remat, made.config.schedule.rows) == ("attention", 16)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("needs", "changes"),
    [
        ([UPDATE], {}),
        ([MemoryNeed(5 * GIB)], {}),
        ([MICRO_BATCH] * 3, {}),
        ([ROLLOUT], {"rollout": {"rows": 8}}),
        ([EVALUATION] * 6, {"rollout": {"prompts_per_rollout": 4}}),
        ([MICRO_BATCH], {"model": {"remat": "full"}}),
    ],
    ids=["update", "state", "plans end", "rows are named", "one at a time", "recomputation is named"],
)
def test_a_run_without_a_choice_left_is_refused(tmp_path, monkeypatch, needs, changes):
    with pytest.raises(
        memory.DoesNotFit, match="^memory: a device needs .* and has 4.0 GiB; try fewer --schedule.rows"
    ):
        set_up_with(tmp_path, monkeypatch, 4 * GIB, needs, **changes)
    assert not list(tmp_path.iterdir())


def test_of_parts_that_are_too_large_there_is_room_for_a_share():
    assert memory.DoesNotFit(BOTH, 4 * GIB, "").shares == {"micro-batch": 3 / 7, "rollout": 3 / 4, "evaluation": 1 / 2}
    assert memory.DoesNotFit(BOTH._replace(state=5 * GIB), 4 * GIB, "").shares == {}


def test_a_resume_keeps_what_the_run_chose():
    chosen = dataclasses.replace(
        TINY,
        model=dataclasses.replace(TINY.model, remat="products"),
        schedule=dataclasses.replace(TINY.schedule, rows=4),
    )
    assert apply_changes(chosen, {"model.remat": "auto", "schedule.rows": None}) == chosen
    with pytest.raises(ValueError, match="--model.remat: the run has products, given full"):
        apply_changes(chosen, {"model.remat": "full"})
