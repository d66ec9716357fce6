"""Tasks from a file with one JSON object a line: {"prompt": "2+2=", "answer": "4"}.

The prompt is a string, or a list of messages with `role` and `content`, which only a model with a chat template can read.
Its key is `prompt`, `question` or `messages`, or the one that is named. The answer is a string or a number; where only a
part of it counts, as after "####" in GSM8K, a pattern says which.

A line may carry "metadata", with any value; it travels along as the example's source. Every other key is refused, because a
misspelt key would otherwise vanish without a word, unless `other_keys` asks for them: then the source is all that the line
holds in addition to prompt and answer.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from experiments.tasks.json_lines import METADATA, check_text, parse_lines, parse_object, parse_prompt
from experiments.tasks.numbers import only_number, same_number
from experiments.tasks.protocol import (
    HELD_OUT_ONE_IN,
    SPLITS,
    Example,
    Split,
    check_index,
    check_split,
    prompt_text,
    split_of,
)
from jaxlogp.errors import require

PROMPT_KEYS = ("prompt", "question", "messages")
VERIFIERS = ("exact", "numeric")
ENOUGH_LINES = 5 * HELD_OUT_ONE_IN


@dataclass(frozen=True)
class JsonlFormat:
    """Format of the lines of a task file, and the comparison of answers."""

    prompt_key: str | None = None
    """Key of the prompt, a text or a list of messages with role and content. None: prompt, question or messages."""
    answer_key: str = "answer"
    """Key of the answer."""
    answer_pattern: str | None = None
    """Regular expression with one group, found once in every answer; the group is the answer. For GSM8K '#### (.+)'."""
    other_keys: bool = False
    """Accept further keys in a line, which become the example's source; otherwise they are refused."""
    verifier: str = "exact"
    """Comparison of answers: exact (equal up to white space), or numeric (the only number of both, as exact rationals)."""
    max_text_bytes: int = 4096
    """Longest prompt, and longest answer, in bytes of UTF-8. Every row has memory for the longest one of the file."""

    def check(self) -> None:
        """Raises ValueError for an option out of range."""
        require(self.verifier in VERIFIERS, "--data.verifier", f"one of {', '.join(VERIFIERS)}", repr(self.verifier))
        require(self.max_text_bytes >= 1, "--data.max-text-bytes", "at least 1", self.max_text_bytes)
        if self.answer_pattern is None:
            return
        option, expected = "--data.answer-pattern", "a regular expression with one group"
        try:
            groups = re.compile(self.answer_pattern).groups
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{option}: expected {expected}, got {self.answer_pattern!r}: {error}") from None
        require(groups == 1, option, expected, f"{groups} groups in {self.answer_pattern!r}")

    def require_default(self) -> None:
        """Raises ValueError for an option that is not the default, where there is no file."""
        for each in fields(JsonlFormat):
            option, value = f"--data.{each.name.replace('_', '-')}", getattr(self, each.name)
            require(value == each.default, option, "no value with a task other than jsonl:PATH", value)

    def parse(self, line: bytes) -> Example:
        """Returns the example of a line; the message of its ValueError is the reason alone."""
        record = parse_object(line)
        prompt_key = self._prompt_key(record)
        known = (prompt_key, self.answer_key, METADATA)
        rest = {key: value for key, value in record.items() if key not in known[:2]}
        unknown = sorted(set(record) - set(known))
        if unknown and not self.other_keys:
            raise ValueError(f"unknown key {unknown[0]!r}; a line has {', '.join(known)}, or --data.other-keys")
        if self.answer_key not in record:
            raise ValueError(f"missing key {self.answer_key!r}")
        prompt, answer = parse_prompt(prompt_key, record[prompt_key]), self._answer(record[self.answer_key])
        self._check_length(prompt_key, prompt_text(prompt))
        self._check_length(self.answer_key, answer)
        return Example(prompt, answer, rest if self.other_keys else rest.get(METADATA))

    def _check_length(self, key: str, text: str) -> None:
        length = len(text.encode())
        if length > self.max_text_bytes:
            raise ValueError(
                f"{key!r} has {length} bytes, more than --data.max-text-bytes {self.max_text_bytes}; memory grows with it"
            )

    def _prompt_key(self, record: dict[str, Any]) -> str:
        keys = PROMPT_KEYS if self.prompt_key is None else (self.prompt_key,)
        found = [key for key in keys if key in record]
        if not found:
            raise ValueError(f"missing key {' or '.join(map(repr, keys))}")
        if len(found) > 1:
            raise ValueError(
                f"keys {' and '.join(map(repr, found))} in one line; --data.prompt-key says which is the prompt"
            )
        return found[0]

    def _answer(self, value: Any) -> str:
        if isinstance(value, int | float) and not isinstance(value, bool):
            # As JSON writes it: 42, 0.5.
            value = json.dumps(value)
        check_text(self.answer_key, value)
        if self.answer_pattern is not None:
            found = re.findall(self.answer_pattern, value)
            if len(found) != 1 or not found[0].strip():
                raise ValueError(
                    f"{self.answer_key!r} must match --data.answer-pattern {self.answer_pattern!r} once, "
                    f"got {len(found)} matches"
                )
            value = found[0].strip()
        if self.verifier == "numeric" and only_number(value) is None:
            raise ValueError(
                f"{self.answer_key!r} must hold exactly one number for a numeric verifier, got {value[:80]!r}"
            )
        return value


