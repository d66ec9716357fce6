"""The GPU head for NVIDIA GPUs without wgmma: Triton kernels through jax-triton (the extra ``triton``)."""

from jaxlogp.head.triton.engine import TritonEngine

__all__ = ["TritonEngine"]
