"""Flash attention of cuDNN through `jax.nn.dot_product_attention`, with packed documents and windows as a mask [B, T, T]."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from experiments.models.attention.allowed import packed_mask
from experiments.models.attention.call import NARROW_DTYPES, AttentionCall, needs_nvidia_gpu, padded_first


def why_not(call: AttentionCall) -> str | None:
    missing = needs_nvidia_gpu(8)
    if missing is not None:
        return missing
    if call.dtype not in NARROW_DTYPES:
        return f"it takes bfloat16 and float16, not {call.dtype}"
    if call.softcap is not None:
        return "it has no soft cap"
    if call.head_dim % 8 or call.head_dim > 128:
        return f"it takes head sizes of up to 128 that 8 divides, not {call.head_dim}"
    return None


def attend_cudnn(
    queries: Float[Array, "B T N D"],
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K D"],
    first: Int[Array, "B T"],
    *,
    scale: float,
) -> Float[Array, "B T N D"]:
    """Computes `attend_packed` without a soft cap; the mask is one for all heads."""
    length = queries.shape[1]
    # cuDNN wants an even number of slots when there is a mask.
    odd = length % 2
    queries, keys, values = (jnp.pad(x, ((0, 0), (0, odd), (0, 0), (0, 0))) for x in (queries, keys, values))
    mask = packed_mask(padded_first(first, 2))[:, None]
    out = jax.nn.dot_product_attention(
        queries, keys, values, mask=mask, scale=scale, is_causal=True, implementation="cudnn"
    )
    return out[:, :length]
