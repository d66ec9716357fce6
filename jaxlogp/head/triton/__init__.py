"""Triton kernels through jax-triton (the extra ``triton``), for NVIDIA GPUs without wgmma, and for Hopper when named."""

from jaxlogp.head.triton.engine import TritonEngine

__all__ = ["TritonEngine"]
