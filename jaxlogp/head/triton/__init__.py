"""Triton kernels through jax-triton (the extra ``triton``), for NVIDIA GPUs without wgmma; by name on Hopper too."""

from jaxlogp.head.triton.engine import TritonEngine

__all__ = ["TritonEngine"]
