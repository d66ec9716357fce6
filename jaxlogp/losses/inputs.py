"""Checks of the per-token inputs of losses and metrics, and the removal of their masked entries.

Checks of values (finite inputs, document ids in range) run only if the values are known. Under a JAX transformation only
shapes and dtypes are checked; a NaN at a label then reaches the result.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Shaped

from jaxlogp._arrays import INT32_MAX, AnyArray
from jaxlogp._compat import automatic_axes
from jaxlogp.errors import describe, is_concrete, is_number, require, require_floating, require_integer


def check_arrays(named: dict[str, AnyArray], mask: Bool[AnyArray, "*tokens"]) -> None:
    """Raises ValueError unless the arrays are floating-point, the mask boolean, and all of one non-empty shape."""
    require(is_array(mask) and mask.dtype == np.bool_, "mask", "an array of dtype bool", describe(mask))
    require(mask.size > 0, "mask", "at least one entry", f"shape {mask.shape}")
    for name, values in named.items():
        require_floating(values, name)
        require(values.shape == mask.shape, name, f"shape {mask.shape} of mask", values.shape)


def labels_of(mask: Bool[AnyArray, "*tokens"] | None, tokens: tuple[int, ...]) -> Bool[AnyArray, "*tokens"]:
    """Returns the mask; all True, of `tokens`, for None."""
    # Of NumPy: under a trace one of JAX would be traced, and known values would not be checked.
    return np.ones(tokens, bool) if mask is None else mask


def shape_of(values: Float[AnyArray, "*tokens"], argument: str) -> tuple[int, ...]:
    """Returns the shape of floating-point values; raises ValueError for anything else."""
    require_floating(values, argument)
    return tuple(values.shape)


def advantages_of_tokens(
    advantages: Float[AnyArray, "*rows"], mask: Bool[AnyArray, "*tokens"]
) -> Float[AnyArray, "*tokens"]:
    """Returns the advantages of tokens; those of rows, [B] or [B, 1], are repeated along rows [B, T].

    Raises:
        ValueError: if the array is not floating-point, or its shape is neither that of the mask nor [B] nor [B, 1].
    """
    check_arrays({}, mask)
    rows = () if mask.ndim != 2 else ((mask.shape[0],), (mask.shape[0], 1))
    shape = shape_of(advantages, "advantages")
    or_rows = f", or {rows[0]} or {rows[1]}" if rows else ""
    require(shape in (mask.shape, *rows), "advantages", f"shape {mask.shape} of mask{or_rows}", shape)
    if shape == mask.shape:
        return advantages
    xp = np if isinstance(advantages, np.ndarray) else jnp
    return xp.broadcast_to(advantages.reshape(-1, 1), mask.shape)


def check_finite(name: str, values: Float[AnyArray, "*tokens"], mask: Bool[AnyArray, "*tokens"]) -> None:
    """Raises ValueError naming the first label with a non-finite value, if values and mask are known."""
    if not is_concrete(values, mask):
        return
    host = np.asarray(values, dtype=np.float64)
    bad = np.asarray(mask) & ~np.isfinite(host)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        require(False, name, "a finite value at every label", f"{host[first]} at position {first}")


def check_labels(named: dict[str, AnyArray], mask: Bool[AnyArray, "*tokens"]) -> None:
    """Runs `check_arrays`, then `check_finite` for each array."""
    check_arrays(named, mask)
    for name, values in named.items():
        check_finite(name, values, mask)


def check_log_probs(named: dict[str, AnyArray], mask: Bool[AnyArray, "*tokens"]) -> None:
    """Runs `check_labels` and refuses known log-probs above 0 by more than the rounding of a log-sum-exp of size 64."""
    check_labels(named, mask)
    for name, values in named.items():
        if not is_concrete(values, mask):
            continue
        host = np.asarray(values, dtype=np.float64)
        bad = np.asarray(mask) & (host > 64 * float(jnp.finfo(values.dtype).eps))
        if bad.any():
            first = tuple(int(i) for i in np.argwhere(bad)[0])
            require(False, name, "log-probs of at most 0 at every label", f"{host[first]} at position {first}")


def check_number(value: Any, argument: str, least: float = -math.inf) -> None:
    """Raises ValueError unless `value` is None or one number; a known one has to be finite and at least `least`."""
    if value is None:
        return
    kinds = ("integral", "real floating")
    one = is_number(value) or is_array(value) and value.shape == () and jnp.isdtype(value.dtype, kinds)
    known = one and is_concrete(value)
    expected = "one number, finite" if math.isinf(least) else f"one number, finite and at least {least:g}"
    ok = one and (not known or least <= float(value) and math.isfinite(value))
    require(ok, argument, expected, value if known else describe(value))


def check_lengths(lengths: Any) -> None:
    """Raises ValueError unless `lengths` is an array of integers, known ones from 0 to the largest of int32."""
    require(is_array(lengths), "lengths", "an array of an integer dtype", describe(lengths))
    require_integer(lengths, "lengths")
    if is_concrete(lengths) and lengths.size > 0:
        smallest, largest = (int(end(np.asarray(lengths))) for end in (np.min, np.max))
        require(smallest >= 0, "lengths", "numbers of at least 0", smallest)
        require(largest <= INT32_MAX, "lengths", f"numbers of at most {INT32_MAX}", largest)


def is_array(values: object) -> bool:
    """Returns True for a JAX or NumPy array or a NumPy scalar, False for lists and numbers."""
    return isinstance(values, jax.Array | np.ndarray | np.generic)


def selected(
    values: Float[AnyArray, "*tokens"], mask: Bool[AnyArray, "*tokens"], dtype: jnp.dtype
) -> Float[Array, "*tokens"]:
    """Casts `values` to `dtype`, with 0 and no gradient where masked."""
    return jnp.where(mask, jnp.asarray(values).astype(dtype), jnp.zeros((), dtype))


def flat(values: Shaped[AnyArray, "*tokens"]) -> Shaped[Array, " tokens"]:
    """Flattens to [tokens], whole on every device if the array is sharded over Explicit mesh axes."""
    return automatic_axes(jnp.ravel, jnp.asarray(values), out_specs=PartitionSpec())


def constant(
    values: Float[AnyArray, "*tokens"], mask: Bool[AnyArray, " tokens"], dtype: jnp.dtype
) -> Float[Array, " tokens"]:
    """Flattens `values` and casts them to `dtype`, 0 where masked, without gradient."""
    return lax.stop_gradient(selected(flat(values), mask, dtype))
