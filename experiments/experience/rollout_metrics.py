"""Counts of what was drawn: sums over rollouts, divided once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from jaxtyping import Bool

from experiments.sampling.policy import Generation
from experiments.tasks.rewards import Scored

NARROW = 0.9
"""Ratios are compared with [0.9, 1.1], as in drift reports."""


@dataclass(frozen=True)
class RolloutMetrics:
    """Sums over rollouts, divided once by `metrics`; of all groups that were drawn, also those not trained on.

    Attributes:
        degenerate: groups without an advantage: their rewards are all equal, unless these are compared with other groups'.
        unfit: prompts whose answer is longer than a completion may be.
        resampled: rollouts that were drawn because others had groups without a difference; None where that is not done.
        filled: groups without a difference that were trained on for want of others.
        unused: groups with a difference beyond the number that was wanted.
        kl: sum over completions of the KL that was subtracted from rewards, in nats; None where none is.
        support_ids: ids that the tokens were drawn from; None where these are not recorded.
        support_cut: tokens that could not be drawn from all of them (`experiments.sampling.support`).
        support_mass: sum over the tokens of the probability of all ids that each was drawn from, in the whole distribution.
        support_narrow: tokens where this is below 0.9: so far would log-probs of the whole vocabulary be from the sampler's.
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
    kl: float | None = None
    support_ids: int | None = None
    support_cut: int = 0
    support_mass: float = 0.0
    support_narrow: int = 0
    rewards: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        drawn: Sequence[Generation],
        scored: Scored,
        names: tuple[str, ...],
        *,
        empty: Bool[np.ndarray, " N"],
        degenerate: Bool[np.ndarray, " groups"],
        unfit: int,
    ) -> "RolloutMetrics":
        """Returns the counts of one draw; `names` are those of the reward functions."""
        supports = [each.support for each in drawn if each.support is not None]
        masses = np.concatenate([np.zeros(0), *(each.mass for each in drawn if each.mass is not None)])
        return cls(
            groups=degenerate.size,
            degenerate=int(np.sum(degenerate)),
            completions=len(drawn),
            truncated=sum(each.finish_reason == "length" for each in drawn),
            tokens=sum(len(each.ids) for each in drawn),
            empty=int(np.sum(empty)),
            unfit=unfit,
            lowest=float(scored.rewards.min()),
            highest=float(scored.rewards.max()),
            support_ids=sum(each.ids.size for each in supports) if supports else None,
            support_cut=sum(int(each.cut.sum()) for each in drawn if each.cut is not None),
            support_mass=float(masses.sum(dtype=np.float64)),
            support_narrow=int(np.sum(masses < NARROW)),
            rewards=dict(zip(names, scored.parts.sum(axis=0, dtype=np.float64).tolist(), strict=True)),
        )

    def __add__(self, other: "RolloutMetrics") -> "RolloutMetrics":
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
        return RolloutMetrics(**added)

    def metrics(self) -> dict[str, float]:
        """Returns shares and means by name; none without a rollout."""
        if not self.completions:
            return {}
        resampled = {"resampled_rollouts": self.resampled, "filled_groups": self.filled, "unused_groups": self.unused}
        support = {}
        if self.support_ids is not None and self.tokens:
            names = ("support_ids", "support_mass", "support_narrow", "support_cut")
            support = {name: getattr(self, name) / self.tokens for name in names}
        return {
            # A source of one's own need not draw groups.
            **({"degenerate_groups": self.degenerate / self.groups} if self.groups else {}),
            **({} if self.resampled is None else resampled),
            "truncated_completions": self.truncated,
            "truncated_share": self.truncated / self.completions,
            "completion_length_mean": self.tokens / self.completions,
            **support,
            **({} if self.kl is None else {"reward_kl": self.kl / self.completions}),
            **{f"reward/{name}": total / self.completions for name, total in self.rewards.items()},
        }

    def why_no_signal(self, max_new_tokens: int) -> str:
        reward = (
            f"every reward is {self.lowest:g}" if self.lowest == self.highest else "within each group rewards are equal"
        )
        if self.unfit == self.groups:
            return f"{reward}, and no answer can be written in the {max_new_tokens} tokens of a completion"
        if self.empty == self.completions > 0:
            return f"{reward}, and every completion is empty"
        if self.truncated == self.completions > 0:
            return f"{reward}, and every completion was truncated at {max_new_tokens} tokens"
        return reward
