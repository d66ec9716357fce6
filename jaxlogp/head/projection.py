"""Hidden states to logits: the dtype policy of the product and the elementwise steps behind it, shared by all engines.

Products take their operands in one dtype and accumulate in fp32:

* by default hidden is cast to the weight's dtype, and its gradient cast back;
* ``fp32_head`` multiplies in fp32, one tile of the weight cast at a time, so no fp32 copy of a bf16 weight exists.

fp32 operands use precision HIGHEST: never TF32.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxlogp.vocab import VocabShards


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """Static options of one head call; see :func:`jaxlogp.linear_log_probs`. ``all_live``: no mask was given."""

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    with_entropy: bool = False
    fp32_head: bool = False
    axis_name: object = None
    vocab_size: int = 0
    shards: VocabShards | None = None
    all_live: bool = False

    def operand_dtype(self, weight: Array) -> jnp.dtype:
        """Dtype in which hidden and weight enter the product."""
        return jnp.dtype(jnp.float32) if self.fp32_head else weight.dtype


def dot(left: Array, right: Array, contract: tuple[int, int]) -> Float[Array, "..."]:
    """2-D product over dimensions ``contract`` of (left, right), operands as they are, fp32 accumulation and result."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def finish_logits(
    products: Float[Array, "tokens columns"], bias: Float[Array, " columns"] | None, options: HeadOptions
) -> Float[Array, "tokens columns"]:
    """softcap(logit_scale (hidden · weightᵀ + bias)) / temperature, fp32, with softcap(a) = cap tanh(a / cap)."""
    logits = products if bias is None else products + bias.astype(jnp.float32)[None, :]
    if options.logit_scale != 1.0:
        logits = logits * options.logit_scale
    if options.softcap is not None:
        logits = options.softcap * jnp.tanh(logits / options.softcap)
    return logits if options.temperature == 1.0 else logits / options.temperature


def product_gradient(
    gradient: Float[Array, "tokens columns"], logits: Float[Array, "tokens columns"], options: HeadOptions
) -> Float[Array, "tokens columns"]:
    """Pulls a gradient of the final logits back through :func:`finish_logits` to hidden · weightᵀ + bias."""
    if options.softcap is not None:
        capped = logits * (options.temperature / options.softcap)
        gradient = gradient * (1.0 - capped * capped)
    factor = options.logit_scale / options.temperature
    return gradient if factor == 1.0 else gradient * factor


def take_rows(x: Shaped[Array, "rows ..."], start: Int[Array, ""], size: int) -> Shaped[Array, "size ..."]:
    """size rows of x from start. 16-bit floats travel as integers: XLA on CPUs would widen all of x for the slice."""
    if x.dtype in (jnp.bfloat16, jnp.float16):
        bits = lax.dynamic_slice_in_dim(lax.bitcast_convert_type(x, jnp.uint16), start, size)
        return lax.bitcast_convert_type(bits, x.dtype)
    return lax.dynamic_slice_in_dim(x, start, size)


def write_rows(
    x: Shaped[Array, "rows ..."], rows: Shaped[Array, "size ..."], start: Int[Array, ""], turn: Bool[Array, " size"]
) -> Shaped[Array, "rows ..."]:
    """Writes rows into x from start, except those that an earlier tile has written; rounded once, here."""
    turn = turn.reshape(-1, *[1] * (x.ndim - 1))
    new = jnp.where(turn, rows.astype(x.dtype), take_rows(x, start, rows.shape[0]))
    return lax.dynamic_update_slice_in_dim(x, new, start, axis=0)
