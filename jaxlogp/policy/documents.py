"""Documents packed into rows of a fixed shape: next-token targets, document index, label counts, padding.

Every per-token array is indexed by the predicting position t of its row: `targets[t]` is the token at t + 1 of the same
document, `mask[t]` tells whether this target is a label, and `old_log_probs[t]` belongs to it. So the last token of a
document has no target, its first token is never a target, and a document of one token has no label at all.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxlogp._arrays import INT32_MAX, AnyArray
from jaxlogp.errors import describe, is_integer, is_number, require, require_flags
from jaxlogp.head.support.ids import PADDING_ID, Support

PADDING_SEGMENT = -1
SAMPLER_COLUMN = "sampler_log_probs"
# Names of attributes that loss and packing read, which no further column may have.
_LOSS_INPUTS = ("old_log_probs", "advantages", SAMPLER_COLUMN)
# By dtype: the unsigned dtype that its bits are read as, and the largest token id.
_LARGEST_ID = {
    np.dtype(f"{kind}{size}"): (np.dtype(f"u{size}"), min(int(np.iinfo(f"{kind}{size}").max), INT32_MAX))
    for kind in "iu"
    for size in (1, 2, 4, 8)
}


@dataclass(frozen=True, eq=False)
class Document:
    """Tokens, of which a mask says which are labels: those that the policy drew, or that supervised training wants.

    Prompts, user turns, tool output and everything else that the policy did not draw are context. One completion of one
    prompt is the simplest case (`of_completion`); `Trajectory` builds documents of several turns.

    Attributes:
        tokens: int [length], all token ids, with the ids that were drawn: no text of a document is tokenized again.
        labels: bool [length], True where the token is a label. The first token is none, because nothing predicts it.
        advantages: the advantage of every label, or [labels], one of each.
        sampler_log_probs: [labels], log-prob of each label under the sampler, in nats; None for supervised documents.
        old_log_probs: [labels], log-probs that ratios are taken to, in nats; None means those of the sampler.
        reward: the reward, for the metrics.
        versions: number of documents that the trainer had seen when the weights were taken that the labels were drawn with;
            one number, or [labels].
        support: the ids that each label was drawn from, on the host and without padding, where the sampler recorded them:
            all log-probs of the document are then over these. None for the whole vocabulary.
        columns: further values of each label by name, [labels] each, such as "ref_log_probs".

    Raises:
        ValueError: if a length, dtype or range is wrong, or a value is not finite.

    Example:
        >>> document = Document(np.array([5, 6, 7]), np.array([False, True, False]), 1.0, np.array([-0.5]))
        >>> document.num_labels, document.label_positions.tolist()
        (1, [1])
    """

    tokens: Integer[np.ndarray, " length"]
    labels: Bool[np.ndarray, " length"]
    advantages: float | Float[np.ndarray, " labels"] = 0.0
    sampler_log_probs: Float[np.ndarray, " labels"] | None = None
    old_log_probs: Float[np.ndarray, " labels"] | None = None
    reward: float = 0.0
    versions: int | Integer[np.ndarray, " labels"] = 0
    support: Support | None = None
    columns: Mapping[str, Float[np.ndarray, " labels"]] = field(default_factory=dict)
    label_positions: Integer[np.ndarray, " labels"] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # A trainer makes hundreds of these per step, so messages are composed only where something is wrong.
        tokens, labels = np.asarray(self.tokens), np.asarray(self.labels)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "labels", labels)
        _check_tokens(tokens)
        if labels.shape != tokens.shape or labels.dtype != np.bool_:
            require(False, "labels", f"booleans of shape {tokens.shape}", describe(labels))
        if labels[0]:
            require(False, "labels", "False for the first token, which nothing predicts", True)
        object.__setattr__(self, "label_positions", np.flatnonzero(labels))
        for name in ("sampler_log_probs", "old_log_probs"):
            self._check_log_probs(name)
        for name, values in self.columns.items():
            if name in _LOSS_INPUTS:
                require(False, "columns", f"names other than {', '.join(_LOSS_INPUTS)}", repr(name))
            self._check_column(name, values)
        self._check_numbers()
        if self.support is not None:
            self._check_support(self.support)

    @classmethod
    def of_completion(
        cls,
        prompt: Integer[AnyArray, " prompt"] | Sequence[int],
        completion: Integer[AnyArray, " completion"] | Sequence[int],
        log_probs: Float[AnyArray, " completion"] | Sequence[float] | None = None,
        *,
        support: Support | None = None,
        **rest: Any,
    ) -> "Document":
        """Makes the document of one completion, whose tokens are the labels.

        Args:
            prompt: int [prompt], token ids. Without any, the first token of the completion is no label.
            completion: int [completion], token ids.
            log_probs: [completion], log-probs of the completion under the sampler, in nats, or None.
            support: the ids that each token of the completion was drawn from, or None.
            rest: further attributes of `Document`.

        Raises:
            ValueError: as `Document`.

        Example:
            >>> Document.of_completion([5, 6], [7, 8], [-0.5, -0.1], advantages=1.0).labels.tolist()
            [False, False, True, True]
        """
        parts = np.asarray(prompt), np.asarray(completion)
        tokens = np.concatenate([part for part in parts if part.size] or parts)
        labels = np.arange(tokens.size) >= max(parts[0].size, 1)
        if log_probs is not None:
            log_probs = np.asarray(log_probs)
            expected = f"shape {parts[1].shape} of the completion"
            require(log_probs.shape == parts[1].shape, "log_probs", expected, log_probs.shape)
            log_probs = log_probs[parts[1].size - int(labels.sum()) :]
        if support is not None:
            _require_support(support)
            expected = f"shape {parts[1].shape} of the completion"
            require(support.counts.shape == parts[1].shape, "support.counts", expected, support.counts.shape)
            support = support.part(parts[1].size - int(labels.sum()), parts[1].size)
        return cls(tokens, labels, sampler_log_probs=log_probs, support=support, **rest)

    @property
    def num_labels(self) -> int:
        """Number of labels."""
        return self.label_positions.size

    @property
    def ratio_log_probs(self) -> Float[np.ndarray, " labels"] | None:
        """Log-probs that ratios are taken to: `old_log_probs`, or those of the sampler; None for supervised documents."""
        return self.sampler_log_probs if self.old_log_probs is None else self.old_log_probs

    def _check_log_probs(self, name: str) -> None:
        if getattr(self, name) is None:
            return
        values = np.asarray(getattr(self, name))
        object.__setattr__(self, name, values)
        self._check_column(name, values)
        if values.size and np.maximum.reduce(values) > 64 * float(jnp.finfo(values.dtype).eps):
            require(False, name, "log-probs of at most 0", values.max())

    def _check_column(self, name: str, values: np.ndarray) -> None:
        if not hasattr(values, "shape"):
            require(False, name, f"an array of shape {self.label_positions.shape} of the labels", describe(values))
        if values.shape != self.label_positions.shape:
            require(False, name, f"shape {self.label_positions.shape} of the labels", values.shape)
        if values.dtype.kind != "f":
            require(False, name, "a floating dtype", values.dtype)
        if not np.logical_and.reduce(np.isfinite(values)):
            require(False, name, "finite values", values[~np.isfinite(values)][:1])

    def _check_support(self, support: Support) -> None:
        _require_support(support)
        labels = self.label_positions.shape
        ids, counts = np.asarray(support.ids), np.asarray(support.counts)
        if counts.shape != labels or counts.dtype.kind not in "iu" or not (counts > 0).all():
            require(
                False, "support.counts", f"integers of at least 1, of shape {labels} of the labels", describe(counts)
            )
        total = int(counts.sum())
        if ids.shape != (total,) or ids.dtype.kind not in "iu" or (ids < 0).any():
            require(False, "support.ids", f"{total} ids of at least 0, as many as the counts say", describe(ids))
        label = np.repeat(np.arange(counts.size), counts)
        drawn = self.tokens[self.label_positions]
        times = np.bincount(label[ids == drawn[label]], minlength=counts.size)
        if (times != 1).any():
            wrong = int(np.argmax(times != 1))
            found = f"{drawn[wrong]} {times[wrong]} times at position {self.label_positions[wrong]}"
            require(False, "support.ids", "the token of each label once among its ids", found)

    def _check_numbers(self) -> None:
        for name in ("advantages", "reward"):
            value = getattr(self, name)
            if name == "advantages" and getattr(value, "ndim", 0):
                self._check_column(name, value)
            elif not (is_number(value) or getattr(value, "ndim", None) == 0) or not math.isfinite(value):
                require(False, name, "a finite number", describe(value))
        versions = np.asarray(self.versions)
        if versions.dtype.kind not in "iu" or versions.shape not in ((), self.label_positions.shape):
            expected = f"an integer, or integers of shape {self.label_positions.shape} of the labels"
            require(False, "versions", expected, describe(self.versions))
        if versions.size and not 0 <= versions.min() <= versions.max() <= INT32_MAX:
            require(False, "versions", f"integers in [0, {INT32_MAX}]", describe(self.versions))


def _require_support(support: object) -> None:
    if not isinstance(support, Support):
        require(False, "support", "a Support, or None", describe(support))


class Trajectory:
    """Builds the `Document` of several turns: what the policy drew are labels, everything else is context.

    Args:
        context: token ids of the first prompt.

    Attributes:
        tokens: all token ids so far, which the policy continues.

    Example:
        >>> game = Trajectory([5, 6])
        >>> game.add_drawn([7], [-0.5])
        >>> game.add_context([8, 9])
        >>> game.add_drawn([10, 11], [-0.1, -0.2])
        >>> game.document(advantages=1.0).labels.astype(int).tolist()
        [0, 0, 1, 0, 0, 1, 1]
    """

    def __init__(self, context: Sequence[int] | Integer[AnyArray, " context"] = ()) -> None:
        self.tokens: list[int] = []
        self._labels: list[bool] = []
        self._log_probs: list[float] = []
        self._supports: list[Support | None] = []
        self.add_context(context)

    def add_context(self, ids: Sequence[int] | Integer[AnyArray, " ids"]) -> None:
        """Adds tokens that the policy did not draw."""
        self._add(ids, False)

    def add_drawn(
        self,
        ids: Sequence[int] | Integer[AnyArray, " ids"],
        log_probs: Sequence[float] | Float[AnyArray, " ids"],
        support: Support | None = None,
    ) -> None:
        """Adds tokens that the policy drew, with their log-probs in nats, and the ids that each was drawn from if recorded.

        Raises:
            ValueError: if their numbers differ, or if there is no context before them.
        """
        require(len(self.tokens) > 0, "ids", "context before the first token that is drawn", "none")
        number = _ids(ids).size
        found = len(log_probs) if np.ndim(log_probs) == 1 else describe(log_probs)
        require(found == number, "log_probs", f"{number} numbers, one for each id", found)
        if support is not None:
            _require_support(support)
        if self._supports:
            known = self._supports[0] is not None
            expected = "one, as for the tokens drawn before" if known else "None, as for the tokens drawn before"
            require((support is not None) == known, "support", expected, describe(support))
        self._add(ids, True)
        self._log_probs += np.asarray(log_probs, np.float32).tolist()
        self._supports.append(support)

    def document(self, **rest: Any) -> Document:
        """Makes the document; `rest` are further attributes of it."""
        tokens, labels = np.array(self.tokens, np.int32), np.array(self._labels, bool)
        log_probs = np.array(self._log_probs, np.float32)
        supports = [each for each in self._supports if each is not None]
        support = Support.concatenate(supports) if supports else None
        return Document(tokens, labels, sampler_log_probs=log_probs, support=support, **rest)

    def _add(self, ids: Sequence[int] | Integer[AnyArray, " ids"], drawn: bool) -> None:
        array = _ids(ids)
        self.tokens += array.tolist()
        self._labels += [drawn] * array.size


def _ids(ids: Sequence[int] | Integer[AnyArray, " ids"]) -> np.ndarray:
    array = np.asarray(ids)
    is_ids = array.ndim == 1 and (array.size == 0 or np.issubdtype(array.dtype, np.integer))
    require(is_ids, "ids", "a sequence of token ids, which are integers", describe(ids))
    if array.size and not 0 <= array.min() <= array.max() <= INT32_MAX:
        require(False, "ids", f"token ids in [0, {INT32_MAX}]", (int(array.min()), int(array.max())))
    return array


def _check_tokens(tokens: np.ndarray) -> None:
    if tokens.ndim != 1 or not tokens.size:
        require(False, "tokens", "shape [length] with length > 0", tokens.shape)
    if tokens.dtype not in _LARGEST_ID:
        require(False, "tokens", "an integer dtype", tokens.dtype)
    unsigned, largest = _LARGEST_ID[tokens.dtype]
    # Read as unsigned, a negative id is larger than any other.
    if np.maximum.reduce(tokens.view(unsigned)) > largest:
        require(False, "tokens", f"ids in [0, {largest}]", (tokens.min(), tokens.max()))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "tokens",
        "targets",
        "positions",
        "document_ids",
        "segment_ids",
        "mask",
        "per_token",
        "versions",
        "support",
        "rewards",
        "model_versions",
        "num_documents",
    ],
    meta_fields=[],
)
@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Packed documents of one data rank; the shapes do not depend on the documents.

    Micro-batches of several ranks are stacked along a new first dimension.

    Attributes:
        tokens: int32 [rows, row_length], model inputs; the padding id where there is no document.
        targets: int32 [rows, row_length], next token within the document; 0 where there is none.
        positions: int32 [rows, row_length], position within the document; 0 in the padding.
        document_ids: int32 [rows, row_length], index of the document in this micro-batch, never decreasing in row-major
            order; padding has the id of the last document before it.
        segment_ids: int32 [rows, row_length], `document_ids` with -1 in the padding: a token may attend only to tokens of
            its own row and segment.
        mask: bool [rows, row_length], True where the target is a label.
        per_token: inputs of a loss at each label, by name, fp32 [rows, row_length], 0 where masked: "old_log_probs", the
            log-probs in nats that ratios are taken to, NaN for supervised documents; "advantages"; and the documents'
            further columns.
        versions: int32 [rows, row_length], version of the weights that each label was drawn with; 0 where masked.
        support: the ids that each label was drawn from, counts [rows, row_length]; None for the whole vocabulary.
        rewards: fp32 [rows * row_length], reward of each document, in order; 0 after the last one.
        model_versions: int32 [rows * row_length], oldest version of each document, in order; 0 after the last one.
        num_documents: int32 scalar, number of documents.
    """

    tokens: Int[AnyArray, "*ranks rows row_length"]
    targets: Int[AnyArray, "*ranks rows row_length"]
    positions: Int[AnyArray, "*ranks rows row_length"]
    document_ids: Int[AnyArray, "*ranks rows row_length"]
    segment_ids: Int[AnyArray, "*ranks rows row_length"]
    mask: Bool[AnyArray, "*ranks rows row_length"]
    per_token: dict[str, Float[AnyArray, "*ranks rows row_length"]]
    versions: Int[AnyArray, "*ranks rows row_length"]
    support: Support | None
    rewards: Float[AnyArray, "*ranks documents"]
    model_versions: Int[AnyArray, "*ranks documents"]
    num_documents: Int[AnyArray, "*ranks"]

    @property
    def document_mask(self) -> Bool[Array, "*ranks documents"]:
        """True for the entries of `rewards` and `model_versions` that belong to a document."""
        shape = self.rewards.shape
        index = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
        return index < self.num_documents[..., None]


