"""Sums and counts that never separate: masked reductions over any mesh axes.

A reduction over tokens or documents is a :class:`WeightedSum`, which can be added, psum'ed and accumulated. Only the end
of a step divides, so a mean of local means cannot be written by accident.

Masked entries are replaced before anything is computed from them, so their NaN and inf change neither values nor
gradients. Counts are int32, hence exact, and an array whose global count could overflow is refused. Also refused are
lists, empty arrays, and integers that a sum in fp32 would round.
"""

import dataclasses
import functools
import math
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxlogp._arrays import INT32_MAX, AnyArray, compute_dtype
from jaxlogp._compat import AxisNames, axis_tuple, refuse_unchecked_gradient
from jaxlogp.errors import describe, is_concrete, require, require_floating, require_mask, require_tokens


# JAX rebuilds it with leaves that are not arrays (sentinels, shapes), so functions check the fields that they use.
@no_type_check
@functools.partial(jax.tree_util.register_dataclass, data_fields=["sum", "count"], meta_fields=["grad_divisor"])
@dataclasses.dataclass(frozen=True, eq=False)
class WeightedSum:
    """A sum together with its divisor.

    A pytree with two leaves, ``sum`` and ``count``: ``jax.lax.psum`` and tree additions leave ``grad_divisor`` alone.

    Attributes:
        sum: fp32 or float64, scalar or of any shape, the sum of the terms so far.
        count: int32, the number of labels or documents in the sum.
        grad_divisor: divisor for the gradient of :meth:`mean` if it differs from ``count``: a finite Python number above 0,
            the same for all parts; or None.

    Raises:
        ValueError: if grad_divisor is anything else.

    Example:
        >>> parts = WeightedSum(jnp.float32(3.0), jnp.int32(1)) + WeightedSum(jnp.float32(1.0), jnp.int32(3))
        >>> float(parts.mean())
        1.0
    """

    sum: Float[AnyArray, "*shape"]
    count: Int[AnyArray, "*shape"]
    grad_divisor: float | int | None = None

    def __post_init__(self) -> None:
        """Refuses a grad_divisor that cannot divide or is not known while tracing."""
        divisor = self.grad_divisor
        number = isinstance(divisor, (int, float)) and not isinstance(divisor, bool)
        ok = divisor is None or (number and math.isfinite(divisor) and divisor > 0)
        require(ok, "grad_divisor", "a finite Python number above 0, or None", describe(divisor))

    def __add__(self, other: "WeightedSum") -> "WeightedSum":
        """Adds sums and counts; both sides must agree on their shapes and on ``grad_divisor``."""
        require(isinstance(other, WeightedSum), "other", "a WeightedSum", describe(other))
        shapes, others = ((jnp.shape(x.sum), jnp.shape(x.count)) for x in (self, other))
        require(shapes == others, "other", f"sum and count of shapes {shapes}", others)
        same = self.grad_divisor == other.grad_divisor
        require(same, "other.grad_divisor", f"the same as self's, {self.grad_divisor}", other.grad_divisor)
        return WeightedSum(self.sum + other.sum, self.count + other.count, self.grad_divisor)

    def __radd__(self, other: int) -> "WeightedSum":
        """Lets ``sum`` start from its 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def psum(self, axis_name: AxisNames | None) -> "WeightedSum":
        """Adds sum and count over the mesh axes ``axis_name``; returns self for None or ().

        Raises:
            ValueError: if the sum is differentiated under ``shard_map(check_vma=False)``, where the gradient would be too
                large.
        """
        axes = axis_tuple(axis_name)
        if not axes:
            return self
        total = refuse_unchecked_gradient(self.sum, axes)
        return WeightedSum(lax.psum(total, axes), lax.psum(self.count, axes), self.grad_divisor)

    def mean(self) -> Float[Array, "*shape"]:
        """Divides sum by count, with 0.0 where count is 0 unless sum is NaN.

        With ``grad_divisor`` the gradient is d(sum) / grad_divisor.
        """
        count = jnp.maximum(self.count, 1).astype(self.sum.dtype)
        nothing = (self.count == 0) & ~jnp.isnan(self.sum)
        mean = jnp.where(nothing, jnp.zeros((), self.sum.dtype), self.sum / count)
        if self.grad_divisor is None:
            return mean
        no_value = self.sum - lax.stop_gradient(self.sum)
        divisor = jnp.asarray(self.grad_divisor, self.sum.dtype)
        return lax.stop_gradient(mean) + jnp.where(self.count == 0, jnp.zeros((), no_value.dtype), no_value / divisor)


def _checked_mask(values: Shaped[AnyArray, "*shape"], mask: Bool[AnyArray, "*shape"] | None) -> Bool[Array, "*shape"]:
    require(hasattr(values, "shape"), "values", "an array", describe(values))
    require_tokens(values, "values")
    if mask is None:
        return jnp.ones_like(values, dtype=bool)
    require_mask(mask, values.shape)
    _check_same_devices(values, mask)
    return mask


def _check_same_devices(values: Shaped[AnyArray, "*shape"], mask: Bool[AnyArray, "*shape"]) -> None:
    pair = (values, mask)
    if all(is_concrete(x) and isinstance(x, jax.Array) and x.committed for x in pair):
        where = [sorted(str(device) for device in x.devices()) for x in pair]
        require(where[0] == where[1], "mask", f"the devices of values, {where[0]}", f"devices {where[1]}")


def _count(mask: Bool[AnyArray, "*shape"], axes: tuple) -> Int[Array, ""]:
    total = mask.size
    for axis in axes:
        total *= lax.axis_size(axis)
    require(total <= INT32_MAX, "mask", f"at most {INT32_MAX} elements over all ranks, for an int32 count", total)
    return jnp.sum(mask, dtype=jnp.int32)


def weighted_sum(
    values: Float[AnyArray, "*shape"],
    mask: Bool[AnyArray, "*shape"] | None = None,
    *,
    axis_name: AxisNames | None = None,
) -> WeightedSum:
    """Computes a masked sum and its count: sum = Σ where(mask, values, 0), count = Σ mask.

    Args:
        values: floating-point array of any shape with at least one element; cast to fp32 before the sum, float64 kept.
        mask: boolean array of the same shape, True where a value counts; None counts all.
        axis_name: mesh axis or axes of the surrounding ``shard_map`` to sum over.

    Returns:
        WeightedSum with an fp32 (or float64) sum and an int32 count.

    Raises:
        ValueError: if values are empty or not a floating-point array (integers would be rounded: cast them if that is
            intended, or count with :func:`masked_count`), shapes differ, mask is not boolean, the global number of
            elements does not fit an int32 count, or the sum over ``axis_name`` is differentiated under
            ``shard_map(check_vma=False)``.

    Example:
        >>> float(weighted_sum(jnp.array([1.0, jnp.nan, 3.0]), jnp.array([True, False, True])).mean())
        2.0
    """
    require_floating(values, "values")
    mask = _checked_mask(values, mask)
    axes = axis_tuple(axis_name)
    count = _count(mask, axes)
    selected = jnp.where(mask, values.astype(compute_dtype(values)), 0.0)
    return WeightedSum(jnp.sum(selected), count).psum(axes)


def masked_sum(
    values: Float[AnyArray, "*shape"],
    mask: Bool[AnyArray, "*shape"] | None = None,
    *,
    axis_name: AxisNames | None = None,
) -> Float[Array, ""]:
    """Computes Σ where(mask, values, 0) over all elements and over ``axis_name``. See :func:`weighted_sum`."""
    return weighted_sum(values, mask, axis_name=axis_name).sum


def masked_count(
    values: Shaped[AnyArray, "*shape"],
    mask: Bool[AnyArray, "*shape"] | None = None,
    *,
    axis_name: AxisNames | None = None,
) -> Int[Array, ""]:
    """Counts active elements over ``axis_name``, as an exact int32. See :func:`weighted_sum`.

    Values may have any dtype. A boolean array alone is the mask: ``masked_count(mask)`` counts its True entries.
    """
    if mask is None and getattr(values, "dtype", None) == np.bool_:
        mask = values
    mask = _checked_mask(values, mask)
    axes = axis_tuple(axis_name)
    count = _count(mask, axes)
    return lax.psum(count, axes) if axes else count


def masked_mean(
    values: Float[AnyArray, "*shape"],
    mask: Bool[AnyArray, "*shape"] | None = None,
    *,
    axis_name: AxisNames | None = None,
) -> Float[Array, ""]:
    """Computes global sum / global count, or 0.0 if nothing is active. See :func:`weighted_sum`."""
    return weighted_sum(values, mask, axis_name=axis_name).mean()


def masked_max(
    values: Float[AnyArray, "*shape"],
    mask: Bool[AnyArray, "*shape"] | None = None,
    *,
    axis_name: AxisNames | None = None,
) -> Float[Array, ""]:
    """Returns the largest active value over ``axis_name``, fp32 (or float64); -inf if nothing is active."""
    require_floating(values, "values")
    mask = _checked_mask(values, mask)
    selected = jnp.where(mask, values.astype(compute_dtype(values)), -jnp.inf)
    largest = jnp.max(selected)
    axes = axis_tuple(axis_name)
    return lax.pmax(largest, axes) if axes else largest


def masked_min(
    values: Float[AnyArray, "*shape"],
    mask: Bool[AnyArray, "*shape"] | None = None,
    *,
    axis_name: AxisNames | None = None,
) -> Float[Array, ""]:
    """Returns the smallest active value over ``axis_name``, fp32 (or float64); +inf if nothing is active."""
    require_floating(values, "values")
    return -masked_max(-values, mask, axis_name=axis_name)
