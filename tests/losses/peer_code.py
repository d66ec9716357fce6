"""The loss of TRL's trainer and the formulas of verl, from their own packages, without their runtimes."""

import collections
import dataclasses
import importlib
import os
import sys
import types
from types import SimpleNamespace

import pytest

SAME_IN_TRAINER = (
    *("loss_type", "beta", "importance_sampling_level", "top_entropy_quantile", "max_completion_length"),
    *("off_policy_mask_threshold", "vllm_importance_sampling_correction", "entropy_coef", "use_adaptive_entropy"),
)
"""Options that TRL's trainer has as attributes of the same name."""


def trl_loss(log_probs, case, **changes):
    """The loss of TRL's `GRPOTrainer` for log-probs [B, T], as in a step of one process and one micro-batch.

    `changes` are options of `GRPOConfig`; the others have their defaults.
    """
    import torch
    from trl import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    unknown = changes.keys() - defaults
    assert not unknown, unknown
    options = SimpleNamespace(**(defaults | {"steps_per_generation": 1, "max_completion_length": 16} | changes))
    epsilon_high = options.epsilon if options.epsilon_high is None else options.epsilon_high
    whole = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        pad_across_processes=lambda x, **_: x,
        reduce=lambda x, **_: x,
    )
    trainer = SimpleNamespace(
        args=options,
        accelerator=whole,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        epsilon_low=options.epsilon,
        epsilon_high=epsilon_high,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=options.entropy_coef != 0.0,
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, case.entropy, None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    for name in SAME_IN_TRAINER:
        setattr(trainer, name, getattr(options, name))
    trainer.get_high_entropy_mask = types.MethodType(GRPOTrainer.get_high_entropy_mask, trainer)
    prompts = torch.zeros((len(log_probs), 1), dtype=torch.long)
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": prompts,
        "completion_ids": torch.zeros(log_probs.shape, dtype=torch.long),
        "completion_mask": case.mask,
        "advantages": case.advantages,
        "old_per_token_logps": case.old,
        "ref_per_token_logps": case.ref,
        "num_items_in_batch": case.mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


class VerlConfig(SimpleNamespace):
    """Options of verl's actor, with the defaults of its files, but for the dual clip, which is off."""

    def __init__(self, **changes):
        defaults = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 1e9}
        defaults |= {"tau_pos": 1.0, "tau_neg": 1.05, "global_batch_info": {}, "gamma": 1.0}
        super().__init__(**(defaults | changes))

    def get(self, name, default=None):
        return getattr(self, name, default)


def verl_module(name):
    """A module of verl's trainer, such as "core_algos".

    The packages around it import Ray and a dozen others; of them it reads the types of its annotations. verl is not in
    this environment, whose folder of tests it would replace by its own, but where `JAXLOGP_TEST_VERL` says.
    """
    folder = os.environ.get("JAXLOGP_TEST_VERL")
    if folder is None:
        pytest.skip("JAXLOGP_TEST_VERL does not name a folder with verl")
    if "verl" not in sys.modules:
        package = types.ModuleType("verl")
        package.__path__ = [os.path.join(folder, "verl")]
        workers = types.ModuleType("verl.workers")
        workers.__path__ = []
        config = types.ModuleType("verl.workers.config")
        config.__path__ = []
        config.ActorConfig = VerlConfig
        actor, protocol = types.ModuleType("verl.workers.config.actor"), types.ModuleType("verl.protocol")
        actor.PolicyLossConfig, protocol.DataProto = object, object
        sys.modules |= {module.__name__: module for module in (package, workers, config, actor, protocol)}
    return importlib.import_module(f"verl.trainer.ppo.{name}")
