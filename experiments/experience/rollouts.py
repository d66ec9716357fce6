"""Rollouts: groups of sampled, rewarded completions of the next training prompts, as documents with advantages."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from experiments.experience.experience import Experience, ExperienceSource, Policy
from experiments.experience.options import RolloutConfig
from experiments.experience.prompts import PromptStream, encode_prompt, fits_completion
from experiments.experience.rollout_metrics import RolloutMetrics
from experiments.experience.scoring import score
from experiments.refusal import NotFinite, Refusal, require_finite
from experiments.sampling.options import SamplingOptions
from experiments.sampling.policy import Generation, Shape, apart_from_greedy
from experiments.tasks import Rewards
from experiments.tasks.options import RewardConfig
from experiments.tasks.rewards import RewardNotFinite
from jaxlogp import Document
from jaxlogp.policy.algorithms import ADVANTAGES, CompletionRewards

ROLLOUTS = 1
"""First number of the seed of a rollout."""


class Group(NamedTuple):
    documents: list[Document]
    degenerate: bool


class Rollout(NamedTuple):
    groups: list[Group]
    counts: RolloutMetrics


class Rollouts(ExperienceSource):
    """The built-in source: prompts of the task, completed by the policy and rewarded; a rollout's number is its seed."""

    def __init__(
        self,
        prompts: PromptStream,
        rewards: Rewards,
        options: RolloutConfig,
        sampling: SamplingOptions,
        prompt_tokens: int,
        advantages: str,
        reward: RewardConfig | None = None,
    ) -> None:
        self._prompts, self._rewards, self._options = prompts, rewards, options
        # One program instead of one for each of its operations.
        self._advantages = jax.jit(ADVANTAGES[advantages])
        self._is_greedy, self._made = advantages == "greedy_baseline", 0
        self._reward = RewardConfig() if reward is None else reward
        # A greedy completion of each prompt is drawn along with the others.
        copies = options.num_generations + self._is_greedy
        sampling = replace(sampling, greedy_last=self._is_greedy)
        self.shape = Shape(options.prompts_per_rollout, prompt_tokens, copies, sampling)

    def state(self) -> dict[str, Any]:
        return {"rollouts": self._made, "cursor": self._prompts.cursor}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._made, self._prompts.cursor = state["rollouts"], state["cursor"]

    def next(self, policy: Policy) -> Experience | None:
        """Returns the documents of the next prompts, completed by the policy; None when the data has ended.

        With `resample_degenerate`, groups without a difference give way to those of further prompts. The state between
        two rollouts is the same two numbers as without it: how many prompts were taken, and how many draws were made.
        """
        draw = self._with_differences if self._options.resample_degenerate else self._draw
        try:
            groups, counts = draw(policy)
        except RewardNotFinite as error:
            return Experience((), refusal=Refusal(str(error)))
        except NotFinite as error:
            return Experience((), refusal=error.refusal)
        documents = tuple(document for group in groups for document in group.documents)
        return Experience(documents, counts) if documents else None

    def _with_differences(self, policy: Policy) -> Rollout:
        options, kept, equal, counts = self._options, [], [], RolloutMetrics()
        for further in range(1 + options.max_resamples):
            drawn = self._draw(policy)
            if not drawn.groups:
                break
            counts += replace(drawn.counts, resampled=int(further > 0))
            for group in drawn.groups:
                (equal if group.degenerate else kept).append(group)
            if len(kept) >= options.prompts_per_rollout:
                break
        filled = equal[: max(options.prompts_per_rollout - len(kept), 0)]
        unused = max(len(kept) - options.prompts_per_rollout, 0)
        counts += RolloutMetrics(filled=len(filled), unused=unused)
        return Rollout([*kept[: options.prompts_per_rollout], *filled], counts)

    def _draw(self, policy: Policy) -> Rollout:
        copies = self._options.num_generations
        examples = self._prompts.take(self.shape.prompts)
        if not examples:
            return Rollout([], RolloutMetrics())
        prompts = [encode_prompt(policy.tokenizer, example, self.shape.tokens) for example in examples]
        drawn, greedy = self._complete(policy, prompts)
        require_finite("log-probs of the sampler", [each.log_probs for each in drawn], lambda i: prompts[i // copies])
        repeated = [example for example in examples for _ in range(copies)]
        (scored,), empty = score(policy.tokenizer, repeated, drawn, self._rewards)
        lengths = np.array([0 if self._is_masked(each) else len(each.ids) for each in drawn], np.int32)
        shape = (-1, copies)
        baselines = score(policy.tokenizer, examples, greedy, self._rewards).scored[0].rewards if greedy else None
        kl = self._kl(policy, [prompts[i // copies] for i in range(len(drawn))], drawn)
        rewards = (scored.rewards - self._reward.kl_coefficient * kl).astype(np.float32).reshape(shape)
        parts, weights = scored.parts.reshape(*rewards.shape, -1), self._rewards.weights.astype(np.float32)
        given = CompletionRewards(rewards, lengths.reshape(shape), baselines, parts, weights)
        advantages = jax.device_get(self._advantages(given).advantages)
        # There is nothing to learn from such a group: its rewards are equal, unless they are compared with other groups'.
        degenerate = ~advantages.any(axis=1)
        facts = zip(drawn, advantages.ravel().tolist(), scored.rewards.tolist(), strict=True)
        documents = [self._document(prompts[i // copies], *each, policy.version) for i, each in enumerate(facts)]
        groups = [Group(documents[copies * i : copies * (i + 1)], same) for i, same in enumerate(degenerate.tolist())]
        longest = self.shape.options.max_new_tokens
        unfit = sum(not fits_completion(policy.tokenizer, example, longest) for example in examples)
        names = self._rewards.names
        counts = RolloutMetrics.of(drawn, scored, names, empty=empty, degenerate=degenerate, unfit=unfit)
        return Rollout(groups, replace(counts, kl=float(kl.sum())) if self._reward.kl_coefficient else counts)

    def _complete(self, policy: Policy, prompts: list[list[int]]) -> tuple[list[Generation], list[Generation]]:
        """Returns the completions of the prompts, and a greedy one of each if they are compared with it."""
        number, width, copies, sampling = self.shape
        seed = (ROLLOUTS, self._made)
        self._made += 1
        drawn = policy.generate(prompts, sampling, copies=copies, seed=seed, pad_to=(number, width))
        if not self._is_greedy:
            return drawn, []
        return apart_from_greedy(drawn, copies)

    def _kl(
        self, policy: Policy, prompts: list[list[int]], drawn: list[Generation]
    ) -> Float[np.ndarray, " completions"]:
        """Returns the KL of each completion to the reference, in nats; zeros where none is subtracted."""
        if not self._reward.kl_coefficient:
            return np.zeros(len(drawn))
        documents = [
            Document.of_completion(prompt, each.ids, each.log_probs, support=each.support)
            for prompt, each in zip(prompts, drawn, strict=True)
        ]
        # Of one shape in every rollout, for which the estimator is compiled once.
        distances = np.zeros((len(drawn), self.shape.options.max_new_tokens), np.float32)
        for row, each, theirs in zip(distances, drawn, policy.reference_log_probs(documents), strict=True):
            row[: len(theirs)] = theirs - each.log_probs
        return self._reward.kl(distances)

    def _document(
        self, prompt: list[int], drawn: Generation, advantage: float, reward: float, version: int
    ) -> Document:
        """Makes a document of a completion, with the advantage of its group.

        With `mask_truncated`, one without an end token is a document of its prompt alone: no token of it is a label. Its
        reward stays in the mean and deviation of its group and in the metrics, as TRL does it (mask_truncated_completions).
        Denominators, also as there: reduction "labels" divides by the labels that are left; "documents", "document_mean"
        and "constant_length" divide by all documents, this one with a sum of zero. A step without any label has loss and
        gradient 0.
        """
        labels = 0 if self._is_masked(drawn) else len(drawn.ids)
        return Document.of_completion(
            np.array(prompt, np.int32),
            drawn.ids[:labels],
            drawn.log_probs[:labels],
            support=None if drawn.support is None else drawn.support.part(0, labels),
            advantages=advantage,
            reward=reward,
            versions=version,
        )

    def _is_masked(self, drawn: Generation) -> bool:
        return self._options.mask_truncated and drawn.finish_reason == "length"
