"""Files of a run folder: no planted link is followed, and a crash leaves the old content or the new.

The folder may come from somebody else. So a file is opened with O_NOFOLLOW, created with O_EXCL under a random name, and
put in its place by a rename, which replaces a link and not what it points to. Folders are looked at before use.
"""

import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from jaxlogp.errors import require

UNFINISHED = re.compile(r"\.unfinished-[0-9a-f]{16}$")
UNREADABLE = ("[", "]", "\\", "*", "?", ":/")
"""Orbax takes paths for patterns or addresses when it puts its files together."""
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def unfinished(path: Path) -> Path:
    """Returns a name beside `path` that nobody can have taken before."""
    return path.with_name(f"{path.name}.unfinished-{secrets.token_hex(8)}")


def create_file(path: Path) -> FileIO:
    """Creates a file, unbuffered, so that a full disk is an OSError of the write and not of a later flush.

    Raises FileExistsError if a file, folder or link has that name.
    """
    return FileIO(path, "xb", opener=lambda name, flags: os.open(name, flags | _NO_LINK, 0o666))


def open_file(path: Path) -> FileIO:
    """Opens an existing file, unbuffered, for reading and writing; ValueError for anything but a file."""
    require_kind(path, "file")
    return FileIO(path, "r+b", opener=lambda name, flags: os.open(name, flags | _NO_LINK))


def write_whole(stream: FileIO, content: bytes | memoryview) -> None:
    """Writes all of it: a system call may write less."""
    rest = memoryview(content)
    while rest:
        rest = rest[stream.write(rest) :]


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file atomically; its content is on disk before the name points to it."""
    fresh = unfinished(path)
    try:
        with create_file(fresh) as stream:
            write_whole(stream, content)
            os.fsync(stream.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replaces a JSON file atomically: a reader, or a crash, sees the old content or the new one, never part of it."""
    replace_file(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def make_folder(path: Path) -> None:
    """Makes a folder if nothing has its name; ValueError if something else has, a link to a folder included."""
    if kind_of(path) == "nothing":
        path.mkdir()
    require_kind(path, "folder")


def require_readable_path(folder: Path) -> None:
    """Raises ValueError for a path under which Orbax writes what it cannot read again."""
    found = [text for text in UNREADABLE if text in f"{folder}/"]
    require(not found, "run folder", f"a path without any of {' '.join(UNREADABLE)}", folder)


def digest_of_json(value: Any) -> str:
    """Returns the sha256 of JSON values, whatever the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def kind_of(path: Path) -> str:
    """Returns what has this name, itself and not where it leads to: "file", "folder", "link", "device" or "nothing"."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "nothing"
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(mode), "device")


def require_kind(path: Path, kind: str) -> None:
    """Raises ValueError for a path that is not itself a "file" or a "folder": a link to one is none."""
    seen = kind_of(path)
    require(seen == kind, str(path), f"a {kind}", seen if seen == "nothing" else f"a {seen}")
