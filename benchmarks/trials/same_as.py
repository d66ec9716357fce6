"""The same tiny runs at two commits: their metrics, samples and arrays of checkpoints must be equal.

    python -m benchmarks.trials.same_as BASE                 # about three CPU minutes
    python -m benchmarks.trials.same_as BASE --only kl       # one run
    python -m benchmarks.trials.same_as BASE --at COMMIT     # COMMIT instead of the working tree

It shows that a change of structure changed nothing that a user gets. Times are left out of the comparison; every other
value must have the same bits. Both trees run on this machine, with this Python and one cache of compiled programs.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.trials.saved_arrays import array_digests

ROOT = Path(__file__).resolve().parents[2]
SIZES = (
    "--task addition:1 --quiet --model.hidden-size 32 --model.intermediate-size 64 --model.num-layers 1 "
    "--model.num-heads 2 --model.num-kv-heads 2 --warm-start.max-steps 4 --warm-start.batch-size 32 "
    "--warm-start.check-every 2 --warm-start.target 1 --warm-start.learning-rate 1e-2 --rollout.prompts-per-rollout 16 "
    "--rollout.num-generations 4 --schedule.steps 2 --schedule.docs-per-step 64 --schedule.rows 8 "
    "--schedule.row-length 32 --evaluation.every 2 --evaluation.num-prompts 16 --drift.every 2 --checkpoint.every 1"
)
HALF = "--schedule.docs-per-step 32 --rollout.rescore True --loss.kl-coefficient 0.1 --loss.name gspo"
RUNS = {
    "plain": [SIZES],
    "half a rollout a step, rescored, with KL": [f"{SIZES} {HALF}"],
    "invariant on data=2,tensor=2": [f"{SIZES} --invariant --invariance.block 8 --mesh data=2,tensor=2"],
    "stopped and resumed": [f"{SIZES} {HALF} --schedule.steps 1", "--quiet --resume {run} --schedule.steps 3"],
}
"""Commands of `experiments.grpo`, each with a run folder of its own."""
TIMES = ("seconds", "per_second")
"""Ends of the names of values that measure time."""


def tree_of(commit: str, folder: Path) -> Path:
    """Writes the files of a commit into a folder."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder


def train(tree: Path, commands: list[str], run: Path, cache: Path) -> None:
    """Runs the commands of one run with the packages of a tree; its exit code must be 0."""
    settings = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(tree),
    }
    settings |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    run.parent.mkdir(parents=True, exist_ok=True)
    for command in commands:
        arguments = command.format(run=run).split()
        if "--resume" not in arguments:
            arguments += ["--out", str(run.parent), "--name", run.name]
        command_line = [sys.executable, "-m", "experiments.grpo", *arguments]
        ended = subprocess.run(command_line, cwd=tree, env={**os.environ, **settings}, capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(f"{tree}: {' '.join(arguments)}: exit code {ended.returncode}\n{ended.stderr}")


def values_of(run: Path) -> dict[str, Any]:
    """All that is compared of a run, by name: values of metrics and samples as JSON, arrays as dtype, shape and sha256."""
    values: dict[str, Any] = {}
    for log in ("metrics.jsonl", "samples.jsonl"):
        seen: Counter[tuple[str, int]] = Counter()
        for record in map(json.loads, (run / log).read_text().splitlines()):
            kind, step = record.get("kind", record.get("phase")), record["step"]
            seen[kind, step] += 1
            place = f"{log} ({kind}, step {step}, number {seen[kind, step]})"
            values |= {
                f"{place}: {name}": json.dumps(value) for name, value in record.items() if not name.endswith(TIMES)
            }
    for step in sorted((run / "checkpoints").iterdir()):
        if step.name.isdecimal():
            values |= {f"checkpoint {step.name}: {name}": array for name, array in array_digests(step).items()}
    return values


def differences(mine: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """A line for every value that is not the same, in the order of the run."""
    lines = []
    for name in [*base, *(name for name in mine if name not in base)]:
        if name not in mine or name not in base:
            lines.append(f"{name}: only {'at BASE' if name in base else 'here'}")
        elif mine[name] != base[name]:
            both = (base[name], mine[name])
            shown = " -> ".join(both) if isinstance(mine[name], str) else "arrays differ"
            lines.append(f"{name}: {shown}")
    return lines


def main() -> None:
    """The command line: exit code 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", help="commit to compare with")
    parser.add_argument("--at", metavar="COMMIT", help="commit to compare; default: the working tree")
    parser.add_argument("--only", default="", metavar="TEXT", help="only runs whose name contains TEXT")
    parser.add_argument("--lines", type=int, default=20, help="differences to print of each run")
    options = parser.parse_args()
    chosen = {name: commands for name, commands in RUNS.items() if options.only in name}
    if not chosen:
        parser.error(f"--only: expected part of one of {list(RUNS)}, got {options.only!r}")
    differ = False
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        trees = {"mine": ROOT if options.at is None else tree_of(options.at, work / "mine")}
        trees["base"] = tree_of(options.base, work / "base")
        for number, (name, commands) in enumerate(chosen.items()):
            found = {}
            for side, tree in trees.items():
                run = work / "runs" / side / f"run{number}"
                train(tree, commands, run, work / "cache")
                found[side] = values_of(run)
            lines = differences(**found)
            differ |= bool(lines)
            verdict = f"{len(lines)} values differ" if lines else f"{len(found['base'])} values are equal"
            print(f"{name}: {verdict}")
            print("".join(f"    {line}\n" for line in lines[: options.lines]), end="", flush=True)
    raise SystemExit(differ)


if __name__ == "__main__":
    main()
