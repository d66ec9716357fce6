"""Why an update was refused: the first thing on the way of a step that is not finite, by name, and in which documents.

It scores the step's documents again, which costs a forward pass, and is made of refused steps alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.learner.backend import GradientBackend
from experiments.learner.packing import GlobalMicroBatch
from experiments.learner.soundness import OPTIMIZER_STATE, FiniteReport, name_non_finite
from experiments.learner.update import TrainState, Update
from experiments.refusal import NotFinite, Refusal, prompt_of, require_finite
from jaxlogp import Document

COLUMNS = {"ref_log_probs": "log-probs of the reference"}


def check_documents(documents: Sequence[Document]) -> None:
    """Raises NotFinite for any number that is not finite: an infinite old log-prob makes a ratio of 0, and a finite loss."""
    for what, name in (("old log-probs", "ratio_log_probs"), ("log-probs of the sampler", "sampler_log_probs")):
        # Supervised documents have none.
        values = [() if (found := getattr(document, name)) is None else found for document in documents]
        _require(what, values, documents)
    _require("advantages", [document.advantages for document in documents], documents)
    for name in documents[0].columns if documents else ():
        _require(COLUMNS.get(name, name), [document.columns[name] for document in documents], documents)
    _require("rewards", [document.reward for document in documents], documents)


def explain_refusal(
    sound: FiniteReport,
    state: TrainState,
    documents: Sequence[Document],
    rounds: list[GlobalMicroBatch],
    update: Update,
    gradients: GradientBackend,
) -> Refusal:
    """Returns what of a refused step is not finite, in the order in which a step computes.

    The documents of the rounds are some of the step's `documents`, in their order: others may not have been computed.
    """
    # Before the scores: of parameters that are not finite no log-prob is.
    unsound = update.first_non_finite(state)
    if unsound is not None:
        return Refusal(unsound)
    try:
        _in_scores(documents, rounds, state, gradients)
    except NotFinite as found:
        return found.refusal
    return Refusal(_in_update(sound, state))


def _in_update(sound: FiniteReport, state: TrainState) -> str:
    if not sound.loss:
        return "loss not finite, of finite log-probs"
    gradients = name_non_finite("gradient", state.params, sound.gradients)
    if gradients is None and not sound.norm:
        return "norm of the gradient not finite: its square overflows, while every leaf is finite"
    params = name_non_finite("updated parameters", state.params, sound.params)
    opt_state = name_non_finite(f"updated {OPTIMIZER_STATE}", state.opt_state, sound.opt_state)
    found = gradients or params or opt_state
    assert found is not None, "something is not sound"
    return found


def _in_scores(
    documents: Sequence[Document], rounds: list[GlobalMicroBatch], state: TrainState, gradients: GradientBackend
) -> None:
    # A document is named by its number in the step; what is not computed has no values.
    scores: list[Any] = [()] * len(documents)
    ratios, left = scores.copy(), iter(enumerate(documents))
    for each in rounds:
        scored = each.at_labels(gradients.score(state.params, each))
        for document, mine in zip(each.documents, scored, strict=True):
            number = next(number for number, other in left if other is document)
            scores[number] = mine
            if document.ratio_log_probs is not None:
                with np.errstate(over="ignore", invalid="ignore"):
                    advantages = np.asarray(document.advantages, np.float32)
                    ratios[number] = np.exp(mine - document.ratio_log_probs) * advantages
    _require("log-probs of the trainer", scores, documents)
    _require("ratios of new to old probabilities", ratios, documents)


def _require(what: str, values: Sequence[Any], documents: Sequence[Document]) -> None:
    arrays = [np.atleast_1d(value) for value in values]
    require_finite(what, arrays, lambda number: prompt_of(documents[number]))
