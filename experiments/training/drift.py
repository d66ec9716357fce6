"""The drift report of a step: sampler against trainer on the tokens that were sampled with the trainer's parameters.

A step's documents may have been sampled before earlier updates. Where old log-probs were rescored, both sides are known
from the time of sampling, for every document. Otherwise the trainer scores the documents that its present parameters have
sampled, and the others are left out: under later parameters they differ by what was learnt.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Float, Integer

from experiments.sampling.packing import Round
from experiments.tasks.tokenizer import Tokenizer
from experiments.training.sums import GradientSums
from jaxlogp import Document, DriftReport, VocabShards, drift_report

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
    """Where the worst token is: the document's number within the step and the token's position in it, prompt included, both
    from 0; its text (`END` of an end token) and the text before it, quoted."""

    document: int
    position: int
    token: str
    context: str

    def __str__(self) -> str:
        return f"{self.token} after {self.context}, position {self.position} of document {self.document}"


class _Compared(NamedTuple):
    """A document, by its number within the step, with positions of labels and what both sides say of them."""

    number: int
    document: Document
    positions: Integer[np.ndarray, " labels"]
    trainer: Float[np.ndarray, " labels"]
    sampler: Float[np.ndarray, " labels"]


@dataclass(frozen=True)
class StepDrift:
    """The report of one step, trainer (candidate) against sampler (reference), and the seconds that it took; where its worst
    token is, and the first one of which a log-prob is not finite."""

    report: DriftReport
    worst: Place | None
    first_non_finite: Place | None
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
        """Three lines at most: quantiles of the errors, share of large ratios, worst token."""
        report = self.report
        errors = [*zip(QUANTILE_NAMES, report.abs_error_quantiles, strict=True), ("max", report.max_abs_error)]
        quantiles = ", ".join(f"{name.replace('_', '.')} {value:.3g}" for name, value in errors)
        share = f"{report.share_outside:.2%} of {report.active_count} tokens"
        if report.num_non_finite:
            share += f"; {report.num_non_finite} NOT FINITE, the first {self.first_non_finite}"
        lines = [f"drift, |trainer - sampler|: {quantiles} nats", f"drift, ratios outside [0.9, 1.1]: {share}"]
        if self.worst is not None:
            values = f"trainer {report.worst_candidate:.9g}, sampler {report.worst_reference:.9g} nats"
            shard = "" if report.tp_size in (None, 1) else f", vocabulary shard {report.worst_owner}"
            lines.append(f"drift, worst token: {self.worst}{shard}: {values}")
        return "\n".join(lines)


class DriftWatch:
    """Makes reports of what `sums` computes as the trainer; `dtype` is None where it is not known."""

    def __init__(
        self, sums: GradientSums, vocab: VocabShards, tokenizer: Tokenizer, reduction: str, dtype: str | None
    ) -> None:
        self._sums, self._vocab, self._tokenizer = sums, vocab, tokenizer
        self._labels = {"reduction": reduction, "candidate_dtype": dtype, "reference_dtype": dtype}

    def report(self, params: nnx.State, rounds: list[Round], documents_seen: int) -> StepDrift | None:
        """The report on a step's rounds, before its update of `params`; None where no token tells the difference."""
        started = time.perf_counter()
        compared = [each for each in self._compared(params, rounds, documents_seen) if each.trainer.size]
        if not compared:
            return None
        targets = [each.document.tokens[each.positions] for each in compared]
        head = self._sums.head_run
        report = drift_report(
            np.concatenate([each.trainer for each in compared]),
            np.concatenate([each.sampler for each in compared]),
            np.concatenate(targets),
            vocab=self._vocab,
            backend="head not run" if head is None else f"engine {head.engine}",
            **self._labels,
        )
        places = (report.worst_index, report.first_non_finite)
        worst, first = (None if index is None else self._place(compared, *index) for index in places)
        return StepDrift(report, worst, first, time.perf_counter() - started)

    def _compared(self, params: nnx.State, rounds: list[Round], documents_seen: int) -> Iterator[_Compared]:
        """The documents of which both sides are known under the same parameters."""
        first = 0
        for each in rounds:
            numbered = list(enumerate(each.documents, start=first))
            first += len(numbered)
            if "sampler_log_probs" in each.packing.columns:
                for number, document in numbered:
                    values = document.ratio_log_probs, document.sampler_log_probs
                    yield _Compared(number, document, document.label_positions, *values)
            elif any(np.any(document.versions == documents_seen) for _, document in numbered):
                scores = self._sums.score(params, each.plain)
                for (number, document), trainer in zip(numbered, each.at_labels(scores.log_probs), strict=True):
                    current = np.broadcast_to(document.versions == documents_seen, trainer.shape)
                    values = document.label_positions, trainer, document.ratio_log_probs
                    yield _Compared(number, document, *(value[current] for value in values))

    def _place(self, compared: list[_Compared], index: int) -> Place:
        """Of a label, by its number among those of all of them."""
        ends = np.cumsum([each.trainer.size for each in compared])
        found = int(np.searchsorted(ends, index, side="right"))
        number, document, positions = compared[found][:3]
        # Counted from the document's last label.
        position = int(positions[index - int(ends[found])])
        before = document.tokens[:position].tolist()
        ends_of_turns = [place for place, token in enumerate(before) if token in self._tokenizer.eos_ids]
        # Decoding stops at an end token, of which a chat template writes one after every turn.
        context = before[ends_of_turns[-1] + 1 if ends_of_turns else 0 :][-CONTEXT_TOKENS:]
        token = int(document.tokens[position])
        return Place(
            document=number,
            position=position,
            token=END if token in self._tokenizer.eos_ids else repr(self._tokenizer.decode([token])),
            context=repr(self._tokenizer.decode(context)),
        )
