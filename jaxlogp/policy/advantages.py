"""Advantages of sampled completions relative to others: of the same prompt, of the whole batch, or a greedy one."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped

from jaxlogp._arrays import AnyArray, compute_dtype
from jaxlogp.errors import (
    describe,
    is_concrete,
    is_number,
    require,
    require_flags,
    require_floating,
    require_integer,
)
from jaxlogp.losses.inputs import check_lengths, flat, is_array

SCALE_REWARDS = ("group", "batch", "none")


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
    """Computes the advantages of GRPO: rewards minus the mean of their group, optionally divided by a standard deviation.

    A = (r - mean(r)) / (std(r) + epsilon) for "group" and A = r - mean(r) for "none" (as in Dr. GRPO), where std is the
    sample standard deviation (divisor n - 1 in a group of n). "batch" (as in Lite PPO) divides by that of all rewards of the
    call (divisor N - 1), which are then to be those of the whole batch.

    A group is degenerate if its largest and smallest rewards are equal, as in a group of one; its advantages are exactly 0.
    A small deviation alone does not make a group degenerate.

    Args:
        rewards: [num_groups, num_generations], the rewards of the completions of one prompt per row; or [N] with group_ids.
        group_ids: [N], of any integer dtype, equal for the completions of one prompt, in any number and order; or None.
        scale_rewards: "group", "batch" or "none".
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
        DeepSeekMath, arXiv:2402.03300; Understanding R1-Zero-like training (Dr. GRPO), arXiv:2503.20783; Tricks or Traps?
        (Lite PPO), arXiv:2508.08221.
    """
    require(scale_rewards in SCALE_REWARDS, "scale_rewards", f"one of {SCALE_REWARDS}", repr(scale_rewards))
    epsilon = _check_epsilon(epsilon)
    groups = _groups(rewards, group_ids)
    rewards = _wide(rewards)
    degenerate = groups.max(rewards) == groups.min(rewards)
    whole = rewards - jnp.min(rewards)
    # Differences of close numbers are exact, their mean is not: so a common offset is subtracted before the mean.
    rewards = rewards - groups.min(rewards)
    advantages = rewards - groups.mean(rewards)
    if scale_rewards == "group":
        # With epsilon 0 the deviation of a degenerate group would make its differences, exactly 0, 0 / 0.
        advantages = advantages / jnp.where(degenerate, 1.0, groups.deviation(rewards) + epsilon)
    elif scale_rewards == "batch":
        # Without any difference every group is degenerate, and a deviation of 0 is never divided by.
        deviation = jnp.std(whole, ddof=min(1, whole.size - 1))
        advantages = advantages / jnp.where(jnp.all(degenerate), 1.0, deviation + epsilon)
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


def batch_advantages(
    rewards: Float[AnyArray, "*rewards"],
    *,
    group_ids: Integer[AnyArray, " rewards"] | None = None,
    lengths: Integer[AnyArray, "*rewards"] | None = None,
    baseline: bool = False,
    epsilon: float = 1e-8,
) -> GroupAdvantages:
    """Computes the advantages of REINFORCE++: rewards, less their group's mean on request, normalized over the whole batch.

    A = (x - mean(x)) / (std(x) + epsilon) with x = r, or with `baseline` x = r - mean of its group; mean and sample standard
    deviation are over all labels of the batch: a completion of l labels counts l times, with the divisor Σ l - 1. Without
    lengths each completion counts once. All are 0 if the x are equal.

    Without baseline a group may have one completion, and equal rewards in a group are not a reason for 0; with lengths,
    not even with baseline. So degenerate groups, here as in `group_advantages`, may have advantages.

    Args:
        rewards: [num_groups, num_generations], or [N] with group_ids, as in `group_advantages`: those of the whole batch.
        group_ids: [N], of any integer dtype, or None, as in `group_advantages`.
        lengths: number of labels of each completion, of the shape of the rewards; 0 for one that is masked. Or None.
        baseline: whether to subtract the mean of the group before.
        epsilon: number added to the standard deviation, at least 0.

    Returns:
        The advantages (fp32, or float64 for float64 rewards), and the degenerate groups.

    Raises:
        ValueError: if an argument is refused as in `group_advantages`, or a known length is negative.

    Example:
        >>> import jax.numpy as jnp
        >>> result = batch_advantages(jnp.array([[1.0, 0.0], [4.0, 3.0]]), baseline=True)
        >>> [[round(x, 3) for x in row] for row in result.advantages.tolist()]
        [[0.866, -0.866], [0.866, -0.866]]

    References:
        REINFORCE++, arXiv:2501.03262.
    """
    epsilon = _check_epsilon(epsilon)
    require_flags(baseline=baseline)
    groups = _groups(rewards, group_ids)
    wide = _wide(rewards)
    degenerate = groups.max(wide) == groups.min(wide)
    weights = jnp.ones_like(wide) if lengths is None else _lengths(lengths, rewards).astype(wide.dtype)
    counted = weights > 0
    values = wide - _offset(jnp.min(jnp.where(counted, wide, jnp.inf)))
    if baseline:
        values = wide - groups.min(wide)
        values = jnp.where(degenerate, 0.0, values - groups.mean(values))
    total = jnp.sum(weights)
    centred = values - jnp.sum(weights * values) / jnp.maximum(total, 1.0)
    # Only of those that count: the square of a very low reward overflows.
    variance = jnp.sum(weights * jnp.square(jnp.where(counted, centred, 0.0))) / jnp.maximum(total - 1.0, 1.0)
    equal = jnp.max(jnp.where(counted, values, -jnp.inf)) <= jnp.min(jnp.where(counted, values, jnp.inf))
    # Where all are equal the deviation is a rounding error or 0.
    advantages = jnp.where(equal, 0.0, centred / jnp.where(equal, 1.0, jnp.sqrt(variance) + epsilon))
    return groups.flagged(advantages, degenerate)


def length_weighted_advantages(
    rewards: Float[AnyArray, "*rewards"],
    lengths: Integer[AnyArray, "*rewards"],
    *,
    group_ids: Integer[AnyArray, " rewards"] | None = None,
) -> GroupAdvantages:
    """Computes the advantages of OPO: each reward minus the mean of its group weighted by length.

    A_i = r_i - Σ_j l_j r_j / Σ_j l_j over the group, for completions of l labels: the baseline of least variance if the
    squared gradient of a completion grows with its length.

    Args:
        rewards: [num_groups, num_generations], or [N] with group_ids, as in `group_advantages`.
        lengths: number of labels of each completion, of the shape of the rewards; 0 for one that is masked.
        group_ids: [N], of any integer dtype, or None, as in `group_advantages`.

    Returns:
        The advantages (fp32, or float64 for float64 rewards), 0 in groups without labels, and the degenerate groups, as in
        `group_advantages`.

    Raises:
        ValueError: if an argument is refused as in `group_advantages`, or a known length is negative.

    Example:
        >>> import jax.numpy as jnp
        >>> length_weighted_advantages(jnp.array([[1.0, 0.0]]), jnp.array([[30, 10]])).advantages.tolist()
        [[0.25, -0.75]]

    References:
        On-Policy RL with Optimal Reward Baseline (OPO), arXiv:2505.23585.
    """
    groups = _groups(rewards, group_ids)
    wide = _wide(rewards)
    weights = _lengths(lengths, rewards).astype(wide.dtype)
    degenerate = groups.max(wide) == groups.min(wide)
    values = wide - _offset(groups.min(jnp.where(weights > 0, wide, jnp.inf)))
    total = groups.sum(weights)
    baseline = groups.sum(weights * values) / jnp.maximum(total, 1.0)
    return groups.advantages(jnp.where(total > 0, values - baseline, 0.0), degenerate)


def greedy_baseline_advantages(
    rewards: Float[AnyArray, "*rewards"],
    baselines: Float[AnyArray, "*baselines"],
    *,
    group_ids: Integer[AnyArray, " rewards"] | None = None,
) -> GroupAdvantages:
    """Computes the advantages of ReMax: each reward minus that of the greedy completion of its prompt.

    A = r - b. A group is degenerate if all its advantages are 0. It may have one completion.

    Args:
        rewards: [num_groups, num_generations], or [N] with group_ids, as in `group_advantages`.
        baselines: [num_groups], reward of the greedy completion of each prompt; or [N] with group_ids, for each reward.
        group_ids: [N], of any integer dtype, or None, as in `group_advantages`.

    Returns:
        The advantages (fp32, or float64 for float64 rewards), and the degenerate groups.

    Raises:
        ValueError: if an argument is refused as in `group_advantages`, or the baselines have a wrong shape or dtype, or a
            known one is not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> greedy_baseline_advantages(jnp.array([[1.0, 0.0]]), jnp.array([1.0])).advantages.tolist()
        [[0.0, -1.0]]

    References:
        ReMax, arXiv:2310.10505.
    """
    groups = _groups(rewards, group_ids)
    require_floating(baselines, "baselines")
    expected = rewards.shape[:1]
    require(baselines.shape == expected, "baselines", f"shape {expected}", baselines.shape)
    _check_finite(baselines, "baselines")
    dtype = compute_dtype(rewards, baselines)
    baselines, rewards = (_whole(x).astype(dtype) for x in (baselines, rewards))
    advantages = rewards - (baselines[:, None] if group_ids is None else baselines)
    return groups.advantages(advantages, groups.max(jnp.abs(advantages)) == 0)


def active_group_advantages(
    rewards: Float[AnyArray, "*rewards"], *, group_ids: Integer[AnyArray, " rewards"] | None = None
) -> GroupAdvantages:
    """Computes the advantages of GPG: rewards minus the mean of their group, scaled up for groups that teach nothing.

    A = (N / N_active) (r - mean(r)), N the number of all rewards and N_active that of rewards in groups that are not
    degenerate. A mean over all completions is then the mean over those of active groups.

    Args:
        rewards: [num_groups, num_generations], or [N] with group_ids, as in `group_advantages`: those of the whole batch.
        group_ids: [N], of any integer dtype, or None, as in `group_advantages`.

    Returns:
        The advantages (fp32, or float64 for float64 rewards) and the degenerate groups, as in `group_advantages`.

    Raises:
        ValueError: if an argument is refused as in `group_advantages`.

    Example:
        >>> import jax.numpy as jnp
        >>> active_group_advantages(jnp.array([[1.0, 0.0], [1.0, 1.0]])).advantages.tolist()
        [[1.0, -1.0], [0.0, 0.0]]

    References:
        GPG, arXiv:2504.02546 (α = B / (B - M) and F_norm = 1).
    """
    advantages, degenerate = group_advantages(rewards, group_ids=group_ids, scale_rewards="none")
    # Groups of rows have one size; with ids each reward has its own entry.
    active = jnp.mean((~degenerate).astype(advantages.dtype))
    return GroupAdvantages(advantages / jnp.where(active > 0, active, 1.0), degenerate)


def decoupled_advantages(
    rewards: Float[AnyArray, "*completions functions"],
    *,
    weights: Float[AnyArray, " functions"] | Sequence[float] | None = None,
    group_ids: Integer[AnyArray, " completions"] | None = None,
    epsilon: float = 1e-4,
) -> GroupAdvantages:
    """Computes the advantages of GDPO: each reward function normalized within its group before they are added.

    A = S / (std(S) + epsilon) with S = Σ_k w_k (r_k - mean(r_k)) / (std(r_k) + epsilon), mean and sample standard deviation
    of r_k over the group, and of S over all completions of the call, which are to be those of the whole batch. S has mean 0.

    The sum of rewards that `group_advantages` normalizes has the scale of its largest function: two completions that differ
    in a small one alone have nearly the same advantage there.

    Args:
        rewards: [num_groups, num_generations, functions], what each function says of the completions of one prompt per row;
            or [N, functions] with group_ids. Without weights.
        weights: [functions], weight of each function; None for 1 each.
        group_ids: [N], of any integer dtype, or None, as in `group_advantages`.
        epsilon: number added to both standard deviations, at least 0.

    Returns:
        The advantages without the axis of functions (fp32, or float64 for float64 rewards), and the degenerate groups, in
        which no function differs.

    Raises:
        ValueError: if an argument is refused as in `group_advantages`, there is no function, or the weights are not one
            finite number for each.

    Example:
        >>> import jax.numpy as jnp
        >>> rewards = jnp.array([[[1.0, 0.0], [0.0, 0.0]], [[1.0, 10.0], [1.0, 0.0]]])
        >>> [[round(x, 2) for x in row] for row in decoupled_advantages(rewards).advantages.tolist()]
        [[0.87, -0.87], [0.87, -0.87]]

    References:
        GDPO, arXiv:2601.05242.
    """
    require_floating(rewards, "rewards")
    axes = 3 if group_ids is None else 2
    expected = "shape [num_groups, num_generations, functions], or [N, functions] with group_ids"
    require(rewards.ndim == axes and rewards.shape[-1] > 0, "rewards", expected, rewards.shape)
    factors = _weights(weights, rewards)
    functions = [rewards[..., k] for k in range(rewards.shape[-1])]
    parts = [group_advantages(each, group_ids=group_ids, epsilon=epsilon) for each in functions]
    total = sum(weight * each.advantages for weight, each in zip(factors, parts, strict=True))
    degenerate = jnp.all(jnp.stack([each.degenerate for each in parts]), axis=0)
    # Each part adds up to 0 in its group. The mean is not subtracted: its rounding would make the zeros others.
    divisor = jnp.std(total, ddof=min(1, total.size - 1)) + epsilon
    return GroupAdvantages(total / jnp.where(divisor > 0.0, divisor, 1.0), degenerate)


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
        return self.flagged(jnp.where(degenerate, 0.0, x), degenerate)

    def flagged(self, x: Float[Array, "*rewards"], degenerate: Bool[Array, "..."]) -> GroupAdvantages:
        return GroupAdvantages(x, degenerate[:, 0] if self.members is None else degenerate)

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
    _check_finite(rewards, "rewards")
    if group_ids is None:
        return _Groups(None, shape[1])
    # Of NumPy where ids are known: without x64, jnp.asarray would wrap ids of 64 bits.
    if is_concrete(group_ids):
        _, members = np.unique(np.asarray(group_ids), return_inverse=True)
    else:
        _, members = jnp.unique(flat(group_ids), return_inverse=True, size=shape[0])
    members = jnp.asarray(members.astype(np.int32))
    return _Groups(members, jax.ops.segment_sum(jnp.ones_like(members), members, num_segments=shape[0])[members])


def _weights(
    weights: Float[AnyArray, " functions"] | Sequence[float] | None, rewards: Float[AnyArray, "*completions functions"]
) -> Float[Array, " functions"]:
    """Returns the checked weights in the dtype of the advantages."""
    count, dtype = rewards.shape[-1], compute_dtype(rewards)
    if weights is None:
        return jnp.ones(count, dtype)
    if not is_array(weights):
        good = isinstance(weights, Sequence) and all(map(is_number, weights))
        require(good, "weights", f"{count} numbers, one for each function", describe(weights))
        weights = np.array(weights, np.float64)
    require_floating(weights, "weights")
    require(weights.shape == (count,), "weights", f"shape ({count},), one for each function", weights.shape)
    if is_concrete(weights):
        most = float(jnp.finfo(dtype).max)
        host = np.asarray(weights, np.float64)
        require(bool(np.all(np.abs(host) <= most)), "weights", f"numbers of at most {most:.2g}", host.tolist())
    return jnp.asarray(weights).astype(dtype)


def _lengths(lengths: Integer[AnyArray, "*rewards"], rewards: Float[AnyArray, "*rewards"]) -> Int[Array, "*rewards"]:
    """Returns the checked lengths."""
    check_lengths(lengths)
    require(lengths.shape == rewards.shape, "lengths", f"shape {rewards.shape} of rewards", lengths.shape)
    return _whole(lengths)


def _offset(least: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the smallest reward that counts, to be subtracted before a mean; 0 where none counts.

    Not the smallest of all: next to -1e9 for a masked completion, all others would be equal.
    """
    return jnp.where(jnp.isinf(least), 0.0, least)


def _check_epsilon(epsilon: float) -> float:
    """Returns epsilon as a number of Python: with x64 a NumPy scalar of float64 would widen fp32 advantages."""
    ok = is_number(epsilon) and 0.0 <= epsilon < math.inf
    require(ok, "epsilon", "a finite Python number of at least 0", describe(epsilon))
    return float(epsilon)


def _check_finite(values: Float[AnyArray, "..."], argument: str) -> None:
    if not is_concrete(values):
        return
    host = np.asarray(values, dtype=np.float64)
    bad = np.argwhere(~np.isfinite(host))
    if len(bad):
        first = tuple(int(i) for i in bad[0])
        require(False, argument, "finite values", f"{host[first]} at position {first}")


def _wide(rewards: Float[AnyArray, "*rewards"]) -> Float[Array, "*rewards"]:
    return _whole(rewards).astype(compute_dtype(rewards))


def _whole(x: Shaped[AnyArray, "*rewards"]) -> Shaped[Array, "*rewards"]:
    """Returns the entries of groups with ids whole on every device, as Explicit mesh axes split no sum over segments."""
    return flat(x) if x.ndim == 1 else jnp.asarray(x)
