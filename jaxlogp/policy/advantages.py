"""Advantages of sampled completions relative to the other completions of the same prompt."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxlogp._arrays import AnyArray, compute_dtype
from jaxlogp.errors import describe, is_concrete, is_number, require, require_floating

SCALE_REWARDS = ("group", "none")


class GroupAdvantages(NamedTuple):
    """Advantages [num_groups, num_generations], and the degenerate groups [num_groups], whose rewards are all equal."""

    advantages: Float[AnyArray, "num_groups num_generations"]
    degenerate: Bool[AnyArray, " num_groups"]


def group_advantages(
    rewards: Float[AnyArray, "num_groups num_generations"], *, scale_rewards: str = "group", epsilon: float = 1e-4
) -> GroupAdvantages:
    """Advantages of GRPO: rewards minus the mean of their group, optionally divided by its standard deviation.

    A = (r - mean(r)) / (std(r) + epsilon) for "group" and A = r - mean(r) for "none" (as in Dr. GRPO), where std is the
    sample standard deviation (divisor num_generations - 1). A group is degenerate when its largest and smallest reward
    are equal; its advantages are exactly 0. A small deviation alone does not make a group degenerate.

    Args:
        rewards: [num_groups, num_generations], one row per prompt, the rewards of its completions.
        scale_rewards: "group" or "none".
        epsilon: added to the standard deviation; at least 0.

    Returns:
        The advantages (fp32, or float64 for float64 rewards) and the degenerate groups.

    Raises:
        ValueError: a wrong shape or dtype, fewer than two generations, no group, an unknown scale, a negative epsilon,
            or a reward that is not finite (checked where the values are known).

    Example:
        >>> import jax.numpy as jnp
        >>> result = group_advantages(jnp.array([[1.0, 0.0], [0.5, 0.5]]), scale_rewards="none")
        >>> result.advantages.tolist(), result.degenerate.tolist()
        ([[0.5, -0.5], [0.0, 0.0]], [False, True])

    References:
        DeepSeekMath, arXiv:2402.03300; Understanding R1-Zero-like training (Dr. GRPO), arXiv:2503.20783.
    """
    require(scale_rewards in SCALE_REWARDS, "scale_rewards", f"one of {SCALE_REWARDS}", repr(scale_rewards))
    ok = is_number(epsilon) and 0.0 <= epsilon < math.inf
    require(ok, "epsilon", "a finite Python number of at least 0", describe(epsilon))
    rewards, degenerate = _checked(rewards)
    # Differences of close numbers are exact, their mean is not: so a common offset is subtracted before the mean.
    rewards = rewards - jnp.min(rewards, axis=1, keepdims=True)
    advantages = rewards - jnp.mean(rewards, axis=1, keepdims=True)
    if scale_rewards == "group":
        deviation = jnp.std(rewards, axis=1, ddof=1, keepdims=True)
        # The differences of a degenerate group are exactly 0; with epsilon 0 its deviation would make them 0 / 0.
        advantages = advantages / jnp.where(degenerate[:, None], 1.0, deviation + epsilon)
    return GroupAdvantages(advantages, degenerate)


def leave_one_out_advantages(rewards: Float[AnyArray, "num_groups num_generations"]) -> GroupAdvantages:
    """Advantages of RLOO: each reward minus the mean of the other rewards of its group.

    A_i = r_i - Σ_{j≠i} r_j / (n - 1), n the number of generations.

    Args:
        rewards: [num_groups, num_generations], one row per prompt, the rewards of its completions.

    Returns:
        The advantages (fp32, or float64 for float64 rewards) and the degenerate groups, as in `group_advantages`.

    Raises:
        ValueError: as in `group_advantages`.

    References:
        Back to Basics, arXiv:2402.14740.
    """
    rewards, degenerate = _checked(rewards)
    # The rounding of the mean shifts a whole group, and cancels against the mean of the others.
    centred = rewards - jnp.mean(rewards, axis=1, keepdims=True)
    others = (jnp.sum(centred, axis=1, keepdims=True) - centred) / (rewards.shape[1] - 1)
    return GroupAdvantages(jnp.where(degenerate[:, None], 0.0, centred - others), degenerate)


def _checked(
    rewards: Float[AnyArray, "num_groups num_generations"],
) -> tuple[Float[Array, "num_groups num_generations"], Bool[Array, " num_groups"]]:
    """Returns the rewards in the dtype of computations, and whether all rewards of each group are equal."""
    require_floating(rewards, "rewards")
    shape = rewards.shape
    require(len(shape) == 2, "rewards", "shape [num_groups, num_generations]", shape)
    require(shape[0] > 0, "rewards", "at least one group", shape)
    require(shape[1] >= 2, "rewards", "at least two generations per group", shape)
    if is_concrete(rewards):
        host = np.asarray(rewards, dtype=np.float64)
        bad = np.argwhere(~np.isfinite(host))
        if len(bad):
            first = tuple(int(i) for i in bad[0])
            require(False, "rewards", "finite values", f"{host[first]} at position {first}")
    rewards = jnp.asarray(rewards)
    rewards = rewards.astype(compute_dtype(rewards))
    return rewards, jnp.max(rewards, axis=1) == jnp.min(rewards, axis=1)