@dataclass(frozen=True)
class JsonlTask:
    """The examples of one file by split, in the order of its lines, with the sha256 of the file; `load_jsonl` makes it.

    `exact` says that no completion is right but the answer's own text; otherwise numbers are compared. The split hashes the
    prompt and not the path, so a moved or copied file keeps its split.
    """

    path: str
    examples: dict[Split, tuple[Example, ...]]
    exact: bool
    digest: str

    family: ClassVar[str] = "jsonl"
    alphabet: ClassVar[None] = None

    @property
    def name(self) -> str:
        """The absolute path after "jsonl:", so that a run finds its data from any folder."""
        return f"{self.family}:{self.path}"

    @property
    def max_prompt_tokens(self) -> int:
        return self._longest(lambda example: prompt_text(example.prompt))

    @property
    def max_answer_tokens(self) -> int:
        return self._longest(lambda example: example.answer)

    def _longest(self, text: Callable[[Example], str]) -> int:
        return max(len(text(example).encode()) for split in SPLITS for example in self.examples[split])

    def num_examples(self, split: Split) -> int:
        check_split(split)
        return len(self.examples[split])

    def example(self, index: int, split: Split) -> Example:
        check_index(self, index, split)
        return self.examples[split][index]

    def verify(self, example: Example, completion: str) -> float:
        if self.exact:
            return float(completion.strip() == example.answer.strip())
        return float(same_number(completion, example.answer))


def load_jsonl(path: str, form: JsonlFormat) -> JsonlTask:
    """Reads a file of examples, all of it, into memory: UTF-8, one JSON object a line.

    ValueError if an option is out of range; if the file cannot be read, is a pipe or a device, is too large or empty, or
    leaves a split empty; or if a line is not what it must be, with its number, counted from 1.
    """
    form.check()
    first_line: dict[str, int] = {}

    def parse(line: bytes) -> Example:
        example = form.parse(line)
        prompt, number = prompt_text(example.prompt), len(first_line) + 1
        if first_line.setdefault(prompt, number) != number:
            raise ValueError(f"duplicate prompt {prompt!r}, first on line {first_line[prompt]}")
        return example

    parsed, digest = parse_lines(path, parse)
    examples: dict[Split, list[Example]] = {split: [] for split in SPLITS}
    for example in parsed:
        examples[split_of(JsonlTask.family, prompt_text(example.prompt))].append(example)
    for split in SPLITS:
        if not examples[split]:
            raise ValueError(
                f"file {path}: expected examples in both splits, got {len(parsed)} lines and none of them {split}; "
                f"a hash holds out about one prompt in {HELD_OUT_ONE_IN}, so {ENOUGH_LINES} lines or more will do"
            )
    divided = {split: tuple(examples[split]) for split in SPLITS}
    return JsonlTask(str(Path(path).resolve()), divided, form.verifier == "exact", digest)
