"""A source of your own: a function, or an object with `next`, `state` and `restore`, found by name and checked."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.experience.experience import Experience, Policy
from experiments.experience.options import STORED
from experiments.experience.rollout_metrics import RolloutMetrics
from experiments.named import NOT_A_MODULE, OWN, call_named, import_named
from jaxlogp import Document, Support
from jaxlogp.errors import describe, require


class SourceFailed(Exception):
    """A source raised, or gave what cannot be trained on."""


class OwnSource:
    """Asks a source, and checks that its documents fit: their length, their ids, and the size of their support.

    The source is a function (policy, step) -> documents, whose `step` counts the calls from 0; or an object with
    `next(policy)`, `state()` and `restore(state)`.
    """

    def __init__(
        self, source: Any, name: str, *, vocab_size: int, row_length: int, support_capacity: int | None = None
    ) -> None:
        self._source, self._name = source, name
        self._vocab_size, self._row_length, self._support_capacity = vocab_size, row_length, support_capacity
        self._calls = 0

    def next(self, policy: Policy) -> Experience | None:
        """Asks for documents; SourceFailed if the source raised, or gave what cannot be trained on."""
        try:
            given = self._source.next(policy) if hasattr(self._source, "next") else self._source(policy, self._calls)
        except Exception as error:
            raise SourceFailed(f"source {self._name}: {type(error).__name__}: {error}") from error
        if given is None:
            return None
        try:
            made = given if isinstance(given, Experience) else Experience(given)
            is_counts = isinstance(made.counts, RolloutMetrics)
            require(is_counts, "counts", "RolloutMetrics of the Experience", describe(made.counts))
            experience = replace(made, documents=_as_tuple(made.documents))
            self._check(experience.documents, policy.version)
        except ValueError as error:
            raise SourceFailed(f"source {self._name}: {error}") from error
        self._calls += 1
        return experience

    def state(self) -> dict[str, Any]:
        return {"calls": self._calls, "own": self._call("state") if hasattr(self._source, "state") else None}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._calls = state["calls"]
        if hasattr(self._source, "restore"):
            self._call("restore", state["own"])

    def _call(self, method: str, *arguments: Any) -> Any:
        """Returns what a method of the source does; ValueError that names both if it raises."""
        try:
            return getattr(self._source, method)(*arguments)
        except ValueError as error:
            raise ValueError(f"source {self._name}: {error}") from error
        except Exception as error:
            raise ValueError(f"source {self._name}: {method} raised {type(error).__name__}: {error}") from error

    def _check(self, documents: tuple[Document, ...], version: int) -> None:
        require(len(documents) > 0, "documents", "at least one, or None at the end of the data", "none")
        for number, each in enumerate(documents):
            at = f"documents[{number}]"
            # Said only where it is wrong: describing a document takes a hundred times as long as packing it.
            if not isinstance(each, Document):
                require(False, at, "a jaxlogp.Document", describe(each))
            size, largest = each.tokens.size, int(each.tokens.max())
            require(size <= self._row_length, at, f"at most {self._row_length} tokens (--schedule.row-length)", size)
            require(largest < self._vocab_size, at, f"ids below {self._vocab_size}", largest)
            require(not each.columns, at, "no further columns", sorted(each.columns))
            known = each.sampler_log_probs is not None
            require(known or not each.num_labels, at, "sampler_log_probs of its labels", None)
            self._check_support(at, each.support)
            newest = int(np.max(each.versions, initial=0))
            require(newest <= version, at, f"versions of at most {version}, the policy's", newest)

    def _check_support(self, at: str, support: Support | None) -> None:
        capacity = self._support_capacity
        if capacity is None:
            require(support is None, at, "no support without --loss.on-support", describe(support))
            return
        expected = "the support of its labels with --loss.on-support (SamplingOptions(record_support=True))"
        require(support is not None, at, expected, None)
        assert support is not None, "just required"
        require(support.ids.size <= capacity, at, f"a support of at most {capacity} ids", support.ids.size)
        largest = int(support.ids.max(initial=0))
        require(largest < self._vocab_size, at, f"a support of ids below {self._vocab_size}", largest)


def _as_tuple(given: Any) -> tuple[Any, ...]:
    require(
        isinstance(given, Sequence), "documents", "a list of jaxlogp.Document, an Experience, or None", describe(given)
    )
    return tuple(given)


def source_name(source: Any) -> str:
    return getattr(source, "__name__", type(source).__name__)


def find_source(name: str) -> Any:
    """Returns the source that `--source` names: module:name of a function, or of a class without arguments."""
    expected = "module:name of a function (policy, step) -> documents, or of a class with next, state and restore"
    found = import_named("--source", name, expected)
    source = call_named("--source", name, expected, found) if isinstance(found, type) else found
    require(_is_source(source), "--source", expected, describe(source))
    return source


def _is_source(source: Any) -> bool:
    complete = all(callable(getattr(source, each, None)) for each in ("next", "state", "restore"))
    return complete or (callable(source) and not hasattr(source, "next"))


def resolve_source(option: str | None, source: Any) -> tuple[str | None, Any]:
    """Returns the option that a run keeps, and the source, by name or the caller's own; both None for the built-in one."""
    if option is not None and option.startswith(OWN):
        mine = f"your own source {option.removeprefix(OWN)}, as the run began (from Python: source=)"
        expected = f"{mine}, or {NOT_A_MODULE}"
        given = "none" if source is None else source_name(source)
        require(source is not None and OWN + source_name(source) == option, "--source", expected, given)
        return option, source
    if source is None and option is not None and option.startswith(STORED):
        # Read once the longest row is known.
        return f"{STORED}{Path(option.removeprefix(STORED)).resolve()}", None
    if source is None:
        return option, None if option is None else find_source(option)
    require(option is None, "--source", "None where train is given a source", option)
    expected = "a function (policy, step) -> documents, or an object with next, state and restore"
    require(_is_source(source) and not isinstance(source, type), "source", expected, describe(source))
    return OWN + source_name(source), source
