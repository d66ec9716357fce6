"""Accumulation of one optimizer step over many micro-batches, with sums that are divided once.

`DocumentSchedule` runs on the host and decides the extent of a step: it takes micro-batches one at a time until the
documents of all ranks together reach a target. `StepSums` holds the sums over the micro-batches, not yet divided, so
that neither the loss nor the gradient depends on how the documents were split into micro-batches.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxlogp._arrays import AnyArray, compute_dtype, nan_where
from jaxlogp._reduce import WeightedSum
from jaxlogp.errors import describe, is_integer, require
from jaxlogp.losses.inputs import check_number
from jaxlogp.policy.metrics import PolicyMetricTerms


@partial(jax.tree_util.register_dataclass, data_fields=["gradients", "loss", "metrics"], meta_fields=[])
@dataclass(frozen=True)
class FinishedStep:
    """The gradients of the step's loss, the loss itself, and the metrics by name."""

    gradients: PyTree[Float[AnyArray, "..."]]
    loss: Float[AnyArray, ""]
    metrics: dict[str, Array]


# JAX rebuilds it with leaves that are not arrays, such as those of jax.eval_shape.
@no_type_check
@partial(jax.tree_util.register_dataclass, data_fields=["gradients", "loss", "metrics"], meta_fields=[])
@dataclass(frozen=True)
class StepSums:
    """Sums over part of an optimizer step: gradients of the loss sum, the loss as sum and count, metric terms.

    Attributes:
        gradients: gradient of `loss.sum` (not of a mean) of this part, fp32 unless `StepSums.of` was given another dtype.
        loss: the loss of this part.
        metrics: metric terms of this part.
    """

    gradients: PyTree[Float[AnyArray, "..."]]
    loss: WeightedSum
    metrics: PolicyMetricTerms

    @classmethod
    def of(
        cls,
        gradients: PyTree[Float[AnyArray, "..."]],
        loss: WeightedSum,
        metrics: PolicyMetricTerms | None = None,
        *,
        gradient_dtype: jax.typing.DTypeLike | None = None,
    ) -> "StepSums":
        """Creates the sums of one micro-batch.

        Args:
            gradients: gradient of `loss.sum`.
            loss: the loss.
            metrics: metric terms; None for no terms.
            gradient_dtype: dtype of the gradient's sums, regardless of the dtype of the parameters; None for fp32. bfloat16
                halves their memory, rounds once for every micro-batch, and stops growing after some 256 of them. Loss,
                counts and metrics do not depend on it.

        Raises:
            ValueError: if the loss is no WeightedSum, or the dtype not a floating-point one.
        """
        require(isinstance(loss, WeightedSum), "loss", "a WeightedSum", describe(loss))
        floating = gradient_dtype is None or jnp.issubdtype(jnp.dtype(gradient_dtype), jnp.floating)
        require(floating, "gradient_dtype", "a floating-point dtype, or None", repr(gradient_dtype))
        gradients = jax.tree.map(lambda x: x.astype(gradient_dtype or compute_dtype(x)), gradients)
        return cls(gradients, loss, PolicyMetricTerms({}) if metrics is None else metrics)

    @classmethod
    def zeros_like(cls, shapes: "StepSums") -> "StepSums":
        """Returns the sums of no micro-batch, the first carry of a loop: 0, and ∓inf for maxima and minima.

        Args:
            shapes: sums of any micro-batch, or their shapes, as `jax.eval_shape` returns them.

        Example:
            >>> def sums_of(batch):
            ...     mask = jnp.ones_like(batch, dtype=bool)
            ...     loss, gradient = jax.value_and_grad(lambda w: jnp.sum(w * batch))(jnp.float32(1.0))
            ...     return StepSums.of(gradient, WeightedSum(loss, jnp.int32(batch.size)), reward_terms(batch, mask))
            >>> batches = -jnp.arange(1.0, 7.0).reshape(3, 2)
            >>> zero = StepSums.zeros_like(jax.eval_shape(sums_of, batches[0]))
            >>> sums, _ = jax.lax.scan(lambda sums, batch: (sums + sums_of(batch), None), zero, batches)
            >>> step = sums.finish()
            >>> float(step.gradients), float(step.metrics["reward_max"])
            (-3.5, -1.0)
        """
        gradients, loss = jax.tree.map(jnp.zeros_like, (shapes.gradients, shapes.loss))
        return cls(gradients, loss, PolicyMetricTerms.zeros_like(shapes.metrics))

    def __add__(self, other: "StepSums") -> "StepSums":
        """Adds the sums of two disjoint parts of a step.

        Raises:
            ValueError: if `other` is no StepSums, or its gradients, metrics or `grad_divisor` do not match.
        """
        require(isinstance(other, StepSums), "other", "StepSums", describe(other))
        mine, others = _leaf_shapes(self.gradients), _leaf_shapes(other.gradients)
        if mine != others:
            require(False, "other.gradients", _some(mine - others), _some(others - mine))
        gradients = jax.tree.map(jnp.add, self.gradients, other.gradients)
        return StepSums(gradients, self.loss + other.loss, self.metrics + other.metrics)

    def __radd__(self, other: int) -> "StepSums":
        """Lets `sum` start from its 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def psum(self, axis_name: str | tuple[str, ...]) -> "StepSums":
        """Adds the sums of all ranks of the mesh axes."""
        gradients = jax.lax.psum(self.gradients, axis_name)
        return StepSums(gradients, self.loss.psum(axis_name), self.metrics.psum(axis_name))

    def finish(self, grad_divisor: Float[AnyArray, ""] | Int[AnyArray, ""] | float | None = None) -> FinishedStep:
        """Divides, once, by the denominators of the whole step.

        Gradients are divided by `loss.grad_divisor` if there is one, otherwise by `loss.count`, in fp32 even if their sums
        are narrower. If no label or document was counted, they are 0, like the loss.

        Args:
            grad_divisor: a divisor of the gradients that follows from the step, not below 0; it may be traced, and a traced
                one below 0 gives NaN. 0, of a step without documents, divides by 1. The square of an int32 count above 46340
                wraps: take that of a float.

        Raises:
            ValueError: if the loss has a grad_divisor of its own, or the given one is no single number, or known to be
                negative or not finite.

        Example:
            Where each micro-batch was divided by the documents of the step, and then by their number once more:

            >>> sums = StepSums.of(jnp.float32(32.0), WeightedSum(jnp.float32(8.0), jnp.int32(4)))
            >>> step = sums.finish(sums.loss.count.astype(jnp.float32) ** 2)
            >>> float(step.loss), float(step.gradients)
            (2.0, 2.0)
        """
        divisor = self.loss.grad_divisor
        if grad_divisor is not None:
            require(divisor is None, "grad_divisor", f"None, since the loss has one, {divisor}", describe(grad_divisor))
            check_number(grad_divisor, "grad_divisor", least=0.0)
            given = jnp.asarray(grad_divisor)
            divisor = jnp.where(given == 0, jnp.ones_like(given), given)
        if divisor is None:
            divisor = jnp.maximum(self.loss.count, 1)

        def divided(x: Array) -> Array:
            by = jnp.asarray(divisor).astype(compute_dtype(x))
            # Only a traced one is not known to be above 0: it would turn the gradient around.
            return x.astype(by.dtype) / (by if grad_divisor is None else nan_where(by < 0, by))

        gradients = jax.tree.map(divided, self.gradients)
        return FinishedStep(gradients, self.loss.mean(), self.metrics.finish())


def _leaf_shapes(tree: PyTree) -> set[tuple[str, tuple[int, ...]]]:
    return {(jax.tree_util.keystr(path), leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _some(leaves: set[tuple[str, tuple[int, ...]]]) -> str:
    """Returns the first three leaves of a difference, or says that there is none."""
    some = ", ".join(f"{path} {list(shape)}" for path, shape in sorted(leaves)[:3])
    return f"leaves {some}" if some else "no other leaves"


@runtime_checkable
class HasDocuments(Protocol):
    """A batch with a document count (a number or an array), such as `MicroBatch`."""

    @property
    def num_documents(self) -> Any: ...


Batch = TypeVar("Batch", bound=HasDocuments)


@dataclass(frozen=True)
class CollectedStep(Generic[Batch]):
    """The micro-batches of one optimizer step on this process.

    Attributes:
        micro_batches: one tuple per round, with one micro-batch for each local stream; the same number of rounds on every
            process.
        num_documents: number of documents over all processes.
        data_wait_seconds: time that this process waited for its streams, in seconds.
        exhausted: whether no process has data left; the step may then be partial or empty.
    """

    micro_batches: tuple[tuple[Batch, ...], ...]
    num_documents: int
    data_wait_seconds: float
    exhausted: bool


@dataclass(frozen=True)
class DocumentSchedule:
    """The extent of an optimizer step: a number of documents, or of micro-batches.

    Attributes:
        docs_per_step: number of documents, over all ranks, that ends a step; the micro-batch that reaches it is kept whole.
            0 counts `micro_batches` instead.
        micro_batches: micro-batches per step and rank if `docs_per_step` is 0, however many documents they hold.
        max_empty_micro_batches: maximum number of successive micro-batches, within a step, without a document on any rank.

    Raises:
        ValueError: if a number is out of range.
    """

    docs_per_step: int = 0
    micro_batches: int = 1
    max_empty_micro_batches: int = 16

    def __post_init__(self) -> None:
        for name, least in {"docs_per_step": 0, "micro_batches": 1, "max_empty_micro_batches": 0}.items():
            value = getattr(self, name)
            require(is_integer(value) and value >= least, name, f"an integer of at least {least}", repr(value))

    def collect(
        self,
        streams: Sequence[Iterator[Batch]],
        *,
        padding: Batch,
        all_reduce: Callable[[Int[np.ndarray, " values"]], Int[np.ndarray, " values"]] | None = None,
    ) -> CollectedStep[Batch]:
        """Takes the micro-batches of the next step, one from each local stream at a time.

        Every decision depends only on globally summed counts, so all processes stop after the same round. A stream that has
        ended contributes `padding` from then on. When all streams of all processes have ended, the step holds what was taken
        so far, with its true counts, and is `exhausted`; nothing is dropped and nothing hangs. A stream that raises ends the
        step on every process.

        Args:
            streams: one iterator per local data rank, or a single one over the micro-batches of all of them, stacked or in
                your own object that counts its documents.
            padding: a micro-batch without documents, for example `pack_documents([], ...)[0]`.
            all_reduce: function that sums an int64 vector over processes; called once per round by every process. None for a
                single process.

        Returns:
            The step.

        Raises:
            ValueError: if there is no stream, the padding has documents, or too many micro-batches in a row have no
                document.
            RuntimeError: if a stream raised on another process.

        Example:
            >>> from jaxlogp.policy.documents import Document, pack_documents
            >>> batch, _ = pack_documents([Document.of_completion([3], [4], [0.0])] * 2, rows=1, row_length=4)
            >>> empty, _ = pack_documents([], rows=1, row_length=4)
            >>> step = DocumentSchedule(docs_per_step=3).collect([iter([batch] * 9)], padding=empty)
            >>> len(step.micro_batches), step.num_documents, step.exhausted
            (2, 4, False)
        """
        require(len(streams) > 0, "streams", "at least one stream", len(streams))
        require(not np.any(padding.num_documents), "padding", "a micro-batch without documents", padding.num_documents)
        rounds: list[tuple[Batch, ...]] = []
        documents, empty_rounds, waited = 0, 0, 0.0
        while not self._complete(documents, len(rounds)):
            started = time.perf_counter()
            taken, failure = _take(streams)
            waited += time.perf_counter() - started
            found, alive = _agree(taken, failure, all_reduce)
            if not alive:
                # Rounds without documents hold nothing to train on: at the end of the data they are not a step.
                return CollectedStep(tuple(rounds) if documents else (), documents, waited, True)
            rounds.append(tuple(padding if item is None else item for item in taken))
            documents += found
            empty_rounds = 0 if found else empty_rounds + 1
            require(
                empty_rounds <= self.max_empty_micro_batches,
                "streams",
                f"a document within {self.max_empty_micro_batches} micro-batches in a row on any rank",
                f"{empty_rounds} micro-batches without one after {documents} documents",
            )
        return CollectedStep(tuple(rounds), documents, waited, False)

    def _complete(self, documents: int, rounds: int) -> bool:
        return documents >= self.docs_per_step if self.docs_per_step else rounds >= self.micro_batches


def _take(streams: Sequence[Iterator[Batch]]) -> tuple[list[Batch | None], Exception | None]:
    """Returns the next micro-batch of each stream, None for one that has ended, and the exception of one that raised."""
    taken: list[Any] = []
    try:
        for stream in streams:
            taken.append(next(stream, None))
    except Exception as failure:
        # Raised only after the other processes know; otherwise they would wait for this one forever.
        return taken, failure
    return taken, None


def _agree(
    taken: Sequence[HasDocuments | None],
    failure: Exception | None,
    all_reduce: Callable[[Int[np.ndarray, " values"]], Int[np.ndarray, " values"]] | None,
) -> tuple[int, bool]:
    """Returns the documents of this round over all processes, and whether any stream still had data."""
    present = [item for item in taken if item is not None]
    local = np.array(
        [sum(int(np.sum(item.num_documents)) for item in present), len(present), failure is not None], dtype=np.int64
    )
    documents, alive, failures = (int(value) for value in (local if all_reduce is None else all_reduce(local)))
    if failure is not None:
        raise failure
    if failures:
        raise RuntimeError(f"streams: data streams raised on {failures} other process(es) of this step")
    return documents, alive > 0
