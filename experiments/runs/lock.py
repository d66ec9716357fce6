"""One writer a run folder: a lock that the kernel releases when its process ends, however it ends."""

import fcntl
import os
import socket
import weakref
from pathlib import Path
from typing import Self

from experiments.runs.files import kind_of
from jaxlogp.errors import require

HOLDER_BYTES = 200


class RunLock:
    """Held from construction to `release`, the end of a ``with`` block, or the end of the process, kill -9 included.

    Readers (evaluation, export, curves) need none. The file is created if missing and never removed: a new one could be
    locked beside the old. ValueError if another process, or this one, has it, or if anything but a file has its name.
    """

    def __init__(self, path: Path) -> None:
        require(kind_of(path) in ("file", "nothing"), str(path), "a lock file", f"a {kind_of(path)}")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o666)
        # Not a file object: a run that was set up and dropped is no leak worth a warning.
        self._close = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, HOLDER_BYTES, 0).decode(errors="replace")
            self._close()
            holder = " ".join("".join(c if c.isprintable() else " " for c in holder).split())
            seen = f"it in use by {holder or 'another process'}"
            require(False, f"run folder {path.parent}", "one that no other process writes", seen)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Lets another process write; a second call does nothing."""
        self._close()
