"""A run whose disk is full at some moment: exit code 3, one line, and a resume that ends with the same bits.

    python -m benchmarks.trials.full_disk --kib 40 1250 1600 1900

The run folder lies on a file system of its own in memory (`mount -t tmpfs`, which takes the rights of root), of each size
in turn: the first has no room for the first checkpoint, the others end in a later one or in a log. Then the disk grows,
is made read-only for one resume, and the run goes on. Its newest arrays are compared with those of a run that had room.
"""

import argparse
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.trials.processes import TINY, Ended, start, wait
from benchmarks.trials.saved_arrays import array_digests
from experiments.runs.checkpoint import complete_steps
from experiments.runs.environment import versions_text

STEPS = 6
ROOM = "64m"


def options(out: Path, steps: int = STEPS) -> list[str]:
    """Of a run that is called `run`."""
    return [*TINY, "--schedule.steps", str(steps), "--out", str(out), "--name", "run"]


@contextmanager
def disk(place: Path, kib: int) -> Iterator[None]:
    """A file system of a size."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def remount(place: Path, how: str) -> None:
    """Changes size or rights."""
    subprocess.run(["mount", "-o", f"remount,{how}", place], check=True)


def digests(run: Path) -> dict[str, tuple]:
    """Of the arrays of its newest checkpoint."""
    return array_digests(run / "checkpoints" / str(complete_steps(run / "checkpoints")[-1]))


def in_order(ended: Ended, words: str) -> bool:
    """Whether a process ended with one sentence about the disk."""
    return ended.code == 3 and not ended.traceback and words in ended.last


def row(kib: int, place: Path, cache: Path, wanted: dict[str, tuple]) -> str:
    """Of the table."""
    with disk(place, kib):
        first = wait(start(options(place), cache))
        run = place / "run"
        # A disk that has no room for a run folder has none to resume.
        made = (run / "config.json").is_file()
        saved = complete_steps(run / "checkpoints")[-1:] if made else []
        remount(place, f"size={ROOM}")
        resume = ["--resume", str(run), "--quiet"] if made else options(place)
        remount(place, "ro")
        locked = wait(start(resume, cache))
        remount(place, "rw")
        again = wait(start(resume, cache))
        equal = digests(run) == wanted
    full, read_only = in_order(first, "No space left on device"), in_order(locked, "Read-only file system")
    good = full and read_only and again.code == 0 and equal
    cells = [f"{kib} KiB", first.last.replace(str(place), "DISK"), f"{first.code}", str(saved[0]) if saved else "none"]
    cells += [locked.last.replace(str(place), "DISK"), f"{locked.code}", "equal" if equal else "OTHER BITS"]
    return f"| {' | '.join(cells)} | {'yes' if good else 'NO'} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kib", type=int, nargs="+", default=[40, 1250, 1600, 1900], help="sizes of the disk")
    parser.add_argument("--out", type=Path, help="Markdown file for the result")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ended = wait(start(options(folder / "room"), folder / "cache"))
        assert ended.code == 0, ended.last
        wanted = digests(folder / "room" / "run")
        rows = [row(kib, folder / f"disk-{kib}", folder / "cache", wanted) for kib in given.kib]
    command = f"python -m benchmarks.trials.full_disk --kib {' '.join(map(str, given.kib))}"
    head = "| disk | last line | exit code | saved | resumed, read-only | exit code | arrays at the end | as promised |"
    made_by = f"Command: `{command}`. {versions_text()}."
    lines = ["# Full and read-only disks", "", made_by, "", head, "|" + "---|" * 8, *rows]
    text = "\n".join(lines) + "\n"
    print(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
