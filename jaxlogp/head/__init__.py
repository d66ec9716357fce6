"""Engines of the language-model head: choosing one, recording which ran, and writing one."""

from jaxlogp.head.api import skipped_tiles
from jaxlogp.head.call import HeadCall, HeadGradients
from jaxlogp.head.chunked.engine import ChunkedEngine
from jaxlogp.head.engine import Engine
from jaxlogp.head.fixed_order.engine import FixedOrderEngine
from jaxlogp.head.gradient_filter import GradientFilter
from jaxlogp.head.hopper.engine import HopperEngine
from jaxlogp.head.hopper.fixed_order import FixedOrderHopperEngine
from jaxlogp.head.projection import HeadSpec
from jaxlogp.head.reference import ReferenceEngine
from jaxlogp.head.registry import HeadRun, record_head_runs, register_engine, why_not
from jaxlogp.head.support.engine import SupportEngine
from jaxlogp.head.support.kernel_engine import SupportKernelEngine
from jaxlogp.head.triton.engine import TritonEngine

__all__ = [
    "ChunkedEngine",
    "Engine",
    "FixedOrderEngine",
    "FixedOrderHopperEngine",
    "GradientFilter",
    "HeadCall",
    "HeadGradients",
    "HeadRun",
    "HeadSpec",
    "HopperEngine",
    "record_head_runs",
    "ReferenceEngine",
    "register_engine",
    "skipped_tiles",
    "SupportEngine",
    "SupportKernelEngine",
    "TritonEngine",
    "why_not",
]
