"""fp32 arithmetic whose bits no compiler can change.

A compiler may contract a * b + c to one rounding (FMA) in one program and not in another, so two equivalent programs
may differ in the last bit. If the product is exact, both forms round once, to the same number. Here every product that
feeds an addition is exact: factors are split into parts of at most 12 significant bits.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_SMALLEST_EXACT_PRODUCT = 2.0**-70


def split(x: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Splits x into high + low exactly, each of at most 12 significant bits.

    ``x`` must not itself be a bare product: the subtraction here might use it before it is rounded.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-4096)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high, x - high


def product(a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes a * b to within two roundings, from exact partial products; the result may be added to anything.

    Below fp32's smallest normal number, 2^-126, it is what ``a * b`` is on the device: 0 where that flushes.
    """
    (a_high, a_low), (b_high, b_low) = split(a), split(b)
    exact = ((a_low * b_low + a_low * b_high) + a_high * b_low) + a_high * b_high
    # Partial products of tiny numbers would underflow, and split does not work on infinities.
    direct = a * b
    ordinary = (jnp.abs(direct) >= _SMALLEST_EXACT_PRODUCT) & (jnp.abs(direct) < jnp.inf)
    return jnp.where(ordinary, exact, direct)


def scaled(x: Float[Array, "..."], factor: float) -> Float[Array, "..."]:
    """Computes x * factor for a Python number, by :func:`product`; returns x itself if the factor is 1."""
    return x if factor == 1.0 else product(x, jnp.full_like(x, factor))


def one_minus_square(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes 1 - x², for |x| <= 1."""
    high, low = split(x)
    return ((1.0 - high * high) - (2.0 * high) * low) - low * low


def no_negative_zero(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Replaces -0.0 by 0.0, so that adding the zeros of padding changes no bit."""
    return jnp.where(x == 0.0, 0.0, x)
