"""Checks of arguments, with one form of message and one exception type.

Every message reads ``argument: expected …, got …``. Checks of values (not of shapes and dtypes) need known values, that
is, a call outside ``jax.jit`` and the like; :func:`is_concrete` tells the two apart.
"""

from collections.abc import Hashable, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer


class EngineUnavailable(ValueError):
    """No engine takes the call, or not the one that the caller named."""


def require(condition: bool | np.bool_, argument: str, expected: object, seen: object) -> None:
    """Raises unless ``condition`` holds.

    Args:
        condition: the condition.
        argument: name of the argument (or of its element) that the caller passed.
        expected: description of the accepted values.
        seen: description of the given value.

    Raises:
        ValueError: if the condition is False: ``argument: expected <expected>, got <seen>``.
    """
    if not condition:
        raise ValueError(f"{argument}: expected {expected}, got {seen}")


def is_concrete(*values: Any) -> bool:
    """Returns True if all ``values`` can be read now: none is traced or partly on other processes."""
    return all(not isinstance(value, Tracer) and getattr(value, "is_fully_addressable", True) for value in values)


def require_floating(array: Any, argument: str) -> None:
    """Raises ``ValueError`` unless ``array`` has a real floating-point dtype."""
    dtype = getattr(array, "dtype", None)
    ok = dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.floating)
    require(ok, argument, "an array of a floating-point dtype", describe(array))


def require_operand_dtype(array: Any, argument: str) -> None:
    """Raises ``ValueError`` for floats that JAX sees as wider or narrower than the three that we compute with.

    Products and sums are fp32, which float64 would not be told; a gradient is returned in its operand's dtype, and fp8
    would round it by half.
    """
    require_floating(array, argument)
    known = jax.dtypes.canonicalize_dtype(array.dtype) in (jax.numpy.bfloat16, jax.numpy.float16, jax.numpy.float32)
    require(known, argument, "dtype bfloat16, float16 or float32", f"{describe(array)}: cast it")


def require_integer(array: Any, argument: str) -> None:
    """Raises ``ValueError`` unless ``array`` has an integer dtype."""
    dtype = getattr(array, "dtype", None)
    ok = dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.integer)
    require(ok, argument, "an array of an integer dtype", describe(array))


def require_tokens(array: Any, argument: str) -> None:
    """Raises ``ValueError`` for an empty array: there is nothing to compute, and no divisor."""
    require(array.size > 0, argument, "at least one element", f"an empty array of shape {tuple(array.shape)}")


def require_mask(mask: Any, shape: tuple[int, ...], argument: str = "mask") -> None:
    """Raises ``ValueError`` unless ``mask`` is a boolean array of ``shape``."""
    require(getattr(mask, "dtype", None) == np.bool_, argument, "an array of dtype bool", describe(mask))
    require(mask.shape == shape, argument, f"shape {shape}", f"shape {mask.shape}")


def is_number(value: Any) -> bool:
    """Returns True for a number of Python or a scalar of NumPy, but not for a bool."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """Returns True for an integer of Python or NumPy, but not for a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_positive_integer(value: Any) -> bool:
    """Returns True for an integer of Python above 0, but not for a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def require_flags(**flags: Any) -> None:
    """Raises ``ValueError`` unless every flag is True or False: any text is true, "no" as well."""
    for argument, value in flags.items():
        require(isinstance(value, (bool, np.bool_)), argument, "True or False", describe(value))


def require_hashable(options: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` for the first of options by name that cannot be a static argument of ``jax.jit``."""
    for name, value in options.items():
        require(isinstance(value, Hashable), name, "a hashable value, not an array", describe(value))


def require_positive(value: Any, argument: str) -> None:
    """Raises ``ValueError`` unless ``value`` is a Python number > 0 that fp32 holds, like its reciprocal.

    Smaller and larger numbers become 0 or inf, or have such a reciprocal.
    """
    ok = is_number(value) and 2.0**-126 <= value <= 2.0**126
    require(ok, argument, "a finite Python number > 0 (in fp32: from 2^-126 to 2^126)", describe(value))


def describe(value: Any) -> str:
    """Describes ``value`` for an error message: dtype and shape of an array, otherwise type and value."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} array of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"


def require_ids_in_range(token_ids: Any, size: int, argument: str, mask: Any = None) -> None:
    """Raises unless every active id lies in [0, size); does nothing under a trace, where values are unknown.

    Args:
        token_ids: integer array of any shape.
        size: number of valid ids.
        argument: name of the argument, for the message.
        mask: boolean array, True where the id counts; None for all ids.

    Raises:
        ValueError: if an id is out of range; names the first such id, its position and the valid range.
    """
    if not is_concrete(token_ids, mask):
        return
    ids = np.asarray(token_ids)
    bad = (ids < 0) | (ids >= size)
    if mask is not None:
        bad &= np.asarray(mask)
    if bad.any():
        position = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"{argument}: expected active ids in [0, {size}), got {int(ids[position])} at position {position}"
            f" ({int(bad.sum())} of {ids.size} ids are out of range)"
        )
