"""A run that is saved on one mesh and goes on on another, and another: A → B → C on eight simulated devices.

    python -m benchmarks.trials.meshes

Every path is two steps on each of three meshes, by way of the run folder. With --invariant the final state must be that of
six steps on one device, bit for bit; without it parameters must agree within 2e-4: six steps of Adam whose fp32 sums are
added in another order, and Adam divides by their scale.
"""

import argparse
import contextlib
import dataclasses
import io
import tempfile
from pathlib import Path

import jax
import numpy as np

from benchmarks.trials.processes import tiny_config
from experiments.config import Config
from experiments.loop.resume import resume
from experiments.loop.run import Result, train
from experiments.runs.environment import versions_text

DEVICES = 8
STEPS = 2
"""On each mesh."""
TOLERANCE = 2e-4
PATHS = (
    ("data=1,tensor=1", "data=2,tensor=2", "data=1,tensor=4"),
    ("data=2,tensor=1", "data=1,tensor=1", "data=1,tensor=2"),
    ("data=1,tensor=4", "data=4,tensor=1", "data=2,tensor=2"),
    ("data=8,tensor=1", "data=1,tensor=8", "data=2,tensor=4"),
    ("data=2,tensor=4", "data=1,tensor=1", "data=8,tensor=1"),
    ("data=4,tensor=2", "data=2,tensor=4", "data=1,tensor=1"),
    ("data=1,tensor=2", "data=2,fsdp=2", "data=4,tensor=1"),
    ("data=1,fsdp=4", "data=1,tensor=1", "data=2,fsdp=2,tensor=2"),
)


def config_of(out: Path, name: str, mesh: str, steps: int, *, invariant: bool) -> Config:
    """The tiny run of the other trials, whose step is here a whole rollout."""
    config = tiny_config("--checkpoint.every", "0")
    schedule = dataclasses.replace(config.schedule, steps=steps, docs_per_step=64, rows=8, row_length=None)
    warm_start = dataclasses.replace(config.warm_start, max_steps=4)
    changes = {"mesh": mesh, "invariant": invariant, "schedule": schedule, "warm_start": warm_start}
    return dataclasses.replace(config, out=str(out), name=name, **changes)


def along(path: tuple[str, ...], out: Path, *, invariant: bool) -> Result:
    """The run on one mesh after the other."""
    # A quiet run still prints its scores.
    with contextlib.redirect_stdout(io.StringIO()):
        return _along(path, out, invariant=invariant)


def _along(path: tuple[str, ...], out: Path, *, invariant: bool) -> Result:
    name = "-".join(mesh.replace(",", "-") for mesh in path) + ("-invariant" if invariant else "")
    result = train(config_of(out, name, path[0], STEPS, invariant=invariant))
    for number, mesh in enumerate(path[1:], start=2):
        result = resume(str(result.run.path), {"mesh": mesh, "schedule.steps": number * STEPS, "quiet": True})
    return result


def difference(mine: Result, other: Result) -> tuple[bool, float]:
    """Whether all of the state has the same bits, and the largest distance of a parameter."""
    states = [[np.asarray(leaf) for leaf in jax.tree.leaves(each.setup.learner.state)] for each in (mine, other)]
    params = [[np.asarray(leaf) for leaf in jax.tree.leaves(each.params)] for each in (mine, other)]
    same = all(a.tobytes() == b.tobytes() for a, b in zip(*states, strict=True))
    return same, max(float(np.abs(a - b).max()) for a, b in zip(*params, strict=True))


def trials(out: Path, modes: tuple[bool, ...] = (True, False)) -> int:
    """Prints a row for every path and mode; returns the number of those that are not as they must be."""
    print("| path | mode | final state | largest difference of a parameter |\n|---|---|---|---|", flush=True)
    failed = 0
    for invariant in modes:
        name = "whole-invariant" if invariant else "whole"
        with contextlib.redirect_stdout(io.StringIO()):
            whole = train(config_of(out, name, "data=1,tensor=1", 3 * STEPS, invariant=invariant))
        for path in PATHS:
            same, largest = difference(along(path, out, invariant=invariant), whole)
            good = same if invariant else largest <= TOLERANCE
            failed += not good
            verdict = "bitwise equal" if same else "within the tolerance" if good else "DIFFERS"
            mode = "--invariant" if invariant else "plain"
            print(f"| {' → '.join(path)} | {mode} | {verdict} | {largest:.1e} |", flush=True)
    return failed


def main() -> None:
    """The command line."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    print(f"{versions_text()}; {DEVICES} simulated devices\n")
    with tempfile.TemporaryDirectory() as folder:
        failed = trials(Path(folder))
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
