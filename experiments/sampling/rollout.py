"""Rollouts: groups of sampled, rewarded completions of the next training prompts, as documents with advantages."""

from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from experiments.config import RolloutConfig
from experiments.sampling.completer import Completer, Completions
from experiments.sampling.prompts import PromptOrder
from jaxlogp import Document, GroupAdvantages, group_advantages, leave_one_out_advantages

ADVANTAGES: dict[str, Callable[[np.ndarray], GroupAdvantages]] = {
    "group": group_advantages,
    "centred": lambda rewards: group_advantages(rewards, scale_rewards="none"),
    "leave_one_out": leave_one_out_advantages,
}
"""Functions from rewards [groups, generations] to advantages, by the name of the option."""


class Rollouts:
    """Makes one rollout after the other.

    Args:
      prompts: gives the next prompts.
      completer: completes them.
      options: sizes of a rollout.
      advantages: a name of `ADVANTAGES`.
      key: random key of all rollouts; each folds in its number.

    Attributes:
      made: number of rollouts so far.
      degenerate: for each rollout since the reader cleared the list, the share of groups whose rewards are all equal.
    """

    def __init__(
        self, prompts: PromptOrder, completer: Completer, options: RolloutConfig, advantages: str, key: jax.Array
    ) -> None:
        self._prompts, self._completer, self._options = prompts, completer, options
        self._advantages, self._key = ADVANTAGES[advantages], key
        self.made = 0
        self.degenerate: list[float] = []

    def next(self, params: nnx.State, model_version: int) -> list[Document]:
        """The documents of the next prompts, completed with ``params``; none when the data has ended."""
        options = self._options
        examples = self._prompts.take(options.prompts_per_rollout)
        if not examples:
            return []
        # The sampler's shape is static: a short last rollout is padded and the padding dropped.
        filled = [examples[i % len(examples)] for i in range(options.prompts_per_rollout)]
        key = jax.random.fold_in(self._key, self.made)
        self.made += 1
        drawn = self._completer.complete(params, filled, key, copies=options.num_generations)
        return self._documents(drawn.first(len(examples) * options.num_generations), model_version)

    def _documents(self, drawn: Completions, model_version: int) -> list[Document]:
        groups = self._advantages(drawn.rewards.reshape(-1, self._options.num_generations))
        advantages, degenerate = jax.device_get(groups)
        self.degenerate.append(float(np.mean(degenerate)))
        columns = (drawn.prompts, drawn.tokens, drawn.log_probs, advantages.ravel().tolist(), drawn.rewards.tolist())
        return [
            Document(
                tokens=np.concatenate([np.array(prompt, np.int32), tokens]),
                prompt_length=len(prompt),
                old_log_probs=log_probs,
                advantage=advantage,
                reward=reward,
                model_version=model_version,
            )
            for prompt, tokens, log_probs, advantage, reward in zip(*columns, strict=True)
        ]
