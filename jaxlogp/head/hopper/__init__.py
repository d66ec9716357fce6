"""The GPU head for NVIDIA Hopper: Pallas kernels on the Mosaic GPU backend."""

from jaxlogp.head.hopper.engine import HopperEngine

__all__ = ["HopperEngine"]
