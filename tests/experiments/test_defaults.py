"""Defaults that depend on other options: what a loss and a model from disk bring with them."""

import jax
import pytest

from experiments.config import Config, LossConfig, ModelConfig, OptimizerConfig, RolloutConfig, ScheduleConfig
from experiments.invariant import options as invariance
from experiments.invariant.options import InvarianceConfig
from experiments.loop.session import identity_of_run
from experiments.models.lora import LoraConfig
from experiments.runs.config_file import save_config
from experiments.runs.folder import RunFolder
from jaxlogp.head import ChunkedEngine
from tests.experiments.tiny import tiny

LOADED = ModelConfig(path="/a/model")


@pytest.mark.parametrize(
    "loss, advantages",
    [
        ("grpo", "group"), ("gspo", "group"), ("gspo_token", "group"), ("dapo", "group"), ("rloo", "leave_one_out"),
        ("dr_grpo", "centred"), ("reinforce_pp", "batch"), ("lite_ppo", "batch_scaled"),
    ],
)  # fmt: skip
def test_a_loss_brings_its_advantages(loss, advantages):
    assert Config(loss=LossConfig(name=loss)).resolved().loss.advantages == advantages
    assert Config(loss=LossConfig(name=loss, advantages="group")).resolved().loss.advantages == "group"


@pytest.mark.parametrize("engine, names", [("auto", ["hopper", "chunked"]), ("hopper", ["hopper"])])
def test_a_gradient_filter_is_that_of_every_engine(engine, names):
    chosen = LossConfig(engine=engine, gradient_filter=0.5).head_engine()
    engines = chosen if isinstance(chosen, tuple) else (chosen,)
    assert [(each.name, each.gradient_filter.threshold) for each in engines] == [(name, 0.5) for name in names]
    assert LossConfig(engine=engine).head_engine() == engine


def test_blocks_are_those_of_the_chunked_engine():
    assert LossConfig(engine="chunked", vocab_tile=64).head_engine() == ChunkedEngine(vocab_tile=64)
    filtered = LossConfig(engine="chunked", token_chunk=32, gradient_filter=0.5).head_engine()
    assert (filtered.token_chunk, filtered.vocab_tile, filtered.gradient_filter.threshold) == (32, 256, 0.5)


@pytest.mark.parametrize(
    "options, learning_rate, longest",
    [({}, 5e-4, None), ({"model": LOADED}, 1e-6, 256), ({"model": LOADED, "lora": LoraConfig(rank=4)}, 1e-5, 256)],
)
def test_a_model_from_disk_has_its_own_learning_rate_and_completions(options, learning_rate, longest):
    resolved = Config(**options).resolved()
    assert (resolved.optimizer.learning_rate, resolved.rollout.max_new_tokens) == (learning_rate, longest)
    own = Config(**options, optimizer=OptimizerConfig(learning_rate=0.5), rollout=RolloutConfig(max_new_tokens=9))
    assert (own.resolved().optimizer.learning_rate, own.resolved().rollout.max_new_tokens) == (0.5, 9)


@pytest.mark.parametrize("loaded, adapters, rate", [(False, False, 1e-3), (True, False, 2e-5), (True, True, 2e-4)])
def test_supervised_learning_has_learning_rates_of_its_own(loaded, adapters, rate):
    resolved = OptimizerConfig().resolved(loaded=loaded, adapters=adapters, supervised=True)
    assert resolved == OptimizerConfig(learning_rate=rate)


@pytest.mark.parametrize("small, engine", [(True, "fixed_order"), (False, "hopper")])
def test_auto_takes_an_engine_that_every_mesh_supports(monkeypatch, small, engine):
    """72 columns have no tile of hopper's for each of two tensor ranks, and a run may be resumed on them."""
    monkeypatch.setattr(invariance.jax, "__version_info__", (0, 11, 2))
    choice = invariance.choose_head("gpu", (9, 0), "bfloat16", small_vocabulary=small)
    assert choice.engine == engine


@pytest.mark.parametrize(
    ("backend", "length", "named", "leaf_rows", "block"),
    [
        ("cpu", None, {}, 8, 16),
        ("gpu", None, {}, 64, 8),
        ("gpu", 512, {}, 64, 8),
        ("gpu", 513, {}, 32, 16),
        ("gpu", 2**20, {}, 8, 64),
        ("gpu", 2**20, {"leaf_rows": 128}, 128, 4),
        ("gpu", None, {"block": 3}, 64, 3),
    ],
)
def test_leaves_are_as_large_as_a_device_likes(monkeypatch, backend, length, named, leaf_rows, block):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    options = {"invariance": InvarianceConfig(**named), "rollout": RolloutConfig(max_new_tokens=length)}
    found = Config(invariant=True, **options).resolved().invariance
    assert (found.leaf_rows, found.block) == (leaf_rows, block)


def test_rows_of_a_micro_batch_are_those_of_a_leaf():
    assert Config(invariant=True, schedule=ScheduleConfig(rows=5)).resolved().invariance.leaf_rows == 5


def test_the_rest_of_the_devices_is_a_number_where_it_is_said(tmp_path):
    """As an identity compares it, too: another number of devices is another mesh."""
    config = tiny(tmp_path, "run", mesh="data=-1")
    folder = RunFolder.create(tmp_path, "run")
    save_config(folder.config, config)
    assert identity_of_run(folder, config).numerics["mesh"] == "data=8,fsdp=1,sequence=1,tensor=1"


@pytest.mark.parametrize(("backend", "kept"), [("cpu", "none"), ("gpu", "attention")])
@pytest.mark.parametrize("invariant", [False, True])
def test_layers_keep_little_on_a_gpu_with_invariant_too(monkeypatch, backend, kept, invariant):
    """With 28 layers, all that a leaf computes took 27 GiB."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert ModelConfig(dtype="float32").resolved(invariant).remat == kept
    assert ModelConfig(dtype="float32", remat="none").resolved(invariant).remat == "none"
