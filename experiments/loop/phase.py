"""The phases of a run: a warm start on worked examples, and the training itself."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from experiments.config import Config
from experiments.experience.prompts import PromptStream
from experiments.experience.scoring import Sample
from experiments.experience.worked_examples import WorkedExamples
from experiments.learner.learner import Learner
from experiments.learner.objectives import CrossEntropy
from experiments.learner.packing import Packing
from experiments.loop.assemble import Setup
from experiments.loop.evaluation import AnswerEvaluation
from experiments.loop.feed import DocumentFeed
from experiments.loop.supervised import SupervisedFile
from experiments.runs.console import ROWS, STEP_COLUMNS, SUPERVISED_COLUMNS, UNREWARDED_COLUMNS, Column

WARM_START = CrossEntropy()
"""What a warm start minimises."""


class Measured(NamedTuple):
    scores: Any
    metrics: dict[str, float]
    samples: list[Sample]


@dataclass(frozen=True)
class Phase:
    """What one `Loop` runs: steps of a learner on what a source gives.

    Its records in the log have the kind `name`, and its progress on the console is `label`, with about so many `rows`.
    `evaluate` takes the number of a step; `evaluates_ends` adds evaluations before the first step and after the last. 0 in
    `evaluate_every` and `drift_every` means never. `is_reached` says whether scores end the phase.
    """

    name: str
    label: str
    setup: Setup
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
        return "eval" if self.name == "train" else f"{self.name}_eval"

    def at(self, step: int) -> str:
        return f"step {step}" if self.name == "train" else f"step {step} of the warm start"


def training_phase(setup: Setup) -> Phase:
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
        columns=_columns(config),
    )


def _columns(config: Config) -> tuple[Column, ...]:
    if config.supervised:
        return SUPERVISED_COLUMNS
    return UNREWARDED_COLUMNS if config.loss.advantages == "none" else STEP_COLUMNS


def warm_start_packing(trained: Setup) -> Packing:
    return replace(trained.learner.packing, columns=(), support_capacity=None)


def warm_start_phase(trained: Setup) -> Phase:
    """Returns the phase that learns worked examples until enough of sampled answers are right.

    It has its own optimizer. The learner of the run gives its parameters away to it; `Learner.begin` takes them back.
    """
    config, task, evaluation = trained.config, trained.task, trained.evaluation
    assert not isinstance(task, SupervisedFile) and isinstance(evaluation, AnswerEvaluation), "answers are rewarded"
    options, seed = config.warm_start, config.seed
    packing, params = warm_start_packing(trained), trained.learner.release()
    learner = Learner(trained.backend, WARM_START, options.optimizer(), packing, params)
    examples = WorkedExamples(PromptStream(task, seed + 1, None), trained.sizes.prompt, options.batch_size)
    setup = replace(trained, learner=learner, source=examples)
    checks = PromptStream(task, seed + 2, None).take(evaluation.check_shape.prompts)

    def evaluate(step: int) -> Measured:
        right = evaluation.exact_match_on(checks, setup.policy_of(setup.params), step)
        return Measured(right, {"exact_match": right}, [])

    return Phase(
        "warm_start",
        "warm start",
        setup,
        DocumentFeed(examples, packing, 0, exact=config.invariant, rescore=False),
        options.max_steps or 0,
        evaluate,
        options.check_every,
        evaluates_ends=False,
        is_reached=lambda right: right >= options.target,
        columns=SUPERVISED_COLUMNS,
        rows=10,
    )
