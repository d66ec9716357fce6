"""Options of runs whose bits do not depend on the mesh."""

from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import jax

from experiments.models.dtype_choice import capability_of
from experiments.options import AtLeast, OneOf
from jaxlogp.errors import require
from jaxlogp.invariance import ReductionOrder

ENGINES = ("fixed_order", "hopper")
GPU_ROWS = 64
GPU_LEAF = 2**15
"""Tokens of a leaf on a GPU up to which it has GPU_ROWS rows: a choice."""
GPU_BLOCK = 512
"""Tokens of a block in all rows of a leaf on a GPU: fewer make slow products, and more are computed for each token drawn."""


class HeadChoice(NamedTuple):
    engine: str
    reason: str


def choose_head(
    platform: str, capability: tuple[int, int] | None, dtype: str, *, small_vocabulary: bool = False
) -> HeadChoice:
    """Returns the engine that "auto" stands for on a device, for operands of a dtype.

    A small vocabulary has too few of hopper's tiles for several tensor ranks, on which a run may be resumed.

    Example:
        >>> choose_head("gpu", (9, 0), "float32")
        HeadChoice(engine='fixed_order', reason='auto: hopper multiplies bfloat16, not float32')
    """
    if platform != "gpu" or capability != (9, 0):
        seen = "unknown" if capability is None else "{}.{}".format(*capability)
        here = platform if platform != "gpu" else f"a GPU of compute capability {seen}"
        return HeadChoice("fixed_order", f"auto: {here}, hopper needs a GPU of 9.0")
    if dtype != "bfloat16":
        return HeadChoice("fixed_order", f"auto: hopper multiplies bfloat16, not {dtype}")
    if small_vocabulary:
        return HeadChoice("fixed_order", "auto: hopper's tiles are too large for a task's own vocabulary")
    if jax.__version_info__ < (0, 11):
        return HeadChoice("fixed_order", f"auto: JAX {jax.__version__} is older than 0.11, which hopper needs")
    return HeadChoice("hopper", "auto: a Hopper GPU and bfloat16")


def head_here(name: str, dtype: str, *, small_vocabulary: bool) -> HeadChoice:
    """Returns an engine of the command line, with "auto" decided by the first device."""
    if name != "auto":
        return HeadChoice(name, "named")
    capability = capability_of(jax.devices()[0])
    return choose_head(jax.default_backend(), capability, dtype, small_vocabulary=small_vocabulary)


def gpu_leaf_rows(row_length: int | None) -> int:
    """Returns rows of a leaf on a GPU, a power of two from 8 to 64, for rows of so many tokens; None: few.

    Example:
        >>> [gpu_leaf_rows(length) for length in (None, 512, 1024, 16384)]
        [64, 64, 32, 8]
    """
    rows = GPU_ROWS
    while rows > 8 and rows * (row_length or 0) > GPU_LEAF:
        rows //= 2
    return rows


@dataclass(frozen=True)
class InvarianceConfig:
    """Settings that determine the bits of a run with --invariant: leaves of rows and granules of the vocabulary."""

    leaf_rows: Annotated[int | None, AtLeast(1)] = None
    """Rows (documents) that are computed together: the micro-batch of a data rank.
    A GPU is fastest with many, up to all completions of a rank.
    None: --schedule.rows, or 8; on a GPU 64, or fewer of long rows."""
    block: Annotated[int | None, AtLeast(1)] = None
    """Tokens of a row that the layers read at a time; the sampler reads the whole newest block for each token.
    None: 16; on a GPU 512 in all rows of a leaf."""
    engine: Annotated[str, OneOf("auto", *ENGINES)] = "auto"
    """Engine of the head: fixed_order, hopper (NVIDIA Hopper, bfloat16), or auto (hopper if it can run)."""

    def resolved(
        self, dtype: str, *, small_vocabulary: bool, rows: int | None, row_length: int | None
    ) -> "InvarianceConfig":
        """Returns the options with what follows from the device, and from rows and tokens of a row where options name them.

        The engine is one that multiplies operands of `dtype`; a task's own vocabulary is small. Neither the mesh nor the
        memory decides: sizes determine the bits of a run.
        """
        engine = head_here(self.engine, dtype, small_vocabulary=small_vocabulary).engine
        on_gpu = jax.default_backend() == "gpu"
        rows = self.leaf_rows or rows or (gpu_leaf_rows(row_length) if on_gpu else 8)
        block = self.block or (max(1, GPU_BLOCK // rows) if on_gpu else 16)
        return replace(self, leaf_rows=rows, block=block, engine=engine)

    def order(self, vocab_size: int, dtype: str) -> ReductionOrder:
        """Returns the numeric identity of the head for a vocabulary of at least 8 tokens; the engine must be resolved.

        ValueError if engine hopper is chosen for a dtype other than bfloat16.
        """
        if self.engine == "hopper":
            expected = "fixed_order for operands of another dtype than bfloat16"
            require(dtype == "bfloat16", "--invariance.engine", expected, f"hopper for {dtype}")
            return ReductionOrder.for_hopper(8)
        return ReductionOrder(24 if vocab_size >= 24 else 8, vocab_tile=512, row_block=128, dtype=dtype)