def pack_documents(
    documents: Iterable[Document],
    *,
    rows: int,
    row_length: int,
    pad_id: int = 0,
    share_rows: bool = True,
    columns: Sequence[str] = (),
    support_capacity: int | None = None,
) -> tuple[MicroBatch, tuple[Document, ...]]:
    """Packs documents in their order, as many as fit, and never splits one.

    A document that does not fit after the previous one starts the next row. The first that fits nowhere, or whose support
    has no room, ends the micro-batch, so the order is kept and every document is either packed or returned.

    Args:
        documents: the documents; if there are none, the result is all padding.
        rows: number of rows.
        row_length: tokens per row.
        pad_id: token id of the padding.
        share_rows: whether several documents may share a row; False gives each its own row.
        columns: names of the documents' further columns; every document must have exactly these. "sampler_log_probs" asks
            for the attribute of that name.
        support_capacity: number of ids for which the micro-batch's support has room; None for log-probs of the whole
            vocabulary. Every document, or none, has a support.

    Returns:
        The micro-batch, as NumPy arrays, and the documents that did not fit.

    Raises:
        ValueError: if a packed document is longer than a row, has other columns, a support where none is packed or none
            where it is, or a support beyond the capacity, or if a size is not positive.

    Example:
        >>> import numpy as np
        >>> long = Document.of_completion([5], [6, 7], [-0.5, -0.1], advantages=1.0)
        >>> short = Document.of_completion([8], [9], [-0.3], advantages=-1.0)
        >>> batch, rest = pack_documents([long, short, long], rows=1, row_length=6)
        >>> batch.tokens.tolist(), batch.document_ids.tolist(), len(rest)
        ([[5, 6, 7, 8, 9, 0]], [[0, 0, 0, 1, 1, 1]], 1)
        >>> batch.targets.tolist(), batch.mask.astype(int).tolist()
        ([[6, 7, 0, 9, 0, 0]], [[1, 1, 0, 1, 0, 0]])
    """
    for name, value in {"rows": rows, "row_length": row_length}.items():
        require(is_integer(value) and value > 0, name, "an integer above 0", repr(value))
    good = is_integer(pad_id) and 0 <= pad_id <= INT32_MAX
    require(good, "pad_id", f"a token id of at least 0 and at most {INT32_MAX}", repr(pad_id))
    require(not isinstance(columns, str), "columns", "a sequence of names", repr(columns))
    require_flags(share_rows=share_rows)
    given = support_capacity
    require(
        given is None or (is_integer(given) and given > 0), "support_capacity", "an integer above 0, or None", given
    )
    documents = tuple(documents)
    for index, document in enumerate(documents):
        if not isinstance(document, Document):
            require(False, f"documents[{index}]", "a Document", describe(document))
    starts = row_starts(
        documents, rows=rows, row_length=row_length, share_rows=share_rows, support_capacity=support_capacity
    )
    packed, rest = documents[: len(starts)], documents[len(starts) :]
    batch = _empty(rows, row_length, pad_id, columns, support_capacity)
    for index, (document, (row, start)) in enumerate(zip(packed, starts, strict=True)):
        if document.columns.keys() != set(columns) - {SAMPLER_COLUMN}:
            require(False, "columns", f"{sorted(document.columns)} of document {index}", sorted(columns))
        _place(batch, index, document, row, start)
    if batch.support is not None:
        ids = Support.concatenate([document.support for document in packed if document.support is not None]).ids
        batch.support.ids[: ids.size] = ids
    # Padding has the id of the document before it; the first token of a batch without documents has none before it.
    newest = np.maximum.accumulate(batch.segment_ids.reshape(-1))
    batch.document_ids[...] = np.maximum(newest, 0).reshape(rows, row_length)
    batch.num_documents[...] = len(packed)
    return batch, rest


