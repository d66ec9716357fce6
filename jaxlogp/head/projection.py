"""Hidden states to logits: the dtype policy of the product and the elementwise steps after it, shared by all engines.

Products take their operands in one dtype and accumulate in fp32:

* by default hidden is cast to the weight's dtype, and its gradient is cast back;
* ``fp32_head`` multiplies in fp32 and casts one tile of the weight at a time, so no fp32 copy of a bf16 weight exists.

fp32 operands use precision HIGHEST, never TF32.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxlogp._arrays import hold_python_numbers
from jaxlogp.errors import describe, is_number, require, require_positive


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """The arithmetic of a head, from hidden · weightᵀ + bias to the logits whose softmax is the policy.

    z = softcap(logit_scale (hidden · weightᵀ + bias)) / temperature, with softcap(a) = cap tanh(a / cap).

    Attributes:
        temperature: T, a Python number from 2^-126 to 2^126.
        logit_scale: multiplier of the logits (MuP output scale), a Python number of size 2^-126 to 2^126.
        softcap: cap, a Python number from 2^-126 to 2^126, or None.
        fp32_head: whether to multiply in fp32 regardless of the dtypes of hidden and weight.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> HeadSpec(softcap=30.0).keywords()
        {'temperature': 1.0, 'logit_scale': 1.0, 'softcap': 30.0, 'fp32_head': False}
    """

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    fp32_head: bool = False

    def __post_init__(self) -> None:
        """Raises ``ValueError`` if a number is out of range."""
        require_positive(self.temperature, "temperature")
        ok = is_number(self.logit_scale) and 2.0**-126 <= abs(self.logit_scale) <= 2.0**126
        expected = "a finite Python number other than 0 (in fp32: of size 2^-126 to 2^126)"
        require(ok, "logit_scale", expected, describe(self.logit_scale))
        if self.softcap is not None:
            require_positive(self.softcap, "softcap")
        require(isinstance(self.fp32_head, bool), "fp32_head", "True or False", describe(self.fp32_head))
        hold_python_numbers(self)

    def keywords(self) -> dict[str, Any]:
        """Returns the fields by name, as keyword arguments of :func:`jaxlogp.linear_log_probs` and its siblings."""
        return dataclasses.asdict(self)

    def operand_dtype(self, weight: Any) -> jnp.dtype:
        """Returns the dtype in which hidden and weight enter the product."""
        return jnp.dtype(jnp.float32) if self.fp32_head else jnp.dtype(weight.dtype)


def dot(left: Array, right: Array, contract: tuple[int, int]) -> Float[Array, "..."]:
    """Computes a 2-D product over dimensions ``contract`` of (left, right), without casts, in fp32."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def finish_logits(
    products: Float[Array, "tokens columns"], bias: Float[Array, " columns"] | None, spec: HeadSpec
) -> Float[Array, "tokens columns"]:
    """Computes softcap(logit_scale (products + bias)) / temperature, fp32, with softcap(a) = cap tanh(a / cap)."""
    products = products if spec.softcap is None else nan_unless_finite(products)
    logits = products if bias is None else products + bias.astype(jnp.float32)[None, :]
    if spec.logit_scale != 1.0:
        logits = logits * spec.logit_scale
    if spec.softcap is not None:
        logits = spec.softcap * jnp.tanh(logits / spec.softcap)
    return logits if spec.temperature == 1.0 else logits / spec.temperature


def nan_unless_finite(products: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
    """Replaces ±inf by NaN; tanh would make it a finite ±cap, of the wrong sign after some overflows.

    Kernels call it too: it uses only operations that every kernel language has.
    """
    return jnp.where(lax.abs(products) < jnp.inf, products, jnp.nan)


def product_gradient(
    gradient: Float[Array, "tokens columns"], logits: Float[Array, "tokens columns"], spec: HeadSpec
) -> Float[Array, "tokens columns"]:
    """Propagates a gradient of the final logits back through :func:`finish_logits` to hidden · weightᵀ + bias."""
    if spec.softcap is not None:
        # Where a logit is NaN, so is its gradient, unless it is one of the exact zeros of a token without a cotangent.
        capped = jnp.where(jnp.isnan(logits), 0.0, logits) * (spec.temperature / spec.softcap)
        gradient = gradient * (1.0 - capped * capped)
    factor = spec.logit_scale / spec.temperature
    return gradient if factor == 1.0 else gradient * factor


def take_rows(x: Shaped[Array, "..."], start: Int[Array, ""], size: int, dim: int = 0) -> Shaped[Array, "size ..."]:
    """Returns ``size`` slices of dimension ``dim`` of x from start, as rows; for dimension 1 transposes the tile alone.

    16-bit floats are sliced as integers: XLA on CPUs would widen all of x for the slice.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint16) if x.dtype in (jnp.bfloat16, jnp.float16) else x
    rows = lax.dynamic_slice_in_dim(bits, start, size, axis=dim)
    rows = rows if bits.dtype == x.dtype else lax.bitcast_convert_type(rows, x.dtype)
    return rows if dim == 0 else rows.T


def write_rows(
    x: Shaped[Array, "..."],
    rows: Shaped[Array, "size ..."],
    start: Int[Array, ""],
    owned: Bool[Array, " size"],
    dim: int = 0,
) -> Shaped[Array, "..."]:
    """Writes and rounds rows where :func:`take_rows` reads them, except those that an earlier tile has written."""
    owned = owned.reshape(-1, *[1] * (x.ndim - 1))
    new = jnp.where(owned, rows.astype(x.dtype), take_rows(x, start, rows.shape[0], dim))
    return lax.dynamic_update_slice_in_dim(x, new if dim == 0 else new.T, start, axis=dim)
