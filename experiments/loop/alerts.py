"""Training-time warnings: gradient-norm spikes, steps without a learning signal, truncated completions."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from experiments.experience.rollout_metrics import RolloutMetrics
from experiments.learner.options import GuardsConfig

WINDOW = 32
"""Gradient norms that a median is taken of."""
FEWEST = 8
"""Of which there have to be so many."""

DEGENERATE_STEPS = 5
"""Steps in a row without a difference of rewards in any group after which there is a warning."""
MANY_TRUNCATED = 0.2
"""Share of truncated completions above which a step warns."""


def over_median(norms: list[float], norm: float) -> float | None:
    """A gradient norm as a multiple of the median of those before it; None where there are too few, or it has none.

    Example:
        >>> over_median([1.0, 2.0, 9.0] * 3, 6.0)
        3.0
    """
    median = statistics.median(norms) if len(norms) >= FEWEST else 0.0
    return norm / median if median > 0.0 and math.isfinite(norm) else None


def with_norm(norms: list[float], norm: float) -> list[float]:
    """The window with one more; a list of its own, because a checkpoint may still be written of the other."""
    return [*norms[1 - WINDOW :], norm] if math.isfinite(norm) else norms


class StepMonitor:
    """Turns the metrics of each step into warnings; `max_new_tokens` is quoted in them.

    Without `rewarded` rewards do not enter the loss, and steps of equal rewards are no reason for a warning.
    """

    def __init__(self, options: GuardsConfig, max_new_tokens: int, *, rewarded: bool = True) -> None:
        self._options, self._max_new_tokens, self._rewarded = options, max_new_tokens, rewarded
        self._degenerate = 0
        self._next_warning = DEGENERATE_STEPS
        self._truncated_steps, self._next_truncated = 0, 1

    def warnings(self, step: int, values: Mapping[str, Any], counts: RolloutMetrics) -> list[str]:
        found = (self._spike(step, values), self._truncated(step, counts), self._nothing_to_learn(step, values, counts))
        return [each for each in found if each]

    def _spike(self, step: int, values: Mapping[str, Any]) -> str | None:
        ratio, factor = values.get("grad_norm_over_median"), self._options.spike_factor
        if ratio is None or not factor or ratio <= factor:
            return None
        return (
            f"step {step}: gradient norm {values['grad_norm']:.3g}, {ratio:.3g} times the median of the norms before it"
        )

    def _nothing_to_learn(self, step: int, values: Mapping[str, Any], counts: RolloutMetrics) -> str | None:
        """A warning after some such steps in a row, and each time that there are twice as many."""
        if counts.groups:
            teaches = counts.degenerate < counts.groups
            what, why = "group had equal rewards", f" ({counts.why_no_signal(self._max_new_tokens)})"
        else:
            # Of a source that counts no groups; supervised steps have no advantages.
            teaches = not values.get("max_advantage") == values.get("min_advantage") == 0.0
            what, why = "document had advantage 0", ""
        if teaches or not self._rewarded:
            self._degenerate, self._next_warning = 0, DEGENERATE_STEPS
            return None
        self._degenerate += 1
        if self._degenerate < self._next_warning:
            return None
        self._next_warning *= 2
        return f"step {step}: every {what} for {self._degenerate} steps in a row: no learning signal{why}"

    def _truncated(self, step: int, counts: RolloutMetrics) -> str | None:
        """Warns of the first step with many truncated completions, and each time that there were twice as many steps."""
        if not counts.completions or counts.truncated <= MANY_TRUNCATED * counts.completions:
            return None
        self._truncated_steps += 1
        if self._truncated_steps < self._next_truncated:
            return None
        self._next_truncated *= 2
        return (
            f"step {step}: {counts.truncated} of {counts.completions} completions were truncated at {self._max_new_tokens} "
            f"tokens; raise --rollout.max-new-tokens"
        )
