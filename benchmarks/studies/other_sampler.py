"""Rollouts of a sampler that is not the trainer's policy: truncated, at another temperature, or of an older policy.

    OTHER_SAMPLER=top_p=0.8,lag=8 python -m experiments.grpo --source benchmarks.studies.other_sampler:Rollouts \
        --schedule.row-length 10 --rollout.rescore True --correction.level token

Documents bring the log-probs of the distribution that was drawn from, as an inference engine reports them. With `support=1`
they bring its ids as well, for `--loss.on-support True`. A `lag` of k gives the documents that were drawn k calls ago.
"""

import os
from collections import deque
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from experiments import Policy, SamplingOptions
from experiments.tasks.arithmetic import Addition
from jaxlogp import Document, group_advantages

PROMPTS, COPIES = 64, 8
VARIABLE = "OTHER_SAMPLER"


@dataclass(frozen=True)
class OtherSampler:
    """The sampler, by default the trainer's policy: NAME=NUMBER, separated by commas, in the environment."""

    top_p: float = 1.0
    temperature: float = 1.0
    lag: int = 0
    support: int = 0

    @classmethod
    def from_text(cls, text: str) -> "OtherSampler":
        types = {field.name: type(field.default) for field in fields(cls)}
        pairs = (pair.split("=") for pair in text.split(",") if pair)
        return cls(**{name: types[name](value) for name, value in pairs})


class Rollouts:
    """Groups of sampled completions of two-digit additions, rewarded for the right answer; see the module."""

    def __init__(self) -> None:
        self._sampler = OtherSampler.from_text(os.environ.get(VARIABLE, ""))
        self._task, self._made, self._waiting = Addition(), 0, deque[list[Document]]()

    def next(self, policy: Policy) -> list[Document]:
        # The first policy fills the queue.
        while len(self._waiting) <= self._sampler.lag:
            self._waiting.append(self._draw(policy))
        return self._waiting.popleft()

    def _draw(self, policy: Policy) -> list[Document]:
        sampler, start = self._sampler, PROMPTS * self._made
        examples = [self._task.example(start + number, "train") for number in range(PROMPTS)]
        prompts = [policy.tokenizer.encode_prompt(example.prompt) for example in examples]
        filters = {"top_p": sampler.top_p, "record_support": sampler.top_p < 1.0}
        options = SamplingOptions(self._task.max_answer_tokens + 1, temperature=sampler.temperature, **filters)
        pad_to = (PROMPTS, self._task.max_prompt_tokens + 1)
        drawn = policy.generate(prompts, options, copies=COPIES, seed=(self._made,), pad_to=pad_to)
        self._made += 1
        right = [
            policy.tokenizer.decode(each.ids) == examples[number // COPIES].answer for number, each in enumerate(drawn)
        ]
        rewards = np.array(right, np.float32)
        advantages = np.asarray(group_advantages(rewards.reshape(PROMPTS, COPIES)).advantages).ravel()
        return [
            Document.of_completion(
                prompts[number // COPIES],
                each.ids,
                each.log_probs,
                support=each.support if sampler.support else None,
                advantages=float(advantages[number]),
                reward=float(rewards[number]),
                versions=policy.version,
            )
            for number, each in enumerate(drawn)
        ]

    def state(self) -> dict[str, Any]:
        """Only the number of calls: the documents that wait are drawn again by the policy of a resume."""
        return {"made": self._made}

    def restore(self, state: dict[str, Any]) -> None:
        self._made = state["made"]
