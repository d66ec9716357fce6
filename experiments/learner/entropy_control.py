"""Control of the entropy bonus: a coefficient that follows a target of the policy's entropy."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxlogp.errors import is_number, require


@dataclass(frozen=True)
class EntropyControl:
    """Rule by which the coefficient of the entropy bonus changes from step to step, `first` in the first one.

    After a step whose entropy is below the target, in nats, the coefficient rises by `step`, above the target it falls by
    `step`, and it stays within [0, maximum]. The entropy is the step's metric `entropy_labelled`: the mean over documents
    with a label of the mean over their labels. ValueError if a number, such as `first`, is out of range.

    Example:
        >>> control = EntropyControl(target=0.2, step=0.25, maximum=1.0)
        >>> control.after(0.5, {"entropy_labelled": 0.1, "num_documents_labelled": 8})
        0.75

    References:
        Skywork Open Reasoner 1 Technical Report, arXiv:2505.22312.
    """

    target: float
    first: float = 0.0
    step: float = 0.005
    maximum: float = 1.0

    def __post_init__(self) -> None:
        # Named as the options of the loss.
        good = is_number(self.target) and 0.0 <= self.target < math.inf
        require(good, "entropy_target", "a finite number of at least 0", self.target)
        for name, value in (("entropy_step", self.step), ("entropy_maximum", self.maximum)):
            require(is_number(value) and 0.0 < value < math.inf, name, "a finite number > 0", value)
        expected = f"a coefficient in [0, {self.maximum}] with an entropy target"
        require(0.0 <= self.first <= self.maximum, "entropy_coefficient", expected, self.first)

    def after(self, coefficient: float, metrics: Mapping[str, Any]) -> float:
        """Returns the coefficient of the step after one with these metrics; the same after a step without labels."""
        entropy = metrics["entropy_labelled"]
        if not metrics["num_documents_labelled"] or entropy == self.target:
            return coefficient
        changed = coefficient + (self.step if entropy < self.target else -self.step)
        return min(max(changed, 0.0), self.maximum)
