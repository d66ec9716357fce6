"""Advantages of sampled completions relative to the other completions of the same prompt."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxlogp._arrays import AnyArray, compute_dtype
from jaxlogp.errors import describe, is_concrete, is_number, require, require_floating, require_integer
from jaxlogp.losses.inputs import is_array

SCALE_REWARDS = ("group", "none")


class GroupAdvantages(NamedTuple):
    """Advantages in the shape of the rewards, and the degenerate groups, whose rewards are all equal.

    Attributes:
        advantages: [num_groups, num_generations], or [N] with group ids; fp32, or float64 for float64 rewards.
        degenerate: bool [num_groups], or [N], True if the group of the reward is degenerate.
    """

    advantages: Float[AnyArray, "*rewards"]
    degenerate: Bool[AnyArray, " groups"]


def group_advantages(
    rewards: Float[AnyArray, "*rewards"],
    *,
    group_ids: Integer[AnyArray, " rewards"] | None = None,
    scale_rewards: str = "group",
    epsilon: float = 1e-4,
) -> GroupAdvantages:
    """Computes the advantages of GRPO: rewards minus the mean of their group, optionally divided by its standard deviation.

    A = (r - mean(r)) / (std(r) + epsilon) for "group" and A = r - mean(r) for "none" (as in Dr. GRPO), where std is the
    sample standard deviation (divisor n - 1 in a group of n). A group is degenerate if its largest and smallest rewards
    are equal, as in a group of one; its advantages are exactly 0. A small deviation alone does not make a group
    degenerate.

    Args:
        rewards: [num_groups, num_generations], the rewards of the completions of one prompt per row; or [N] with group_ids.
        group_ids: [N], of any integer dtype, equal for the completions of one prompt, in any number and order; or None.
        scale_rewards: "group" or "none".
        epsilon: number added to the standard deviation, at least 0.

    Returns:
        The advantages (fp32, or float64 for float64 rewards) and the degenerate groups.

    Raises:
        ValueError: if a shape or dtype is wrong, there is no reward, the scale is unknown, epsilon is negative, or a known
            reward is not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> result = group_advantages(jnp.array([[1.0, 0.0], [0.5, 0.5]]), scale_rewards="none")
        >>> result.advantages.tolist(), result.degenerate.tolist()
        ([[0.5, -0.5], [0.0, 0.0]], [False, True])
        >>> ids = jnp.array([7, 2, 7, 9])
        >>> group_advantages(jnp.array([1.0, 5.0, 0.0, 2.0]), group_ids=ids, scale_rewards="none").advantages.tolist()
        [0.5, 0.0, -0.5, 0.0]

    References:
        DeepSeekMath, arXiv:2402.03300; Understanding R1-Zero-like training (Dr. GRPO), arXiv:2503.20783.
    """
    require(scale_rewards in SCALE_REWARDS, "scale_rewards", f"one of {SCALE_REWARDS}", repr(scale_rewards))
    ok = is_number(epsilon) and 0.0 <= epsilon < math.inf
    require(ok, "epsilon", "a finite Python number of at least 0", describe(epsilon))
    groups = _groups(rewards, group_ids)
    rewards = _wide(rewards)
    degenerate = groups.max(rewards) == groups.min(rewards)
    # Differences of close numbers are exact, their mean is not: so a common offset is subtracted before the mean.
    rewards = rewards - groups.min(rewards)
    advantages = rewards - groups.mean(rewards)
    if scale_rewards == "group":
        # With epsilon 0 the deviation of a degenerate group would make its differences, exactly 0, 0 / 0.
        advantages = advantages / jnp.where(degenerate, 1.0, groups.deviation(rewards) + epsilon)
    return groups.advantages(advantages, degenerate)


def leave_one_out_advantages(
    rewards: Float[AnyArray, "*rewards"], *, group_ids: Integer[AnyArray, " rewards"] | None = None
) -> GroupAdvantages:
    """Computes the advantages of RLOO: each reward minus the mean of the other rewards of its group.

    A_i = r_i - Σ_{j≠i} r_j / (n - 1), n the number of rewards of the group; 0 in a group of one.

    Args:
        rewards: [num_groups, num_generations], or [N] with group_ids, as in `group_advantages`.
        group_ids: [N], of any integer dtype, or None, as in `group_advantages`.

    Returns:
        The advantages (fp32, or float64 for float64 rewards) and the degenerate groups, as in `group_advantages`.

    Raises:
        ValueError: if an argument is refused as in `group_advantages`.

    References:
        Back to Basics, arXiv:2402.14740.
    """
    groups = _groups(rewards, group_ids)
    rewards = _wide(rewards)
    degenerate = groups.max(rewards) == groups.min(rewards)
    # The rounding of the mean shifts a whole group, and cancels against the mean of the others.
    centred = rewards - groups.mean(rewards)
    others = (groups.sum(centred) - centred) / groups.others(rewards.dtype)
    return groups.advantages(centred - others, degenerate)


class _Groups(NamedTuple):
    """Sums and extremes of groups, repeated at each member (or broadcast to them).

    Attributes:
        members: int32 [N], the group of each reward in [0, N); None for the rows of an array.
        sizes: number of rewards of the group of each reward.
    """

    members: Int[Array, " rewards"] | None
    sizes: Int[Array, " rewards"] | int

    def others(self, dtype: jnp.dtype) -> Float[Array, "..."]:
        """Returns the number of other rewards of each group; 1 for a group of one, where it divides 0."""
        return jnp.maximum(jnp.asarray(self.sizes, dtype) - 1, 1)

    def sum(self, x: Float[Array, "*rewards"]) -> Float[Array, "..."]:
        return self._reduced(jnp.sum, jax.ops.segment_sum, x)

    def min(self, x: Float[Array, "*rewards"]) -> Float[Array, "..."]:
        return self._reduced(jnp.min, jax.ops.segment_min, x)

    def max(self, x: Float[Array, "*rewards"]) -> Float[Array, "..."]:
        return self._reduced(jnp.max, jax.ops.segment_max, x)

    def mean(self, x: Float[Array, "*rewards"]) -> Float[Array, "..."]:
        return self.sum(x) / jnp.asarray(self.sizes, x.dtype)

    def deviation(self, x: Float[Array, "*rewards"]) -> Float[Array, "..."]:
        """Computes the sample standard deviation; 0 in a group of one."""
        if self.members is None:
            return jnp.std(x, axis=1, ddof=min(1, self.sizes - 1), keepdims=True)
        return jnp.sqrt(self.sum(jnp.square(x - self.mean(x))) / self.others(x.dtype))

    def advantages(self, x: Float[Array, "*rewards"], degenerate: Bool[Array, "..."]) -> GroupAdvantages:
        return GroupAdvantages(jnp.where(degenerate, 0.0, x), degenerate[:, 0] if self.members is None else degenerate)

    def _reduced(self, of_rows, of_segments, x: Float[Array, "*rewards"]) -> Float[Array, "..."]:
        if self.members is None:
            return of_rows(x, axis=1, keepdims=True)
        return of_segments(x, self.members, num_segments=x.shape[0])[self.members]


def _groups(rewards: Float[AnyArray, "*rewards"], group_ids: Integer[AnyArray, " rewards"] | None) -> _Groups:
    """Checks rewards and ids, and returns the groups."""
    require_floating(rewards, "rewards")
    shape = rewards.shape
    if group_ids is None:
        require(len(shape) == 2, "rewards", "shape [num_groups, num_generations], or [N] with group_ids", shape)
    else:
        require(len(shape) == 1, "rewards", "shape [N] of group_ids", shape)
        require(is_array(group_ids), "group_ids", "an array of an integer dtype", describe(group_ids))
        require_integer(group_ids, "group_ids")
        require(group_ids.shape == shape, "group_ids", f"shape {shape} of rewards", group_ids.shape)
    require(rewards.size > 0, "rewards", "at least one reward", shape)
    if is_concrete(rewards):
        host = np.asarray(rewards, dtype=np.float64)
        bad = np.argwhere(~np.isfinite(host))
        if len(bad):
            first = tuple(int(i) for i in bad[0])
            require(False, "rewards", "finite values", f"{host[first]} at position {first}")
    if group_ids is None:
        return _Groups(None, shape[1])
    # Of NumPy where ids are known: without x64, jnp.asarray would wrap ids of 64 bits.
    if is_concrete(group_ids):
        _, members = np.unique(np.asarray(group_ids), return_inverse=True)
    else:
        _, members = jnp.unique(group_ids, return_inverse=True, size=shape[0])
    members = jnp.asarray(members.astype(np.int32))
    return _Groups(members, jax.ops.segment_sum(jnp.ones_like(members), members, num_segments=shape[0])[members])


def _wide(rewards: Float[AnyArray, "*rewards"]) -> Float[Array, "*rewards"]:
    rewards = jnp.asarray(rewards)
    return rewards.astype(compute_dtype(rewards))
