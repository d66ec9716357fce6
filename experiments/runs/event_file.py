"""Event files of TensorBoard, written by the thread that calls: a full disk is an OSError there and then.

Of tensorboardX's writers, EventFileWriter hands events to a thread, which dies on a full disk and leaves a queue that
blocks for ever; EventsWriter buffers them, syncs the disk in every flush, and cannot be closed after a failed one.
"""

import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import masked_crc32c

from experiments.runs.files import create_file, make_folder, write_whole

# Their classes are made when they are imported: a type checker sees none.
_event: Any = event_pb2
_summary: Any = summary_pb2


class EventFile:
    """A new event file in a folder, which is made if missing; it hides what earlier files have from `purge_step` on."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        make_folder(folder)
        # TensorBoard wants the time first. The random end keeps a quick resume from an earlier file.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._stream = create_file(folder / f"{name}.{secrets.token_hex(4)}")
        try:
            self._write(file_version="brain.Event:2")
            if purge_step is not None:
                self._write(step=purge_step, session_log=_event.SessionLog(status=_event.SessionLog.START))
        except BaseException:
            self._stream.close()
            raise

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [_summary.Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(step=step, summary=_summary.Summary(value=values))

    def close(self) -> None:
        self._stream.close()

    def _write(self, **fields: Any) -> None:
        content = _event.Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(content))
        checks = [struct.pack("<I", masked_crc32c(part)) for part in (length, content)]
        write_whole(self._stream, length + checks[0] + content + checks[1])
