"""Why an update was refused: the first thing on the way of a step that is not finite, by name, and in which documents.

It scores the step's documents again, which costs a forward pass, and is made of refused steps alone.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Bool

from experiments.sampling.finite import NotFinite
from experiments.tasks.tokenizer import Tokenizer
from experiments.training.soundness import OPTIMIZER_STATE, Soundness, unsound_names
from experiments.training.sums import GradientSums
from experiments.training.update import TrainState, Update
from jaxlogp import MicroBatch

COLUMNS = {"old_log_probs": "old log-probs", "ref_log_probs": "log-probs of the reference", "lse": "log-sum-exps"}


def require_finite_inputs(rounds: list[MicroBatch]) -> None:
    """Checks what documents bring. An infinite old log-prob makes a ratio of 0, and a loss that is finite.

    Raises:
      NotFinite: old log-probs, advantages, rewards or another column.
    """
    for name in rounds[0].per_token:
        what = COLUMNS.get(name, name)
        _require(what, rounds, lambda batch, name=name: batch.mask & ~np.isfinite(batch.per_token[name]))
    _require("rewards", rounds, lambda batch: ~np.isfinite(_of_documents(batch.rewards, batch)))


def why_refused(
    sound: Soundness,
    state: TrainState,
    rounds: list[MicroBatch],
    update: Update,
    sums: GradientSums,
    tokenizer: Tokenizer,
) -> str:
    """What of a refused step is not finite, in the order in which a step computes.

    Args:
      sound: what the update found.
      state: which it left as it was.
      rounds: of the step.
      update: knows what of a state is sound.
      sums: scores documents with the parameters of the state.
      tokenizer: shows prompts.
    """
    # Before the scores: of parameters that are not finite no log-prob is.
    unsound = update.unsound(state)
    if unsound is not None:
        return unsound
    try:
        _in_scores(rounds, state, sums)
    except NotFinite as found:
        return found.sentence(tokenizer)
    return _in_update(sound, state)


def _in_update(sound: Soundness, state: TrainState) -> str:
    if not sound.loss:
        return "loss not finite, of finite log-probs"
    gradients = unsound_names("gradient", state.params, sound.gradients)
    if gradients is None and not sound.norm:
        return "norm of the gradient not finite: its square overflows, while every leaf is finite"
    params = unsound_names("updated parameters", state.params, sound.params)
    opt_state = unsound_names(f"updated {OPTIMIZER_STATE}", state.opt_state, sound.opt_state)
    found = gradients or params or opt_state
    assert found is not None, "something is not sound"
    return found


def _in_scores(rounds: list[MicroBatch], state: TrainState, sums: GradientSums) -> None:
    scored = {}
    for batch in rounds:
        # The columns that every round has, so that this is the program of the drift report and of the reference.
        plain = {name: batch.per_token[name] for name in ("old_log_probs", "advantages")}
        scored[id(batch)] = sums.score(state.params, dataclasses.replace(batch, per_token=plain)).log_probs
    _require("log-probs of the trainer", rounds, lambda batch: batch.mask & ~np.isfinite(scored[id(batch)]))

    def overflows(batch: MicroBatch) -> Bool[np.ndarray, "ranks rows row_length"]:
        with np.errstate(over="ignore", invalid="ignore"):
            ratio = np.exp(np.where(batch.mask, scored[id(batch)] - batch.per_token["old_log_probs"], 0.0))
            return ~np.isfinite(ratio * batch.per_token["advantages"])

    _require("ratios of new to old probabilities", rounds, overflows)


def _require(what: str, rounds: list[MicroBatch], bad: Callable[[MicroBatch], np.ndarray]) -> None:
    """Raises NotFinite with the documents that have a bad token."""
    prompts, first = {}, 0
    for batch in rounds:
        for number, tokens in _documents_with(batch, bad(batch)):
            prompts[first + number] = tokens
        first += int(batch.num_documents.sum())
    if prompts:
        raise NotFinite(what, prompts)


def _documents_with(
    batch: MicroBatch, bad: Bool[np.ndarray, "ranks rows row_length"]
) -> Iterator[tuple[int, list[int]]]:
    """Number within the round, and prompt, of every document with a bad token."""
    first = 0
    for rank, count in enumerate(batch.num_documents.tolist()):
        segments = batch.segment_ids[rank]
        for document in np.unique(segments[bad[rank] & (segments >= 0)]).tolist():
            here = segments == document
            tokens, labels = batch.tokens[rank][here], np.flatnonzero(batch.mask[rank][here])
            # The first label is the token behind the last one of the prompt.
            yield first + document, tokens[: labels[0] + 1 if labels.size else None].tolist()
        first += count


def _of_documents(values: np.ndarray, batch: MicroBatch) -> np.ndarray:
    """Values of documents at their tokens."""
    return np.stack([each[ids] for each, ids in zip(values, batch.document_ids, strict=True)])
