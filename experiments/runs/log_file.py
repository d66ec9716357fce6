"""Logs of one JSON object a line, and what a checkpoint remembers of them.

A mark is the length of a log and the sha256 of its content at the time of a checkpoint. A run that resumes from the
checkpoint finds exactly this content, or is refused; later lines are cut off once nothing else can refuse the run.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.runs.config_file import to_json
from experiments.runs.files import open_file, write_whole
from jaxlogp.errors import require


@dataclass(frozen=True)
class LogMark:
    """The first `size` bytes of a log."""

    size: int
    sha256: str


EMPTY = LogMark(0, hashlib.sha256().hexdigest())


@dataclass(frozen=True)
class LogMarks:
    """What a checkpoint remembers of metrics.jsonl and samples.jsonl."""

    metrics: LogMark = EMPTY
    samples: LogMark = EMPTY


class LogFile:
    """A log that only this process appends to (it holds the run's lock); `kept` is its content up to the mark, until `cut`.

    ValueError for anything but a file, and for another content up to the mark.
    """

    def __init__(self, path: Path, mark: LogMark = EMPTY) -> None:
        self.path = path
        self._stream = open_file(path)
        try:
            content = self._stream.readall()
            self.kept, rest = content[: mark.size], content[mark.size :]
            self._sha256 = hashlib.sha256(self.kept)
            expected = f"the first {mark.size} bytes as they were when the checkpoint was saved"
            require(len(self.kept) == mark.size, str(path), expected, f"a file that ends after {len(content)}")
            require(self._sha256.hexdigest() == mark.sha256, str(path), expected, "a change before this mark")
            self._size = self._stream.seek(mark.size)
            self._later_lines = len(rest.splitlines())
        except BaseException:
            self._stream.close()
            raise

    def cut(self) -> int:
        """Cuts off the lines after the mark, before any is appended, and returns their number."""
        if self._later_lines:
            # In place: another file under the same name would lose what somebody else has open.
            os.ftruncate(self._stream.fileno(), self._size)
        number, self._later_lines, self.kept = self._later_lines, 0, b""
        return number

    def append(self, record: dict[str, Any]) -> None:
        assert not self._later_lines, "cut comes first"
        plain = {name: to_json(value, name) for name, value in record.items()}
        line = json.dumps(plain, allow_nan=False).encode() + b"\n"
        write_whole(self._stream, line)
        self._sha256.update(line)
        self._size += len(line)

    def mark(self) -> LogMark:
        """Returns what a checkpoint remembers of the log, whose lines are durable from here on."""
        os.fsync(self._stream.fileno())
        return LogMark(self._size, self._sha256.hexdigest())

    def close(self) -> None:
        self._stream.close()
