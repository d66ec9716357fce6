"""The phases of a run: a warm start on worked examples, and the training itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.experience.scoring import Sample
from experiments.loop.feed import DocumentFeed
from experiments.runs.console import ROWS, STEP_COLUMNS, SUPERVISED_COLUMNS, Column

if TYPE_CHECKING:
    from experiments.loop.assemble import Setup


class Measured(NamedTuple):
    """Scores of an evaluation, its values for the log, and samples to read."""

    scores: Any
    metrics: dict[str, float]
    samples: list[Sample]


@dataclass(frozen=True)
class Phase:
    """What one `Loop` runs: steps of a learner on what a source gives.

    Attributes:
        name: kind of its records in the log.
        label: name of its progress on the console.
        setup: learner, source, and the facts of the run.
        feed: documents of its steps.
        steps: maximum number of steps.
        evaluate: evaluates the present parameters after a step, by its number.
        evaluate_every: steps between evaluations; 0 for none.
        drift_every: steps between drift reports; 0 for none.
        evaluates_ends: whether it is also evaluated before the first step and after the last.
        is_reached: whether scores end the phase.
        columns: of the rows on the console.
        rows: about so many rows there.
    """

    name: str
    label: str
    setup: "Setup"
    feed: DocumentFeed
    steps: int
    evaluate: Callable[[int], Measured]
    evaluate_every: int
    drift_every: int = 0
    evaluates_ends: bool = True
    is_reached: Callable[[Any], bool] = lambda scores: False
    columns: tuple[Column, ...] = STEP_COLUMNS
    rows: int = ROWS

    @property
    def evaluation_name(self) -> str:
        """The kind of the records of evaluations."""
        return "eval" if self.name == "train" else f"{self.name}_eval"

    def at(self, step: int) -> str:
        """Names a step in a sentence."""
        return f"step {step}" if self.name == "train" else f"step {step} of the warm start"


def training_phase(setup: "Setup") -> Phase:
    """Returns the phase that trains on the run's own source, evaluated on what is held out."""
    config = setup.config

    def evaluate(step: int) -> Measured:
        # The same random numbers at every step.
        del step
        found = setup.evaluation.of(setup.policy_of(setup.params))
        metrics = found.metrics()
        if config.evaluation.kl:
            metrics["kl_reference"] = setup.learner.kl_to_reference(found.documents)
        return Measured(found.scores, metrics, found.samples)

    return Phase(
        "train",
        "SFT" if config.supervised else config.loss.name.upper(),
        setup,
        setup.feed(),
        config.schedule.steps,
        evaluate,
        config.evaluation.every,
        config.drift.every,
        columns=SUPERVISED_COLUMNS if config.supervised else STEP_COLUMNS,
    )
