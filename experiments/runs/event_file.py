"""Event files of TensorBoard, written by the thread that calls: a full disk is an OSError there and then.

A file is a sequence of records, each a protocol buffer `tensorflow.Event`, of which four fields are enough here.
They are encoded by hand: tensorboardX takes a second to import, and imports PyTorch where it is installed, four seconds more
of every start.
"""

import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from experiments.runs.files import create_file, make_folder, write_whole

WALL_TIME, STEP, FILE_VERSION, SUMMARY, SESSION_LOG = 1, 2, 3, 5, 7
"""Fields of `Event`."""
VALUE = 1
"""The field of `Summary`."""
TAG, SIMPLE_VALUE = 1, 2
"""Fields of each of its values."""
STATUS, START = 1, 1
"""The field of `SessionLog`, and what it says here."""
VARINT, EIGHT_BYTES, DELIMITED, FOUR_BYTES = 0, 1, 2, 5
"""How the content of a field is written."""
CASTAGNOLI = 0x82F63B78


class EventFile:
    """A new event file in a folder, which is made if missing; it hides what earlier files have from `purge_step` on."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        make_folder(folder)
        # TensorBoard wants the time first. The random end keeps a quick resume from an earlier file.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._stream = create_file(folder / f"{name}.{secrets.token_hex(4)}")
        try:
            self._write(_delimited(FILE_VERSION, b"brain.Event:2"))
            if purge_step is not None:
                self._write(_number(STEP, purge_step) + _delimited(SESSION_LOG, _number(STATUS, START)))
        except BaseException:
            self._stream.close()
            raise

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        values = b"".join(_delimited(VALUE, _scalar(name, value)) for name, value in scalars.items())
        self._write(_number(STEP, step) + _delimited(SUMMARY, values))

    def close(self) -> None:
        self._stream.close()

    def _write(self, fields: bytes) -> None:
        content = _key(WALL_TIME, EIGHT_BYTES) + struct.pack("<d", time.time()) + fields
        length = struct.pack("<Q", len(content))
        checks = [struct.pack("<I", _masked_checksum(part)) for part in (length, content)]
        write_whole(self._stream, length + checks[0] + content + checks[1])


def _scalar(name: str, value: float) -> bytes:
    with np.errstate(over="ignore"):
        # A number beyond fp32 is infinite there.
        return _delimited(TAG, name.encode()) + _key(SIMPLE_VALUE, FOUR_BYTES) + np.array(value).astype("<f4").tobytes()


def _key(field: int, written: int) -> bytes:
    return _varint(field << 3 | written)


def _delimited(field: int, content: bytes) -> bytes:
    return _key(field, DELIMITED) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    return _key(field, VARINT) + _varint(value)


def _varint(value: int) -> bytes:
    """A number that is not negative, 7 bits a byte, the lowest first."""
    digits = [value >> shift & 127 for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([digit | 128 for digit in digits[:-1]] + digits[-1:])


def _table() -> list[int]:
    table = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (CASTAGNOLI if entry & 1 else 0)
        table.append(entry)
    return table


_CHECKSUMS = _table()


def _masked_checksum(content: bytes) -> int:
    """CRC-32C, turned and shifted as in every record."""
    checksum = 0xFFFFFFFF
    for byte in content:
        checksum = _CHECKSUMS[checksum & 255 ^ byte] ^ checksum >> 8
    checksum ^= 0xFFFFFFFF
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
