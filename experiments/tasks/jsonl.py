"""Tasks from a file with one JSON object a line: {"prompt": "2+2=", "answer": "4"}.

A line may carry a third key, "metadata", with any value; it travels along as the example's source. Every other key is
refused, because a misspelt key would otherwise vanish without a word.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from experiments.tasks.protocol import HELD_OUT_ONE_IN, SPLITS, Example, Split, check_request, split_of

TEXT_KEYS = ("prompt", "answer")
KEYS = (*TEXT_KEYS, "metadata")
ENOUGH_LINES = 5 * HELD_OUT_ONE_IN


@dataclass(frozen=True)
class JsonlTask:
    """The examples of one file, in the order of its lines; make it with `load_jsonl`.

    The split hashes the prompt and not the path, so a moved or copied file keeps its split.

    Args:
        path: where the examples came from.
        examples: the examples of each split.
    """

    path: str
    examples: dict[Split, tuple[Example, ...]]

    family: ClassVar[str] = "jsonl"
    alphabet: ClassVar[None] = None

    @property
    def name(self) -> str:
        """The path as it was given, behind "jsonl:"."""
        return f"{self.family}:{self.path}"

    @property
    def max_prompt_tokens(self) -> int:
        """Length of the longest prompt of the file in UTF-8 bytes."""
        return max(len(example.prompt.encode()) for split in SPLITS for example in self.examples[split])

    @property
    def max_answer_tokens(self) -> int:
        """Length of the longest answer of the file in UTF-8 bytes."""
        return max(len(example.answer.encode()) for split in SPLITS for example in self.examples[split])

    def num_examples(self, split: Split) -> int:
        """Number of lines that belong to the split."""
        check_request(0, split)
        return len(self.examples[split])

    def example(self, index: int, split: Split) -> Example:
        """See `Task.example`; going round the file again is the caller's business."""
        check_request(index, split)
        examples = self.examples[split]
        if index >= len(examples):
            raise ValueError(f"index: expected less than {len(examples)} ({split} of {self.path}), got {index}")
        return examples[index]

    def reward(self, example: Example, completion: str) -> float:
        """1.0 when the completion is the answer, up to white space around either."""
        return float(completion.strip() == example.answer.strip())


def load_jsonl(path: str) -> JsonlTask:
    """Reads a file of examples, all of it, into memory.

    Args:
        path: a UTF-8 file, one JSON object a line.

    Returns:
        The task.

    Raises:
        ValueError: the file cannot be read, is empty, or leaves a split empty; or a line is not what it must be, with
            the number of the line, counted from 1.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"task file {path}: expected a readable file, got {error.strerror or error}") from error
    if lines[-1] == b"":
        lines.pop()
    if not lines:
        raise ValueError(f"task file {path}: expected one JSON object a line, got an empty file")
    examples: dict[Split, list[Example]] = {split: [] for split in SPLITS}
    first_line: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        try:
            example = _parse(line)
            if example.prompt in first_line:
                raise ValueError(f"duplicate prompt {example.prompt!r}, first on line {first_line[example.prompt]}")
        except ValueError as error:
            raise ValueError(f"task file {path}, line {number}: {error}") from error
        first_line[example.prompt] = number
        examples[split_of(JsonlTask.family, example.prompt)].append(example)
    for split in SPLITS:
        if not examples[split]:
            raise ValueError(
                f"task file {path}: expected examples in both splits, got {len(lines)} lines and none of them "
                f"{split}; a hash holds out about one prompt in {HELD_OUT_ONE_IN}, so {ENOUGH_LINES} lines or more "
                "will do"
            )
    return JsonlTask(path, {split: tuple(examples[split]) for split in SPLITS})


def _parse(line: bytes) -> Example:
    """One example from one line; the message of its ValueError is the reason alone."""
    try:
        record = json.loads(line.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError("invalid JSON: nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    unknown = sorted(set(record) - set(KEYS))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; a line has {', '.join(KEYS)}")
    for key in TEXT_KEYS:
        if key not in record:
            raise ValueError(f"missing key {key!r}")
        _check_text(key, record[key])
    return Example(record["prompt"], record["answer"], record.get("metadata"))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"key {key!r} occurs twice in one object")
    return dict(pairs)


def _check_text(key: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be a string, got {type(value).__name__}")
    # An empty answer would reward the model for saying nothing.
    if not value.strip():
        raise ValueError(f"{key!r} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{key!r} holds half of a surrogate pair at character {error.start}") from error
