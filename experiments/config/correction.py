"""Options of what is done where sampler and trainer disagree on a label's probability."""

import dataclasses
from dataclasses import dataclass

from experiments.options import refused_as
from jaxlogp.losses import Correction, Rejection


@dataclass(frozen=True)
class CorrectionConfig:
    """Weights trainer / sampler of each label's loss, where old log-probs are the trainer's (docs/losses.md)."""

    level: str | None = None
    """token, sequence (the product over a document) or geometric (its mean). None: no weights."""
    kind: str = "truncate"
    """truncate (weights of at most --correction.high) or mask (0 outside of --correction.low and --correction.high)."""
    low: float = 0.0
    """Smallest weight of kind mask."""
    high: float = 2.0
    """Largest weight."""

    def correction(self) -> Correction | None:
        """Returns the correction of the loss; ValueError if an option is out of range."""
        if self.level is None:
            return None
        with refused_as("correction"):
            return Correction(**dataclasses.asdict(self))


@dataclass(frozen=True)
class RejectionConfig:
    """Rules by which labels leave the loss where the policies are too far apart (docs/losses.md). None: no such rule."""

    token: tuple[float, float] | None = None
    """Keep labels whose ratio trainer / sampler is between the two numbers."""
    sequence: tuple[float, float] | None = None
    """Keep documents whose product of ratios is between them."""
    geometric: tuple[float, float] | None = None
    """Keep documents whose geometric mean of ratios is between them."""
    veto: float | None = None
    """Reject documents with any ratio below this."""
    k1: float | None = None
    """Reject documents whose mean k1 estimate of the KL from sampler to trainer is above this, in nats."""
    k2: float | None = None
    """The same with k2."""
    k3: float | None = None
    """The same with k3."""
    negative_kl: float | None = None
    """Reject documents with a negative advantage whose mean of old minus new log-probs is above this, in nats."""
    probability_gap: float | None = None
    """Reject labels whose probability has moved by more than this from the sampler's, in the direction of the advantage."""
    keep_denominator: bool = False
    """Count rejected labels in the divisor of the loss."""

    @property
    def reads_sampler(self) -> bool:
        """Whether a rule compares the trainer's log-probs at the time of sampling with the sampler's."""
        rules = (self.token, self.sequence, self.geometric, self.veto, self.k1, self.k2, self.k3)
        return any(rule is not None for rule in rules)

    def rejection(self) -> Rejection | None:
        """Returns the rejection of the loss; ValueError if an option is out of range."""
        if self == RejectionConfig():
            return None
        with refused_as("rejection"):
            return Rejection(**dataclasses.asdict(self))
