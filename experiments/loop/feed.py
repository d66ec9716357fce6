"""The documents of each step, drawn by a source and packed; those beyond a step wait for the next."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from experiments.experience.experience import ExperienceSource, Policy
from experiments.experience.order import EpochOrder
from experiments.experience.own_source import SourceFailed
from experiments.experience.rollout_metrics import RolloutMetrics
from experiments.learner.packing import Packing
from experiments.loop.queue import DocumentQueue
from experiments.processes import processes
from experiments.refusal import NotFinite, Refusal
from experiments.tasks.protocol import TaskFailed
from experiments.tasks.rewards import RewardFailed
from jaxlogp import Document, DocumentSchedule


class Taken(NamedTuple):
    """What a step trains on, or why it is refused; the counts of what was drawn for it, and how long that took.

    Without documents and a refusal, the data has ended.
    """

    documents: Sequence[Document]
    counts: RolloutMetrics
    rollout_seconds: float
    wait_seconds: float
    refusal: Refusal | None = None


class DocumentFeed:
    """Asks a source for documents, step by step.

    `docs_per_step` documents complete a step; 0 takes one call of the source, whole. An `exact` step ends there, any other
    with the micro-batch that reaches the number. `rescore` gives documents without old log-probs those of the trainer. Each
    document is trained on `epochs` times; above 1, each time in a new order from `seed`.
    """

    def __init__(
        self,
        source: ExperienceSource,
        packing: Packing,
        docs_per_step: int,
        *,
        exact: bool,
        rescore: bool,
        epochs: int = 1,
        seed: int = 0,
    ) -> None:
        self._source, self._packing, self._number = source, packing, docs_per_step
        self._exact, self._rescore, self._epochs, self._seed = exact, rescore, epochs, seed
        self._queue, self._orders = DocumentQueue(), 0

    def take(self, policy: Policy) -> Taken:
        """Draws the documents of the next step, and packs them; what is drawn beyond them waits for the one after.

        All of a step is drawn before any of it is packed, so that the micro-batches do not depend on where a rollout ends.
        RewardFailed, SourceFailed and TaskFailed pass through; nothing has then been taken of the data.
        """
        started, before = time.perf_counter(), self._source.state()
        waiting, orders = self._queue.documents, self._orders
        try:
            counts, refusal = self._draw(policy)
        except (RewardFailed, SourceFailed, TaskFailed):
            self._source.restore(before)
            self._queue.documents, self._orders = waiting, orders
            raise
        seconds = time.perf_counter() - started
        if refusal is not None:
            return Taken((), counts, seconds, seconds, refusal)
        documents = self._packed()
        return Taken(documents, counts, seconds, time.perf_counter() - started)

    def state(self) -> dict[str, Any]:
        """Returns JSON values from which `restore` goes on to the same documents."""
        return {"source": self._source.state(), "queued": self._queue.to_json(), "orders": self._orders}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._source.restore(state["source"])
        self._queue, self._orders = DocumentQueue.from_json(state["queued"]), state["orders"]

    def _draw(self, policy: Policy) -> tuple[RolloutMetrics, Refusal | None]:
        """Fills the queue up to the documents of a step; the counts of what was drawn, and why the step is refused."""
        counts = RolloutMetrics()
        while self._queue.lacks(self._number):
            experience = self._source.next(policy)
            if experience is None:
                break
            counts += experience.counts
            if experience.refusal is not None:
                return counts, experience.refusal
            try:
                self._queue.add(self._repeated(self._rescored(experience.documents, policy)))
            except NotFinite as error:
                return counts, error.refusal
        return counts, None

    def _rescored(self, documents: Sequence[Document], policy: Policy) -> Sequence[Document]:
        unscored = [each for each in documents if each.old_log_probs is None] if self._rescore else []
        if not unscored:
            return documents
        scores = iter(policy.log_probs(unscored))
        return [replace(each, old_log_probs=next(scores)) if each.old_log_probs is None else each for each in documents]

    def _repeated(self, documents: Sequence[Document]) -> Sequence[Document]:
        if self._epochs == 1:
            return documents
        first, count = self._orders * len(documents), len(documents)
        self._orders += self._epochs
        order = EpochOrder(count, self._seed)
        return [documents[order[position]] for position in range(first, first + self._epochs * count)]

    def _packed(self) -> list[Document]:
        """The documents of the micro-batches that reach the number, or all that wait."""
        number = self._number or len(self._queue.documents)
        # The last micro-batch of a step would hold more documents on one mesh than on another.
        at_most = number if self._exact else None
        collected = DocumentSchedule(number).collect(
            [self._queue.rounds(self._packing, at_most)],
            padding=self._packing.padding(),
            all_reduce=processes().require_equal_counts,
        )
        return [document for (each,) in collected.micro_batches for document in each.documents]
