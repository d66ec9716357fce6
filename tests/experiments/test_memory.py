"""What a run says of its memory before the first step, and what it refuses."""

import functools
import gc
import io
import logging
import math
import operator
import re
import threading
from collections import Counter
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import resume, train
from experiments.command_line import exit_code
from experiments.config import Config, ScheduleConfig
from experiments.invariant.leaf_sums import LeafSums, TreeFold
from experiments.learner.optimizers import Optimizer, adamw
from experiments.learner.update import Update
from experiments.loop import memory
from experiments.loop.assemble import assemble
from experiments.loop.find_model import find_model
from experiments.loop.loop import Progress, take_step
from experiments.loop.memory import MemoryNeed, memory_need, peak_bytes, say_memory
from experiments.loop.supervised import find_task
from experiments.models.compiled_program import compile_program
from experiments.models.mesh import make_mesh, parse_mesh
from experiments.models.placement import bytes_a_device
from experiments.models.sharding import on_one_device, parameter_shardings, place_parameters
from experiments.options import flat_fields
from experiments.runs.console import RunConsole
from tests.experiments.tiny import tiny
from tests.experiments.waves import batch, sums_on

pytestmark = pytest.mark.costly

GIB = 2**30
NEED = MemoryNeed(4 * GIB, {"micro-batch": 9 * GIB, "update": 3 * GIB, "rollout": GIB // 2})


def test_the_need_is_that_of_the_moment_that_takes_most():
    assert NEED.total == 13 * GIB and NEED._replace(compiling=14 * GIB).total == 14 * GIB
    assert str(NEED) == ("13.0 GiB (state 4.0 GiB; beyond it: micro-batch 9.0 GiB, update 3.0 GiB, rollout 512.0 MiB)")
    assert str(NEED._replace(compiling=14 * GIB)).endswith("; set-up and compilation took 14.0 GiB)")
    assert str(MemoryNeed(2**20)) == "at least 1.0 MiB (state alone, without its programs)"


def test_drawn_parameters_are_on_the_device_once_when_a_run_is_assembled(tmp_path):
    gc.collect()
    before = sum(x.nbytes for x in jax.live_arrays())
    gc.disable()
    try:
        setup = assemble(tiny(tmp_path, "drawn"))
        added = sum(x.nbytes for x in jax.live_arrays()) - before
    finally:
        gc.enable()
    state = setup.learner.state
    drawn = sum(x.nbytes for x in jax.tree.leaves(state.params))
    assert added < sum(x.nbytes for x in jax.tree.leaves(state)) + drawn / 2


def test_each_shard_is_drawn_where_it_belongs_with_the_bits_of_one_device(tmp_path):
    config = tiny(tmp_path, "drawn")
    model = find_model(config, find_task(config), None, restored=False)
    mesh = make_mesh(parse_mesh("fsdp=2,tensor=2"))
    whole = model.parts(on_one_device(jax.devices()[0]), None).params
    split = model.parts(lambda state: parameter_shardings(state, mesh), mesh).params
    jax.tree.map(np.testing.assert_array_equal, split, whole)
    places = parameter_shardings(split, mesh)
    assert jax.tree.all(jax.tree.map(lambda x, place: x.sharding == place, split, places))
    assert bytes_a_device(split) < bytes_a_device(whole) / 2


def said(monkeypatch, limit, *, needed=NEED, steps=3, resumed=False, **options):
    """What is printed about a need, and what is raised."""
    monkeypatch.setattr(memory, "memory_need", lambda setup, **options: needed)
    monkeypatch.setattr(memory, "device_limit", lambda devices: limit)
    config = Config(schedule=ScheduleConfig(steps=steps), **options).resolved()
    setup = SimpleNamespace(mesh=make_mesh(parse_mesh("")), config=config, warms_up=False)
    stream = io.StringIO()
    try:
        say_memory(setup, Progress(), RunConsole(stream=stream), resumed=resumed)
    except ValueError as error:
        return stream.getvalue(), error
    return stream.getvalue(), None


def test_a_need_that_no_device_has_is_refused_with_what_may_make_it_fit(monkeypatch):
    line = f"memory per device: {NEED}"
    assert said(monkeypatch, 80 * GIB) == (f"{line}; limit: 80.0 GiB\n", None)
    assert said(monkeypatch, None) == (f"{line}\n", None)
    host = said(monkeypatch, None, needed=NEED._replace(host=3 * GIB))[0]
    assert host == f"{line}; on the host, for a checkpoint: 3.0 GiB\n"
    assert said(monkeypatch, 8 * GIB, steps=0) == ("", None)
    _, error = said(monkeypatch, 8 * GIB)
    assert exit_code(error) == 2
    assert str(error).startswith(f"memory: a device needs {NEED} and has 8.0 GiB; try fewer --schedule.r")
    # What is said is within a tenth of the peak.
    text, error = said(monkeypatch, 12 * GIB)
    assert error is None and f"WARNING: memory: a device needs {NEED} and has 12.0 GiB" in text
    _, error = said(monkeypatch, 3 * GIB, needed=MemoryNeed(4 * GIB))
    assert str(error).startswith("memory: a device needs at least 4.0 GiB (state alone, without its programs) and")
    # A state is no estimate.
    assert said(monkeypatch, 4 * GIB - 1, needed=MemoryNeed(4 * GIB))[1] is not None
    _, error = said(monkeypatch, 8 * GIB, resumed=True)
    kept = "--rollout.rows (fewer completions at a time), fewer --evaluation.num-prompts, "
    kept += "--mesh with more fsdp or tensor ranks, a device with more memory"
    assert str(error).endswith(f"try {kept}")
    _, error = said(monkeypatch, 8 * GIB, invariant=True)
    assert str(error).endswith("; try fewer --invariance.leaf-rows, --model.remat full, a device with more memory")


@pytest.mark.parametrize("option", [*memory.CURES, *memory.CURES_OF_LEAVES])
def test_what_may_make_it_fit_are_options(option):
    assert option in flat_fields(Config)


def test_a_program_compiled_for_its_memory_is_the_one_that_runs(caplog):
    sums, params = sums_on("fsdp=2")
    update = Update(
        Optimizer(adamw(), lambda step: 1e-3), functools.partial(place_parameters, mesh=make_mesh(parse_mesh("fsdp=2")))
    )
    state = update.init(params)
    with jax.log_compiles():
        micro_batch = sums.lower(state.params, batch(2))()
        then = update.ahead(state, micro_batch.sums)
        for name in ("_of_micro_batch", "_applied"):
            assert any(f"Compiling jit({name})" in each.getMessage() for each in caplog.records)
        caplog.clear()
        total = sums.accumulate(state.params, [batch(2)], 0)
        update(state, total)
    again = [each.getMessage()[:60] for each in caplog.records if each.levelno >= logging.WARNING]
    assert not [each for each in again if "Compiling jit(_of_micro_batch)" in each or "Compiling jit(_applied)" in each]
    # fp32 gradients of 1920 rows of 14 of the 28 features, and of the phases, which are whole; a few numbers beside them.
    summed, applied = (each.compiled.memory_analysis() for each in (*micro_batch.programs, then))
    assert 0 <= summed.output_size_in_bytes - 4 * (1920 * 14 + 28) < 200
    # The new state takes the memory of the old one.
    assert 0 <= applied.output_size_in_bytes - applied.alias_size_in_bytes < 200


def test_the_check_of_an_update_keeps_nothing_that_was_computed():
    # Whatever passes a barrier is kept. The CPU's compiler also keeps what it could compute again, so memory says nothing.
    sums, params = sums_on("fsdp=2")
    place = functools.partial(place_parameters, mesh=make_mesh(parse_mesh("fsdp=2")))
    update = Update(Optimizer(adamw(), lambda step: 1e-3, elementwise=True), place)
    state = update.init(params)
    program = jax.make_jaxpr(update._applied)(state, sums.accumulate(state.params, [batch(2)], 0), np.int32(0)).jaxpr
    barriers = [each for each in program.eqns if each.primitive.name == "optimization_barrier"]
    assert len(barriers) == 1 and set(barriers[0].invars) <= set(program.invars)


@pytest.mark.parametrize("mesh", ["", "data=2", "data=2,tensor=2"])
def test_a_rollout_takes_its_cache_and_little_else(mesh):
    rollout = {"num_generations": 8, "max_new_tokens": 64}
    setup = assemble(tiny("unused", "unused", mesh=mesh, rollout=rollout, schedule={"row_length": 128}))
    decoder, sizes, prompts = setup.model.decoder, setup.sizes, setup.config.rollout.prompts_per_rollout
    # Keys and values of every head and layer, fp32: of a prompt once, and of each of its completions.
    slot = 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim * 4
    cache = prompts * (sizes.prompt + 8 * sizes.completion) * slot / parse_mesh(mesh).num_devices
    # Each row with a copy of its prompt; logits, what a token is drawn with, and the completions.
    assert 0.9 * cache < setup.samplers.lower(setup.learner.state.params, setup.source.shape)() < 1.4 * cache


def test_programs_are_lowered_in_order_and_compiled_beside_each_other():
    events, here, both = [], threading.get_ident(), threading.Barrier(2, timeout=60)

    def lower(name):
        assert threading.get_ident() == here
        events.append(name)
        return lambda: (both.wait(), name)[1]

    programs = [functools.partial(lower, "a"), functools.partial(lower, "b")]
    assert memory._side_by_side(programs) == ["a", "b"] == events


def test_parameters_on_a_mesh_of_the_rollouts_own_count():
    apart = assemble(tiny("unused", "unused", mesh="fsdp=2", rollout={"mesh": "data=2"}))
    there = assemble(tiny("unused", "unused", mesh="data=2"))
    copies = bytes_a_device(there.learner.state.params)
    need, without = (each.samplers.lower(each.learner.state.params, each.source.shape)() for each in (apart, there))
    assert need == without + copies
    assert bytes_a_device(apart.learner.state.params) < copies


def test_a_warm_start_has_an_optimizer_and_micro_batches_of_its_own():
    """Its AdamW holds two numbers a parameter where the run's own optimizer holds one."""
    options = {
        "optimizer": {"name": "muon"},
        "schedule": {"rows": 32, "docs_per_step": 32},
        "warm_start": {"batch_size": 512},
    }
    setup = assemble(tiny("unused", "unused", **options, evaluation={"kl": False}))
    params = bytes_a_device(setup.learner.state.params)
    first = memory_need(setup, warm_start_to_come=True)
    assert 3 * params <= first.state < 3 * params + 100
    after = memory_need(setup, warm_start_to_come=False)
    assert after.state == params + bytes_a_device(setup.learner.state.opt_state)
    # A batch of the warm start takes several micro-batches here: their sum is beside the gradients of one. With it are the
    # sums of metrics: fewer than 200 numbers of 4 bytes.
    more = first.parts["micro-batch"] - after.parts["micro-batch"]
    assert 0 <= more - params < 200 * 4
    assert list(after.parts) == ["micro-batch", "update", "rollout", "evaluation"]


def test_the_batch_of_a_program_is_asked_for_by_its_types_and_places():
    function = jax.jit(lambda x: {"sum": x.sum(), "same": x})
    made = compile_program(function, np.ones((2, 3), np.float32))
    assert {name: (x.shape, x.dtype.name) for name, x in made.results.items()} == {
        "sum": ((), "float32"),
        "same": ((2, 3), "float32"),
    }


@pytest.mark.slow
def test_a_run_that_cannot_fit_is_refused_without_a_folder_and_a_resume_without_new_options(
    tmp_path, monkeypatch, capsys, caplog
):
    options = {"warm_start": {"max_steps": 1, "check_every": 1}, "schedule": {"steps": 1}, "quiet": False}
    # Shapes that no other test has compiled.
    options |= {"rollout": {"num_generations": 3}, "evaluation": {"num_prompts": 5}}
    # In every thread, for programs are compiled side by side.
    jax.config.update("jax_log_compiles", True)
    try:
        result = train(tiny(tmp_path, "fits", **options))
    finally:
        jax.config.update("jax_log_compiles", False)
    compiled = Counter(names_compiled(caplog))
    # Of rollouts, evaluations and checks of the warm start; of the warm start and the training.
    programs = {"_prefill": 3, "_decode": 3, "_of_micro_batch": 2}
    assert {name: compiled[name] for name in programs} == programs, "asking for their memory adds none"
    line = next(each for each in capsys.readouterr().out.splitlines() if each.startswith("memory per device: "))
    assert "state" in line and "micro-batch" in line and "rollout" in line and "at least" not in line
    monkeypatch.setattr(memory, "device_limit", lambda devices: 100 * 2**10)
    with pytest.raises(ValueError, match=r"^memory: a device needs .* and has 100.0 KiB; .*fewer --schedule.rows"):
        train(tiny(tmp_path, "never", **options))
    assert [each.name for each in tmp_path.iterdir()] == ["fits"]
    before = result.run.config.read_bytes()
    with pytest.raises(ValueError, match=r"^memory: a device needs"):
        resume(str(result.run.path), {"schedule.steps": 2})
    assert result.run.config.read_bytes() == before


def names_compiled(caplog):
    found = [re.match(r"Compiling jit\((\w+)\)", each.getMessage()) for each in caplog.records]
    return [each[1] for each in found if each]


def leaves(**options):
    invariance = {"invariant": True, "invariance": {"block": 4}, "warm_start": {"max_steps": 0}}
    return assemble(tiny("unused", "unused", **invariance, schedule={"row_length": None}, **options))


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "rollout"), [("", {}), ("data=2,tensor=2", {"top_p": 0.9})])
def test_an_invariant_run_compiles_what_it_will_call(mesh, rollout, caplog):
    setup = leaves(mesh=mesh, rollout=rollout)
    # In every thread, for programs are compiled side by side.
    jax.config.update("jax_log_compiles", True)
    try:
        need = memory_need(setup, warm_start_to_come=False)
        ahead = names_compiled(caplog)
        take_step(setup, setup.feed())
    finally:
        jax.config.update("jax_log_compiles", False)
    programs = {"_read", "_all_log_probs", "_all_gradients", "_one_leaf", "_one_token", "_applied"}
    assert programs <= set(ahead) and programs.isdisjoint(names_compiled(caplog)[len(ahead) :])
    assert list(need.parts) == ["micro-batch", "update", "rollout", "evaluation"]


