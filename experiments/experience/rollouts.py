"""Rollouts: groups of sampled, rewarded completions of the next training prompts, as documents with advantages."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Bool

from experiments.config import RolloutConfig
from experiments.experience.counts import RolloutCounts
from experiments.experience.experience import Experience
from experiments.refusal import require_finite
from experiments.sampling.completer import Completer, Completions, Draw
from experiments.sampling.policy import SamplerPolicy
from experiments.sampling.prompts import PromptOrder
from jaxlogp import Document, GroupAdvantages, group_advantages, leave_one_out_advantages

ADVANTAGES: dict[str, Callable[[np.ndarray], GroupAdvantages]] = {
    "group": group_advantages,
    "centred": lambda rewards: group_advantages(rewards, scale_rewards="none"),
    "leave_one_out": leave_one_out_advantages,
}
"""Functions from rewards [groups, generations] to advantages, by the name of the option."""


class Group(NamedTuple):
    """The documents of one prompt, and whether their rewards are all equal."""

    documents: list[Document]
    degenerate: bool


class Rollout(NamedTuple):
    """Groups of documents, and the counts of all that were drawn for them."""

    groups: list[Group]
    counts: RolloutCounts


class Rollouts:
    """The built-in source: prompts of the task, completed and rewarded; each rollout folds its number into the key."""

    def __init__(
        self, prompts: PromptOrder, completer: Completer, options: RolloutConfig, advantages: str, key: jax.Array
    ) -> None:
        self._prompts, self._completer, self._options = prompts, completer, options
        self._advantages, self._key = ADVANTAGES[advantages], key
        self._made = 0

    @property
    def exhausted(self) -> bool:
        """Whether the training data has ended."""
        return self._prompts.exhausted

    def state(self) -> dict[str, Any]:
        """See `ExperienceSource`."""
        return {"rollouts": self._made, "cursor": self._prompts.cursor}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `ExperienceSource`."""
        self._made, self._prompts.cursor = state["rollouts"], state["cursor"]

    def next(self, policy: SamplerPolicy) -> Experience | None:
        """The documents of the next prompts, completed by the policy; None when the data has ended.

        With `resample_degenerate`, groups without a difference give way to those of further prompts. The state between
        two rollouts is the same two numbers as without it: how many prompts were taken, and how many draws were made.

        Raises:
            NotFinite: log-probs of the sampler.
            RewardNotFinite: of a reward function.
            RewardFailed: it raised, or returned no number.
        """
        draw = self._with_differences if self._options.resample_degenerate else self._draw
        groups, counts = draw(policy.params, policy.version)
        documents = tuple(document for group in groups for document in group.documents)
        return Experience(documents, counts) if documents else None

    @property
    def draw(self) -> Draw:
        """What completes prompts."""
        return self._completer.draw

    def _with_differences(self, params: nnx.State, model_version: int) -> Rollout:
        options, kept, equal, counts = self._options, [], [], RolloutCounts()
        for further in range(1 + options.max_resamples):
            drawn = self._draw(params, model_version)
            if not drawn.groups:
                break
            counts += replace(drawn.counts, resampled=int(further > 0))
            for group in drawn.groups:
                (equal if group.degenerate else kept).append(group)
            if len(kept) >= options.prompts_per_rollout:
                break
        filled = equal[: max(options.prompts_per_rollout - len(kept), 0)]
        unused = max(len(kept) - options.prompts_per_rollout, 0)
        counts += RolloutCounts(filled=len(filled), unused=unused)
        return Rollout([*kept[: options.prompts_per_rollout], *filled], counts)

    def _draw(self, params: nnx.State, model_version: int) -> Rollout:
        """The groups of the next prompts; none when the data has ended."""
        options = self._options
        examples = self._prompts.take(options.prompts_per_rollout)
        if not examples:
            return Rollout([], RolloutCounts())
        # The sampler's shape is static: a short last rollout is padded and the padding dropped.
        filled = [examples[i % len(examples)] for i in range(options.prompts_per_rollout)]
        key = jax.random.fold_in(self._key, self._made)
        self._made += 1
        drawn = self._completer.complete(params, filled, key, copies=options.num_generations)
        drawn = drawn.first(len(examples) * options.num_generations)
        require_finite("log-probs of the sampler", drawn.log_probs, drawn.prompts.__getitem__)
        groups, degenerate = self._groups(drawn, model_version)
        unfit = sum(not self._completer.fits(example) for example in examples) if degenerate.all() else 0
        return Rollout(groups, RolloutCounts.of(drawn, self._completer.rewards.names, degenerate, unfit))

    def _groups(self, drawn: Completions, model_version: int) -> tuple[list[Group], Bool[np.ndarray, " groups"]]:
        """Documents with the advantages of their groups, and which groups have none of a difference.

        With `mask_truncated`, a completion without an end token is a document of its prompt alone: no token of it is a
        label. Its reward stays in the mean and deviation of its group and in the metrics, as TRL does it
        (mask_truncated_completions). Denominators, also as there: reduction "labels" divides by the labels that are left;
        "documents", "document_mean" and "constant_length" divide by all documents, this one with a sum of zero. A step
        without any label has loss and gradient 0.
        """
        size = self._options.num_generations
        advantages, degenerate = jax.device_get(self._advantages(drawn.rewards.reshape(-1, size)))
        documents = [
            self._document(drawn, number, advantage, model_version)
            for number, advantage in enumerate(advantages.ravel().tolist())
        ]
        groups = [Group(documents[size * i : size * (i + 1)], same) for i, same in enumerate(degenerate.tolist())]
        return groups, degenerate

    def _document(self, drawn: Completions, number: int, advantage: float, model_version: int) -> Document:
        prompt = np.array(drawn.prompts[number], np.int32)
        masked = self._options.mask_truncated and not drawn.ended[number]
        labels = 0 if masked else None
        return Document.of_completion(
            prompt,
            drawn.tokens[number][:labels],
            drawn.log_probs[number][:labels],
            advantages=advantage,
            reward=float(drawn.rewards[number]),
            versions=model_version,
        )
