"""What a run says of its memory before the first step, and what it refuses."""

import io
import logging
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import resume, train
from experiments.command_line import exit_code
from experiments.config import Config, RolloutConfig, ScheduleConfig
from experiments.models.ahead import compiled_ahead
from experiments.models.decoder_config import DecoderConfig
from experiments.models.lora import LoraConfig
from experiments.models.mesh import make_mesh, parse_mesh
from experiments.models.placement import bytes_a_device
from experiments.runs.console import RunConsole
from experiments.sampling.prompts import Sizes
from experiments.training import memory
from experiments.training.introduction import cache_bytes
from experiments.training.memory import StepMemory, memory_of, peak_bytes, remedies, say_memory
from experiments.training.optimizers import Optimizer, adamw
from experiments.training.trainer import Progress, Trainer
from experiments.training.update import Update
from tests.experiments.tiny import tiny
from tests.experiments.waves import batch, sums_on

pytestmark = pytest.mark.costly

GIB = 2**30
STEP = StepMemory(
    state=4 * GIB, intermediate=3 * GIB, gradients=2 * GIB, several=True, update=GIB, draws={"a rollout": GIB // 2}
)


def test_the_need_is_that_of_the_moment_that_takes_most():
    # State, intermediate results, their gradients, those of the micro-batch before and the sum; or gradients alone.
    assert STEP.need == 13 * GIB and STEP.least == 9 * GIB
    assert STEP._replace(update=8 * GIB).need == 14 * GIB, "state, sum and update"
    assert STEP._replace(draws={"a rollout": GIB, "an evaluation": 10 * GIB}).need == 14 * GIB
    small = StepMemory(2**20, intermediate=2**20, compiling=5 * 2**20)
    assert small.need == 5 * 2**20 and str(small).endswith("; set-up and compilation took 5.0 MiB")
    assert STEP._replace(compiling=GIB).need == STEP.need and "compilation" not in str(STEP._replace(compiling=GIB))
    assert str(STEP) == ("state 4.0 GiB; beside it a micro-batch 9.0 GiB, the update 3.0 GiB, a rollout 512.0 MiB")
    assert str(StepMemory(2**20)) == "state 1.0 MiB"


CURES = {
    "what layers keep": (
        StepMemory(GIB, intermediate=20 * GIB, gradients=GIB), {}, (16, "attention"),
        ["--schedule.rows below 16", "--model.remat full"],
    ),
    "one row, all made again": (StepMemory(GIB, intermediate=20 * GIB, gradients=GIB), {}, (1, "full"), []),
    "sums": (
        StepMemory(6 * GIB, intermediate=GIB, gradients=6 * GIB, several=True), {}, (1, None),
        ["--mesh data=1,fsdp=3,sequence=1,tensor=1", "--schedule.accumulate bfloat16"],
    ),
    "sums of bf16": (
        StepMemory(GIB, intermediate=GIB, gradients=9 * GIB, several=True),
        {"schedule": ScheduleConfig(accumulate="bfloat16"), "mesh": "tensor=2"}, (1, None),
        ["--mesh data=1,fsdp=4,sequence=1,tensor=2"],
    ),
    "copies become shards": (
        StepMemory(16 * GIB, update=GIB, gradients=GIB), {"mesh": "data=4"}, (1, None),
        ["--mesh data=2,fsdp=2,sequence=1,tensor=1"],
    ),
    "more devices than there are": (
        StepMemory(95 * GIB, update=GIB, gradients=GIB), {}, (1, None),
        ["--mesh data=1,fsdp=11,sequence=1,tensor=1 (3 more devices)"],
    ),
    "a model from disk": (
        StepMemory(9 * GIB, intermediate=12 * GIB), {"model": "on disk"}, (2, "full"),
        ["--schedule.rows below 2", "--lora.rank 16"],
    ),
    "adapters": (
        StepMemory(9 * GIB, intermediate=12 * GIB), {"model": "on disk", "lora": LoraConfig(rank=4)}, (2, "full"),
        ["--schedule.rows below 2"],
    ),
    "a rollout": (
        StepMemory(GIB, intermediate=GIB, draws={"a rollout": 20 * GIB, "an evaluation": 8 * GIB}), {}, (8, "none"),
        [f"--rollout.prompts-per-rollout below {Config().rollout.prompts_per_rollout}"],
    ),
    "an evaluation": (
        StepMemory(GIB, intermediate=GIB, draws={"a rollout": GIB, "an evaluation": 8 * GIB}), {}, (8, "none"),
        [f"--evaluation.num-prompts below {Config().evaluation.num_prompts}"],
    ),
    "a check of the warm start": (
        StepMemory(GIB, draws={"a rollout": GIB, "a check of the warm start": 20 * GIB}), {}, (8, "none"),
        [f"--warm-start.check-every above {Config().warm_start.max_steps}"],
    ),
    "leaves on one device": (StepMemory(20 * GIB), {"invariant": True}, (8, "none"), []),
}  # fmt: skip


@pytest.mark.parametrize("name", CURES)
def test_what_would_make_it_fit_follows_from_what_is_largest(name):
    needed, changes, micro_batch, wanted = CURES[name]
    config = Config(**{key: value for key, value in changes.items() if key != "model"})
    if "model" in changes:
        model = SimpleNamespace(path="somewhere")
        config = SimpleNamespace(**{**vars(config), "model": model})
    assert remedies(needed, 10 * GIB, config, *micro_batch) == wanted


def said(monkeypatch, needed, limit, steps=3):
    """What is printed about a need, and what is raised."""
    monkeypatch.setattr(memory, "memory_of", lambda trainer: needed)
    monkeypatch.setattr(memory, "device_limit", lambda devices: limit)
    trainer = SimpleNamespace(
        mesh=make_mesh(parse_mesh("")),
        config=Config(schedule=ScheduleConfig(steps=steps)),
        progress=Progress(),
        sizes=SimpleNamespace(rows=16),
        num_held_out=20,
        origin=SimpleNamespace(decoder=SimpleNamespace(remat="none")),
    )
    stream = io.StringIO()
    try:
        say_memory(trainer, RunConsole(stream=stream))
    except ValueError as error:
        return stream.getvalue(), error
    return stream.getvalue(), None


def test_a_need_that_no_device_has_is_refused_with_what_may_make_it_fit(monkeypatch):
    line = f"memory a device: 13.0 GiB of 80.0 GiB ({STEP})\n"
    assert said(monkeypatch, STEP, 80 * GIB) == (line, None)
    assert said(monkeypatch, STEP, None) == (line.replace(" of 80.0 GiB", ""), None)
    assert said(monkeypatch, STEP, 8 * GIB, steps=0) == ("", None)
    _, error = said(monkeypatch, STEP, 8 * GIB)
    assert exit_code(error) == 2
    assert str(error) == (
        f"memory: a device needs 13.0 GiB and has 8.0 GiB ({STEP}); what may make it fit: "
        "--mesh data=1,fsdp=2,sequence=1,tensor=1, or --schedule.accumulate bfloat16, "
        "or --schedule.rows below 16, or --model.remat full"
    )
    # A step of one micro-batch would fit.
    text, error = said(monkeypatch, STEP, 10 * GIB)
    assert error is None and "WARNING: memory, in a step of several micro-batches: a device needs 13.0 GiB" in text
    _, error = said(monkeypatch, StepMemory(4 * GIB), 3 * GIB)
    assert str(error).startswith("memory: a device needs at least 4.0 GiB and has 3.0 GiB (state 4.0 GiB); what may")


def test_a_program_compiled_for_its_memory_is_the_one_that_runs(caplog):
    sums, params = sums_on("fsdp=2")
    update = Update(Optimizer(adamw(), lambda step: 1e-3), sums.place)
    state = update.init(params)
    with jax.log_compiles():
        program = sums.ahead(state.params, batch(2))
        then = update.ahead(state, program.results)
        for name in ("_of_micro_batch", "_applied"):
            assert any(f"Compiling jit({name})" in each.getMessage() for each in caplog.records)
        caplog.clear()
        total = sums.sums_of(state.params, [batch(2)], 0)
        update(state, total)
    again = [each.getMessage()[:60] for each in caplog.records if each.levelno >= logging.WARNING]
    assert not [each for each in again if "Compiling jit(_of_micro_batch)" in each or "Compiling jit(_applied)" in each]
    # fp32 gradients of 1920 rows of 14 of the 28 features, and of the phases, which are whole; a few numbers beside them.
    micro_batch, applied = (each.compiled.memory_analysis() for each in (program, then))
    assert 0 <= micro_batch.output_size_in_bytes - 4 * (1920 * 14 + 28) < 200
    # The new state takes the memory of the old one.
    assert 0 <= applied.output_size_in_bytes - applied.alias_size_in_bytes < 200


@pytest.mark.parametrize("mesh", ["", "data=2", "data=2,tensor=2"])
def test_a_rollout_takes_its_cache_and_little_else(mesh):
    if "tensor" in mesh and jax.__version_info__[:2] < (0, 11):
        pytest.skip("with one key-value head on a device, JAX 0.10 copies the cache")
    rollout = {"num_generations": 8, "max_new_tokens": 64}
    trainer = Trainer(tiny("unused", "unused", mesh=mesh, rollout=rollout, schedule={"row_length": 128}))
    decoder, spec = trainer.origin.decoder, parse_mesh(mesh)
    cache = (
        cache_bytes(decoder, trainer.sizes, trainer.config.rollout, trainer.num_held_out, spec.ranks) / spec.num_devices
    )
    # Each row with a copy of its prompt; logits, what a token is drawn with, and the completions.
    assert 0.9 * cache < trainer.rollouts.memory(trainer.state.params) < 1.4 * cache


def test_parameters_on_a_mesh_of_the_rollouts_own_count():
    apart = Trainer(tiny("unused", "unused", mesh="fsdp=2", rollout={"mesh": "data=2"}))
    there = Trainer(tiny("unused", "unused", mesh="data=2"))
    copies = bytes_a_device(there.state.params)
    assert apart.rollouts.memory(apart.state.params) == there.rollouts.memory(there.state.params) + copies
    assert bytes_a_device(apart.state.params) < copies


def test_a_warm_start_has_an_optimizer_and_micro_batches_of_its_own():
    """Its AdamW holds two numbers a parameter where the run's own optimizer holds one."""
    options = {"optimizer": {"name": "muon"}, "schedule": {"rows": 32, "docs_per_step": 32}}
    trainer = Trainer(tiny("unused", "unused", **options, evaluation={"kl": False}))
    params = bytes_a_device(trainer.state.params)
    memory_in = memory_of(trainer)
    assert memory_in.phase == "in the warm start: " and str(memory_in).startswith("in the warm start: state ")
    assert 3 * params <= memory_in.state < 3 * params + 100
    assert set(memory_in.draws) == {"a check of the warm start"}
    trainer.progress.evaluated = 0
    after = memory_of(trainer)
    assert after.phase == "" and set(after.draws) == {"a rollout", "an evaluation"}
    assert after.state == params + bytes_a_device(trainer.state.opt_state)
    assert after.need < memory_in.need


def test_the_batch_of_a_program_is_asked_for_by_its_types_and_places():
    function = jax.jit(lambda x: {"sum": x.sum(), "same": x})
    made = compiled_ahead(function, np.ones((2, 3), np.float32))
    assert {name: (x.shape, x.dtype.name) for name, x in made.results.items()} == {
        "sum": ((), "float32"),
        "same": ((2, 3), "float32"),
    }


@pytest.mark.slow
def test_a_run_that_cannot_fit_is_refused_without_a_folder_and_a_resume_without_new_options(
    tmp_path, monkeypatch, capsys, caplog
):
    options = {"warm_start": {"max_steps": 0}, "schedule": {"steps": 1}, "quiet": False}
    # Shapes that no other test has compiled.
    options |= {"rollout": {"num_generations": 3}, "evaluation": {"num_prompts": 5}}
    with jax.log_compiles():
        result = train(tiny(tmp_path, "fits", **options))
    messages = [each.getMessage() for each in caplog.records]
    for name in ("_begin", "_advance"):
        compiled = sum(f"Compiling jit({name})" in each for each in messages)
        assert compiled == 3, (
            "one for rollouts, and one each for sampled and greedy evaluations; asking for their memory adds none"
        )
    line = next(each for each in capsys.readouterr().out.splitlines() if each.startswith("memory a device: "))
    assert "state" in line and "a micro-batch" in line and "a rollout" in line and "at least" not in line
    monkeypatch.setattr(memory, "device_limit", lambda devices: 100 * 2**10)
    with pytest.raises(ValueError, match=r"^memory: a device needs .* and has 100.0 KiB .*--schedule.rows below 16"):
        train(tiny(tmp_path, "never", **options))
    assert [each.name for each in tmp_path.iterdir()] == ["fits"]
    before = result.run.config.read_bytes()
    with pytest.raises(ValueError, match=r"^memory: a device needs"):
        resume(str(result.run.path), {"schedule.steps": 2})
    assert result.run.config.read_bytes() == before


@pytest.mark.slow
def test_an_invariant_run_says_its_state_alone(tmp_path, capsys):
    invariance = {"invariant": True, "schedule": {"steps": 1, "row_length": None}}
    train(tiny(tmp_path, "leaves", warm_start={"max_steps": 0}, quiet=False, **invariance))
    line = next(each for each in capsys.readouterr().out.splitlines() if each.startswith("memory a device: "))
    assert line.startswith("memory a device: at least ") and "micro-batch" not in line


def test_the_sampler_s_cache_is_that_of_prompts_filled_up_for_the_ranks():
    decoder = DecoderConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4
    )
    rollout = RolloutConfig(prompts_per_rollout=5, num_generations=3)
    sizes = Sizes(prompt=10, completion=4, row=14, rows=1)
    # Keys and values of two layers, a head of four fp32 features each.
    slot = 2 * 2 * 4 * 4
    for ranks, prompts in ((1, 5), (2, 6), (5, 5), (4, 8)):
        assert cache_bytes(decoder, sizes, rollout, 1, ranks) == prompts * (10 + 3 * 4) * slot
    assert cache_bytes(decoder, sizes, rollout, 100, 3) == 102 * (10 + 4) * slot


def test_the_peak_is_that_of_the_fullest_device():
    def device(platform, stats):
        return SimpleNamespace(platform=platform, memory_stats=lambda: stats)

    used = [device("gpu", {"peak_bytes_in_use": number}) for number in (3, 7, 5)]
    assert peak_bytes(used) == 7
    assert peak_bytes([device("cpu", {"peak_bytes_in_use": 9})]) is None
    assert peak_bytes([device("gpu", None), device("gpu", {})]) is None
