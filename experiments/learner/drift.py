"""The drift report of a step: sampler against trainer on the tokens that were sampled with the trainer's parameters.

A step's documents may have been sampled before earlier updates. Where old log-probs were rescored, both sides are known
from the time of sampling. Otherwise the trainer's are those that the step itself has computed, of the documents that its
parameters have sampled; others are left out, as under later parameters they differ by what was learnt. So are documents
that the step does not compute.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from experiments.learner.backend import LabelValues
from experiments.learner.packing import GlobalMicroBatch
from experiments.models.tokenizer import Tokenizer
from jaxlogp import Document, DriftReport, VocabShards, drift_report
from jaxlogp.head import HeadRun
from jaxlogp.policy.documents import SAMPLER_COLUMN

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


class TokenLocation(NamedTuple):
    """A token: the document's number within the step and the token's position in it, prompt included, both from 0; its id,
    and the ids of up to `CONTEXT_TOKENS` before it."""

    document: int
    position: int
    token: int
    context: list[int]

    def texts(self, tokenizer: Tokenizer) -> tuple[str, str]:
        """Returns the token's text (`END` of an end token) and the text before it, quoted."""
        ends = [place for place, token in enumerate(self.context) if token in tokenizer.eos_ids]
        # Decoding stops at an end token, of which a chat template writes one after every turn.
        context = self.context[ends[-1] + 1 if ends else 0 :]
        token = END if self.token in tokenizer.eos_ids else repr(tokenizer.decode([self.token]))
        return token, repr(tokenizer.decode(context))

    def sentence(self, tokenizer: Tokenizer) -> str:
        token, context = self.texts(tokenizer)
        return f"{token} after {context}, position {self.position} of document {self.document}"


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
    worst: TokenLocation | None
    first_non_finite: TokenLocation | None
    seconds: float

    def metrics(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Scalars and texts for metrics.jsonl; errors are |log-prob of the trainer - of the sampler|, nats."""
        report = self.report
        start, end = report.worst_owner_range or (None, None)
        token, context = (None, None) if self.worst is None else self.worst.texts(tokenizer)
        return {
            **{name: getattr(report, attribute) for name, attribute in _REPORTED.items()},
            **dict(zip(QUANTILE_NAMES, report.abs_error_quantiles, strict=True)),
            "worst_owner_start": start,
            "worst_owner_end": end,
            "worst_document": getattr(self.worst, "document", None),
            "worst_position": getattr(self.worst, "position", None),
            "worst_token": token,
            "worst_context": context,
            "seconds": self.seconds,
        }

    def lines(self, tokenizer: Tokenizer) -> list[str]:
        """Returns three lines at most: quantiles of the errors, share of large ratios, worst token."""
        report = self.report
        errors = [*zip(QUANTILE_NAMES, report.abs_error_quantiles, strict=True), ("max", report.max_abs_error)]
        quantiles = ", ".join(f"{name.replace('_', '.')} {value:.3g}" for name, value in errors)
        share = f"{report.share_outside:.2%} of {report.active_count} tokens"
        if self.first_non_finite is not None:
            share += f"; {report.num_non_finite} NOT FINITE, the first {self.first_non_finite.sentence(tokenizer)}"
        lines = [f"drift, |trainer - sampler|: {quantiles} nats", f"drift, ratios outside [0.9, 1.1]: {share}"]
        if self.worst is not None:
            values = f"trainer {report.worst_candidate:.9g}, sampler {report.worst_reference:.9g} nats"
            shard = "" if report.tp_size in (None, 1) else f", vocabulary shard {report.worst_owner}"
            lines.append(f"drift, worst token: {self.worst.sentence(tokenizer)}{shard}: {values}")
        return lines


def measure_drift(
    documents: Sequence[Document],
    computed: Sequence[tuple[GlobalMicroBatch, LabelValues]],
    version: int,
    *,
    head: HeadRun | None,
    vocab: VocabShards,
    reduction: str,
    dtype: str | None,
) -> StepDrift | None:
    """Compares the computed rounds of a step's documents, with the trainer's log-probs of them, with the sampler.

    `version` is that of the parameters before the step, `reduction` names the order of the sums of its `head`, and `dtype`
    is that of both sides, None if it is not known. Returns None if no token tells the difference.
    """
    started = time.perf_counter()
    compared = [each for each in _compared(documents, computed, version) if each.trainer.size]
    if not compared:
        return None
    targets = [each.document.tokens[each.positions] for each in compared]
    report = drift_report(
        np.concatenate([each.trainer for each in compared]),
        np.concatenate([each.sampler for each in compared]),
        np.concatenate(targets),
        vocab=vocab,
        backend="head not run" if head is None else f"engine {head.engine}",
        reduction=reduction,
        candidate_dtype=dtype,
        reference_dtype=dtype,
    )
    places = (report.worst_index, report.first_non_finite)
    worst, first = (None if index is None else _locate(compared, *index) for index in places)
    return StepDrift(report, worst, first, time.perf_counter() - started)


def _compared(
    documents: Sequence[Document], computed: Sequence[tuple[GlobalMicroBatch, LabelValues]], version: int
) -> Iterator[_Compared]:
    """Yields the documents of which both sides are known under the same parameters."""
    numbers = {id(document): number for number, document in enumerate(documents)}
    for each, log_probs in computed:
        numbered = [(numbers[id(document)], document) for document in each.documents]
        if SAMPLER_COLUMN in each.packing.columns:
            for number, document in numbered:
                values = document.ratio_log_probs, document.sampler_log_probs
                yield _Compared(number, document, document.label_positions, *values)
            continue
        for (number, document), trainer in zip(numbered, each.at_labels(log_probs), strict=True):
            current = np.broadcast_to(document.versions == version, trainer.shape)
            values = document.label_positions, trainer, document.ratio_log_probs
            yield _Compared(number, document, *(value[current] for value in values))


def _locate(compared: list[_Compared], index: int) -> TokenLocation:
    """Locates a label, by its number among those of all of them."""
    ends = np.cumsum([each.trainer.size for each in compared])
    found = int(np.searchsorted(ends, index, side="right"))
    number, document, positions = compared[found][:3]
    # Counted from the document's last label.
    position = int(positions[index - int(ends[found])])
    before = document.tokens[max(position - CONTEXT_TOKENS, 0) : position].tolist()
    return TokenLocation(number, position, int(document.tokens[position]), before)
