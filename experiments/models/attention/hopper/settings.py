"""Settings of the Hopper attention kernels."""

import math
from dataclasses import dataclass
from typing import Any

import jax

from jaxlogp.errors import require

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Settings:
    """Options of the scores, and how the kernels run.

    Attributes:
        scale: factor of the products of queries and keys, positive.
        softcap: None, or the bound c of scores c · tanh(score / c), positive.
        interpret: None, or the parameters of the interpreter that runs the kernels on a CPU.
    """

    scale: float
    softcap: float | None = None
    interpret: Any = None

    def __post_init__(self) -> None:
        """Raises ValueError for options without a meaning."""
        require(self.scale > 0, "scale", "a positive number", self.scale)
        require(self.softcap is None or self.softcap > 0, "softcap", "None or a positive number", self.softcap)

    @property
    def bits(self) -> float:
        """What makes scores in bits, whose exponentials are powers of 2, of products, or of their capped values."""
        return LOG2_E * (self.scale if self.softcap is None else self.softcap)

    def num_blocks(self) -> int:
        """Returns the number of persistent blocks: one per multiprocessor."""
        return int(jax.devices()[0].core_count) if self.interpret is None else 2
