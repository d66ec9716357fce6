"""Supervised runs: documents of a file instead of rollouts, cross-entropy instead of a policy loss, and their score."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from experiments.config import SUPERVISED, Config, ScheduleConfig
from experiments.experience.conversations import Conversations, load_conversations
from experiments.experience.experience import Policy
from experiments.experience.limits import Limits
from experiments.experience.prompts import LengthLimits, length_limits, row_length_for, rows_for
from experiments.experience.scoring import Sample
from experiments.loop.evaluation import HeldOutLoss
from experiments.models.mesh import MeshSpec, parse_mesh
from experiments.models.tokenizer import Tokenizer
from experiments.tasks import Task
from experiments.tasks.json_lines import digest_of
from jaxlogp import Document
from jaxlogp.errors import require


class SupervisedFile:
    """A file of conversations in the place of a task; see `experiments.experience.conversations`."""

    alphabet: ClassVar[None] = None

    def __init__(self, path: str) -> None:
        self.path = Path(path).resolve()
        self._loaded: tuple[Tokenizer, Conversations] | None = None

    @property
    def name(self) -> str:
        return f"{SUPERVISED}{self.path}"

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of the file, read at the first call; ValueError if it cannot be read."""
        return digest_of(self.path)[1]

    def load(self, tokenizer: Tokenizer) -> Conversations:
        """Returns the documents, which are read once for each tokenizer; ValueError if the file has changed."""
        if self._loaded is None or self._loaded[0] is not tokenizer:
            found = load_conversations(self.path, tokenizer, Limits(vocab_size=tokenizer.vocab_size))
            require(found.digest == self.digest, "--data.path", "a file that does not change", self.path)
            for split, what in (
                ("train", "to train on"),
                ("held_out", "held out, about one in ten by a hash of its prompt"),
            ):
                require(bool(found.documents[split]), "--data.path", f"at least one document {what}", "none")
            self._loaded = tokenizer, found
        return self._loaded[1]

    def sizes(
        self, tokenizer: Tokenizer, schedule: ScheduleConfig, mesh: MeshSpec, leaf_rows: int | None
    ) -> LengthLimits:
        found = self.load(tokenizer)
        row = row_length_for(found.longest, schedule, mesh, f"{self.path}, line {found.longest_line}")
        step = -(-(schedule.docs_per_step or 1) // mesh.ranks)
        return LengthLimits(found.longest - 1, 1, row, schedule.rows or leaf_rows or rows_for(row, step))


def find_task(config: Config) -> "Task | SupervisedFile":
    if config.supervised:
        return SupervisedFile(config.task.removeprefix(SUPERVISED))
    return config.data.task(config.task, config.seed)


def find_sizes(config: Config, task: "Task | SupervisedFile", tokenizer: Tokenizer) -> LengthLimits:
    """Returns the static sizes of a run. Slow: all prompts that can be counted are encoded."""
    leaf_rows = config.invariance.leaf_rows if config.invariant else None
    options = config.schedule, parse_mesh(config.mesh), leaf_rows
    if isinstance(task, SupervisedFile):
        return task.sizes(tokenizer, *options)
    return length_limits(task, tokenizer, config.rollout, *options)


@dataclass(frozen=True)
class EvaluatedLoss:
    """Cross-entropy of held-out documents: a sum of nats, and its number of labels."""

    nats: float
    labels: int
    documents: list[Document]

    samples: ClassVar[list[Sample]] = []

    @property
    def scores(self) -> HeldOutLoss:
        loss = self.nats / self.labels
        return HeldOutLoss(loss, math.exp(min(loss, math.log(np.finfo(np.float64).max))))

    def metrics(self) -> dict[str, float]:
        return {**{f"held_out_{name}": value for name, value in self.scores._asdict().items()}, "labels": self.labels}


class LossEvaluation:
    """Cross-entropy of held-out documents under a policy, divided once by all of their labels."""

    scores = HeldOutLoss

    def __init__(self, documents: Sequence[Document], most: int) -> None:
        self._documents, self._all = list(documents[:most]), len(documents)

    @property
    def size(self) -> str:
        return f"{len(self._documents)} of {self._all} held-out documents"

    def of(self, policy: Policy) -> EvaluatedLoss:
        log_probs = policy.log_probs(self._documents)
        nats = -math.fsum(value for each in log_probs for value in each.tolist())
        return EvaluatedLoss(nats, sum(document.num_labels for document in self._documents), self._documents)
