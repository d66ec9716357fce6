"""Report of versions, devices and usable engines for a bug report: ``python -m jaxlogp``."""

import importlib.metadata
import os
import platform

import jax
import jax.numpy as jnp

from jaxlogp.head import why_not
from jaxlogp.head.registry import ENGINES

PACKAGES = "jaxlogp jax jaxlib jax-cuda12-plugin jax-cuda13-plugin numpy jaxtyping flax optax jax-triton triton".split()
DTYPES = jnp.bfloat16, jnp.float16, jnp.float32


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _engine_status(name: str) -> str:
    """Returns the dtypes of a small head that the engine takes on the default device, and why not the others."""
    dtypes_by_reason: dict[str | None, list[str]] = {}
    for dtype in DTYPES:
        hidden, weight = (jax.ShapeDtypeStruct((rows, 256), dtype) for rows in (1024, 2048))
        dtypes_by_reason.setdefault(why_not(name, hidden, weight), []).append(jnp.dtype(dtype).name)
    return "; ".join(
        f"{', '.join(dtypes)}: {'can run here' if reason is None else f'no, {reason}'}"
        for reason, dtypes in dtypes_by_reason.items()
    )


def main() -> None:
    """Prints the report. Versions come first: they are printed even if JAX finds no devices."""
    print(f"Python {platform.python_version()} on {platform.platform()}")
    for package in PACKAGES:
        print(f"{package} {_version(package)}")
    for variable in ("JAX_PLATFORMS", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES"):
        print(f"{variable}={os.environ.get(variable, 'not set')}")
    try:
        devices = jax.devices()
    except Exception as error:  # JAX's own assertion, too: whatever it is belongs in the report.
        print(f"devices: none, {error!r}")
        return
    print(f"devices: {len(devices)} {devices[0].platform} ({devices[0].device_kind})")
    print("engines, for hidden states [1024, 256] and weight [2048, 256]:")
    for name in ENGINES:
        print(f"  {name}: {_engine_status(name)}")


if __name__ == "__main__":
    main()