def test_an_invariant_rollout_takes_the_cache_and_the_weights_of_a_leaf_and_little_else():
    # With four layers the head's blocks take less than the cache.
    setup = leaves(rollout={"max_new_tokens": 64}, model={"num_layers": 4})
    decoder, row = setup.model.decoder, setup.sizes.prompt + setup.sizes.completion
    slot = 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim * 4
    weights = bytes_a_device(setup.learner.state.params)
    # Keys and values of 8 rows of whole blocks; hidden states of what is drawn; the head twice more than the parameters.
    cache, hidden = 8 * 4 * math.ceil(row / 4) * slot, 8 * 64 * decoder.hidden_size * 4
    least = cache + hidden + weights + 2 * 24 * decoder.hidden_size * 4
    assert least < setup.samplers.lower(setup.learner.state.params, setup.source.shape)() < 1.5 * least


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sums_of_leaves_that_wait(ranks):
    sums = object.__new__(LeafSums)
    sums._programs = SimpleNamespace(ranks=SimpleNamespace(count=ranks))
    fold, most = TreeFold(operator.add), 0
    for rounds in range(1, 12):
        # Each rank has a part of every node.
        most = max(most, len(fold._nodes))
        assert math.ceil(most / ranks) <= sums.sums_waiting(rounds) <= math.ceil((most + 1) / ranks)
        for _ in range(ranks):
            fold.push(1)