def row_starts(
    documents: Iterable[Document],
    *,
    rows: int,
    row_length: int,
    share_rows: bool = True,
    support_capacity: int | None = None,
) -> list[tuple[int, int]]:
    """Returns the row and first position at which `pack_documents`, of the same arguments, puts documents that fit.

    Raises:
        ValueError: as `pack_documents`, but for columns.

    Example:
        >>> documents = [Document.of_completion([5], [6] * (length - 1)) for length in (3, 2, 3, 6, 1)]
        >>> row_starts(documents, rows=2, row_length=6)
        [(0, 0), (0, 3), (1, 0)]
    """
    starts, row, end, ids = [], 0, 0, 0
    for index, document in enumerate(documents):
        length = document.tokens.size
        if length > row_length:
            require(False, "documents", f"at most {row_length} tokens each", f"{length} in document {index}")
        ids += _support_size(index, document, support_capacity)
        if end + length > row_length:
            row, end = row + 1, 0
        if row == rows or (support_capacity is not None and ids > support_capacity):
            break
        starts.append((row, end))
        end += length if share_rows else row_length
    return starts


def _support_size(index: int, document: Document, capacity: int | None) -> int:
    """Returns the number of ids that a document adds to a micro-batch's support."""
    if (document.support is None) != (capacity is None):
        expected = "documents without a support" if capacity is None else "a support in every document"
        require(False, "documents", expected, f"{'none' if document.support is None else 'one'} in document {index}")
    if document.support is None or capacity is None:
        return 0
    size = document.support.ids.size
    if size > capacity:
        require(False, "documents", f"at most {capacity} ids in each support", f"{size} in document {index}")
    return size


