"""The dtype of activations and head that "auto" stands for, and why."""

import re
from typing import NamedTuple

import jax

FIRST_WITH_BFLOAT16 = (8, 0)
"""Compute capability of the first NVIDIA GPUs (Ampere) that multiply bf16; older ones emulate it, slower than fp32."""


class DtypeChoice(NamedTuple):
    dtype: str
    reason: str

    def __str__(self) -> str:
        return f"{self.dtype} ({self.reason})"


def choose_dtype(platform: str, capability: tuple[int, int] | None) -> DtypeChoice:
    """Returns what "auto" means on a device.

    Example:
        >>> print(choose_dtype("gpu", (7, 5)))
        float32 (auto: compute capability 7.5 emulates bfloat16, which needs 8.0)
        >>> print(choose_dtype("gpu", (9, 0)))
        bfloat16 (auto: a GPU of compute capability 9.0)
    """
    if platform != "gpu":
        return DtypeChoice("float32", f"auto: {platform}, not a GPU")
    if capability is None:
        return DtypeChoice("bfloat16", "auto: a GPU")
    seen, needed = (".".join(map(str, each)) for each in (capability, FIRST_WITH_BFLOAT16))
    if capability < FIRST_WITH_BFLOAT16:
        return DtypeChoice("float32", f"auto: compute capability {seen} emulates bfloat16, which needs {needed}")
    return DtypeChoice("bfloat16", f"auto: a GPU of compute capability {seen}")


def dtype_here(name: str) -> DtypeChoice:
    """Returns a dtype of the command line, with "auto" decided by the first device."""
    if name != "auto":
        return DtypeChoice(name, "named")
    return choose_dtype(jax.default_backend(), capability_of(jax.devices()[0]))


def capability_of(device: jax.Device) -> tuple[int, int] | None:
    # Other vendors' GPUs have a name there.
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return None if found is None else (int(found[1]), int(found[2]))
