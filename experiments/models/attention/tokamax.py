"""Flash attention of tokamax (extra `gpu`), whose Mosaic GPU kernels take the first key of every query as it is."""

import functools
import importlib.util

import jax
from jaxtyping import Array, Float, Int

from experiments.models.attention.call import AttentionCall, by_head, needs_nvidia_gpu, why_not_by_head

OLDEST_JAX = (0, 11, 1)


def why_not(call: AttentionCall) -> str | None:
    missing = needs_nvidia_gpu(9)
    if missing is not None:
        return missing
    if importlib.util.find_spec("tokamax") is None:
        return 'tokamax is not installed (pip install -e ".[gpu]")'
    if jax.__version_info__ < OLDEST_JAX:
        return f"tokamax needs JAX {'.'.join(map(str, OLDEST_JAX))} or newer, not {jax.__version__}"
    return why_not_by_head(call)


def attend_tokamax(
    queries: Float[Array, "B T N D"],
    keys: Float[Array, "B T K D"],
    values: Float[Array, "B T K D"],
    first: Int[Array, "B T"],
    *,
    scale: float,
    softcap: float | None,
    mesh: jax.sharding.Mesh | None,
) -> Float[Array, "B T N D"]:
    """Computes `attend_packed`; on a mesh, each device its own rows and heads."""
    attend = functools.partial(_attend, scale=scale, softcap=softcap)
    return by_head(attend, mesh, queries, keys, values, first)


def _attend(queries, keys, values, first, *, scale, softcap):
    # Imported here: it takes seconds, and is not there without the extra.
    from tokamax._src.ops.attention.base import Mask
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    mask = Mask(k_start=first[:, None, :], is_causal=True)
    attend = PallasMosaicGpuFlashAttention()
    return attend(queries, keys, values, mask=mask, logits_scale=scale, logits_soft_cap=softcap)
