"""Steps of GRPO here and by the `GRPOTrainer` of TRL, on the same completions: advantages, old log-probs of the trainer, two
steps for each rollout, clipping and the KL to a reference.

Needs the extra parity.

python -m pytest -m parity tests/experiments/test_trl_grpo.py
"""

from dataclasses import replace

import numpy as np
import pytest

from experiments import train
from experiments.config import LossConfig, ModelConfig, OptimizerConfig, RolloutConfig, WarmStartConfig
from experiments.runs.folder import metric_of
from jaxlogp import Document, decoupled_advantages, group_advantages
from tests.experiments.test_trl_step import ROUNDING, model_of
from tests.experiments.tiny import tiny, train_records
from tests.experiments.tiny_directory import write_tiny_directory

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]
transformers = pytest.importorskip("transformers", reason="the extra parity is not installed")
trl = pytest.importorskip("trl", reason="the extra parity is not installed")

CALLS, PROMPTS, COPIES, EPOCHS = 2, 4, 3, 2
STEPS, DOCUMENTS, LONGEST = CALLS * EPOCHS, PROMPTS * COPIES, 20
WEIGHTS = (1.0, 0.5)
"""Of two reward functions."""


class Drawn:
    """Random ids, and rewards that differ, for every call. Half a row is shorter than any document: a row has one of them,
    and a step those of one call, in either order."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.prompts = [rng.integers(1, 250, 7 + number % 2).tolist() for number in range(PROMPTS)]
        self.completions = [
            [[rng.integers(1, 250, size).tolist() for size in rng.integers(5, 13, COPIES)] for _ in self.prompts]
            for _ in range(CALLS)
        ]
        self.rewards = rng.normal(size=(CALLS, PROMPTS, COPIES, len(WEIGHTS))).astype(np.float32)


class Source:
    """The completions of each call with their advantages, as drawn by the trainer itself."""

    def __init__(self, drawn, decoupled):
        self.drawn, self.call, self.decoupled = drawn, 0, decoupled

    def next(self, policy):
        drawn, call = self.drawn, self.call
        self.call += 1
        if call == CALLS:
            return None
        rewards = drawn.rewards[call]
        if self.decoupled:
            advantages = np.asarray(decoupled_advantages(rewards, weights=WEIGHTS).advantages)
        else:
            advantages = np.asarray(group_advantages(rewards @ np.float32(WEIGHTS)).advantages)
        documents = [
            Document.of_completion(
                prompt, ids, np.zeros(len(ids), np.float32), advantages=float(advantage), versions=policy.version
            )
            for prompt, group, row in zip(drawn.prompts, drawn.completions[call], advantages, strict=True)
            for ids, advantage in zip(group, row, strict=True)
        ]
        now = policy.log_probs(documents)
        return [replace(each, sampler_log_probs=values) for each, values in zip(documents, now, strict=True)]

    def state(self):
        return {"call": self.call}

    def restore(self, state):
        self.call = state["call"]


def their_steps(directory, out, drawn, options):
    """Loss and gradient norm of every step of TRL's trainer, whose prompts are numbers."""
    from datasets import Dataset

    calls = iter(range(CALLS))

    def rollout(prompts, trainer):
        call, seen = next(calls), [prompts[:number].count(prompt) for number, prompt in enumerate(prompts)]
        places = [(call, int(prompt), copy) for prompt, copy in zip(prompts, seen, strict=True)]
        ids = [drawn.completions[call][prompt][copy] for call, prompt, copy in places]
        prompt_ids = [drawn.prompts[prompt] for _, prompt, _ in places]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None, "place": places}

    def first(prompts, completions, place, **others):
        return [float(drawn.rewards[each][0]) for each in place]

    def second(prompts, completions, place, **others):
        return [float(drawn.rewards[each][1]) for each in place]

    options |= {"reward_weights": [*WEIGHTS]}
    options |= {"max_steps": STEPS, "num_iterations": EPOCHS, "num_generations": COPIES, "max_completion_length": 12}
    options |= {
        "per_device_train_batch_size": DOCUMENTS // 3,
        "gradient_accumulation_steps": 3,
        "shuffle_dataset": False,
    }
    options |= {"max_grad_norm": 1.0, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "weight_decay": 0.0}
    options |= {
        "logging_steps": 1,
        "output_dir": str(out),
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    trainer = trl.GRPOTrainer(
        model=model_of(directory),
        args=trl.GRPOConfig(use_cpu=True, bf16=False, activation_checkpointing=False, **options),
        reward_funcs=[first, second],
        train_dataset=Dataset.from_list([{"prompt": str(number)} for number in range(PROMPTS)]),
        processing_class=transformers.AutoTokenizer.from_pretrained(directory),
        rollout_func=rollout,
    )
    trainer.train()
    return [row for row in trainer.state.log_history if "grad_norm" in row]


@pytest.mark.parametrize(
    "family, name, options, loss",
    [
        ("qwen3", "Qwen3", {"loss_type": "dapo", "beta": 0.0}, {"name": "grpo"}),
        (
            "qwen3",
            "Qwen3",
            {"loss_type": "dapo", "beta": 0.0, "multi_objective_aggregation": "normalize_then_sum"},
            {"name": "gdpo"},
        ),
        (
            "llama3",
            "Llama",
            {"loss_type": "grpo", "beta": 0.1},
            {"name": "grpo_paper", "kl_coefficient": 0.1, "kl_unbiased": True},
        ),
    ],
)
def test_steps_on_the_same_completions_are_those_of_trl(tmp_path, monkeypatch, family, name, options, loss):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    directory = write_tiny_directory(tmp_path / "model", family, architectures=[f"{name}ForCausalLM"])
    drawn = Drawn()
    result = train(
        tiny(
            tmp_path,
            "run",
            task="addition:1",
            model=ModelConfig(path=str(directory), chat_template=False),
            loss=LossConfig(**loss),
            warm_start=WarmStartConfig(max_steps=0),
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=0, b2=0.999),
            rollout=RolloutConfig(max_prompt_tokens=8, max_new_tokens=12),
            schedule={
                "steps": STEPS, "docs_per_step": DOCUMENTS, "rows": 2, "row_length": LONGEST, "epochs_per_rollout": EPOCHS
            },
        ),
        source=Source(drawn, decoupled=loss["name"] == "gdpo"),
    )  # fmt: skip
    found, wanted = train_records(result), their_steps(directory, tmp_path / "trl", drawn, options)
    assert [each["num_documents"] for each in found] == [DOCUMENTS] * STEPS == [DOCUMENTS] * len(wanted)
    # The second step on a rollout is off the policy.
    clipped = [metric_of(each, "clipped_ratio_fraction_labelled") for each in found]
    assert clipped[0] == clipped[2] == 0.0 and min(clipped[1], clipped[3]) > 0.1
    # Each step starts from parameters that differ by the rounding of those before. A loss is a mean of numbers of up to 2,
    # the largest advantage of three being 1.2 and the ratio that its loss keeps 1.2; of the twelve of gdpo it is 2.
    largest = 2.4 if loss["name"] == "gdpo" else 2.0
    for ours, other in zip(found, wanted, strict=True):
        assert abs(ours["loss"] - other["loss"]) <= ROUNDING * STEPS * largest
        assert abs(ours["grad_norm"] - other["grad_norm"]) <= ROUNDING * STEPS * other["grad_norm"]
