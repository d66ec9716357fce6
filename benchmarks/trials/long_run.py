"""A run of many steps that must not grow: memory, file descriptors, threads, time of a step, with the errors of the slopes.

    python -m benchmarks.trials.long_run --steps 2000
    python -m benchmarks.trials.long_run --steps 10000 --left-out 5000
    python -m benchmarks.trials.long_run --steps 2000 --checkpoint-every 0

The whole loop of a tiny run, with its logs, evaluations, drift reports and checkpoints. Before every step the process is
measured: what is resident, and what of it is in use; the rest is what the allocator keeps of memory that the threads of a
save have freed, and differs from run to run. The first steps are left out; the rest is cut into blocks of which the medians
are fitted by a line, and the error of its slope is that of the medians around it.
"""

import argparse
import ctypes
import dataclasses
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.trials.processes import tiny_config
from experiments.config import CheckpointConfig
from experiments.loop.run import set_up
from experiments.runs.environment import versions_text

BLOCKS = 18
PAGE = os.sysconf("SC_PAGE_SIZE")


class MallocInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


class Slope(NamedTuple):
    """A line through medians of blocks.

    Attributes:
        level: the mean of the medians.
        per_step: growth.
        error: standard error of the growth.
    """

    level: float
    per_step: float
    error: float


def slope_of(values: np.ndarray) -> Slope:
    """The line of least squares through the medians of successive blocks.

    Example:
        >>> slope = slope_of(np.arange(1800.0))
        >>> round(slope.per_step, 6), slope.error < 1e-6
        (1.0, True)
    """
    blocks = np.array_split(values, BLOCKS)
    medians = np.array([np.median(block) for block in blocks])
    centres = np.cumsum([len(block) for block in blocks]) - len(values) / len(blocks) / 2
    x = centres - centres.mean()
    per_step = float(x @ medians / (x @ x))
    rest = medians - medians.mean() - per_step * x
    error = float(np.sqrt(rest @ rest / (len(medians) - 2) / (x @ x)))
    return Slope(float(medians.mean()), per_step, error)


def measure() -> dict[str, float]:
    """What the process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallocInfo
    info = mallinfo()
    return {
        "resident memory [kB]": pages * PAGE / 1024,
        "malloc, in use [kB]": (info.uordblks + info.hblkhd) / 1024,
        "Python objects, in use [blocks]": sys.getallocatedblocks(),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def measured_run(out: Path, steps: int, checkpoint_every: int) -> dict[str, np.ndarray]:
    """Measurements before every step of the learner, and its seconds, of a run with everything that a run does."""
    config = tiny_config()
    changes: dict[str, Any] = {
        "schedule": dataclasses.replace(config.schedule, steps=steps),
        "evaluation": dataclasses.replace(config.evaluation, every=50),
        "checkpoint": dataclasses.replace(config.checkpoint, every=checkpoint_every),
        "drift": dataclasses.replace(config.drift, every=50),
    }
    run = set_up(dataclasses.replace(config, out=str(out), name="long", **changes))
    plain, names = run.setup.learner.step, [*measure(), "seconds of a step"]
    # Of its final size, and touched, from the start: what is measured must not grow with the measurements.
    table, number = np.ones((steps, len(names))), itertools.count()

    def measured(*arguments: Any, **options: Any) -> Any:
        row, started = measure(), time.perf_counter()
        result = plain(*arguments, **options)
        table[next(number)] = [*row.values(), time.perf_counter() - started]
        return result

    run.setup.learner.step = measured
    run.finish()
    return dict(zip(names, table.T, strict=True))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--left-out", type=int, help="steps that the slopes leave out; a tenth of --steps")
    parser.add_argument(
        "--checkpoint-every", type=int, default=CheckpointConfig().every, help="steps between checkpoints; 0 for none"
    )
    given = parser.parse_args()
    steps, every = given.steps, given.checkpoint_every
    left_out = steps // 10 if given.left_out is None else given.left_out
    if steps - left_out < BLOCKS:
        parser.error(f"--left-out: expected at most {steps - BLOCKS} of {steps} steps, got {left_out}")
    with tempfile.TemporaryDirectory() as folder:
        measured = measured_run(Path(folder), steps, every)
    print(f"\n{versions_text()}; {steps} steps, an evaluation and a drift report every 50,")
    print(f"{f'a checkpoint every {every}' if every else 'no checkpoint'}; the first {left_out} steps are left out.\n")
    print("| | level | growth per 1000 steps | standard error | share of the level |\n|---|---|---|---|---|")
    for name, values in measured.items():
        level, per_step, error = slope_of(values[left_out:])
        share = 1000 * per_step / level
        print(f"| {name} | {level:.4g} | {1000 * per_step:+.3g} | {1000 * error:.2g} | {share:+.2%} |")


if __name__ == "__main__":
    main()
