"""What is damaged: every file of the newest checkpoint, and everything else of a run folder."""

import json
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.trials.corruption import damage
from experiments.config import Config
from experiments.runs.config_file import load_config, save_config
from experiments.runs.files import digest_of_json

Lines = Callable[[list[bytes]], list[bytes]]


class Case(NamedTuple):
    """One damage.

    Attributes:
        place: what is damaged, relative to the run folder.
        name: of the damage.
        apply: takes the run folder, the canary outside of it, and a random generator.
    """

    place: str
    name: str
    apply: Callable[[Path, Path, np.random.Generator], None]


def of_the_newest_step(folder: Path, step: Path, number: int) -> list[Case]:
    """At least `number` cases: every damage of every file and of the step itself, then random ones again.

    Args:
        folder: a run folder like those that are damaged.
        step: the newest step, relative to it.
        number: of cases.
    """
    files = sorted(path.relative_to(folder) for path in (folder / step).rglob("*") if path.is_file())
    once = [_case(file, each) for file in files for each in damage.OF_A_FILE_OF_A_STEP]
    once += [_case(step, each) for each in damage.OF_A_STEP]
    again = cycle([_case(file, each) for file in files for each in damage.RANDOM])
    return once + list(islice(again, max(0, number - len(once))))


def of_the_folder(number: int) -> list[Case]:
    """At least `number` cases: files, lines of the logs, names, planted links, edited records."""
    files = ["config.json", "env.json", "metrics.jsonl", "samples.jsonl", "summary.json", "curves.png", "lock"]
    once = [_case(Path(file), each) for file in files for each in damage.OF_A_FILE]
    once += [*_lines("metrics.jsonl"), *_lines("samples.jsonl"), *_links(), *_edits(), *_names()]
    again = cycle([_case(Path(file), each) for file in files[:4] for each in damage.RANDOM])
    return once + list(islice(again, max(0, number - len(once))))


def _case(place: Path, each: damage.Damage) -> Case:
    return Case(str(place), each.__name__, lambda folder, canary, rng: each(folder / place, rng))


def _lines(log: str) -> Iterator[Case]:
    changes: dict[str, Lines] = {
        "first line missing": lambda lines: lines[1:],
        "a line missing": lambda lines: lines[:1] + lines[2:],
        "a line doubled": lambda lines: lines[:2] + lines[1:],
        "two lines swapped": lambda lines: [lines[1], lines[0], *lines[2:]],
        "a number altered": lambda lines: [lines[0].replace(b"1", b"2"), *lines[1:]],
        "a blank line": lambda lines: [lines[0], b"\n", *lines[1:]],
        "other line ends": lambda lines: [line.replace(b"\n", b"\r\n") for line in lines],
        "a line of brackets": lambda lines: [lines[0], damage.DEEP + b"\n", *lines[1:]],
        "last lines missing": lambda lines: lines[:2],
        "a damaged line at the end": lambda lines: [*lines, b"\xff\x00[[["],
        "other lines at the end": lambda lines: [*lines, lines[-1], lines[0]],
    }
    for name, change in changes.items():

        def apply(folder: Path, canary: Path, rng: np.random.Generator, change: Lines = change) -> None:
            path = folder / log
            path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

        yield Case(log, name, apply)


def _links() -> Iterator[Case]:
    names = ["metrics.jsonl", "samples.jsonl", "config.json", "env.json", "lock", "summary.json", "curves.png"]
    names += [f"{name}.unfinished" for name in names[:4]] + ["summary.json.unfinished"]
    for name in names:
        yield Case(name, "a link to a file outside", _planted(name, "file"))
    for name in ("checkpoints", "tb", "tb/train", "checkpoints/quarantine", "checkpoints/9999"):
        yield Case(name, "a link to a folder outside", _planted(name, "folder"))


def _planted(name: str, target: str) -> Callable[[Path, Path, np.random.Generator], None]:
    def apply(folder: Path, canary: Path, rng: np.random.Generator) -> None:
        place = folder / name
        if place.exists():
            damage.delete(place, rng)
        place.symlink_to(canary / target)
        if name == "checkpoints/quarantine":
            damage.flip_a_bit(_newest(folder) / "manifest.json", rng)

    return apply


def _edits() -> Iterator[Case]:
    yield Case("config.json", "another seed, right hash", lambda folder, canary, rng: _edit_config(folder, "seed", 77))
    yield Case("config.json", "another task, right hash", lambda *at: _edit_config(at[0], "task", "addition"))
    for value in (3, None, [3], {"a": 1}, "x"):
        yield Case("env.json", f"resumes: {json.dumps(value)}", lambda *at, value=value: _edit_env(at[0], value))


def _edit_config(folder: Path, option: str, value: object) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_bytes())["config"]
    config = load_config(path, Config)
    save_config(path, config)
    assert json.loads(path.read_bytes())["config"] == values
    object.__setattr__(config, option, value)
    save_config(path, config)
    assert json.loads(path.read_bytes())["config"] != values


def _edit_env(folder: Path, value: object) -> None:
    path = folder / "env.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "resumes": value}))


def _names() -> Iterator[Case]:
    for name in ("031", "٣٣", "-4", "4_0", "+9", "1e3", "9" * 40, "4.5", "\x1b[31m", "a\nb"):
        yield Case("checkpoints", f"a folder {name!a}", lambda *at, name=name: (at[0] / "checkpoints" / name).mkdir())
    yield Case("checkpoints", "a file 9999", lambda *at: (at[0] / "checkpoints" / "9999").write_bytes(b"x"))
    yield Case("checkpoints", "deleted", lambda *at: damage.delete(at[0] / "checkpoints", at[2]))
    yield Case("checkpoints", "emptied", lambda *at: damage.step_emptied(at[0] / "checkpoints", at[2]))
    yield Case("tb", "deleted", lambda *at: damage.delete(at[0] / "tb", at[2]))
    yield Case("checkpoints", "of another run", _foreign)


def _foreign(folder: Path, canary: Path, rng: np.random.Generator) -> None:
    """A sealed manifest that this program did not write."""
    content = {"step": 9999, "extra": {}, "leaves": []}
    (folder / "checkpoints" / "9999").mkdir()
    manifest = {"content": content, "sha256": digest_of_json(content)}
    (folder / "checkpoints" / "9999" / "manifest.json").write_text(json.dumps(manifest))


def _newest(folder: Path) -> Path:
    names = [each for each in (folder / "checkpoints").iterdir() if each.name.isascii() and each.name.isdecimal()]
    return max(names, key=lambda path: int(path.name))
