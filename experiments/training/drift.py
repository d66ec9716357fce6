"""The drift report of a step: sampler against trainer on the tokens that were sampled with the trainer's parameters.

A step's documents may have been sampled before earlier updates. Where old log-probs were rescored, both sides are known
from the time of sampling, for every document. Otherwise the trainer scores the documents that its present parameters have
sampled, and the others are left out: under later parameters they differ by what was learnt.
"""

import dataclasses
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Bool, Float

from experiments.tasks.tokenizer import Tokenizer
from experiments.training.sums import GradientSums
from jaxlogp import DriftReport, MicroBatch, VocabShards, drift_report

CONTEXT_TOKENS = 32
END = "an end token"
QUANTILE_NAMES = ("p50", "p90", "p99", "p99_9")
_REPORTED = {
    "tokens": "active_count",
    "max": "max_abs_error",
    "mean": "mean_abs_error",
    "share_outside": "share_outside",
    "num_non_finite": "num_non_finite",
    "worst_token_id": "worst_token_id",
    "worst_owner": "worst_owner",
    "worst_trainer": "worst_candidate",
    "worst_sampler": "worst_reference",
}


class Place(NamedTuple):
    """Where the worst token is.

    Attributes:
      document: its number within the step, from 0.
      position: of the token in the document, from 0, prompt included.
      token: its text, quoted; of an end token `END`.
      context: the text before it, quoted.
    """

    document: int
    position: int
    token: str
    context: str


@dataclass(frozen=True)
class StepDrift:
    """The report of one step.

    Attributes:
      report: trainer (candidate) against sampler (reference).
      worst: where its worst token is, or None without a finite one.
      seconds: that it took.
    """

    report: DriftReport
    worst: Place | None
    seconds: float

    def metrics(self) -> dict[str, Any]:
        """Scalars and texts for metrics.jsonl; errors are |log-prob of the trainer - of the sampler|, nats."""
        report = self.report
        start, end = report.worst_owner_range or (None, None)
        return {
            **{name: getattr(report, attribute) for name, attribute in _REPORTED.items()},
            **dict(zip(QUANTILE_NAMES, report.abs_error_quantiles, strict=True)),
            "worst_owner_start": start,
            "worst_owner_end": end,
            **{f"worst_{name}": getattr(self.worst, name, None) for name in Place._fields},
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        """The report, and the worst token's text."""
        text = f"sampler against trainer: {self.report}"
        if self.worst is None:
            return text
        place = self.worst
        return f"{text}: {place.token} after {place.context}, position {place.position} of document {place.document}"


class DriftWatch:
    """Makes reports.

    Args:
      sums: scores documents as the trainer computes their log-probs.
      vocab: shards of the head's vocabulary.
      tokenizer: the model's.
      reduction: label of the mesh.
    """

    def __init__(self, sums: GradientSums, vocab: VocabShards, tokenizer: Tokenizer, reduction: str) -> None:
        self._sums, self._vocab, self._tokenizer, self._reduction = sums, vocab, tokenizer, reduction

    def report(self, params: nnx.State, rounds: list[MicroBatch], documents_seen: int) -> StepDrift | None:
        """The report on a step's rounds, before its update.

        Args:
          params: those about to be updated.
          rounds: of the step.
          documents_seen: before the step, the version of `params`.

        Returns:
          The report, or None where no token tells the difference.
        """
        started = time.perf_counter()
        sides = [self._both(params, batch, documents_seen) for batch in rounds]
        trainer, sampler, mask = (np.stack(column) for column in zip(*sides, strict=True))
        if not mask.any():
            return None
        head = self._sums.head_run
        report = drift_report(
            trainer,
            sampler,
            np.stack([batch.targets for batch in rounds]),
            vocab=self._vocab,
            mask=mask,
            backend="head not run" if head is None else f"engine {head.engine}",
            reduction=self._reduction,
        )
        worst = None if report.worst_index is None else self._place(rounds, report.worst_index)
        return StepDrift(report, worst, time.perf_counter() - started)

    def _both(
        self, params: nnx.State, batch: MicroBatch, documents_seen: int
    ) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."], Bool[np.ndarray, "..."]]:
        """Log-probs of trainer and sampler, and where both are known under the same parameters."""
        columns = batch.per_token
        if "sampler_log_probs" in columns:
            return columns["old_log_probs"], columns["sampler_log_probs"], batch.mask
        sampler = columns["old_log_probs"]
        versions = np.stack([rank[ids] for rank, ids in zip(batch.model_versions, batch.document_ids, strict=True)])
        current = batch.mask & (versions == documents_seen)
        if not current.any():
            return sampler, sampler, current
        # The columns that every round has, so that scoring is one program, shared with that of the reference.
        plain = {name: columns[name] for name in ("old_log_probs", "advantages")}
        scores = self._sums.score(params, dataclasses.replace(batch, per_token=plain))
        return scores.log_probs, sampler, current

    def _place(self, rounds: list[MicroBatch], index: tuple[int, ...]) -> Place:
        number, rank, row, column = index
        batch = rounds[number]
        earlier = sum(int(each.num_documents.sum()) for each in rounds[:number])
        earlier += int(batch.num_documents[:rank].sum())
        document = batch.segment_ids[rank, row, column]
        before = batch.tokens[rank, row, : column + 1][batch.segment_ids[rank, row, : column + 1] == document].tolist()
        ends = [place for place, token in enumerate(before) if token in self._tokenizer.eos_ids]
        # Decoding stops at an end token, of which a chat template writes one after every turn.
        context = before[ends[-1] + 1 if ends else 0 :][-CONTEXT_TOKENS:]
        token = int(batch.targets[rank, row, column])
        return Place(
            document=earlier + int(document),
            position=int(batch.positions[rank, row, column]) + 1,
            token=END if token in self._tokenizer.eos_ids else repr(self._tokenizer.decode([token])),
            context=repr(self._tokenizer.decode(context)),
        )
