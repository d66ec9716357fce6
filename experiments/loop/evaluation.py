"""Exact match on held-out prompts, and what else a completion of them tells."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from experiments.experience.experience import Policy
from experiments.experience.prompts import encode_prompt, held_out_examples
from experiments.experience.scoring import Sample, score, to_samples
from experiments.sampling.options import SamplingOptions
from experiments.sampling.policy import Generation, Shape, apart_from_greedy
from experiments.tasks import Example, Rewards, RewardTerm, Task
from experiments.tasks.rewards import CORRECT, Scored
from jaxlogp import Document

SHOWN_SAMPLES = 16
CHECK_PROMPTS = 512
"""Prompts on which a warm start is checked."""
CHECKS, EVALUATION = 2, 3
"""First numbers of the seeds of checks in the warm start, and of evaluations."""


class ExactMatch(NamedTuple):
    """Shares of held-out prompts that the task's verdict calls right, in [0, 1]: the mean over the samples of a prompt, its
    greedy completion, and any of several samples (pass@k; None of one)."""

    sampled: float
    greedy: float
    any_sample: float | None = None

    def __str__(self) -> str:
        more = "" if self.any_sample is None else f", any sample {self.any_sample:.3f}"
        return f"held-out exact match sampled {self.sampled:.3f}{more}, greedy {self.greedy:.3f}"

    def named(self) -> dict[str, float]:
        more = {} if self.any_sample is None else {"held-out exact match (any sample)": self.any_sample}
        sampled = {"held-out exact match (temperature 1)": self.sampled, **more}
        return sampled | {"held-out exact match (greedy)": self.greedy}


class HeldOutLoss(NamedTuple):
    """Cross-entropy of held-out documents, in nats per label, and its exponential."""

    loss: float
    perplexity: float

    def __str__(self) -> str:
        return f"held-out loss {self.loss:.4f}, perplexity {self.perplexity:.3f}"

    def named(self) -> dict[str, float]:
        return {"held-out loss": self.loss, "held-out perplexity": self.perplexity}


Scores = ExactMatch | HeldOutLoss


class Evaluated(Protocol):
    """What an evaluation has found: scores, samples to read, and the documents of a KL to the reference."""

    @property
    def scores(self) -> Scores: ...
    @property
    def samples(self) -> list[Sample]: ...
    @property
    def documents(self) -> list[Document]: ...

    def metrics(self) -> dict[str, float]:
        """Values for the log."""


class Answers(NamedTuple):
    drawn: list[Generation]
    rewards: Scored
    verdicts: Scored

    @property
    def exact_match(self) -> float:
        return float(np.mean(self.verdicts.rewards, dtype=np.float64))


@dataclass(frozen=True)
class EvaluatedAnswers:
    """What a policy has answered, at temperature 1 and greedily, and some of the sampled answers to read."""

    prompts: list[list[int]]
    sampled: Answers
    greedy: Answers
    samples: list[Sample]

    @property
    def scores(self) -> ExactMatch:
        verdicts = self.sampled.verdicts.rewards.reshape(len(self.prompts), -1)
        any_sample = float(np.mean(verdicts.max(axis=1), dtype=np.float64)) if verdicts.shape[1] > 1 else None
        return ExactMatch(self.sampled.exact_match, self.greedy.exact_match, any_sample)

    @property
    def documents(self) -> list[Document]:
        """The sampled answers, without advantages."""
        each = len(self.sampled.drawn) // len(self.prompts)
        prompts = [np.array(prompt, np.int32) for prompt in self.prompts for _ in range(each)]
        pairs = zip(prompts, self.sampled.drawn, strict=True)
        return [Document.of_completion(prompt, drawn.ids, drawn.log_probs) for prompt, drawn in pairs]

    def metrics(self) -> dict[str, float]:
        scores = self.scores._asdict().items()
        values = {f"exact_match_{name}": score for name, score in scores if score is not None}
        for name, answers in (("sampled", self.sampled), ("greedy", self.greedy)):
            values[f"reward_{name}"] = float(answers.rewards.rewards.mean())
            values[f"completion_length_{name}"] = float(np.mean([len(each.ids) for each in answers.drawn]))
            values[f"truncated_share_{name}"] = float(
                np.mean([each.finish_reason == "length" for each in answers.drawn])
            )
        return values


class Evaluation(Protocol):
    """Scores a policy on what is held out; `scores` is the type of its scores."""

    scores: type[ExactMatch] | type[HeldOutLoss]

    @property
    def size(self) -> str: ...

    def of(self, policy: Policy) -> Evaluated:
        """Evaluates a policy."""


class AnswerEvaluation:
    """Held-out prompts, at most `num_prompts`, each completed `samples` times with the same random numbers every time."""

    scores = ExactMatch

    def __init__(
        self,
        task: Task,
        rewards: Rewards,
        num_prompts: int,
        prompt_tokens: int,
        options: SamplingOptions,
        samples: int = 1,
    ) -> None:
        self._rewards, self._verdict = rewards, Rewards((RewardTerm(CORRECT, task.verify),))
        self._examples = held_out_examples(task, num_prompts)
        # Sampled and greedy completions are drawn together: one program, which reads each prompt once.
        self.shape = Shape(len(self._examples), prompt_tokens, samples + 1, replace(options, greedy_last=True))
        self.check_shape = Shape(CHECK_PROMPTS, prompt_tokens, 1, options)
        self._asked = num_prompts

    @property
    def size(self) -> str:
        fewer = f" (requested: {self._asked}; the task has no more)" if self.shape.prompts < self._asked else ""
        return f"{self.shape.prompts} held-out prompts{fewer}"

    def of(self, policy: Policy) -> EvaluatedAnswers:
        examples, tokenizer, judges = self._examples, policy.tokenizer, (self._rewards, self._verdict)
        prompts = [encode_prompt(tokenizer, example, self.shape.tokens) for example in examples]
        copies = self.shape.copies
        both = self._draw(policy, prompts, self.shape.options, copies=copies)
        repeated = [example for example in examples for _ in range(copies - 1)]
        drawn, last = apart_from_greedy(both, copies)
        sampled = Answers(drawn, *score(tokenizer, repeated, drawn, *judges).scored)
        greedy = Answers(last, *score(tokenizer, examples, last, *judges).scored)
        shown = repeated[:SHOWN_SAMPLES]
        samples = to_samples(tokenizer, shown, sampled.drawn, sampled.rewards, self._rewards.names)
        return EvaluatedAnswers(prompts, sampled, greedy, samples)

    def exact_match_on(self, examples: list[Example], policy: Policy, step: int) -> float:
        """Share of right answers to other examples, sampled with other random numbers at every step."""
        prompts = [encode_prompt(policy.tokenizer, example, self.shape.tokens) for example in examples]
        drawn = self._draw(policy, prompts, self.check_shape.options, (CHECKS, step))
        (verdicts,) = score(policy.tokenizer, examples, drawn, self._verdict).scored
        return float(np.mean(verdicts.rewards, dtype=np.float64))

    def _draw(
        self,
        policy: Policy,
        prompts: list[list[int]],
        options: SamplingOptions,
        seed: tuple[int, ...] = (EVALUATION,),
        copies: int = 1,
    ) -> list[Generation]:
        return policy.generate(prompts, options, copies=copies, seed=seed, pad_to=(len(prompts), self.shape.tokens))
