"""The few places where the Mosaic GPU API of supported JAX versions differs, and whether there is one to build on."""

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax

MINIMUM_JAX = (0, 11)


@functools.cache
def _module() -> ModuleType | None:
    try:
        return importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    except ImportError:  # A jaxlib without Mosaic GPU; why_not_available names it.
        return None


class _MosaicGPU:
    """The module, imported where a kernel is traced: that takes a third of the time of ``import jaxlogp``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_module(), name)


plgpu: Any = _MosaicGPU()


def why_not_available() -> str | None:
    """Why no Hopper kernel can be traced by this JAX, or None when it can."""
    if jax.__version_info__[:2] < MINIMUM_JAX:
        return f"JAX {jax.__version__} is older than 0.11 (its Mosaic GPU backend lacks what the kernels use)"
    if _module() is None:
        return "this jaxlib has no Mosaic GPU backend"
    return None


def kernel(
    body: Callable[..., None], *, name: str, out_type: Any, scratch_types: Any = (), **options: Any
) -> Callable[..., Any]:
    """``plgpu.kernel`` under the argument names of the installed version; profilers show the name."""
    body.__name__ = name
    if "out_type" in inspect.signature(plgpu.kernel).parameters:
        return plgpu.kernel(body, out_type=out_type, scratch_types=scratch_types, **options)
    return plgpu.kernel(body, out_shape=out_type, scratch_shapes=scratch_types, **options)


def interpreter() -> Any:
    """What ``interpret=`` takes to run a kernel on the CPU."""
    return plgpu.InterpretGPUParams()
