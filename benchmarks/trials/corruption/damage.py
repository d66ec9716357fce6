"""Ways to damage a file or a folder; each takes its path and a random generator, and may look at the older step."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

Damage = Callable[[Path, np.random.Generator], None]
DEEP = b"[" * 100_000


def flip_a_bit(path: Path, rng: np.random.Generator) -> None:
    _flip(path, rng, 1)


def flip_64_bits(path: Path, rng: np.random.Generator) -> None:
    _flip(path, rng, 64)


def _flip(path: Path, rng: np.random.Generator, number: int) -> None:
    content = bytearray(path.read_bytes())
    # Distinct ones, so that no flip undoes another.
    for bit in rng.choice(8 * len(content), size=min(number, 8 * len(content)), replace=False):
        content[bit // 8] ^= 1 << int(bit % 8)
    path.write_bytes(content)


def truncate(path: Path, rng: np.random.Generator) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.integers(len(content))])


def lose_the_last_byte(path: Path, rng: np.random.Generator) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path, rng: np.random.Generator) -> None:
    path.write_bytes(b"")


def delete(path: Path, rng: np.random.Generator) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def garbage(path: Path, rng: np.random.Generator) -> None:
    path.write_bytes(rng.bytes(path.stat().st_size))


def zero_a_block(path: Path, rng: np.random.Generator) -> None:
    """As a file system leaves it after a loss of power."""
    content = bytearray(path.read_bytes())
    start = int(rng.integers(len(content)))
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    path.write_bytes(content)


def brackets(path: Path, rng: np.random.Generator) -> None:
    path.write_bytes(DEEP)


def folder_in_its_place(path: Path, rng: np.random.Generator) -> None:
    delete(path, rng)
    path.mkdir()


def pipe_in_its_place(path: Path, rng: np.random.Generator) -> None:
    """A reader that opens it waits for ever."""
    delete(path, rng)
    os.mkfifo(path)


def device_in_its_place(path: Path, rng: np.random.Generator) -> None:
    """A reader that follows it never comes to an end."""
    delete(path, rng)
    path.symlink_to("/dev/zero")


def dangling_link(path: Path, rng: np.random.Generator) -> None:
    delete(path, rng)
    path.symlink_to(path.with_name("nowhere"))


def of_the_older_step(path: Path, rng: np.random.Generator) -> None:
    shutil.copy(_older(path), path)


def link_to_the_older_step(path: Path, rng: np.random.Generator) -> None:
    delete(path, rng)
    path.symlink_to(_older(path))


def _older(path: Path) -> Path:
    """The file of the same name in the older step, or any other file of it: those of arrays are named by chance."""
    step = next(parent for parent in path.parents if parent.parent.name == "checkpoints")
    same = _older_step(step) / path.relative_to(step)
    others = (each for each in sorted(_older_step(step).rglob("*")) if each.is_file())
    return same if same.is_file() else next(others)


def step_of_the_older(path: Path, rng: np.random.Generator) -> None:
    """A whole step in the place of another; `path` is the newest step."""
    delete(path, rng)
    shutil.copytree(_older_step(path), path)


def step_linked_to_the_older(path: Path, rng: np.random.Generator) -> None:
    delete(path, rng)
    path.symlink_to(_older_step(path))


def step_renamed(path: Path, rng: np.random.Generator) -> None:
    path.rename(path.with_name(f"0{path.name}"))


def step_in_arabic_digits(path: Path, rng: np.random.Generator) -> None:
    path.rename(path.with_name("".join(chr(0x660 + int(digit)) for digit in path.name)))


def step_emptied(path: Path, rng: np.random.Generator) -> None:
    delete(path, rng)
    path.mkdir()


def file_for_step(path: Path, rng: np.random.Generator) -> None:
    delete(path, rng)
    path.write_bytes(b"20")


def step_renumbered(path: Path, rng: np.random.Generator) -> None:
    path.rename(path.with_name(str(int(path.name) + 7)))


def _older_step(path: Path) -> Path:
    return path.with_name(str(min(int(each.name) for each in path.parent.iterdir())))


OF_A_FILE: tuple[Damage, ...] = (
    flip_a_bit,
    flip_64_bits,
    truncate,
    lose_the_last_byte,
    empty,
    delete,
    garbage,
    zero_a_block,
    brackets,
    folder_in_its_place,
    pipe_in_its_place,
    device_in_its_place,
    dangling_link,
)
OF_A_FILE_OF_A_STEP = (*OF_A_FILE, of_the_older_step, link_to_the_older_step)
OF_A_STEP: tuple[Damage, ...] = (
    delete,
    step_of_the_older,
    step_linked_to_the_older,
    step_renamed,
    step_in_arabic_digits,
    step_emptied,
    file_for_step,
    step_renumbered,
)
RANDOM = (flip_a_bit, flip_64_bits, truncate, garbage, zero_a_block)
"""Those that differ from draw to draw."""
