"""Shaping of rewards: the punishment of overlong completions."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from jaxlogp._arrays import INT32_MAX, AnyArray, as_int32
from jaxlogp.errors import describe, is_integer, is_number, require
from jaxlogp.losses.inputs import check_lengths

_FP32_MAX = float(np.finfo(np.float32).max)


def soft_overlong_punishment(
    lengths: Integer[AnyArray, "*completions"],
    *,
    max_length: int | np.integer,
    buffer: int | np.integer,
    factor: float = 1.0,
) -> Float[Array, "*completions"]:
    """Computes DAPO's soft overlong punishment, a term to add to rewards: 0 for short completions, -factor beyond the limit.

    With the length l, it is 0 up to max_length - buffer, then falls linearly as factor (max_length - buffer - l) / buffer,
    and is -factor from max_length on. With buffer 0 it is 0 up to max_length and -factor beyond.

    Args:
        lengths: [*completions], int, number of tokens of each completion.
        max_length: length from which the punishment is full, above 0 (`max_completion_len` in TRL, `max_resp_len` in verl).
        buffer: tokens over which the punishment grows, in [0, max_length] (`soft_punish_cache`, `overlong_buffer_cfg.len`).
        factor: largest punishment, in units of the reward, at least 0 (verl's `penalty_factor`; 1 in the paper).

    Returns:
        [*completions], fp32, in [-factor, 0].

    Raises:
        ValueError: if the lengths are not integers, a known one is negative, or a number is out of range.

    Example:
        >>> soft_overlong_punishment(jnp.array([80, 90, 100, 120]), max_length=100, buffer=20).tolist()
        [0.0, -0.5, -1.0, -1.0]

    References:
        DAPO, arXiv:2503.14476, equation 13.
    """
    check_lengths(lengths)
    good = is_integer(max_length) and 0 < max_length <= INT32_MAX
    require(good, "max_length", f"an integer above 0 and at most {INT32_MAX}", describe(max_length))
    good = is_integer(buffer) and 0 <= buffer <= max_length
    require(good, "buffer", f"an integer in [0, max_length = {max_length}]", describe(buffer))
    # A factor that is infinite in fp32 would make NaN of 0 for short completions.
    good = is_number(factor) and 0.0 <= factor <= _FP32_MAX
    require(good, "factor", "a finite number of at least 0 (in fp32: at most 3.4e38)", describe(factor))
    # Numbers of Python: a NumPy integer could wrap in the difference or, with x64, widen the result.
    max_length, buffer = int(max_length), int(buffer)
    beyond = as_int32(lengths) - (max_length - buffer)
    share = beyond.astype(jnp.float32) / buffer if buffer > 0 else (beyond > 0).astype(jnp.float32)
    return 0.0 - float(factor) * jnp.clip(share, 0.0, 1.0)
