"""Checks that jax-triton can be imported and that the device is one that the kernels are made for."""

import functools
import importlib
import importlib.util

import jax

from jaxlogp.head.triton.tiles import TABLE


@functools.cache
def why_not_installed() -> str | None:
    """Why jax-triton cannot be used here, or None when it can. Imports it, so it is called after the cheap checks."""
    for module in ("jax_triton", "triton"):
        if importlib.util.find_spec(module) is None:
            return f'{module} is not installed (pip install "jaxlogp[triton]")'
    try:
        importlib.import_module("jax_triton")
    except (ImportError, RuntimeError) as error:
        # RuntimeError: Triton looks for a driver, and may find one that it does not support.
        return f"jax_triton cannot be imported: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return None


def device_capability() -> int | None:
    """Compute capability of the default device, times ten; None when it is not an NVIDIA GPU."""
    device = jax.devices()[0]
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    # AMD GPUs name an architecture instead of a number.
    return 10 * int(major) + int(minor) if device.platform == "gpu" and major.isdigit() and minor.isdigit() else None


def why_not_device() -> str | None:
    """Why the default device cannot run the kernels, or None when it can."""
    device, capability = jax.devices()[0], device_capability()
    if capability is None:
        return f"it needs an NVIDIA GPU, the default device is {device.platform} ({device.device_kind})"
    return None if capability in TABLE else f"{why_not_capability(capability)} ({device.device_kind})"


def why_not_capability(capability: int) -> str | None:
    """Why there are no kernels for a compute capability (times ten), or None when there are."""
    if capability in TABLE:
        return None
    known = ", ".join(f"{entry / 10}" for entry in sorted(TABLE))
    return f"it needs compute capability {known}, got {capability / 10}"
