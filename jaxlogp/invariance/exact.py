"""fp32 arithmetic whose bits no compiler can change.

A compiler may contract a * b + c to one rounding (FMA) in one program and not in another, so two programs that mean the
same may differ in the last bit. It cannot where the product is exact: then both ways round once, to the same number.
Here every product that meets an addition is exact. Factors are split into pieces of at most 12 significant bits, ln 2 is
a sum of short constants, and sums of exponentials are rescaled by powers of two only.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

# Logits beyond ±LARGEST_EXPONENT ln 2 (5.8e6, where fp32 steps by 0.5) have no reference and become NaN.
LARGEST_EXPONENT = 2**23
# A side that is 2^-60 of the other lies far below the last bit of an fp32 sum.
SMALLEST_RESCALE = -60
# e^-80 is a normal fp32 number; below, exp may return denormals, which some programs flush and others keep.
SMALLEST_SHIFT = -80.0
_SMALLEST_EXACT_PRODUCT = 2.0**-70


def _short(value: float, bits: int) -> float:
    """``value`` truncated to ``bits`` significant bits."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)


# ln 2 = _LN2[0] + _LN2[1] + _LN2[2] up to 2^-39; the first has 9 bits, so that its products with large integers are short.
_LN2_HIGH = 355.0 / 512.0
_LN2_MIDDLE = _short(math.log(2.0) - _LN2_HIGH, 12)
_LN2_LOW = _short(math.log(2.0) - _LN2_HIGH - _LN2_MIDDLE, 12)


def split(x: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """x = high + low exactly, each of at most 12 significant bits.

    ``x`` must not itself be a bare product: the subtraction here would see it before its rounding.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-4096)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high, x - high


def product(a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """a * b to within two roundings, from exact partial products; the result may be added to anything."""
    (a_high, a_low), (b_high, b_low) = split(a), split(b)
    exact = ((a_low * b_low + a_low * b_high) + a_high * b_low) + a_high * b_high
    # Partial products of tiny numbers would underflow; nor does split work on infinities.
    direct = a * b
    ordinary = (jnp.abs(direct) >= _SMALLEST_EXACT_PRODUCT) & (jnp.abs(direct) < jnp.inf)
    return jnp.where(ordinary, exact, direct)


def scaled(x: Float[Array, "..."], factor: float) -> Float[Array, "..."]:
    """x * factor for a Python number, by :func:`product`; x itself where the factor is 1."""
    return x if factor == 1.0 else product(x, jnp.full_like(x, factor))


def one_minus_square(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 - x², for |x| <= 1."""
    high, low = split(x)
    return ((1.0 - high * high) - (2.0 * high) * low) - low * low


def power_of_two(exponent: Int[Array, "..."]) -> Float[Array, "..."]:
    """2^exponent from its bits for exponent in [SMALLEST_RESCALE, 0], and 0 below."""
    bits = (jnp.clip(exponent, SMALLEST_RESCALE, 0) + 127) << 23
    return jnp.where(exponent < SMALLEST_RESCALE, 0.0, lax.bitcast_convert_type(bits, jnp.float32))


class Reference(NamedTuple):
    """exponent · ln 2 as three numbers to subtract one after the other; the first two are exact."""

    coarse: Float[Array, "*tokens"]
    fine: Float[Array, "*tokens"]
    rest: Float[Array, "*tokens"]


def reference(exponent: Int[Array, "*tokens"]) -> Reference:
    """The pieces of exponent · ln 2, for |exponent| <= LARGEST_EXPONENT."""
    sign, size = jnp.sign(exponent), jnp.abs(exponent)
    high = (sign * (size >> 12)).astype(jnp.float32)
    low = (sign * (size & 4095)).astype(jnp.float32)
    rest = (low * _LN2_LOW + high * (4096 * _LN2_LOW)) + (low * _LN2_MIDDLE + high * (4096 * _LN2_MIDDLE))
    return Reference(high * (4096 * _LN2_HIGH), low * _LN2_HIGH, rest)


def distance(x: Float[Array, "..."], to: Reference) -> Float[Array, "..."]:
    """x - exponent · ln 2, subtractions only; ``to`` must broadcast against x."""
    return ((x - to.coarse) - to.fine) - to.rest


def ceil_exponent(maximum: Float[Array, "*tokens"]) -> Int[Array, "*tokens"]:
    """The smallest integer k with k · ln 2 >= maximum, up to rounding; clipped, and 0 for NaN."""
    units = jnp.ceil(maximum * np.float32(1.0 / math.log(2.0)))
    units = jnp.where(jnp.isnan(units), 0.0, jnp.clip(units, -LARGEST_EXPONENT, LARGEST_EXPONENT))
    return units.astype(jnp.int32)


def times_ln2(x: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """x · ln 2, ending in an addition."""
    high, low = split(x)
    small = low * _LN2_LOW + high * _LN2_LOW
    middle = low * _LN2_MIDDLE + high * _LN2_MIDDLE
    return (small + middle) + (low * _LN2_HIGH + high * _LN2_HIGH)


def no_negative_zero(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x with -0.0 replaced by 0.0, so that adding the zeros of padding changes no bit."""
    return jnp.where(x == 0.0, 0.0, x)
