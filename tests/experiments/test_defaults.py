"""Defaults that depend on other options: what a loss and a model from disk bring with them."""

import pytest

from experiments.config import Config, LossConfig, ModelConfig, OptimizerConfig, RolloutConfig
from experiments.models.lora import LoraConfig

LOADED = ModelConfig(path="/a/model")


@pytest.mark.parametrize(
    "loss, advantages",
    [("grpo", "group"), ("gspo", "group"), ("dapo", "group"), ("rloo", "leave_one_out"), ("dr_grpo", "centred")],
)
def test_a_loss_brings_its_advantages(loss, advantages):
    assert Config(loss=LossConfig(name=loss)).resolved().loss.advantages == advantages
    assert Config(loss=LossConfig(name=loss, advantages="group")).resolved().loss.advantages == "group"


@pytest.mark.parametrize(
    "options, learning_rate, longest",
    [({}, 5e-4, None), ({"model": LOADED}, 1e-6, 256), ({"model": LOADED, "lora": LoraConfig(rank=4)}, 1e-5, 256)],
)
def test_a_model_from_disk_has_its_own_learning_rate_and_completions(options, learning_rate, longest):
    resolved = Config(**options).resolved()
    assert (resolved.optimizer.learning_rate, resolved.rollout.max_new_tokens) == (learning_rate, longest)
    own = Config(**options, optimizer=OptimizerConfig(learning_rate=0.5), rollout=RolloutConfig(max_new_tokens=9))
    assert (own.resolved().optimizer.learning_rate, own.resolved().rollout.max_new_tokens) == (0.5, 9)
