"""Logs of one JSON object a line, and what a checkpoint remembers of them.

A mark is the number of lines and their checksums at the time of a checkpoint. A run that goes on from the checkpoint
finds exactly these lines, or is refused with the number of the first that is missing or another; later lines are cut off
once nothing else refuses.
"""

import hashlib
import json
import os
import zlib
from array import array
from pathlib import Path
from typing import Any, NamedTuple, Self

from experiments.runs.config_file import to_json
from experiments.runs.files import open_file, write_whole
from jaxlogp.errors import require

DIGITS = 8


class Mark(NamedTuple):
    """The lines of a log up to a checkpoint: their number, the sha256 of all, and the CRC-32 of each in 8 hexadecimal
    digits, which finds the line that made sha256 another."""

    lines: int
    sha256: str
    checksums: str


NOTHING = Mark(0, hashlib.sha256().hexdigest(), "")


class LogFile:
    """A log that only this process appends to (it holds the run's lock); the mark is that of the checkpoint that the run
    goes on from. `kept` are the lines up to it, until `cut`, `dropped` is the number of lines after it.

    Raises:
        ValueError: not a file, or lines up to the mark that are not those of the mark.
    """

    def __init__(self, path: Path, mark: Mark = NOTHING) -> None:
        self.path = path
        self._stream = open_file(path)
        try:
            *whole, torn = self._stream.readall().split(b"\n")
            lines = [line + b"\n" for line in whole] + ([torn] if torn else [])
            self.kept, self.dropped = lines[: mark.lines], len(lines[mark.lines :])
            self._sha256 = hashlib.sha256(b"".join(self.kept))
            self._checksums = array("I", map(zlib.crc32, self.kept))
            self._require_same(mark)
            self._end = sum(map(len, self.kept))
            self._stream.seek(self._end)
            self._ends_here = not self.dropped
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_same(self, mark: Mark) -> None:
        if len(self.kept) == mark.lines and self._sha256.hexdigest() == mark.sha256:
            return
        checksums = [mark.checksums[DIGITS * i : DIGITS * (i + 1)] for i in range(mark.lines)]
        same = [_hexadecimal(one) == other for one, other in zip(self._checksums, checksums, strict=False)]
        first = same.index(False) if False in same else len(same)
        seen = "another line" if first < len(self.kept) else "the end of the file"
        expected = f"the line that was there when the checkpoint was saved (which has {mark.lines} lines of it)"
        require(False, f"{self.path} line {first + 1}", expected, seen)

    def cut(self) -> None:
        """Cuts off the lines after the mark, before another is added; until then nothing is written."""
        if self.dropped:
            # In place: another file under the same name would lose what somebody else has open.
            os.ftruncate(self._stream.fileno(), self._end)
        self.kept, self._ends_here = [], True

    def append(self, record: dict[str, Any]) -> None:
        assert self._ends_here, "cut comes first"
        plain = {name: to_json(value, name) for name, value in record.items()}
        line = json.dumps(plain, allow_nan=False).encode() + b"\n"
        write_whole(self._stream, line)
        self._sha256.update(line)
        self._checksums.append(zlib.crc32(line))

    def mark(self) -> Mark:
        """Returns what a checkpoint remembers of the log, whose lines are durable from here on."""
        os.fsync(self._stream.fileno())
        return Mark(len(self._checksums), self._sha256.hexdigest(), "".join(map(_hexadecimal, self._checksums)))

    def close(self) -> None:
        self._stream.close()


def _hexadecimal(checksum: int) -> str:
    return f"{checksum:0{DIGITS}x}"
