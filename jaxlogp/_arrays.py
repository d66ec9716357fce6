"""The array type of arguments, the dtype of computations, and ids as int32."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxlogp.errors import require

INT32_MAX = int(np.iinfo(np.int32).max)
AnyArray = jax.Array | np.ndarray
"""What functions take: JAX arrays, traced or not, and NumPy arrays. What they return is a `jax.Array`."""


def compute_dtype(*values: Float[AnyArray, "..."]) -> jnp.dtype:
    """float64 if any of the values is, otherwise float32: sums and exponentials never run in 16 bits."""
    return jnp.dtype(jnp.float64 if any(jnp.result_type(x) == jnp.float64 for x in values) else jnp.float32)


def hold_python_numbers(options: Any) -> None:
    """Replaces scalars of NumPy in the fields of a frozen dataclass: with x64 one of float64 would widen fp32 arrays."""

    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, np.generic) else value

    for name, value in list(vars(options).items()):
        object.__setattr__(options, name, tuple(map(plain, value)) if isinstance(value, tuple) else plain(value))


def as_int32(ids: int | np.integer | Integer[AnyArray, "*shape"]) -> Int[Array, "*shape"]:
    """Ids or counts of any integer dtype as int32, for every comparison; -1 where int32 cannot hold one.

    A comparison in a narrow dtype would wrap the other side, and a cast from a wide one would wrap the ids.
    """
    ids = np.asarray(ids, np.int64) if isinstance(ids, int) else ids
    # 64-bit NumPy ids are narrowed in NumPy: without x64, jnp.asarray would wrap them.
    xp = np if isinstance(ids, np.ndarray | np.generic) else jnp
    if np.iinfo(ids.dtype).max > INT32_MAX:
        held = (ids >= 0) & (ids <= xp.asarray(INT32_MAX, ids.dtype))
        ids = xp.where(held, ids, xp.asarray(0, ids.dtype)).astype(np.int32) - (~held).astype(np.int32)
    return jnp.asarray(ids.astype(np.int32))


@jax.jit
def nan_where(condition: Bool[Array, "*#shape"], x: Float[Array, "*#shape"]) -> Float[Array, "*#shape"]:
    """x, and NaN where the condition holds.

    A single program also outside jit: with ``jax_debug_nans``, a NaN created before the selection would raise on clean
    data.
    """
    return jnp.where(condition, jnp.asarray(jnp.nan, x.dtype), x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def refuse_gradient(x: Float[Array, "*shape"], argument: str, expected: str, seen: str) -> Float[Array, "*shape"]:
    """x; a gradient through it raises ``argument: expected ..., got ...`` once it reaches x in reverse mode.

    An output that is not used, such as an auxiliary one, has no cotangent and raises nothing.
    """
    del argument, expected, seen
    return x


def _refused_forward(x, argument: str, expected: str, seen: str) -> tuple[Array, None]:
    del argument, expected, seen
    return x.value, None


def _refuse(argument: str, expected: str, seen: str, residuals: None, g) -> tuple[None]:
    del residuals
    require(isinstance(g, SymbolicZero), argument, expected, seen)
    return (None,)


refuse_gradient.defvjp(_refused_forward, _refuse, symbolic_zeros=True)
