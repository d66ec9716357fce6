"""Exact match on held-out prompts, and what else a completion of them tells."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from experiments.runs.folder import Sample
from experiments.sampling.completer import Completer, Completions, Draw, readable
from experiments.sampling.pick import DrawOptions
from experiments.sampling.prompts import held_out_examples
from experiments.sampling.scorer import Scorer
from experiments.tasks import Example, Rewards, RewardTerm, Task
from experiments.tasks.rewards import CORRECT

SHOWN_SAMPLES = 16


class ExactMatch(NamedTuple):
    """Share of held-out prompts that the task's verdict calls right, in [0, 1]."""

    sampled: float
    greedy: float


@dataclass(frozen=True)
class Evaluated:
    """What a policy has answered, at temperature 1 and greedily, how well, and some of the sampled answers to read."""

    exact_match: ExactMatch
    sampled: Completions
    greedy: Completions
    samples: list[Sample]

    def metrics(self) -> dict[str, float]:
        """Values for the log."""
        values = {f"exact_match_{name}": score for name, score in self.exact_match._asdict().items()}
        for name, drawn in (("sampled", self.sampled), ("greedy", self.greedy)):
            values[f"reward_{name}"] = float(drawn.rewards.mean())
            values[f"completion_length_{name}"] = drawn.mean_length
            values[f"truncated_share_{name}"] = drawn.truncated_share
        return values


class Evaluation:
    """Held-out prompts, completed with the same random numbers every time."""

    def __init__(
        self,
        task: Task,
        rewards: Rewards,
        num_prompts: int,
        completer: Callable[[DrawOptions], Completer],
        key: jax.Array,
    ) -> None:
        self._verdict = Scorer(Rewards((RewardTerm(CORRECT, task.verify),)))
        self._names = rewards.names
        self._examples = held_out_examples(task, num_prompts)
        self._sampled, self._greedy = completer(DrawOptions()), completer(DrawOptions(greedy=True))
        self._key = key

    @property
    def num_prompts(self) -> int:
        """How many there are."""
        return len(self._examples)

    def of(self, params: nnx.State) -> Evaluated:
        """The evaluation of a policy.

        Raises:
            RewardFailed: a reward function, or the task's verdict, is broken.
            RewardNotFinite: of one of them.
        """
        key = jax.random.fold_in(self._key, 3)
        sampled, greedy = (each.complete(params, self._examples, key) for each in (self._sampled, self._greedy))
        score = ExactMatch(*(self._share(self._examples, drawn) for drawn in (sampled, greedy)))
        return Evaluated(
            score, sampled, greedy, readable(self._examples[:SHOWN_SAMPLES], sampled.first(SHOWN_SAMPLES), self._names)
        )

    @property
    def draw(self) -> Draw:
        """What completes prompts."""
        return self._sampled.draw

    def exact_match_on(self, examples: list[Example], params: nnx.State, step: int) -> float:
        """Share of right answers to other examples, sampled with other random numbers at every step."""
        key = jax.random.fold_in(jax.random.fold_in(self._key, 2), step)
        return self._share(examples, self._sampled.complete(params, examples, key))

    def _share(self, examples: list[Example], drawn: Completions) -> float:
        return float(np.mean(self._verdict.score(examples, drawn.texts).rewards, dtype=np.float64))
