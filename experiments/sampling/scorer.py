"""Rewards of completions, each computed by one of the processes and known to all of them.

A reward function may be slow, or answer differently when it is asked twice: with several processes no completion is
scored by two.
"""

from collections.abc import Sequence
from typing import Any

from experiments.runs.processes import processes
from experiments.tasks import Completion, Example, Rewards
from experiments.tasks.rewards import RewardFailed, RewardNotFinite, Scored

_RAISED = {error.__name__: error for error in (RewardFailed, RewardNotFinite)}


class Scorer:
    """Scores completions by functions, which every process has."""

    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards

    @property
    def names(self) -> tuple[str, ...]:
        """Of the functions."""
        return self._rewards.names

    def score(self, examples: Sequence[Example], completions: Sequence[Completion]) -> Scored:
        """As `Rewards.score`; what is raised in one process is raised in all of them."""
        here = processes()
        if here.count == 1:
            return self._rewards.score(examples, completions)
        mine = here.part_of(len(completions))
        answers = here.gather("rewards", self._of(examples, completions, mine))
        for error, _ in answers:
            if error is not None:
                kind, text = error
                raise _RAISED[kind](text)
        return self._rewards.weighted(examples, completions, here.in_order([parts for _, parts in answers]))

    def _of(self, examples: Sequence[Example], completions: Sequence[Completion], numbers: range) -> tuple[Any, Any]:
        try:
            return None, self._rewards.parts(examples, completions, numbers)
        except (RewardFailed, RewardNotFinite) as error:
            # The others wait for this process, and are to end, or to refuse the step, as it does.
            return (type(error).__name__, str(error)), []
