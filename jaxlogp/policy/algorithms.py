"""Published algorithms by name: a loss, the advantages that it is for, and which labels learn.

`ADVANTAGES` has functions of the rewards of completions; `ALGORITHMS` pairs one of them with a preset of
`jaxlogp.losses`. docs/losses.md lists papers, formulas, and where an algorithm differs from its paper.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Float, Integer

from jaxlogp import losses
from jaxlogp._arrays import AnyArray
from jaxlogp.losses import PolicyLoss
from jaxlogp.policy.advantages import (
    GroupAdvantages,
    active_group_advantages,
    batch_advantages,
    decoupled_advantages,
    greedy_baseline_advantages,
    group_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
)


class CompletionRewards(NamedTuple):
    """What advantages are computed from, a row for each prompt.

    Attributes:
        rewards: reward of each completion.
        lengths: labels of each completion; 0 for one that is masked.
        baselines: reward of each prompt's greedy completion, for "greedy_baseline"; or None.
        parts: what each of several reward functions says of each completion, for "decoupled"; or None.
        weights: weight of each function in the reward, for "decoupled"; None for 1 each.
    """

    rewards: Float[AnyArray, "groups generations"]
    lengths: Integer[AnyArray, "groups generations"]
    baselines: Float[AnyArray, " groups"] | None = None
    parts: Float[AnyArray, "groups generations functions"] | None = None
    weights: Float[AnyArray, " functions"] | None = None


ADVANTAGES: dict[str, Callable[[CompletionRewards], GroupAdvantages]] = {
    "group": lambda given: group_advantages(given.rewards),
    "centred": lambda given: group_advantages(given.rewards, scale_rewards="none"),
    "leave_one_out": lambda given: leave_one_out_advantages(given.rewards),
    "length_weighted": lambda given: length_weighted_advantages(given.rewards, given.lengths),
    "greedy_baseline": lambda given: greedy_baseline_advantages(given.rewards, given.baselines),
    "batch_scaled": lambda given: group_advantages(given.rewards, scale_rewards="batch"),
    "batch": lambda given: batch_advantages(given.rewards, lengths=given.lengths),
    "batch_baseline": lambda given: batch_advantages(given.rewards, lengths=given.lengths, baseline=True),
    "active_group": lambda given: active_group_advantages(given.rewards),
    "decoupled": lambda given: decoupled_advantages(given.parts, weights=given.weights),
    "none": lambda given: _without_advantages(group_advantages(given.rewards)),
}
"""Functions of `jaxlogp` by the names that a command line offers; "none" is 0, for a loss of its other parts alone."""


def _without_advantages(given: GroupAdvantages) -> GroupAdvantages:
    return given._replace(advantages=jnp.zeros_like(given.advantages))


OVER_BATCH = frozenset({"batch_scaled", "batch", "batch_baseline", "active_group", "decoupled"})
"""Advantages that depend on the rewards of other prompts: they need those of the whole batch at once."""


@dataclass(frozen=True)
class Algorithm:
    """A published algorithm.

    Attributes:
        loss: function of keyword arguments that returns the loss.
        advantages: name in `ADVANTAGES`.
        selection: the function of `jaxlogp.policy.selection` that chooses among the labels of a step: "clip_cov" for
            `clip_cov_advantages`, "kl_cov" for `high_covariance_labels` as `penalized`; None for all labels alike.

    Example:
        >>> rloo = ALGORITHMS["rloo"]
        >>> rloo.loss(kl_coefficient=0.05).reduction, rloo.advantages
        ('documents', 'leave_one_out')
    """

    loss: Callable[..., PolicyLoss]
    advantages: str = "group"
    selection: str | None = None


ALGORITHMS: dict[str, Algorithm] = {
    "cispo": Algorithm(losses.cispo),
    "clip_cov": Algorithm(losses.grpo, selection="clip_cov"),
    "dapo": Algorithm(losses.dapo),
    "dppo_kl": Algorithm(losses.dppo_kl),
    "dppo_tv": Algorithm(losses.dppo_tv),
    "dr_grpo": Algorithm(losses.dr_grpo, "centred"),
    "gdpo": Algorithm(losses.grpo, "decoupled"),
    "gmpo": Algorithm(losses.gmpo),
    "gpg": Algorithm(losses.gpg, "active_group"),
    "grpo": Algorithm(losses.grpo),
    "grpo_paper": Algorithm(losses.grpo_paper),
    "gspo": Algorithm(losses.gspo),
    "gspo_token": Algorithm(losses.gspo_token),
    "kl_cov": Algorithm(losses.kl_cov, selection="kl_cov"),
    "lite_ppo": Algorithm(losses.grpo, "batch_scaled"),
    "opo": Algorithm(losses.grpo, "length_weighted"),
    "reinforce": Algorithm(losses.reinforce),
    "reinforce_pp": Algorithm(losses.grpo, "batch"),
    "reinforce_pp_baseline": Algorithm(losses.grpo, "batch_baseline"),
    "remax": Algorithm(losses.reinforce, "greedy_baseline"),
    "rloo": Algorithm(losses.reinforce, "leave_one_out"),
    "sapo": Algorithm(losses.sapo),
    "vespo": Algorithm(losses.vespo),
}
"""Algorithms by the names that a command line offers."""


def find_algorithm(name: str) -> Algorithm | None:
    """Returns an algorithm by its name; of a loss of your own (`register_loss`), one with group advantages."""
    own = losses.PRESETS.get(name)
    return ALGORITHMS.get(name) or (None if own is None else Algorithm(own))
