"""The head of a step: its arithmetic, where its vocabulary lies, and what computes it."""

from typing import Any, NamedTuple

from jaxlogp import VocabShards
from jaxlogp.head import HeadSpec
from jaxlogp.head.registry import EngineChoice


class HeadPlacement(NamedTuple):
    """The head's arithmetic, where its vocabulary lies, and what computes it; a frozen head has no gradient."""

    spec: HeadSpec
    axis_name: str
    vocab: VocabShards
    engine: EngineChoice
    frozen: bool = False

    def keywords(self) -> dict[str, Any]:
        """Returns the keywords of `jaxlogp.linear_log_probs`."""
        place = {"axis_name": self.axis_name, "vocab": self.vocab, "engine": self.engine, "frozen_head": self.frozen}
        return {**self.spec.keywords(), **place}
