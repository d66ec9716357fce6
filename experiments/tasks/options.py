"""Options of prompts, answers and rewards."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from jaxtyping import Float

from experiments.options import AtLeast, OneOf, option_errors
from experiments.tasks.jsonl import JsonlFormat
from experiments.tasks.prompted import PromptedTask
from experiments.tasks.protocol import MEMBERS, Task, check_task
from experiments.tasks.registry import NamedTask, make_task
from experiments.tasks.rewards import RewardOptions, Rewards, rewards_for
from jaxlogp.errors import describe, require
from jaxlogp.losses.ratios import KL_ESTIMATORS


@dataclass(frozen=True)
class DataConfig(JsonlFormat):
    """Presentation of examples to the model. Keys, patterns and verifier belong to task jsonl:PATH alone."""

    system: str | None = None
    """System message before every prompt; needs a chat template."""
    instruction: str | None = None
    """Text appended to every prompt, after an empty line."""
    extract: tuple[str, ...] = ()
    """Part of a completion that is the answer: whole, tag (<answer>…</answer>), boxed (\\boxed{…}), answer_is, last_number.
    The first of several that finds something decides. Empty: the task decides."""

    def task(self, spec: str, seed: int) -> Task:
        """Returns the task that a text names, asked as these options say.

        Raises:
            ValueError: if the text or an option cannot be used, or a file has a bad line.
        """
        return self._asked(make_task(spec, seed=seed, form=self))

    def user_task(self, task: Task) -> Task:
        """Returns a task from Python, asked as these options say.

        Raises:
            ValueError: if it is no task, a rule is unknown, or an option belongs to files.
        """
        self.require_default()
        lacks = [name for name in MEMBERS if not hasattr(task, name)]
        expected = f"an object with {', '.join(MEMBERS)} (experiments.tasks.Task)"
        is_object = not lacks and not isinstance(task, type)
        require(is_object, "task", expected, f"{describe(task)}{f' without {lacks[0]}' if lacks else ''}")
        check_task(task, "task")
        return self._asked(NamedTask(task, text=task.name))

    def _asked(self, task: Task) -> Task:
        if self.system is None and self.instruction is None and not self.extract:
            return task
        with option_errors("data"):
            return PromptedTask(task, self.system, self.instruction, self.extract)


@dataclass(frozen=True)
class RewardConfig:
    """Reward of a completion, a weighted sum. Does not affect held-out scores, which are exact match."""

    functions: tuple[str, ...] = ("correct",)
    """correct (the task's verdict), ended (by an end token), overlong, pattern, short, tags, or module:name of your own.
    pattern: --reward.pattern matches the whole completion. tags: it is <think>…</think><answer>…</answer>.
    short: 0 up to --reward.length tokens, 1 - tokens / length beyond.
    overlong: falls from 0 to -1 over the last --reward.buffer tokens before --reward.length (DAPO)."""
    weights: tuple[float, ...] | None = None
    """Weight of each function. None: 1.0 each."""
    pattern: str | None = None
    """Regular expression of the function pattern; a dot matches line breaks as well."""
    length: int | None = None
    """Number of tokens of the functions short and overlong."""
    buffer: int | None = None
    """Number of tokens over which the function overlong falls."""
    kl_coefficient: Annotated[float, AtLeast(0.0)] = 0.0
    """Subtract this times the KL of a completion, in nats, to a reference, the policy after the warm start.
    The sum over its tokens; the metrics reward and reward/NAME are without it."""
    kl_estimator: Annotated[str, OneOf(*KL_ESTIMATORS)] = "k1"
    """Estimator of this KL: k1, k2 or k3."""

    def rewards(self, task: Task) -> Rewards:
        """Returns the rewards that these options name; errors are those of `rewards_for`."""
        return rewards_for(task, self.functions, self.weights, RewardOptions(self.pattern, self.length, self.buffer))

    def kl(self, reference_to_policy: Float[np.ndarray, "N T"]) -> Float[np.ndarray, " N"]:
        """Returns the estimate of the KL of N completions, in nats, from log π_reference - log π of their tokens, else 0."""
        return np.asarray(KL_ESTIMATORS[self.kl_estimator](reference_to_policy)).sum(axis=1, dtype=np.float64)
