"""Logs of one JSON object a line, and what a checkpoint remembers of them.

A mark is the length of a log and the sha256 of its content at the time of a checkpoint. A run that resumes from the
checkpoint finds exactly this content, or is refused; later lines are cut off once nothing else can refuse the run.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from experiments.runs.config_file import to_json
from experiments.runs.files import open_file, write_whole
from jaxlogp.errors import require

CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class LogMark:
    """The first `size` bytes of a log."""

    size: int
    sha256: str


EMPTY = LogMark(0, hashlib.sha256().hexdigest())


@dataclass(frozen=True)
class LogMarks:
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
            expected = f"the first {mark.size} bytes as they were when the checkpoint was saved"
            size = os.fstat(self._stream.fileno()).st_size
            require(size >= mark.size, str(path), expected, f"a file that ends after {size}")
            self.kept = b"".join(_chunks(self._stream, mark.size))
            self._sha256 = hashlib.sha256(self.kept)
            require(self._sha256.hexdigest() == mark.sha256, str(path), expected, "a change before this mark")
            self._later_lines = _count_lines(self._stream)
            self._size = self._stream.seek(mark.size)
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
        """Adds a line; OSError if somebody has removed, replaced or changed the length of the file since the last one."""
        assert not self._later_lines, "cut comes first"
        self._require_untouched()
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

    def _require_untouched(self) -> None:
        # Lines would go on to a file that has no name any more, or behind a hole of zeros.
        ours = os.fstat(self._stream.fileno())
        try:
            named = self.path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            found = "it is gone"
        else:
            is_ours = (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)
            found = f"it has {ours.st_size} bytes" if is_ours else "another file has its name"
            if is_ours and ours.st_size == self._size:
                return
        words = f"the log was changed during the run: expected the {self._size} bytes that were written, but {found}"
        raise OSError(errno.EIO, words, str(self.path))


def _chunks(stream: FileIO, size: int | None = None) -> Iterator[bytes]:
    while size is None or size > 0:
        chunk = stream.read(CHUNK_BYTES if size is None else min(size, CHUNK_BYTES))
        if not chunk:
            return
        size = None if size is None else size - len(chunk)
        yield chunk


def _count_lines(stream: FileIO) -> int:
    """Returns the number of lines that are left, an unfinished last one included; the file may be larger than the memory."""
    lines, last = 0, b"\n"
    for chunk in _chunks(stream):
        lines, last = lines + chunk.count(b"\n"), chunk[-1:]
    return lines + (last != b"\n")