def _empty(rows: int, row_length: int, pad_id: int, columns: Sequence[str], support_capacity: int | None) -> MicroBatch:
    shape = (rows, row_length)
    capacity = rows * row_length
    support = None
    if support_capacity is not None:
        support = Support(np.full(support_capacity, PADDING_ID, np.int32), np.zeros(shape, np.int32))
    return MicroBatch(
        tokens=np.full(shape, pad_id, np.int32),
        targets=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        document_ids=np.zeros(shape, np.int32),
        segment_ids=np.full(shape, PADDING_SEGMENT, np.int32),
        mask=np.zeros(shape, np.bool_),
        per_token={name: np.zeros(shape, np.float32) for name in ("old_log_probs", "advantages", *columns)},
        versions=np.zeros(shape, np.int32),
        support=support,
        rewards=np.zeros(capacity, np.float32),
        model_versions=np.zeros(capacity, np.int32),
        num_documents=np.zeros((), np.int32),
    )


def _place(batch: MicroBatch, index: int, document: Document, row: int, start: int) -> None:
    length = document.tokens.size
    end = start + length
    batch.tokens[row, start:end] = document.tokens
    batch.targets[row, start : end - 1] = document.tokens[1:]
    batch.positions[row, start:end] = np.arange(length)
    batch.segment_ids[row, start:end] = index
    # A label belongs to the position that predicts it, the one before it.
    labels = start + document.label_positions - 1
    batch.mask[row, labels] = True
    values = {"old_log_probs": document.ratio_log_probs, SAMPLER_COLUMN: document.sampler_log_probs}
    values |= {"advantages": document.advantages, **document.columns}
    for name, packed in batch.per_token.items():
        packed[row, labels] = np.nan if values[name] is None else values[name]
    batch.versions[row, labels] = document.versions
    if batch.support is not None and document.support is not None:
        batch.support.counts[row, labels] = document.support.counts
    batch.rewards[index] = document.reward
    versions = np.asarray(document.versions)
    batch.model_versions[index] = versions.min() if versions.size else 0
