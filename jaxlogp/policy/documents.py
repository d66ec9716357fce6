"""Documents packed into rows of a fixed shape: next-token targets, document index, label counts, padding.

Every per-token array is indexed by the predicting position t of its row: `targets[t]` is the token at t + 1 of the same
document, `mask[t]` tells whether this target is a label, and `old_log_probs[t]` belongs to it. So the last token of a
document has no target, its first token is never a target, and a document of one token has no label at all.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped

from jaxlogp._arrays import AnyArray
from jaxlogp.errors import describe, require

PADDING_SEGMENT = -1
_INT32_MAX = int(np.iinfo(np.int32).max)
# By dtype: the unsigned dtype that its bits are read as, and the largest token id.
_LARGEST_ID = {
    np.dtype(f"{kind}{size}"): (np.dtype(f"u{size}"), min(int(np.iinfo(f"{kind}{size}").max), _INT32_MAX))
    for kind in "iu"
    for size in (1, 2, 4, 8)
}


@dataclass(frozen=True, eq=False)
class Document:
    """One prompt with one sampled completion.

    Attributes:
        tokens: int [length], prompt and completion.
        prompt_length: number of prompt tokens; the rest is the completion, whose tokens are the labels.
        old_log_probs: [length - prompt_length], the sampler's log-prob of each completion token, in nats. Without a
            prompt the first entry is not used: nothing predicts the first token of a document.
        advantage: advantage of every token of the completion.
        reward: reward of the document, for the metrics.
        model_version: number of documents that the trainer had seen when the sampler's weights were taken, for the
            metrics.
        columns: further values of each completion token by name, [length - prompt_length] each, such as "ref_log_probs".

    Raises:
        ValueError: if a length, dtype or range is wrong, or a value is not finite.
    """

    tokens: Integer[np.ndarray, " length"]
    prompt_length: int
    old_log_probs: Float[np.ndarray, " completion"]
    advantage: float
    reward: float = 0.0
    model_version: int = 0
    columns: Mapping[str, Float[np.ndarray, " completion"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A trainer makes hundreds of these per step, so messages are composed only where something is wrong.
        tokens, old = np.asarray(self.tokens), np.asarray(self.old_log_probs)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "old_log_probs", old)
        if tokens.ndim != 1 or not tokens.size:
            require(False, "tokens", "shape [length] with length > 0", tokens.shape)
        if tokens.dtype not in _LARGEST_ID:
            require(False, "tokens", "an integer dtype", tokens.dtype)
        unsigned, largest = _LARGEST_ID[tokens.dtype]
        # Read as unsigned, a negative id is larger than any other.
        if np.maximum.reduce(tokens.view(unsigned)) > largest:
            require(False, "tokens", f"ids in [0, {largest}]", (tokens.min(), tokens.max()))
        if not 0 <= self.prompt_length <= tokens.size:
            require(False, "prompt_length", f"a number in [0, {tokens.size}]", self.prompt_length)
        self._check_column("old_log_probs", old)
        if old.size and np.maximum.reduce(old) > 64 * float(jnp.finfo(old.dtype).eps):
            require(False, "old_log_probs", "log-probs of at most 0", old.max())
        for name, values in self.columns.items():
            if name in ("old_log_probs", "advantages"):
                require(False, "columns", "names other than old_log_probs and advantages", repr(name))
            self._check_column(name, values)
        self._check_numbers()

    @property
    def first_label(self) -> int:
        """Position of the first label: the completion's first token, or its second if there is no prompt."""
        return max(self.prompt_length, 1)

    def at_labels(self, column: Shaped[np.ndarray, " completion"]) -> Shaped[np.ndarray, " labels"]:
        """Returns the entries of a completion's column that belong to labels."""
        return column[self.first_label - self.prompt_length :]

    def _check_column(self, name: str, values: np.ndarray) -> None:
        if values.shape != (completion := (self.tokens.size - self.prompt_length,)):
            require(False, name, f"shape {completion} of the completion", values.shape)
        if values.dtype.kind != "f":
            require(False, name, "a floating dtype", values.dtype)
        if not np.logical_and.reduce(np.isfinite(values)):
            require(False, name, "finite values", values[~np.isfinite(values)][:1])

    def _check_numbers(self) -> None:
        for name in ("advantage", "reward"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) or getattr(value, "ndim", None) == 0) or not math.isfinite(value):
                require(False, name, "a finite number", describe(value))
        if not 0 <= self.model_version <= _INT32_MAX:
            require(False, "model_version", f"an integer in [0, {_INT32_MAX}]", self.model_version)


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
            sampler's log-prob of the target in nats; "advantages", the document's advantage; and the documents' further
            columns.
        rewards: fp32 [rows * row_length], reward of each document, in order; 0 after the last one.
        model_versions: int32 [rows * row_length], model version of each document, in order; 0 after the last one.
        num_documents: int32 scalar, number of documents.
    """

    tokens: Int[AnyArray, "*ranks rows row_length"]
    targets: Int[AnyArray, "*ranks rows row_length"]
    positions: Int[AnyArray, "*ranks rows row_length"]
    document_ids: Int[AnyArray, "*ranks rows row_length"]
    segment_ids: Int[AnyArray, "*ranks rows row_length"]
    mask: Bool[AnyArray, "*ranks rows row_length"]
    per_token: dict[str, Float[AnyArray, "*ranks rows row_length"]]
    rewards: Float[AnyArray, "*ranks documents"]
    model_versions: Int[AnyArray, "*ranks documents"]
    num_documents: Int[AnyArray, "*ranks"]

    @property
    def document_mask(self) -> Bool[Array, " documents"]:
        """True for the entries of `rewards` and `model_versions` that belong to a document."""
        return jnp.arange(self.rewards.shape[0], dtype=jnp.int32) < self.num_documents


def pack_documents(
    documents: Iterable[Document],
    *,
    rows: int,
    row_length: int,
    pad_id: int = 0,
    share_rows: bool = True,
    columns: Sequence[str] = (),
) -> tuple[MicroBatch, tuple[Document, ...]]:
    """Packs documents in their order, as many as fit, and never splits one.

    A document that does not fit after the previous one starts the next row. The first that fits nowhere ends the
    micro-batch, so the order is kept and every document is either packed or returned.

    Args:
        documents: the documents; if there are none, the result is all padding.
        rows: number of rows.
        row_length: tokens per row.
        pad_id: token id of the padding.
        share_rows: whether several documents may share a row; False gives each its own row.
        columns: names of the documents' further columns; every document must have exactly these.

    Returns:
        The micro-batch, as NumPy arrays, and the documents that did not fit.

    Raises:
        ValueError: if a packed document is longer than a row or has other columns, or a size is not positive.

    Example:
        >>> import numpy as np
        >>> long = Document(np.array([5, 6, 7]), 1, np.array([-0.5, -0.1]), advantage=1.0)
        >>> short = Document(np.array([8, 9]), 1, np.array([-0.3]), advantage=-1.0)
        >>> batch, rest = pack_documents([long, short, long], rows=1, row_length=6)
        >>> batch.tokens.tolist(), batch.document_ids.tolist(), len(rest)
        ([[5, 6, 7, 8, 9, 0]], [[0, 0, 0, 1, 1, 1]], 1)
        >>> batch.targets.tolist(), batch.mask.astype(int).tolist()
        ([[6, 7, 0, 9, 0, 0]], [[1, 1, 0, 1, 0, 0]])
    """
    require(rows > 0, "rows", "a number above 0", rows)
    require(row_length > 0, "row_length", "a number above 0", row_length)
    require(pad_id >= 0, "pad_id", "a token id of at least 0", pad_id)
    documents = tuple(documents)
    starts = row_starts((document.tokens.size for document in documents), rows, row_length, share_rows=share_rows)
    packed, rest = documents[: len(starts)], documents[len(starts) :]
    batch = _empty(rows, row_length, pad_id, columns)
    for index, (document, (row, start)) in enumerate(zip(packed, starts, strict=True)):
        if document.columns.keys() != set(columns):
            require(False, "columns", f"{sorted(document.columns)} of document {index}", sorted(columns))
        _place(batch, index, document, row, start)
    # Padding has the id of the document before it; the first token of a batch without documents has none before it.
    newest = np.maximum.accumulate(batch.segment_ids.reshape(-1))
    batch.document_ids[...] = np.maximum(newest, 0).reshape(rows, row_length)
    batch.num_documents[...] = len(packed)
    return batch, rest


def row_starts(lengths: Iterable[int], rows: int, row_length: int, *, share_rows: bool = True) -> list[tuple[int, int]]:
    """Returns the row and first position at which `pack_documents` puts documents of given lengths, as many as fit.

    Args:
        lengths: tokens of each document; read up to the first that fits nowhere.
        rows: number of rows.
        row_length: tokens per row.
        share_rows: whether several documents may share a row.

    Raises:
        ValueError: if a length exceeds a row.

    Example:
        >>> row_starts([3, 2, 3, 6, 1], rows=2, row_length=6)
        [(0, 0), (0, 3), (1, 0)]
    """
    starts, row, end = [], 0, 0
    for index, length in enumerate(lengths):
        if length > row_length:
            require(False, "documents", f"at most {row_length} tokens each", f"{length} in document {index}")
        if end + length > row_length:
            row, end = row + 1, 0
        if row == rows:
            break
        starts.append((row, end))
        end += length if share_rows else row_length
    return starts


def _empty(rows: int, row_length: int, pad_id: int, columns: Sequence[str]) -> MicroBatch:
    shape = (rows, row_length)
    capacity = rows * row_length
    return MicroBatch(
        tokens=np.full(shape, pad_id, np.int32),
        targets=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        document_ids=np.zeros(shape, np.int32),
        segment_ids=np.full(shape, PADDING_SEGMENT, np.int32),
        mask=np.zeros(shape, np.bool_),
        per_token={name: np.zeros(shape, np.float32) for name in ("old_log_probs", "advantages", *columns)},
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
    labels = slice(start + document.first_label - 1, end - 1)
    batch.mask[row, labels] = True
    for name, values in {"old_log_probs": document.old_log_probs, **document.columns}.items():
        batch.per_token[name][row, labels] = document.at_labels(values)
    batch.per_token["advantages"][row, labels] = document.advantage
    batch.rewards[index] = document.reward
    batch.model_versions[index] = document.model_version
