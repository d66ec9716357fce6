"""Rollouts: groups of sampled, rewarded completions of the next training prompts, as documents with advantages."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Bool

from experiments.config import RolloutConfig
from experiments.refusal import require_finite
from experiments.sampling.completer import Completer, Completions, Draw
from experiments.sampling.prompts import PromptOrder
from jaxlogp import Document, GroupAdvantages, group_advantages, leave_one_out_advantages

ADVANTAGES: dict[str, Callable[[np.ndarray], GroupAdvantages]] = {
    "group": group_advantages,
    "centred": lambda rewards: group_advantages(rewards, scale_rewards="none"),
    "leave_one_out": leave_one_out_advantages,
}
"""Functions from rewards [groups, generations] to advantages, by the name of the option."""


@dataclass(frozen=True)
class RolloutCounts:
    """Sums over rollouts, divided once by `metrics`; of all groups that were drawn, also those not trained on.

    Attributes:
        degenerate: groups whose rewards are all equal.
        empty: completions without text.
        unfit: of the prompts of rollouts without a difference, those whose answer is longer than a completion may be.
        lowest: reward.
        highest: reward.
        resampled: rollouts that were drawn because others had groups without a difference; None where that is not done.
        filled: groups without a difference that were trained on for want of others.
        unused: groups with a difference beyond the number that was wanted.
        rewards: sum of what each reward function said, by its name.
    """

    groups: int = 0
    degenerate: int = 0
    completions: int = 0
    truncated: int = 0
    tokens: int = 0
    empty: int = 0
    unfit: int = 0
    lowest: float = math.inf
    highest: float = -math.inf
    resampled: int | None = None
    filled: int = 0
    unused: int = 0
    rewards: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, drawn: Completions, names: tuple[str, ...], degenerate: np.ndarray, unfit: int) -> "RolloutCounts":
        """Returns the counts of one draw; `names` are those of the reward functions, `degenerate` says it of each group."""
        return cls(
            groups=degenerate.size,
            degenerate=int(np.sum(degenerate)),
            completions=len(drawn.tokens),
            truncated=int(np.sum(~drawn.ended)),
            tokens=sum(map(len, drawn.tokens)),
            empty=int(np.sum(drawn.empty)),
            unfit=unfit,
            lowest=float(drawn.rewards.min()),
            highest=float(drawn.rewards.max()),
            rewards=dict(zip(names, drawn.parts.sum(axis=0, dtype=np.float64).tolist(), strict=True)),
        )

    def __add__(self, other: "RolloutCounts") -> "RolloutCounts":
        """Adds the counts of other rollouts."""
        added = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, mine in added.items():
            theirs = getattr(other, name)
            if name == "rewards":
                added[name] = {key: mine.get(key, 0.0) + theirs.get(key, 0.0) for key in {**mine, **theirs}}
            elif name in ("lowest", "highest"):
                added[name] = (min if name == "lowest" else max)(mine, theirs)
            elif mine is None or theirs is None:
                added[name] = theirs if mine is None else mine
            else:
                added[name] = mine + theirs
        return RolloutCounts(**added)

    def metrics(self) -> dict[str, float]:
        """Shares and means by name; none without a rollout."""
        if not self.completions:
            return {}
        resampled = {"resampled_rollouts": self.resampled, "filled_groups": self.filled, "unused_groups": self.unused}
        return {
            "degenerate_groups": self.degenerate / self.groups,
            **({} if self.resampled is None else resampled),
            "truncated_completions": self.truncated,
            "truncated_share": self.truncated / self.completions,
            "completion_length_mean": self.tokens / self.completions,
            **{f"reward/{name}": total / self.completions for name, total in self.rewards.items()},
        }

    def sameness(self, max_new_tokens: int) -> str:
        """What is the same in groups without a difference."""
        reward = (
            f"every reward is {self.lowest:g}" if self.lowest == self.highest else "within each group rewards are equal"
        )
        if self.unfit == self.groups:
            return f"{reward}, and no answer can be written in the {max_new_tokens} tokens of a completion"
        if self.empty == self.completions:
            return f"{reward}, and every completion is empty"
        if self.truncated == self.completions:
            return f"{reward}, and every completion was truncated at {max_new_tokens} tokens"
        return reward


class Group(NamedTuple):
    """The documents of one prompt, and whether their rewards are all equal."""

    documents: list[Document]
    degenerate: bool


class Rollout(NamedTuple):
    """Groups of documents, and the counts of all that were drawn for them."""

    groups: list[Group]
    counts: RolloutCounts

    @property
    def documents(self) -> list[Document]:
        """Of all groups; none when the data has ended."""
        return [document for group in self.groups for document in group.documents]


class Rollouts:
    """Makes one rollout after the other; the number of each, of which `made` is the next, is folded into the key."""

    def __init__(
        self, prompts: PromptOrder, completer: Completer, options: RolloutConfig, advantages: str, key: jax.Array
    ) -> None:
        self._prompts, self._completer, self._options = prompts, completer, options
        self._advantages, self._key = ADVANTAGES[advantages], key
        self.made = 0

    def next(self, params: nnx.State, model_version: int) -> Rollout:
        """The documents of the next prompts, completed with ``params``; none when the data has ended.

        With `resample_degenerate`, groups without a difference give way to those of further prompts. The state between
        two rollouts is the same two numbers as without it: how many prompts were taken, and how many draws were made.

        Raises:
            NotFinite: log-probs of the sampler.
            RewardNotFinite: of a reward function.
            RewardFailed: it raised, or returned no number.
        """
        draw = self._with_differences if self._options.resample_degenerate else self._draw
        return draw(params, model_version)

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
        key = jax.random.fold_in(self._key, self.made)
        self.made += 1
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