def test_the_peak_is_that_of_the_fullest_device():
    def device(platform, stats):
        return SimpleNamespace(platform=platform, memory_stats=lambda: stats)

    used = [device("gpu", {"peak_bytes_in_use": number}) for number in (3, 7, 5)]
    assert peak_bytes(used) == 7
    assert peak_bytes([device("cpu", {"peak_bytes_in_use": 9})]) is None
    assert peak_bytes([device("gpu", None), device("gpu", {})]) is None


def test_an_evaluation_takes_no_more_rows_than_a_rollout():
    sizes = {"rollout": {"num_generations": 4, "max_new_tokens": 64}, "schedule": {"row_length": 128}}
    setup = assemble(
        tiny("unused", "unused", evaluation={"num_prompts": 90}, task="comparison:2", mesh="data=2", **sizes)
    )
    rollout, evaluation = (setup.shapes[name] for name in ("rollout", "evaluation"))
    assert evaluation.prompts * evaluation.copies == 180 and rollout.prompts * rollout.copies == 64
    assert evaluation.options.rows == 32 and rollout.options.rows is None
    params = setup.learner.state.params
    drawn, scored = (setup.samplers.lower(params, shape)() for shape in (rollout, evaluation))
    # Tokens and log-probs of all completions, and the prompts, are kept beside the rows.
    decoder, prompt = setup.model.decoder, setup.sizes.prompt
    slot = 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim * 4
    assert scored < drawn + 90 * prompt * 2 * slot + 4 * 180 * 64 * 8
